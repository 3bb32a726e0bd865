"""The trace of the request that a task serves, in every line that it logs."""

import logging
from contextvars import ContextVar
from typing import Final

TRACE_ID: Final[ContextVar[str]] = ContextVar("trace_id", default="")
"""Of the running task; "" outside of requests. Tasks that it starts inherit it."""

_ANYBODYS: Final = "asyncio"
"""The logger of what is noticed when it is collected, in whatever task that happens."""


class TraceFilter(logging.Filter):
    """Adds ` trace=…` to the lines of a request that do not say it themselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True: nothing is held back."""
        trace_id = TRACE_ID.get()
        if trace_id and record.name != _ANYBODYS and "trace=" not in record.getMessage():
            record.msg, record.args = f"{record.getMessage()} trace={trace_id}", None
        return True


def mark_lines() -> None:
    """Let every line that is logged from now on tell its trace."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(TraceFilter())
