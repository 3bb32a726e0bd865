"""How both processes log: one line per record, the same for ours, uvicorn's and the libraries'."""

import logging
import time
from collections.abc import Mapping
from typing import Final

_QUIET: Final[Mapping[str, int]] = {
    # What they complain of is told once by who called them.
    "opentelemetry": logging.CRITICAL,
    "urllib3": logging.CRITICAL,
}


class LineFormatter(logging.Formatter):
    """`2026-11-30T07:27:49.123Z WARNING engine: message`; a traceback follows, indented."""

    def __init__(self, part: str) -> None:
        """`part` is which process speaks."""
        super().__init__(f"{{asctime}} {{levelname}} {part}: {{message}}", style="{")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """UTC, with milliseconds."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        """Whatever begins at the left edge is a record."""
        return super().format(record).replace("\n", "\n    ")


def start_logging(part: str, level: str) -> None:
    """Log to standard error from now on; `level` is the least that is told, in any case."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(part))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(least)
