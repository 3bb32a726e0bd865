"""`ApiError`: what is refused, once, for every dialect; each dialect gives it its own shape."""

import math
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import msgspec

from engine.api import EngineError, EngineOverloaded, RequestRefused
from engine.types import FinishReason
from service.events import Failed

T = TypeVar("T")

RETRY_SOON = {"retry-after": "1", "retry-after-ms": "1000"}


def retry_after(seconds: float) -> dict[str, str]:
    """Both headers that say when to come back; the SDKs obey the one in milliseconds first."""
    ms = max(1, math.ceil(seconds * 1e3))
    return {"retry-after": str(math.ceil(ms / 1e3)), "retry-after-ms": str(ms)}


class ApiError(Exception):
    """An answer other than success. `param` is the dotted path of the field, where there is one.

    `type` and `code` are OpenAI's vocabulary; other dialects map from `status` and `code`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def openai_error(error: ApiError) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400 for a field whose value is refused."""
    return ApiError(400, message, code=code, param=param)


def overloaded(message: str) -> ApiError:
    """503 for what may be asked again soon."""
    return ApiError(
        503, message, type="server_error", code="server_is_overloaded", headers=RETRY_SOON
    )


def draining(then: str) -> ApiError:
    """503 while the server ends; `then` is what the client may do."""
    return overloaded(f"The server is draining, it is shutting down: {then}.")


def context_exceeded(param: str, message: str) -> ApiError:
    """400 for what does not fit the context. The code stands in the text too: LangChain looks for
    it there to know that the history must be shortened."""
    return invalid(param, f"{message} (context_length_exceeded)", "context_length_exceeded")


def from_engine(error: EngineError) -> ApiError:
    """The answer for what the engine refused."""
    if isinstance(error, RequestRefused):
        return invalid(error.field.removeprefix("sampling."), str(error))
    if isinstance(error, EngineOverloaded):
        return ApiError(
            503,
            f"The server is overloaded: {error}.",
            type="server_error",
            code="server_is_overloaded",
            headers=retry_after(error.retry_after_s),
        )
    if error.retryable:
        return overloaded(str(error))
    return ApiError(500, str(error), type="server_error")


async def asked(answer: Awaitable[T]) -> T:
    """What the engine answers. Raises ApiError where it does not."""
    try:
        return await answer
    except EngineError as error:
        raise from_engine(error) from error


def from_failure(failed: Failed) -> ApiError:
    """The answer for a generation that ended otherwise than by itself."""
    if failed.finish_reason is FinishReason.DEADLINE:
        return ApiError(
            408,
            failed.message,
            code="timeout",
            param="timeout",
            headers={"x-should-retry": "false"},
        )
    if failed.finish_reason is FinishReason.ABORT:
        return overloaded(failed.message)
    if failed.retryable:
        return ApiError(
            503, failed.message, type="server_error", code="server_error", headers=RETRY_SOON
        )
    return ApiError(500, failed.message, type="server_error")
