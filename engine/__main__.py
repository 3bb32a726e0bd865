"""`python -m engine --fd N`: the engine process, started by `engine.transport`, never by hand.

It reads its EngineConfig from the inherited socket N, answers with what it is or why it cannot
start, and runs the step loop. It ends when the edge says so, on SIGTERM when its requests have
ended, and at once when the edge is gone, even while it is stopped. Exit code 0 is a wanted end.
"""

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from engine.core import Core
from engine.loop import StepLoop, serve
from engine.transport.logs import start_logging
from engine.types import EngineConfig
from engine.wire.frames import FrameReader
from engine.wire.messages import decode_config

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def main() -> int:
    """The exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the edge's: it drains us
    parser = argparse.ArgumentParser(prog="engine", description="An engine process of Headwater.")
    parser.add_argument("--fd", type=int, required=True, help="an inherited stream socket")
    start_logging("engine", "info")
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("headwater-engin")  # 15 characters is the most
    sock = socket.socket(fileno=parser.parse_args().fd)
    _end_with_edge(sock)
    config = _read_config(sock)
    if config is None:
        return 1
    start_logging("engine", config.log_level)
    try:
        return 0 if serve(sock, lambda: _build(config), _drain_on_sigterm) else 1
    except Exception:
        _log.exception("the engine failed")
        return 1


def _build(config: EngineConfig) -> Core:
    if config.backend == "scripted":
        from engine.scripted import build_scripted_core

        return build_scripted_core(config)
    from engine.runtime import build_core

    return build_core(config)


def _read_config(sock: socket.socket) -> EngineConfig | None:
    """The edge's first message, which waits for our answer before it says more; None if it is
    gone."""
    reader = FrameReader()
    while data := sock.recv(65536):
        for payload in reader.feed(data):
            return decode_config(payload)
    return None


def _drain_on_sigterm(loop: StepLoop) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: loop.drain())


def _end_with_edge(sock: socket.socket) -> None:
    """No orphan: also in a long step, or while weights load, the process ends with its edge.

    On Linux the kernel sees to it, so a stopped process ends too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(sock, 0)  # hang-up and error are always reported

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="edge-watch", daemon=True).start()


if __name__ == "__main__":
    raise SystemExit(main())
