"""The store of responses: chains, forks, tenants, time to live, byte cap."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import FinishReason
from service.conversation import Message, ToolCall
from service.dialects.responses_entries import Cancelled
from service.events import (
    Completed,
    TextDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStarted,
    Usage,
)
from service.responses.store import ResponsesStore, StoredResponse


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def say(store: ResponsesStore, response: StoredResponse, *pieces: str) -> StoredResponse:
    for piece in pieces:
        store.append(response, TextDelta(piece))
    store.append(response, end(1, 2, 3))
    return response


def end(*token_ids: int, reason: FinishReason = FinishReason.STOP) -> Completed:
    return Completed(reason, Usage(1, 0, len(token_ids)), token_ids=token_ids)


def texts(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


def test_a_continuation_reads_the_chain_then_its_own_input() -> None:
    store = ResponsesStore()
    first = say(store, store.begin("a", user("one")), "un", "o")
    second = say(store, store.begin("a", user("two"), previous=first), "due")
    third = store.begin("a", user("three"), previous=second)
    assert texts(third.prompt()) == [
        ("user", "one"),
        ("assistant", "uno"),
        ("user", "two"),
        ("assistant", "due"),
        ("user", "three"),
    ]
    assert third.conversation_id == first.id
    store.check()


def test_a_fork_of_a_running_response_keeps_what_it_saw() -> None:
    store = ResponsesStore()
    running = store.begin("a", user("count"))
    early = store.begin("a", user("stop"), previous=running)
    store.append(running, TextDelta("1, 2"))
    later = store.begin("a", user("stop"), previous=running)
    say(store, running, ", 3")
    assert texts(early.prompt()) == [("user", "count"), ("user", "stop")]
    assert texts(later.prompt()) == [("user", "count"), ("assistant", "1, 2"), ("user", "stop")]
    after = store.begin("a", (), previous=running)
    assert texts(after.prompt()) == [("user", "count"), ("assistant", "1, 2, 3")]
    store.check()


def test_an_incomplete_response_can_be_forked_and_a_warm_up_leaves_no_turn() -> None:
    store = ResponsesStore()
    cut = store.begin("a", user("go"))
    store.append(cut, TextDelta("half a sen"))
    store.append(cut, end(1, reason=FinishReason.LENGTH))
    assert cut.status == "incomplete"
    assert texts(cut.turn()) == [("assistant", "half a sen")]
    warm = store.begin("a", user("tools"), generates=False)
    store.append(warm, end(reason=FinishReason.LENGTH))
    assert warm.status == "completed"
    assert texts(store.begin("a", user("hi"), previous=warm).prompt()) == [
        ("user", "tools"),
        ("user", "hi"),
    ]


def test_a_completed_response_that_said_nothing_still_took_its_turn() -> None:
    store = ResponsesStore()
    silent = say(store, store.begin("a", user("shh")))
    assert texts(silent.turn()) == [("assistant", "")]


def test_calls_are_part_of_the_turn_once_they_are_complete() -> None:
    store = ResponsesStore()
    response = store.begin("a", user("weather?"))
    store.append(response, TextDelta("Let me look."))
    store.append(response, ToolCallStarted(0, "call_1", "weather"))
    store.append(response, ToolCallDelta(0, '{"city":'))
    store.append(response, ToolCallDelta(0, '"Rome"}'))
    assert response.turn() == (Message("assistant", "Let me look."),)
    store.append(response, ToolCallDone(0))
    store.append(response, ToolCallStarted(1, "call_2", "cut"))
    said = Message(
        "assistant",
        "Let me look.",
        tool_calls=(ToolCall("call_1", "weather", '{"city":"Rome"}'),),
    )
    assert response.turn() == (said,)
    store.append(response, Cancelled())
    assert response.turn() == (said,)
    store.check()


def test_a_deleted_response_is_gone_at_once_and_its_bytes_when_it_has_ended() -> None:
    store = ResponsesStore()
    running = store.begin("a", user("long"))
    store.delete(running)
    assert store.get("a", running.id) is None
    assert store.num_bytes > 0
    say(store, running, "x")
    assert store.num_bytes == 0
    parent = say(store, store.begin("a", user("p")), "x")
    child = store.begin("a", user("c"), previous=parent)
    store.delete(parent)
    assert store.get("a", parent.id) is None
    assert texts(child.prompt())[0] == ("user", "p")
    store.check()


def test_what_is_told_again_counts_to_the_bytes() -> None:
    store = ResponsesStore()
    response = store.begin("a", user("x"))
    before = store.num_bytes
    for _ in range(1000):
        store.append(response, TextDelta("abcd"))
    assert store.num_bytes - before > 15 * 4000 / 4
    store.check()


def test_ids_belong_to_their_tenant() -> None:
    store = ResponsesStore()
    mine = say(store, store.begin("a", user("x")), "y")
    assert store.get("a", mine.id) is mine
    assert store.get("b", mine.id) is None
    assert mine.id.startswith("resp_")


def test_responses_expire_after_their_last_use_and_a_use_counts_for_the_chain() -> None:
    clock = Clock()
    store = ResponsesStore(ttl_s=10, clock=clock)
    parent = say(store, store.begin("a", user("p")), "x")
    child = say(store, store.begin("a", user("c"), previous=parent), "y")
    lone = say(store, store.begin("a", user("l")), "z")
    clock.now = 9
    assert store.get("a", child.id) is child
    clock.now = 18.9
    assert store.get("a", lone.id) is None
    assert store.get("a", parent.id) is parent
    clock.now = 100
    assert store.get("a", child.id) is None
    assert len(store) == 0
    assert store.num_bytes == 0


def test_a_running_response_outlives_its_time_and_the_cap() -> None:
    clock = Clock()
    store = ResponsesStore(ttl_s=1, max_bytes=1, clock=clock)
    running = store.begin("a", user("long"))
    clock.now = 50
    assert store.get("a", running.id) is running
    store.append(running, end(1))
    assert store.get("a", running.id) is None
    assert store.num_bytes == 0


def test_the_byte_cap_drops_the_least_recently_used_and_ends_of_chains_first() -> None:
    store = ResponsesStore(max_bytes=11_000)
    old = say(store, store.begin("a", user("x" * 2000)), "a")
    root = say(store, store.begin("a", user("y" * 2000)), "b")
    leaf = say(store, store.begin("a", user("z" * 1000), previous=root), "c")
    assert store.get("a", leaf.id) is leaf
    small = say(store, store.begin("a", user("w" * 100)), "d")
    assert store.get("a", old.id) is None
    big = say(store, store.begin("a", user("v" * 3000)), "e")
    assert store.get("a", leaf.id) is None
    assert all(store.get("a", kept.id) is kept for kept in (root, small, big))
    assert store.num_bytes <= 11_000
    store.check()


def test_a_predecessor_lives_as_long_as_its_continuation() -> None:
    clock = Clock()
    store = ResponsesStore(ttl_s=10, clock=clock)
    parent = say(store, store.begin("a", user("p")), "x")
    child = store.begin("a", user("c"), previous=parent)
    clock.now = 20
    assert store.get("a", parent.id) is parent, "what continues it runs"
    say(store, child, "y")
    store.check()
    assert store.get("a", child.id) is None
    assert store.get("a", parent.id) is parent, "it was used by its own name at 20"
    store.check()
    clock.now = 30
    assert store.get("a", parent.id) is None
    assert len(store) == store.num_bytes == 0


def test_a_deleted_predecessor_stays_readable_through_its_continuation() -> None:
    store = ResponsesStore()
    parent = say(store, store.begin("a", user("p")), "x")
    child = say(store, store.begin("a", user("c"), previous=parent), "y")
    store.delete(parent)
    assert store.get("a", parent.id) is None
    assert texts(child.prompt())[0] == ("user", "p")
    store.check()
    store.discard(child)
    store.check()
    assert store.num_bytes == 0


def test_a_chain_goes_from_its_end_when_room_is_needed() -> None:
    store = ResponsesStore(max_bytes=60_000)
    chain = [say(store, store.begin("a", user("x" * 500)), "a")]
    for _ in range(9):
        chain.append(say(store, store.begin("a", user("x" * 500), previous=chain[-1]), "a"))
    other = say(store, store.begin("a", user("x" * 500)), "b")
    size = len(store)
    while store.get("a", chain[0].id) is not None:
        other = say(store, store.begin("a", user("y" * 500), previous=other), "c")
        alive = [store.get("a", each.id) is not None for each in chain[1:]]
        assert alive == sorted(alive, reverse=True)
        store.check()
        if len(store) > 200:
            break
    assert store.num_bytes <= 60_000
    assert size < len(store)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "fork", "say", "end", "delete", "wait"]), st.integers(0, 7)
        ),
        max_size=60,
    )
)
def test_bytes_and_holders_add_up_after_every_operation(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    store = ResponsesStore(ttl_s=20, max_bytes=20_000, clock=clock)
    known: list[StoredResponse] = []
    running: list[StoredResponse] = []
    for action, number in steps:
        if action == "begin":
            running.append(store.begin("a", user("i" * 100 * number)))
            known.append(running[-1])
        elif action == "fork" and known:
            previous = store.get("a", known[number % len(known)].id)
            if previous is not None:
                running.append(store.begin("a", user("f" * 100 * number), previous=previous))
                known.append(running[-1])
        elif action == "say" and running:
            store.append(running[number % len(running)], TextDelta("word " * number * 50))
        elif action == "end" and running:
            store.append(running.pop(number % len(running)), end(number))
        elif action == "delete" and known:
            response = store.get("a", known[number % len(known)].id)
            if response is not None:
                store.delete(response)
        elif action == "wait":
            clock.now += number
        store.check()
    for response in running:
        store.append(response, Cancelled())
        assert response.status == "cancelled"
    clock.now += 100
    assert store.get("a", "resp_none") is None
    assert len(store) == store.num_bytes == 0
