"""The life cycle of a request and what it counts."""

import itertools

import numpy as np
import pytest

from engine.scheduling.request import IllegalTransition, Request, RequestStatus
from engine.types import EngineRequest, SamplingParams, pack_tokens
from prefix_cache.key import Namespace

LEGAL = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
    (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
    (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
}


def make(
    num_prompt: int = 4,
    max_tokens: int = 8,
    *,
    max_context: int = 100,
    arrival: int = 1,
    priority: int = 0,
    credits: int = 4,
) -> Request:
    tokens = np.arange(num_prompt, dtype=np.int32)
    wire = EngineRequest(
        "r", pack_tokens(tokens), SamplingParams(max_tokens), priority=priority, credits=credits
    )
    namespace = Namespace("m", "n", "f16", "t")
    return Request(wire, tokens, namespace, arrival=arrival, now_ns=1000, max_context=max_context)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestStatus, repeat=2)))
def test_only_legal_transitions(old: RequestStatus, new: RequestStatus) -> None:
    request = make()
    request.status = old
    if (old, new) in LEGAL:
        request.move_to(new)
        assert request.status is new
    else:
        with pytest.raises(IllegalTransition, match=f"{old.name} to {new.name}"):
            request.move_to(new)


def test_tokens_grow_and_credits_shrink() -> None:
    request = make(num_prompt=3, max_tokens=5000, max_context=10_000)
    for token in range(3, 3000):
        request.append(token)
    assert request.token_ids.tolist() == list(range(3000))
    assert request.token_ids.dtype == np.int32
    assert (request.num_tokens, request.num_output_tokens) == (3000, 2997)
    assert request.credits == 4 - 2997


def test_the_context_cuts_max_tokens() -> None:
    assert make(num_prompt=90, max_tokens=50, max_context=100).max_new_tokens == 10
    assert make(num_prompt=90, max_tokens=10, max_context=100).max_new_tokens == 10
    assert make(num_prompt=90, max_tokens=9, max_context=100).max_new_tokens == 9


def test_paused_without_credit_but_not_when_nothing_is_sampled() -> None:
    assert not make(credits=1).paused
    assert make(credits=0).paused
    assert not make(credits=0, max_tokens=0).paused


def test_order_is_priority_then_arrival() -> None:
    late_urgent, early, late = make(arrival=3, priority=-1), make(arrival=1), make(arrival=2)
    assert sorted([late, early, late_urgent], key=lambda r: r.order) == [late_urgent, early, late]


def test_phases_follow_each_other_through_preemption() -> None:
    request = make(num_prompt=10)
    request.stamp("queue", 1100)
    request.stamp("prefix_match", 1200)
    request.move_to(RequestStatus.RUNNING)
    request.num_computed_tokens = 4
    request.stamp_current(1300)
    request.move_to(RequestStatus.PREEMPTED)
    request.num_computed_tokens = 0
    request.stamp("queue", 1400)
    request.move_to(RequestStatus.RUNNING)
    request.num_computed_tokens = 10
    request.stamp("prefill", 1500, num_tokens=10)
    request.num_computed_tokens = 12
    phases = request.close_phases(1600)
    assert [(p.name, p.start_ns, p.end_ns) for p in phases] == [
        ("queue", 1000, 1100),
        ("prefix_match", 1100, 1200),
        ("prefill", 1200, 1300),
        ("queue", 1300, 1400),
        ("prefill", 1400, 1500),
        ("decode", 1500, 1600),
    ]
    assert (phases[-1].num_tokens, phases[-1].start_position) == (2, 10)


def test_a_waiting_request_has_no_stop_automaton() -> None:
    """It costs megabytes for long lists, and a thousand requests may wait."""
    sampling = SamplingParams(4, stop=(b"end",))
    asked = EngineRequest("r", pack_tokens([1, 2]), sampling)
    made = Request(
        asked,
        np.array([1, 2], dtype=np.int32),
        Namespace("m", "n", "f16", "t"),
        arrival=1,
        now_ns=0,
        max_context=64,
    )
    assert made._stop_matcher is None
    matcher = made.stop_matcher
    assert matcher is not None and made.stop_matcher is matcher
