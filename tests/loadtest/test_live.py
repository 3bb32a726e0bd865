"""What a terminal shows while it runs, and a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.loadtest.playing import Play, playing

ROOT = Path(__file__).parent.parent.parent
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(columns: int, *arguments: str) -> str:
    """All that `python -m loadtest` writes to a terminal that is `columns` wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "loadtest", *arguments],
        cwd=ROOT,
        env=environment | {"TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 65536):
            written += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return written.decode()


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_whole_lines(columns: int) -> None:
    """No line is wider than the terminal, which would break it and leave pieces of frames."""
    play = Play(pieces=("word ",) * 12, delay_s=0.03)
    with playing(play) as url:
        arguments = ("--url", url, "--name", "a-server-with-a-name", "--concurrency", "4", "8")
        written = on_terminal(columns, "run", *arguments)
    lines = [line.rstrip("\r") for line in ESCAPE.sub("", written).split("\n")]
    lines = [part for line in lines for part in line.split("\r")]
    assert max(map(len, lines)) <= columns
    frames = [line for line in lines if "in flight" in line]
    assert len(frames) > 2
    assert any(re.search(r" [1-9]\d* pieces/s   4 in flight", line) for line in frames)
    assert any("TTFT" in line and "ITL" in line for line in lines)
    assert any("a-server-with-a-name, 8 at once, repeat 1: 32/32 turns" in line for line in lines)
    whole = any(line.startswith("| 8 at once") for line in lines)
    turned = any(line.startswith("| ITL p99 ms") for line in lines)
    assert (whole, turned) == ((False, True) if columns == 80 else (True, False))


def test_a_pipe_gets_plain_lines() -> None:
    with playing(Play()) as url:
        done = subprocess.run(
            [sys.executable, "-m", "loadtest", "run", "--url", url, "--concurrency", "2"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "40"},
            check=True,
        )
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[0].startswith("[1/1] server, 2 at once, repeat 1: 8/8 turns")
    assert "| 2 at once | server |" in done.stdout
