"""A server that does not end by itself is ended, and says what it waited for."""

import subprocess
import sys

from service.last_resort import EXIT_STUCK

WAITS = """
import asyncio
from service.last_resort import LastResort

async def wait_for_what_never_comes():
    last_resort = LastResort()
    last_resort.end_within(3600.0)
    last_resort.end_within(0.1)
    last_resort.end_within(3600.0)
    await asyncio.Event().wait()

asyncio.run(wait_for_what_never_comes())
"""
BLOCKED = """
import asyncio, threading
from service.last_resort import LastResort

def hold_for_ever():
    threading.Lock().acquire()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

async def main():
    LastResort().end_within(0.1)
    asyncio.get_running_loop().run_in_executor(None, hold_for_ever)

asyncio.run(main())
"""


def end_of(code: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60, check=False
    )
    return ended.returncode, ended.stderr.decode()


def test_a_task_that_waits_for_ever_is_named() -> None:
    code, told = end_of(WAITS)
    assert code == EXIT_STUCK
    assert "headwater: the server was told to end" in told
    assert "in wait_for_what_never_comes" in told


def test_a_thread_that_holds_up_the_end_of_the_loop_is_named() -> None:
    code, told = end_of(BLOCKED)
    assert code == EXIT_STUCK
    assert "in hold_for_ever" in told
