"""What an engine refuses at the call, and that nothing else is refused."""

from typing import Any

import msgspec
import pytest

from engine.api import RequestRefused
from engine.limits import MAX_CREDITS, MAX_STOP_BYTES, MAX_STOPS, check_request
from engine.scripted import ScriptFile
from engine.types import MAX_BIASES, EngineRequest, SamplingParams, pack_tokens

INFO = ScriptFile(vocab_size=1000, max_context=100, num_pages=5).info(page_size=16)
FITTING = EngineRequest("r", pack_tokens([0, 999]), SamplingParams(10))


def request(**changes: Any) -> EngineRequest:
    return msgspec.structs.replace(FITTING, **changes)


def sampling(**changes: Any) -> EngineRequest:
    return request(sampling=msgspec.structs.replace(FITTING.sampling, **changes))


REFUSED = [
    (request(id=""), "id"),
    (request(id="x" * 257), "id"),
    (request(id="\ud800"), "id"),
    (request(token_ids=b""), "token_ids"),
    (request(token_ids=b"\0\0\0"), "token_ids"),
    (request(token_ids=pack_tokens([1, -1])), "token_ids"),
    (request(token_ids=pack_tokens([1000])), "token_ids"),
    (request(token_ids=pack_tokens([2**31 - 1])), "token_ids"),
    (request(token_ids=pack_tokens([1] * 100)), "token_ids"),
    (request(token_ids=pack_tokens([1] * 81)), "token_ids"),
    (request(token_ids="text"), "token_ids"),
    (request(prediction=b"\0"), "prediction"),
    (request(prediction=pack_tokens([1, 1000])), "prediction"),
    (request(prediction=pack_tokens([-1])), "prediction"),
    (request(prediction=pack_tokens([1] * 101)), "prediction"),
    (request(tenant=None), "tenant"),
    (request(salt="\udfff"), "salt"),
    (request(priority=2**70), "priority"),
    (request(priority=0.5), "priority"),
    (request(deadline_ns=-1), "deadline_ns"),
    (request(credits=0), "credits"),
    (request(credits=MAX_CREDITS + 1), "credits"),
    (request(sampling=None), "sampling"),
    (sampling(max_tokens=-1), "sampling.max_tokens"),
    (sampling(max_tokens=2**70), "sampling.max_tokens"),
    (sampling(max_tokens=80), "sampling.max_tokens"),
    (sampling(temperature=-0.1), "sampling.temperature"),
    (sampling(temperature=float("nan")), "sampling.temperature"),
    (sampling(temperature=float("inf")), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.5), "sampling.top_p"),
    (sampling(top_k=-1), "sampling.top_k"),
    (sampling(min_p=float("nan")), "sampling.min_p"),
    (sampling(seed=-1), "sampling.seed"),
    (sampling(frequency_penalty=2.1), "sampling.frequency_penalty"),
    (sampling(presence_penalty=float("nan")), "sampling.presence_penalty"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=float("nan")), "sampling.repetition_penalty"),
    (sampling(logit_bias=((-1, 1.0),)), "sampling.logit_bias"),
    (sampling(logit_bias=((1000, 1.0),)), "sampling.logit_bias"),
    (sampling(logit_bias=((2**31, 1.0),)), "sampling.logit_bias"),
    (sampling(logit_bias=((1, float("nan")),)), "sampling.logit_bias"),
    (sampling(logit_bias=((1, 100.5),)), "sampling.logit_bias"),
    (sampling(logit_bias=((1, 1.0),) * (MAX_BIASES + 1)), "sampling.logit_bias"),
    (sampling(allowed_token_ids=(0, 1000)), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=(1,) * (MAX_BIASES + 1)), "sampling.allowed_token_ids"),
    (sampling(min_tokens=-1), "sampling.min_tokens"),
    (sampling(prompt_logprobs=21), "sampling.prompt_logprobs"),
    (sampling(prompt_logprobs=-1), "sampling.prompt_logprobs"),
    (sampling(seed=2**63), "sampling.seed"),
    (sampling(stop=("text",)), "sampling.stop"),
    (sampling(stop=(b"",)), "sampling.stop"),
    (sampling(stop=(b"x" * (MAX_STOP_BYTES + 1),)), "sampling.stop"),
    (sampling(stop=(b"x",) * (MAX_STOPS + 1)), "sampling.stop"),
    (sampling(stop_token_ids=(1000,)), "sampling.stop_token_ids"),
    (sampling(stop_token_ids=(-1,)), "sampling.stop_token_ids"),
    (sampling(stop_token_ids=(1,) * (MAX_STOPS + 1)), "sampling.stop_token_ids"),
    (sampling(logprobs=21), "sampling.logprobs"),
    (sampling(logprobs=-1), "sampling.logprobs"),
]


@pytest.mark.parametrize(("refused", "field"), REFUSED)
def test_refusals_name_the_field(refused: EngineRequest, field: str) -> None:
    with pytest.raises(RequestRefused) as raised:
        check_request(refused, INFO)
    assert raised.value.field == field
    assert str(raised.value)
    assert not raised.value.retryable


TAKEN = [
    FITTING,
    request(id="x" * 256, tenant="täglich", salt="\U0001f30a", priority=-5, deadline_ns=2**62),
    request(credits=1),
    request(token_ids=pack_tokens([1] * 80), sampling=SamplingParams(1)),
    request(token_ids=pack_tokens([1] * 80), sampling=SamplingParams(0)),
    request(prediction=pack_tokens([0, 999] * 50)),
    sampling(max_tokens=79),
    sampling(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=1.0, seed=2**63 - 1),
    sampling(stop=(b"x" * MAX_STOP_BYTES,) * MAX_STOPS, stop_token_ids=(0, 999), logprobs=20),
]


@pytest.mark.parametrize("taken", TAKEN)
def test_what_fits_is_taken(taken: EngineRequest) -> None:
    check_request(taken, INFO)


def test_an_answer_is_limited_by_the_context_before_the_pool() -> None:
    """`max_tokens` beyond the context is no reason to refuse where the whole context fits."""
    roomy = ScriptFile(vocab_size=1000, max_context=80, num_pages=5).info(page_size=16)
    check_request(sampling(max_tokens=10**6), roomy)


def test_the_refusal_says_the_numbers() -> None:
    with pytest.raises(RequestRefused, match=r"120 tokens.*context of 100 tokens.*at most 99"):
        check_request(request(token_ids=pack_tokens([1] * 120)), INFO)
