"""Anthropic's error envelope, and its words for what is refused."""

from typing import Final

import msgspec

from service.conversation import JSONValue
from service.errors import ApiError

_STATUS: Final = {408: 504, 503: 529}
"""Where this protocol has a status of its own: a timeout of the server, and too much load."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_status(error: ApiError) -> int:
    """The HTTP status of an error on this surface."""
    return _STATUS.get(error.status, error.status)


def encode_error(error: ApiError, request_id: str) -> bytes:
    """The envelope. `details.error_code` is our code, which clients may not know.

    Agents look for "prompt is too long" to know that they must shorten their history.
    """
    status = error_status(error)
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    inner: dict[str, JSONValue] = {
        "type": _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error"),
        "message": message,
    }
    if error.code is not None:
        inner["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})
