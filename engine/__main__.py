"""`python -m engine --fd N`: the engine process, started by `engine.transport`, never by hand.

It reads its EngineConfig from the inherited socket N and does ahead what needs little memory. Told
to begin, it loads the model, answers with what it is or why it cannot start, and runs the step
loop. It ends when the edge says so, on SIGTERM when its requests have
ended, and at once when the edge is gone, even while it is stopped. Exit code 0 is a wanted end.
"""

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from engine.core import Core
from engine.logs import start_logging
from engine.loop import StepLoop, serve
from engine.types import EngineConfig
from engine.wire.frames import FrameReader, FrameSender
from engine.wire.messages import WIRE, StartFailed, decode_config, decode_hello, encode

_OTHER_CODE = (
    "its code is of another version than the server's, which has changed on disk since: "
    "start the server again"
)
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


def main() -> int:
    """The exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the edge's: it drains us
    parser = argparse.ArgumentParser(prog="engine", description="An engine process of Headwater.")
    parser.add_argument("--fd", type=int, required=True, help="an inherited stream socket")
    start_logging("engine", "info")
    _name_process("headwater-spare")
    gc.disable()  # what is loaded stays
    sock = socket.socket(fileno=parser.parse_args().fd)
    _end_with_edge(sock)
    said = _payloads(sock)
    config = _read_config(sock, said)
    if config is None:
        return 1
    start_logging("engine", config.log_level)
    build = _prepare(config)
    _give_back_freed_memory()
    if next(said, None) is None:
        return 1
    _name_process("headwater-engin")  # 15 characters is the most
    try:
        return 0 if serve(sock, lambda: _settle(build()), _drain_on_sigterm) else 1
    except Exception:
        _log.exception("the engine failed")
        return 1


def _prepare(config: EngineConfig) -> Callable[[], Core]:
    if config.backend == "scripted":
        from engine.scripted import build_scripted_core

        return lambda: build_scripted_core(config)
    from engine.runtime import prepare_core

    return prepare_core(config)


def _give_back_freed_memory() -> None:
    """A spare is to be small."""
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _settle(core: Core) -> Core:
    """What stands now need not be scanned for garbage in the middle of somebody's answer."""
    gc.freeze()
    gc.enable()
    return core


def _payloads(sock: socket.socket) -> Iterator[bytes]:
    """What the edge says before it waits for our answer."""
    reader = FrameReader()
    while data := sock.recv(65536):
        yield from reader.feed(data)


def _read_config(sock: socket.socket, said: Iterator[bytes]) -> EngineConfig | None:
    """What we shall be; None if the edge is gone, or speaks otherwise, which it is told."""
    payload = next(said, None)
    if payload is None:
        return None
    try:
        hello = decode_hello(payload)
    except msgspec.MsgspecError:
        hello = None
    if hello is None or hello.wire != WIRE:
        FrameSender(sock).push(encode(StartFailed(_OTHER_CODE)))
        return None
    return decode_config(hello.config)


def _name_process(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


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
