"""The frames that tell what became of `response.steer`."""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from service.conversation import ToolCall
from service.dialects.responses_decode import SteerRequest

SteerProblem: TypeAlias = Literal[
    "response_not_found",
    "invalid_input",
    "steering_not_supported",
    "too_many_pending_steers",
    "response_already_completed",
    "response_not_active",
    "successor_creation_failed",
]

_MESSAGES: Final[dict[SteerProblem, str]] = {
    "response_not_found": "No response of this id is known on this connection.",
    "invalid_input": "The input cannot be used.",
    "steering_not_supported": "This response says nothing that could be steered.",
    "too_many_pending_steers": "Too much steering input waits on this connection.",
    "response_already_completed": "The response has ended.",
    "response_not_active": "The response ended before the input could be used.",
    "successor_creation_failed": "No response could be begun with the input.",
}

_json = msgspec.json.Encoder().encode


def accepted(steer_id: str, asked: SteerRequest, number: int, stream_id: str | None) -> bytes:
    """The input is the server's from here on."""
    return _frame("accepted", number, stream_id, steer=_steer(asked, steer_id))


def pending(
    steer_id: str,
    asked: SteerRequest,
    calls: tuple[ToolCall, ...],
    number: int,
    stream_id: str | None,
) -> bytes:
    """The input waits for the client's own continuation, which brings what the calls return."""
    needed = [
        {"type": "function_call_output", "call_id": call.id, "name": call.name} for call in calls
    ]
    return _frame(
        "pending",
        number,
        stream_id,
        reason="waiting_for_required_input",
        required_input=needed,
        steer=_steer(asked, steer_id),
    )


def failed(
    problem: SteerProblem,
    asked: SteerRequest,
    steer_id: str | None,
    number: int,
    stream_id: str | None,
) -> bytes:
    """The input goes back, as it came."""
    error = {
        "type": "invalid_request_error",
        "code": problem,
        "message": asked.fault or _MESSAGES[problem],
    }
    steer = {**_steer(asked, steer_id), "input": asked.input}
    return _frame("failed", number, stream_id, error=error, steer=steer)


def _steer(asked: SteerRequest, steer_id: str | None) -> dict[str, Any]:
    named = {} if steer_id is None else {"id": steer_id}
    return {**named, "previous_response_id": asked.previous_response_id}


def _frame(kind: str, number: int, stream_id: str | None, **fields: Any) -> bytes:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    head = {"type": f"response.steer.{kind}", "sequence_number": number}
    return _json({**head, **fields, **lane})
