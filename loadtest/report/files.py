"""Reads and writes reports."""

import os
import tempfile
from pathlib import Path

import msgspec

from loadtest.measure.result import FORMAT, Report


class ReportError(ValueError):
    """A file that is no report of ours; the message is a sentence for the user."""


def write_json(report: Report, path: Path) -> None:
    """Write the report's data. Raises OSError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=0).decode() + "\n")


def read_json(path: Path) -> Report:
    """The report of a file that `write_json` wrote. Raises ReportError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ReportError(f"{path} is not a report: {error}") from error
    if report.format != FORMAT:
        raise ReportError(f"{path} has format {report.format!r}, this tool reads {FORMAT!r}")
    return report


def write_whole(path: Path, text: str) -> None:
    """The file holds all of `text`, or what it held before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
