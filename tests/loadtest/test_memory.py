"""What a server's memory is said to be."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loadtest.measure.memory import MemoryWatch, tree_pss_bytes
from tests.loadtest.playing import Play, playing
from tests.loadtest.test_command import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
MIB = 1 << 20
HOLDER = "import sys; held = bytearray(b'x') * {size}; print(1, flush=True); sys.stdin.read()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"


@contextmanager
def holding(size: int) -> Iterator[int]:
    """A process whose child holds so many bytes."""
    code = PARENT.format(code=HOLDER.format(size=size))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    yield process.pid
    process.communicate()


def test_the_children_of_a_process_count() -> None:
    with holding(MIB) as small, holding(65 * MIB) as large:
        more = tree_pss_bytes(large) - tree_pss_bytes(small)
    assert 62 * MIB < more < 66 * MIB


def test_a_process_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="memory of process 4194399 cannot be read"):
        tree_pss_bytes(4194399)


def test_the_peak_stands_when_the_server_is_gone() -> None:
    async def watched() -> int:
        with holding(64 * MIB) as pid:
            watch = await MemoryWatch(pid).__aenter__()
        await watch.__aexit__()
        return watch.peak_bytes

    assert asyncio.run(watched()) > 64 * MIB


def test_a_run_reports_it() -> None:
    with playing(Play()) as url:
        arguments = ("run", "--url", url, "--concurrency", "1", "--pid")
        code, out, err = run(*arguments, str(os.getpid()), "--assert", "pss_peak_mib>20")
        assert code == 0, err
        assert "PSS MiB" in out
        code, _, err = run(*arguments, "4194399")
        assert code == 2
        assert "memory of process 4194399" in err
