"""`headwater`: ends at once on a signal, from the first moment on, until a server takes it."""

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

SIGNAL_EXITS: Final = 128
"""Ended by a signal before it was ready: this, and the signal's number."""


def main() -> int:
    """Run the command of this process's arguments; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    # Only now: these imports take most of a second, and a Ctrl-C may come meanwhile.
    from service.command import run

    return run()


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """There is nothing to finish before the server is ready; the engine ends with us."""
    name = signal.Signals(number).name
    sys.stderr.write(f"headwater: ended by {name} before the server was ready\n")
    sys.stderr.flush()
    os._exit(SIGNAL_EXITS + number)


if __name__ == "__main__":
    sys.exit(main())
