"""sglang#34683, #4175: a cache hit flipped greedy answers. And vllm#42019: prompt log-probabilities
changed with the order of requests."""

import itertools

from engine.types import SamplingParams
from tests.engine.tiny import Answer, Driver, prompt, tiny_core

PROMPTS = [prompt(n, 20 + 31 * n) for n in range(12)]
SHOWN = SamplingParams(8, ignore_eos=True, logprobs=5)


def ask(run: Driver, tokens: list[int], sampling: SamplingParams = SHOWN) -> Answer:
    request_id = run.add(tokens, sampling=sampling)
    run.run()
    return run.answers[request_id]


def test_cold_cold_and_warm_are_the_same_bits() -> None:
    run = Driver(tiny_core())
    for tokens in PROMPTS:
        run.core.flush()
        first = ask(run, tokens)
        run.core.flush()
        second = ask(run, tokens)
        warm = ask(run, tokens)
        assert warm.started is not None and warm.started.num_cached_tokens == len(tokens) - 1
        assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
        assert (first.tokens, first.logprobs) == (warm.tokens, warm.logprobs)


def test_scores_of_prompts_do_not_depend_on_their_order() -> None:
    """Case 11."""
    shared = prompt(99, 50)
    prompts = [shared + prompt(n, 9 + n) for n in range(3)]
    scoring = SamplingParams(1, ignore_eos=True, prompt_logprobs=2)
    told = []
    for order in itertools.permutations(range(3)):
        run = Driver(tiny_core())
        scored = {n: ask(run, prompts[n], scoring).scored for n in order}
        told.append([scored[n] for n in range(3)])
    assert all(each == told[0] for each in told)
