"""One style of log lines."""

import logging
import re
import sys

from engine.logs import LineFormatter


def test_a_record_is_one_line_and_a_traceback_is_indented() -> None:
    try:
        raise ValueError("bad\npage")
    except ValueError:
        what = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "step %d\nfailed", (7,), what)
    first, *others = LineFormatter("engine").format(record).splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR engine: step 7", first)
    assert others[0] == "    failed"
    assert all(line.startswith("    ") for line in others)
    assert "ValueError: bad" in "".join(others)
