"""Types of fields that several dialects have, with their bounds."""

from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

MAX_NAME: Final = 256
MAX_TOOLS: Final = 1_000
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_TIMEOUT_S: Final = 86_400
INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1

BREAKPOINT_S: Final = 1800.0
"""How long a prompt is kept up to its `prompt_cache_breakpoint`, where nothing says otherwise."""
RETENTION_S: Final = {"30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Stop: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops: TypeAlias = Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
StopTokens: TypeAlias = Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS)]
TokenCount: TypeAlias = Annotated[int, Meta(ge=1, le=INT32)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=INT32)]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-INT64 - 1, le=INT64)]
Priority: TypeAlias = Annotated[int, Meta(ge=-INT32, le=INT32)]
Timeout: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
Echoed: TypeAlias = Annotated[str, Meta(max_length=1024)]
CacheSalt: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]


def kept_seconds(options: Any, retention: Any) -> float | None:
    """How long `prompt_cache_options.ttl` or `prompt_cache_retention` asks to keep the prompt.
    They are hints: what is not understood asks for nothing."""
    ttl = options.get("ttl") if isinstance(options, dict) else None
    asked = (RETENTION_S.get(each) for each in (ttl, retention) if isinstance(each, str))
    return max(filter(None, asked), default=None)


def is_breakpoint(asked: Any) -> bool:
    """Whether a part's `prompt_cache_breakpoint` asks to keep the prompt up to it: a hint too."""
    return isinstance(asked, dict) and asked.get("mode") == "explicit"
