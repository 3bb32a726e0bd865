"""llama.cpp#27148: under concurrency a prompt cache continued the wrong conversation, and the
answer said nothing was cached."""

from engine.types import SamplingParams
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

HEADER = prompt(1, 40)
NUM_CONVERSATIONS = 200


def conversation(number: int) -> list[int]:
    """The same beginning for all, then words of its own."""
    return HEADER + prompt(1000 + number, 6 + number % 23)


def test_200_conversations_get_their_own_answers_and_true_counts() -> None:
    run = Driver(tiny_core(num_pages=14, max_context=8 * PAGE, max_running=8))
    stored: list[list[int]] = []
    for first in range(0, NUM_CONVERSATIONS, 8):
        batch = [conversation(number) for number in range(first, first + 8)]
        ids = [run.add(tokens, 4) for tokens in batch]
        run.run()
        for tokens, request_id in zip(batch, ids, strict=True):
            answer = run.answers[request_id]
            assert answer.tokens == Driver(tiny_core()).answer(tokens, 4).tokens
            assert answer.started is not None and answer.finished is not None
            others = [other for other in stored + batch if other is not tokens]
            longest = max(common(tokens, other) for other in others)
            assert answer.started.num_cached_tokens <= longest
            assert answer.finished.num_cached_tokens == answer.started.num_cached_tokens
        stored += batch
    again = run.add(conversation(NUM_CONVERSATIONS - 1), 4, sampling=SamplingParams(0))
    run.run()
    end = run.answers[again].finished
    assert end is not None and end.num_cached_tokens > len(HEADER)
    run.assert_idle()


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
