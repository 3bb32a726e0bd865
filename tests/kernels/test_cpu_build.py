"""How the CPU kernels' library is built, kept and refused."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from kernels.contract import BackendUnavailable
from kernels.cpu import build, library
from kernels.cpu.build import (
    REQUIRED_CPU_FLAGS,
    check_cpu,
    default_cache_dir,
    instruction_sets,
    library_path,
    read_cpu_flags,
)

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1.0; exit; fi
echo "$@" >> "{log}"
for last; do :; done
echo built > "$last"
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """An environment whose compiler writes a line of text for every output and logs its calls."""
    compiler = tmp_path / "fake-c++"
    compiler.write_text(FAKE_COMPILER.format(log=tmp_path / "log"))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return {"CXX": str(compiler), "PATH": os.environ["PATH"]}


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "log").read_text().splitlines())


def test_compiles_once(
    tmp_path: Path, fake: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = library_path(tmp_path / "cache", fake)
    assert path.read_text() == "built\n"
    assert calls(tmp_path) == len(list(build.SOURCES.glob("*.cpp"))) + 1
    assert "compiling the cpu kernels" in capsys.readouterr().err
    count = calls(tmp_path)
    assert library_path(tmp_path / "cache", fake) == path
    assert calls(tmp_path) == count
    assert not capsys.readouterr().err


def test_a_corrupt_library_is_built_anew(tmp_path: Path, fake: dict[str, str]) -> None:
    path = library_path(tmp_path / "cache", fake)
    path.write_text("bui")
    assert library_path(tmp_path / "cache", fake).read_text() == "built\n"


def test_a_library_without_its_checksum_is_built_anew(tmp_path: Path, fake: dict[str, str]) -> None:
    """As a process leaves it that dies between the two renames."""
    path = library_path(tmp_path / "cache", fake)
    count = calls(tmp_path)
    path.with_suffix(".sha256").unlink()
    library_path(tmp_path / "cache", fake)
    assert calls(tmp_path) == 2 * count


def test_another_compiler_builds_another_library(tmp_path: Path, fake: dict[str, str]) -> None:
    first = library_path(tmp_path / "cache", fake)
    compiler = Path(fake["CXX"])
    compiler.write_text(compiler.read_text().replace("1.0", "2.0"))
    assert library_path(tmp_path / "cache", fake) != first


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"no C\+\+ compiler .*g\+\+, c\+\+, clang\+\+.* install"
    ):
        library_path(tmp_path, {"PATH": str(tmp_path)})


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="looked for no-such"):
        library_path(tmp_path, {"PATH": os.environ["PATH"], "CXX": "no-such"})


def test_no_compiler_but_a_library_built_before(tmp_path: Path, fake: dict[str, str]) -> None:
    path = library_path(tmp_path / "cache", fake)
    bare = {"PATH": str(tmp_path / "none")}
    assert library_path(tmp_path / "cache", bare) == path
    path.write_text("bui")
    with pytest.raises(BackendUnavailable):
        library_path(tmp_path / "cache", bare)


def test_a_compiler_that_fails(tmp_path: Path, fake: dict[str, str]) -> None:
    Path(fake["CXX"]).write_text('#!/bin/sh\n[ "$1" = --version ] || { echo oops >&2; exit 1; }\n')
    with pytest.raises(BackendUnavailable, match=r"C\+\+20[^$]*oops"):
        library_path(tmp_path / "cache", fake)
    assert not list((tmp_path / "cache").glob("*.so"))
    assert not list((tmp_path / "cache").glob(".build-*"))


def test_a_cache_that_cannot_be_written(tmp_path: Path, fake: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable, match="XDG_CACHE_HOME"):
        library_path(tmp_path / "file", fake)


def test_cache_directory(tmp_path: Path) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "headwater"
    assert default_cache_dir({}) == Path.home() / ".cache" / "headwater"


def test_processors(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: sse2 avx avx2 fma\n")
    with pytest.raises(BackendUnavailable, match=r"does not report f16c\. Use the reference"):
        check_cpu(read_cpu_flags(cpuinfo))
    with pytest.raises(BackendUnavailable, match="avx2, f16c, fma"):
        check_cpu(read_cpu_flags(tmp_path / "none"))
    check_cpu(frozenset({"avx2", "fma", "f16c", "sse2"}))


def test_the_best_instruction_set_is_the_last_that_the_flags_allow() -> None:
    flags = REQUIRED_CPU_FLAGS | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert instruction_sets(flags) == ("avx2",)
    assert instruction_sets(flags | {"avx512_vnni"}) == ("avx2", "avx512")
    assert instruction_sets(flags | {"avx512_bf16"}) == ("avx2",)
    all_sets = ("avx2", "avx512", "avx512bf16")
    assert instruction_sets(flags | {"avx512_vnni", "avx512_bf16"}) == all_sets


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_only_avx512_kernels_hold_avx512_instructions() -> None:
    """An inline function compiled for AVX-512 and linked for all would end other processors'
    processes with an illegal instruction."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library_path())]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    holders = set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line
        elif re.search(r"%zmm|%k[0-7]|%ymm(1[6-9]|[23]\d)|%xmm(1[6-9]|[23]\d)", line):
            holders.add(function)
    assert any("avx512_kernels::linear" in name for name in holders)
    assert [name for name in holders if "avx512" not in name] == []


def test_something_else_under_the_librarys_name(tmp_path: Path) -> None:
    path = tmp_path / "cpu.so"
    path.write_text("not a library")
    with pytest.raises(BackendUnavailable, match="delete it"):
        library.open_library(path)
