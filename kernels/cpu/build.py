"""Builds the CPU kernels' shared library once, into the user's cache directory.

`library_path()` returns the path of a library that is built from exactly these sources; it compiles
them where no sound one is cached. `python -m kernels.cpu.build` does the same ahead of time.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from kernels.contract import BackendUnavailable

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-std=c++20", "-O3", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off"),
    *("-fPIC", "-fvisibility=hidden", "-pthread"),
)
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
AVX512_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
BF16_FLAGS = (*AVX512_FLAGS, "-mavx512bf16")
BF16_CPU_FLAGS = AVX512_CPU_FLAGS | {"avx512_bf16"}
REQUIRED_CPU_FLAGS = frozenset({"avx2", "fma", "f16c"})
INSTRUCTION_SETS = MappingProxyType(
    {"avx2": REQUIRED_CPU_FLAGS, "avx512": AVX512_CPU_FLAGS, "avx512bf16": BF16_CPU_FLAGS}
)
COMPILERS = ("g++", "c++", "clang++")
PARALLEL_COMPILES = 2


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Features of this machine's first core; empty where the system does not tell."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def check_cpu(flags: frozenset[str]) -> None:
    """Raise BackendUnavailable unless a core with these flags can run the kernels."""
    missing = sorted(REQUIRED_CPU_FLAGS - flags)
    if missing:
        raise BackendUnavailable(
            f"The cpu backend needs an x86-64 processor with AVX2, FMA and F16C under Linux; this "
            f"one does not report {', '.join(missing)}. Use the reference backend instead."
        )


def instruction_sets(flags: frozenset[str]) -> Sequence[str]:
    """Those that a core with these flags runs and there are kernels for, the best one last."""
    return tuple(name for name, needed in INSTRUCTION_SETS.items() if flags >= needed)


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME/headwater, or ~/.cache/headwater."""
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "headwater"
    except RuntimeError as error:
        raise BackendUnavailable(
            "The cpu backend has no place for its library, for this user has no home directory: "
            "point XDG_CACHE_HOME to a writable directory."
        ) from error


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """$CXX where set, else the first of g++, c++ and clang++ on $PATH; None where there is none."""
    found = (shutil.which(name, path=environ.get("PATH")) for name in _compiler_names(environ))
    return next((path for path in found if path), None)


def _compiler_names(environ: Mapping[str, str]) -> Sequence[str]:
    return (environ["CXX"],) if environ.get("CXX") else COMPILERS


def library_path(cache_dir: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The library built from these sources, compiled first where the cache has no sound one.

    Without a compiler a sound library of the same sources and flags, whatever compiler built it,
    is used. Raises BackendUnavailable, saying what to do, where there is neither.
    """
    directory = default_cache_dir(environ) if cache_dir is None else cache_dir
    # What is inline and used on both sides of a border is taken from the first object that has it:
    # the more an object may use, the later it comes.
    units = sorted(SOURCES.glob("*.cpp"), key=lambda unit: (len(_flags(unit)), unit.name))
    stem = f"cpu-{_sources_hash()}"
    compiler = find_compiler(environ)
    if compiler is None:
        for path in sorted(directory.glob(f"{stem}-*.so")):
            if _is_sound(path):
                return path
        raise BackendUnavailable(
            "The cpu backend is compiled on first use and no C++ compiler was found (looked for "
            f"{', '.join(_compiler_names(environ))}): install g++, for example with `apt install "
            "g++`, or name another in CXX, or use the reference backend."
        )
    path = directory / f"{stem}-{_compiler_hash(compiler)}.so"
    if _is_sound(path):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_sound(path):
                _build(compiler, units, path)
    except OSError as error:
        raise BackendUnavailable(
            f"The cpu backend cannot keep its library in {directory} ({error.strerror}): make that "
            "directory writable or point XDG_CACHE_HOME to one that is."
        ) from error
    return path


def _flags(unit: Path) -> Sequence[str]:
    if unit.name.startswith("avx512bf16"):
        return (*FLAGS, *BF16_FLAGS)
    return (*FLAGS, *AVX512_FLAGS) if unit.name.startswith("avx512") else FLAGS


def _sources_hash() -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, *BF16_FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        content = source.read_bytes()
        digest.update(f"\0{source.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _compiler_hash(compiler: str) -> str:
    result = _run([compiler, "--version"])
    return hashlib.sha256(f"{compiler}\0{result}".encode()).hexdigest()[:8]


def _run(command: Sequence[str]) -> str:
    """Standard output of a compiler's run. Raises BackendUnavailable with what it complained of."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BackendUnavailable(
            f"The C++ compiler {command[0]} cannot be run ({error.strerror}): name another in CXX."
        ) from error
    if result.returncode:
        raise BackendUnavailable(
            f"The C++ compiler {command[0]} failed on the cpu backend; it needs C++20 (g++ 11 or "
            f"clang 14 and later), name another in CXX. It said:\n{result.stderr[-2000:]}"
        )
    return result.stdout


def _build(compiler: str, units: Sequence[Path], path: Path) -> None:
    """Compile and link into `path`, which appears whole or not at all, its checksum after it."""
    sys.stderr.write(f"headwater: compiling the cpu kernels with {compiler} ...\n")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        objects = [str(Path(scratch) / f"{unit.stem}.o") for unit in units]
        commands = [
            [compiler, *_flags(unit), "-c", str(unit), "-o", out]
            for unit, out in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(PARALLEL_COMPILES) as executor:
            list(executor.map(_run, commands))
        library = Path(scratch) / path.name
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(library)])
        checksum = Path(scratch) / "checksum"
        checksum.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        os.replace(library, path)
        os.replace(checksum, _checksum_path(path))
    sys.stderr.write(f"headwater: wrote {path}\n")


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_sound(path: Path) -> bool:
    """Whether the library is there and is the one that was written."""
    try:
        return (
            hashlib.sha256(path.read_bytes()).hexdigest()
            == _checksum_path(path).read_text().strip()
        )
    except OSError:
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes honour; it goes with this process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        check_cpu(read_cpu_flags())
        sys.stdout.write(f"{library_path()}\n")
    except BackendUnavailable as unavailable:
        sys.exit(str(unavailable))
