"""What requests ask of the default model's logits: biases, seeds and log-probabilities of prompts,
the same whatever else runs."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.core import Core
from engine.models import load_model
from engine.runtime import build_core
from engine.types import (
    EngineConfig,
    EngineRequest,
    PromptLogprobs,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from kernels.contract import KVDType
from tests.engine.test_runtime import model_path
from tests.kernels.stepping import kv_layout, make_batch

PROMPT = [504, 2766, 314, 3575, 253, 1105, 28, 351, 260, 6330]
CONFIG = EngineConfig(model=str(model_path()), kv_memory_bytes=32 * 2**20, max_context=1024)
Scores = list[TokenLogprobs]


def params(max_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens, ignore_eos=True, **changes)


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    built = build_core(CONFIG)
    yield built
    built.close()


def run(
    core: Core, wanted: list[tuple[list[int], SamplingParams]]
) -> list[tuple[list[int], Scores]]:
    """All at once; the tokens of each, and its prompt's scores."""
    for index, (tokens, sampling) in enumerate(wanted):
        core.add(EngineRequest(str(index), pack_tokens(tokens), sampling))
    results: list[tuple[list[int], Scores]] = [([], []) for _ in wanted]
    while core.has_work:
        for event in core.step():
            tokens, scores = results[int(event.request_id)]
            if isinstance(event, TokenDelta):
                tokens += unpack_tokens(event.token_ids).tolist()
            elif isinstance(event, PromptLogprobs):
                scores += event.logprobs
    return results


def test_a_bias_forces_and_forbids_a_token(core: Core) -> None:
    [(plain, _)] = run(core, [(PROMPT, params())])
    [(forced, _)] = run(core, [(PROMPT, params(logit_bias=((1234, 100.0),)))])
    assert forced == [1234] * 8
    [(barred, _)] = run(core, [(PROMPT, params(logit_bias=((plain[0], -100.0),)))])
    assert barred[0] != plain[0] and plain[0] not in barred
    last = core.info.vocab_size - 1
    [(edge, _)] = run(core, [(PROMPT, params(2, logit_bias=((last, 100.0),)))])
    assert edge == [last] * 2


def test_penalties_keep_tokens_from_coming_back(core: Core) -> None:
    loops = [1000] * 12
    [(plain, _)] = run(core, [(loops, params(24))])
    [(varied, _)] = run(core, [(loops, params(24, frequency_penalty=2.0, presence_penalty=2.0))])
    assert len(set(varied)) > len(set(plain))


def test_a_seed_gives_the_same_tokens_beside_any_load(core: Core) -> None:
    wanted = params(16, temperature=1.0, seed=42, frequency_penalty=0.6, top_p=0.95)
    core.flush()
    [(alone, _)] = run(core, [(PROMPT, wanted)])
    load = [
        (PROMPT[:5] + [300 + i] * 20, params(20, temperature=0.8, seed=i, presence_penalty=i / 4))
        for i in range(5)
    ]
    beside = run(core, [*load[:2], (PROMPT, wanted), *load[2:]])
    assert beside[2][0] == alone
    [(other, _)] = run(core, [(PROMPT, params(16, temperature=1.0, seed=43, top_p=0.95))])
    assert other != alone


def test_scores_of_prompts_have_the_same_bits_in_any_order(core: Core) -> None:
    prompts = [PROMPT, PROMPT[:7] + [900, 901] * 40, [7, *PROMPT]]
    scored = params(1, prompt_logprobs=2)
    core.flush()
    forward = [run(core, [(tokens, scored)])[0][1] for tokens in prompts]
    core.flush()
    backward = [run(core, [(tokens, scored)])[0][1] for tokens in reversed(prompts)][::-1]
    again = [scores for _, scores in run(core, [(tokens, scored) for tokens in prompts])]
    assert forward == backward == again
    assert [len(scores) for scores in forward] == [len(tokens) - 1 for tokens in prompts]


def test_scores_of_a_prompt_are_those_of_a_plain_forward_pass() -> None:
    reference = pytest.importorskip("kernels.reference").ReferenceBackend(threads=1)
    loaded = load_model(model_path())
    model = reference.load(loaded.spec, loaded.weights)
    kv = reference.alloc_kv(kv_layout(loaded.spec, 16, KVDType.F32), 2)
    full = reference.step(model, kv, make_batch([(PROMPT, 0, range(2))], 16)).full
    assert full is not None
    logits = full.astype(np.float64)
    peak = logits.max(axis=1, keepdims=True)
    expected = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    built = build_core(msgspec.structs.replace(CONFIG, exact=True))
    try:
        [(_, scores)] = run(built, [(PROMPT, params(0, prompt_logprobs=1))])
    finally:
        built.close()
    for position, score in enumerate(scores):
        row = expected[position]
        assert score.logprob == pytest.approx(row[PROMPT[position + 1]], abs=0.02)
        assert score.top_logprobs[0] == pytest.approx(row.max(), abs=0.02)
