"""The test engine keeps the promises of a real core, on a clock that the tests turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.api import EngineError
from engine.scripted import (
    Script,
    ScriptedCore,
    ScriptFile,
    ScriptStep,
    build_scripted_core,
    in_order,
    read_script_file,
    text_script,
)
from engine.types import (
    EngineConfig,
    EngineEvent,
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

MS = 1_000_000


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_ns = 1000 * MS

    def __call__(self) -> int:
        return self.now_ns


def request(
    name: str = "r",
    max_tokens: int = 100,
    *,
    credits: int = 256,
    deadline_ns: int = 0,
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        name,
        pack_tokens([1] * 20),
        SamplingParams(max_tokens, **sampling),
        credits=credits,
        deadline_ns=deadline_ns,
    )


def play(script: Script, asked: EngineRequest, **options: Any) -> list[EngineEvent]:
    """Everything that an undisturbed request gets."""
    core = ScriptedCore(lambda request: script, **options)
    core.add(asked)
    events: list[EngineEvent] = []
    while core.has_work:
        events += core.step()
    return events


def text_of(events: Sequence[EngineEvent]) -> bytes:
    return b"".join(event.text for event in events if isinstance(event, TokenDelta))


def tokens_of(events: Sequence[EngineEvent]) -> list[int]:
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    return [int(token) for delta in deltas for token in unpack_tokens(delta.token_ids)]


def end_of(events: Sequence[EngineEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.mark.parametrize("tokens_per_step", range(1, 12))
def test_a_stop_string_never_leaks_however_tokens_are_grouped(tokens_per_step: int) -> None:
    events = play(text_script("abcSTOpSTOPde", tokens_per_step), request(stop=(b"STOP",)))
    assert text_of(events) == b"abcSTOp"
    assert tokens_of(events) == list(b"abcSTOpSTOP")
    assert (end_of(events).reason, end_of(events).stop) == (FinishReason.STOP, b"STOP")


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
def test_what_was_held_for_a_stop_comes_with_the_end(tokens_per_step: int) -> None:
    events = play(text_script("abcSTO", tokens_per_step), request(stop=(b"STOP",)))
    assert text_of(events) == b"abcSTO"
    assert end_of(events).stop == b""
    assert [type(event) for event in events].count(TokenDelta) == -(-6 // tokens_per_step)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
def test_max_tokens_cuts_a_group(tokens_per_step: int) -> None:
    events = play(text_script("abcdefgh", tokens_per_step), request(max_tokens=5))
    assert text_of(events) == b"abcde"
    assert (end_of(events).reason, end_of(events).num_output_tokens) == (FinishReason.LENGTH, 5)


def test_a_token_that_ends_is_counted_and_not_shown() -> None:
    script = Script((ScriptStep((65, 300, 66)),))
    stopped = play(script, request(), eos_token_ids=frozenset({300}))
    assert (tokens_of(stopped), text_of(stopped)) == ([65, 300], b"A")
    assert end_of(stopped).stop_token_id == 300
    ignored = play(script, request(ignore_eos=True), eos_token_ids=frozenset({300}))
    assert tokens_of(ignored) == [65, 300, 66]
    own = play(script, request(stop_token_ids=(65,), ignore_eos=True))
    assert (tokens_of(own), text_of(own), end_of(own).stop_token_id) == ([65], b"", 65)


def test_text_can_be_given_with_the_tokens() -> None:
    events = play(
        Script((ScriptStep((900, 901), text=b"\xc3"), ScriptStep(text=b"\xa4"))), request()
    )
    assert (tokens_of(events), text_of(events)) == ([900, 901], b"\xc3\xa4")


def test_logprobs_come_one_per_token_where_asked_for() -> None:
    given = TokenLogprobs(-0.5, (65, 66, 67), (-0.5, -1.5, -2.5))
    script = Script((ScriptStep((65,), logprobs=(given,)), ScriptStep((66, 67))))
    _, first, second, _ = play(script, request(logprobs=2))
    assert isinstance(first, TokenDelta)
    assert isinstance(second, TokenDelta)
    assert first.logprobs == (TokenLogprobs(-0.5, (65, 66), (-0.5, -1.5)),)
    assert [one.top_ids for one in second.logprobs] == [(66,), (67,)]
    assert not any(e.logprobs for e in play(script, request()) if isinstance(e, TokenDelta))


def test_delays_are_kept_and_do_not_drift() -> None:
    clock = Clock()
    core = ScriptedCore(lambda asked: text_script("abc", 1, 0.010), clock_ns=clock)
    core.add(request())
    assert [type(event) for event in core.step()] == [Started]
    assert (core.has_work, core.wake_ns) == (False, 1010 * MS)
    clock.now_ns = 1013 * MS
    assert core.has_work
    assert text_of(core.step()) == b"a"
    assert core.wake_ns == 1020 * MS
    clock.now_ns = 1050 * MS
    assert text_of(core.step()) == b"b"
    assert text_of(core.step()) == b"c"
    assert (core.has_work, core.wake_ns) == (False, 0)


def test_what_is_due_between_two_steps_is_said_together() -> None:
    clock = Clock()
    core = ScriptedCore(lambda asked: text_script("abc"), step_s=0.010, clock_ns=clock)
    core.add(request("r"))
    core.step()
    core.add(request("late"))
    assert (core.has_work, core.wake_ns) == (False, 1010 * MS)
    clock.now_ns = 1014 * MS
    assert [type(event) for event in core.step()] == [TokenDelta, Started, TokenDelta]
    assert core.wake_ns == 1020 * MS, "a late step delays none"


def test_a_request_without_credit_waits_for_it() -> None:
    core = ScriptedCore(lambda asked: text_script("abcdef", 4))
    core.add(request(credits=3))
    assert text_of(core.step()) == b"abc"
    assert (core.has_work, core.wake_ns) == (False, 0)
    core.grant("r", 2)
    assert text_of(core.step()) + text_of(core.step()) == b"de"
    assert not core.has_work
    core.grant("r", 9)
    core.grant("nobody", 9)
    events = core.step()
    assert text_of(events) == b"f"
    assert end_of(events).num_output_tokens == 6


def test_deadlines_and_aborts_end_also_what_is_silent() -> None:
    clock = Clock()
    core = ScriptedCore(lambda asked: Script(finish=None), clock_ns=clock)
    core.add(request("late", deadline_ns=1500 * MS))
    core.add(request("aborted"))
    core.step()
    assert core.wake_ns == 1500 * MS
    core.abort("aborted")
    core.abort("nobody")
    assert core.has_work
    (end,) = core.step()
    assert isinstance(end, Finished)
    assert (end.request_id, end.reason) == ("aborted", FinishReason.ABORT)
    clock.now_ns = 1500 * MS
    (end,) = core.step()
    assert isinstance(end, Finished)
    assert (end.request_id, end.reason) == ("late", FinishReason.DEADLINE)
    assert core.audit().referenced == 0


def test_a_request_that_ends_before_it_starts_has_no_started() -> None:
    core = ScriptedCore(lambda asked: text_script("abc"))
    core.add(request())
    core.abort("r")
    (end,) = core.step()
    assert isinstance(end, Finished)
    assert [phase.name for phase in end.phases] == ["queue"]


def test_cached_tokens_are_reported_and_never_the_whole_prompt() -> None:
    for scripted, told in ((16, 16), (999, 19)):
        events = play(Script(num_cached_tokens=scripted), request())
        assert isinstance(events[0], Started)
        assert events[0].num_cached_tokens == end_of(events).num_cached_tokens == told
        assert end_of(events).phases[1].start_position == told


def test_running_requests_reference_pages() -> None:
    core = ScriptedCore(lambda asked: Script(finish=None))
    core.add(request())
    assert (core.stats().waiting, core.audit().referenced) == (1, 0)
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.pool.referenced) == (1, 0, 2)
    assert stats.pool.free + stats.pool.referenced == stats.pool.total
    core.close()
    assert core.audit().referenced == 0


def test_faults() -> None:
    events = play(Script((ScriptStep((65,)), ScriptStep(error="broken"))), request())
    assert (end_of(events).reason, end_of(events).message) == (FinishReason.ERROR, "broken")
    with pytest.raises(RuntimeError, match="torn"):
        play(Script((ScriptStep((65,)), ScriptStep(crash="torn"))), request())


def test_scripts_in_order() -> None:
    first, second = text_script("a"), text_script("b")
    once = in_order([first, second])
    assert [once(request()), once(request())] == [first, second]
    with pytest.raises(LookupError):
        once(request())
    endless = in_order([first, second], repeat=True)
    assert [endless(request()) for _ in range(3)] == [first, second, first]


def test_the_built_in_script_repeats_its_sentence() -> None:
    core = build_scripted_core(EngineConfig(model="", backend="scripted", page_size=32))
    assert core.info.page_size == 32
    assert (
        text_of(play(ScriptFile(delay_s=0.0).script_for()(request()), request()))
        == ((ScriptFile().text * 3).encode()[:100])
    )


def test_a_script_file_says_how_long_and_how_fast(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"text": "né", "tokens_per_step": 2, "num_tokens": 7, "delay_s": 0}')
    events = play(read_script_file(str(path)).script_for()(request()), request())
    assert text_of(events) == "nénén".encode()
    assert end_of(events).reason is FinishReason.STOP
    assert [type(event) for event in events].count(TokenDelta) == 4


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"txt": "a"}',
        '{"text": ""}',
        '{"delay_s": -1}',
        '{"scripts": [{"repeat": true}]}',
        '{"scripts": [{"steps": [{"token_ids": [1, 2], "logprobs": [[-1.0]]}]}]}',
    ],
)
def test_a_file_that_cannot_be_played_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(content)
    with pytest.raises(EngineError, match=r"script\.json cannot be played"):
        read_script_file(str(path))
