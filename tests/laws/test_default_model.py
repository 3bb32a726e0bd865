"""Law 1 on the default model, with the arithmetic it is served with: the same tokens and the same
bits of log-probability, cold, warm, chunked, batched, preempted and forked."""

from collections.abc import Iterator

import msgspec
import pytest

from engine.core import Core
from engine.runtime import build_core
from engine.text import load_text
from engine.types import (
    EngineConfig,
    EngineRequest,
    Finished,
    FinishReason,
    SamplingParams,
    Started,
    TokenDelta,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from tests.engine.test_runtime import model_path

Run = tuple[list[int], list[TokenLogprobs], int]
SAMPLING = SamplingParams(12, ignore_eos=True, logprobs=2)
PAGES = 32
PAGE_BYTES = 368_640
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rivers that never reach the sea, and say which river you mean.",
    "List three uses of a paper clip.",
)
SYSTEM = (
    "You are a careful assistant. Answer in one short sentence, never invent facts, and say so "
    "when you do not know. Dates are written as year, month, day; numbers have no separators."
)


CONFIG = EngineConfig(
    model=str(model_path()),
    kv_memory_bytes=PAGES * PAGE_BYTES,
    max_context=PAGES * 16,
    decode_token_budget=32,
    speculation=False,
)


@pytest.fixture
def core() -> Iterator[Core]:
    """A pool of 512 tokens; beside streams a prompt is computed in chunks of 32."""
    built = build_core(CONFIG)
    assert built.info.num_pages == PAGES
    if built.info.backend != "cpu":
        built.close()
        pytest.skip("bits are promised for the CPU backend only")
    yield built
    built.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_text(model_path()).tokenizer
    return [
        tokenizer.encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n",
            add_special_tokens=False,
        ).ids
        for question in QUESTIONS
    ]


def run(core: Core, wanted: list[list[int]], sampling: SamplingParams = SAMPLING) -> list[Run]:
    """All at once; tokens, log-probabilities and cached tokens of each."""
    for index, tokens in enumerate(wanted):
        core.add(EngineRequest(str(index), pack_tokens(tokens), sampling))
    tokens_of: list[list[int]] = [[] for _ in wanted]
    logprobs_of: list[list[TokenLogprobs]] = [[] for _ in wanted]
    cached = [0] * len(wanted)
    while core.has_work:
        for event in core.step():
            index = int(event.request_id)
            if isinstance(event, Started):
                cached[index] = event.num_cached_tokens
            elif isinstance(event, TokenDelta):
                tokens_of[index] += unpack_tokens(event.token_ids).tolist()
                logprobs_of[index] += event.logprobs
            elif isinstance(event, Finished):
                assert event.reason is FinishReason.LENGTH
    assert core.audit().referenced == 0
    return list(zip(tokens_of, logprobs_of, cached, strict=True))


def test_cold_warm_batched_and_forked(core: Core, prompts: list[list[int]]) -> None:
    cold = []
    for tokens in prompts:
        core.flush()
        cold += run(core, [tokens])
    assert [cached for *_, cached in cold] == [0, 0, 0]
    warm = run(core, [prompts[-1]])
    assert warm == [(*cold[-1][:2], len(prompts[-1]) - 1)]
    core.flush()
    for (tokens, logprobs, _), (*expected, _) in zip(run(core, prompts), cold, strict=True):
        assert [tokens, logprobs] == expected
    trunk = prompts[0] + cold[0][0]
    forks = [trunk[: len(prompts[0]) + 5] + prompts[i][-9:] for i in range(3)]
    forked = run(core, forks)
    assert all(cached >= len(prompts[0]) + 5 for *_, cached in forked)
    for tokens, result in zip(forks, forked, strict=True):
        core.flush()
        assert run(core, [tokens])[0][:2] == result[:2]


def test_a_prompt_of_several_key_blocks(core: Core, prompts: list[list[int]]) -> None:
    """Beyond 256 keys attention merges blocks: whole, from partial prefixes, and beside others."""
    long = (prompts[1] + prompts[0] + prompts[2]) * 2
    assert 300 < len(long) < PAGES * 16 - 40
    [expected] = run(core, [long])
    for cut in (100, 255, 256, 257, 290):
        core.flush()
        run(core, [long[:cut]])
        [(tokens, logprobs, cached)] = run(core, [long])
        assert cached >= cut
        assert (tokens, logprobs) == expected[:2]
    core.flush()
    beside = run(core, [prompts[0][:40], long])
    assert beside[1][:2] == expected[:2]


def test_chunked(core: Core, prompts: list[list[int]]) -> None:
    """A stream that decodes cuts the others' prefill into smaller chunks."""
    [expected] = run(core, [prompts[1]])
    core.flush()
    core.add(EngineRequest("stream", pack_tokens([1, 2, 3]), SamplingParams(400, ignore_eos=True)))
    core.step()
    core.add(EngineRequest("chunked", pack_tokens(prompts[1]), SAMPLING))
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    phases: list[str] = []
    while not phases:
        for event in core.step():
            if event.request_id == "chunked" and isinstance(event, TokenDelta):
                tokens += unpack_tokens(event.token_ids).tolist()
                logprobs += event.logprobs
            elif event.request_id == "chunked" and isinstance(event, Finished):
                phases = [phase.name for phase in event.phases]
    assert phases.count("prefill") > 1
    assert (tokens, logprobs) == expected[:2]


def test_preempted(core: Core, prompts: list[list[int]]) -> None:
    """Three that share nothing; the last one gives up its pages and goes on later."""
    longer = msgspec.structs.replace(SAMPLING, max_tokens=110)
    wanted = [[1 + index, *tokens] for index, tokens in enumerate(prompts)]
    together = run(core, wanted, longer)
    assert core.stats().num_preemptions > 0
    for tokens, result in zip(wanted, together, strict=True):
        core.flush()
        assert run(core, [tokens], longer)[0][:2] == result[:2]


def test_speculated(core: Core, prompts: list[list[int]]) -> None:
    """One that falls into a loop, which is drafted, alone and beside others."""
    longer = msgspec.structs.replace(SAMPLING, max_tokens=200)
    expected = run(core, prompts[1:2], longer)[0]
    speculating = build_core(msgspec.structs.replace(CONFIG, speculation=True))
    try:
        for wanted in (prompts[1:2], prompts[1:]):
            assert run(speculating, wanted, longer)[0][:2] == expected[:2]
        assert speculating.stats().num_accepted_tokens > 0
    finally:
        speculating.close()
