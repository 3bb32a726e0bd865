"""Proves the kernels on a GPU, then times them; one command, under 8 minutes.

python -m kernels.triton.gpu_check [--reduced]

Needs torch and Triton, a GPU of compute capability 8.0 or newer, and no installation of this
project. Weights are random by seed. Exits with 1 where a result is wrong; a missed speed is only
said. --reduced runs the same code in Triton's interpreter (TRITON_INTERPRET=1), on a few small
cases, to show that the script works; its times mean nothing.
"""

import argparse
import concurrent.futures
import itertools
import multiprocessing
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import triton

from kernels.contract import KVDType
from kernels.triton.arguments import interpreted
from kernels.triton.checks.attention import BOUNDS, case_error
from kernels.triton.checks.grid import AttentionCase, pairwise_cases
from kernels.triton.checks.models import SHAPES, SMALL_SHAPES, agreement
from kernels.triton.checks.sampling import sample_faults
from kernels.triton.checks.small_ops import ELEMENTWISE, check_rope_write
from kernels.triton.checks.speed import (
    FULL,
    REDUCED,
    Peaks,
    Row,
    attention_rows,
    cascade_ratio,
    measure_peaks,
    small_rows,
)

_PROCESSES: Final = 8
"""Compiling is what the grid spends its time on."""
_SANITIZER_LIMIT_S: Final = 120
_CASCADE_TARGET: Final = 6.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.triton.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--reduced", action="store_true", help="the script itself, on the CPU")
    parser.add_argument("--small-case", action="store_true", help="what the sanitizer watches")
    options = parser.parse_args()
    if options.reduced != interpreted():
        parser.error("--reduced goes with TRITON_INTERPRET=1, and a GPU with neither")
    if not options.reduced and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    if options.small_case:
        return _small_case()
    begin = time.monotonic()
    _describe()
    faults = 0
    for part in (_grid, _small_ops, _speed, _models, _sanitizer):
        faults += _told(part.__name__.strip("_"), part, options.reduced, begin)
    print(f"{time.monotonic() - begin:.0f} s; {faults} faults")
    return 1 if faults else 0


def _told(
    name: str, part: Callable[[bool], Iterator[tuple[bool, str]]], reduced: bool, begin: float
) -> int:
    """Run a part, print what is wrong and how much was right, and count the faults."""
    count = faults = 0
    for good, line in _guarded(part(reduced)):
        count += 1
        faults += not good
        if not good or not line.startswith("case "):
            print(f"  {'ok   ' if good else 'WRONG'} {line}", flush=True)
    print(
        f"[{time.monotonic() - begin:4.0f} s] {name}: {count - faults} of {count} right", flush=True
    )
    return faults


def _guarded(outcomes: Iterator[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    """The outcomes, and whatever is raised between them as a wrong one: a device is lent for
    minutes, so one part that breaks must not cost the others."""
    try:
        yield from outcomes
    except Exception:
        yield False, traceback.format_exc(limit=-4)


def _describe() -> None:
    device = platform.processor() or "CPU, Triton's interpreter"
    if not interpreted():
        device = torch.cuda.get_device_name()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, ", end="")
    print(f"Triton {triton.__version__}, {device}")


def _device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")


def _capability() -> int:
    if interpreted():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _grid(reduced: bool) -> Iterator[tuple[bool, str]]:
    """Attention: the pairwise cases, shared out over processes on a GPU."""
    cases = pairwise_cases()
    if reduced:
        cases = cases[:: len(cases) // 4]
        outcomes = [_run_cases(cases)]
    else:
        parts = [cases[at::_PROCESSES] for at in range(_PROCESSES)]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(_PROCESSES, context) as pool:
            outcomes = list(pool.map(_run_cases, parts))
    for outcome in outcomes:
        yield from outcome


def _run_cases(cases: Sequence[AttentionCase], debug: bool = False) -> list[tuple[bool, str]]:
    found = []
    for case in cases:
        try:
            error = case_error(case, _device(), _capability(), debug=debug)
        except Exception as fault:  # of the compiler or of the launch: the next case may run
            found.append((False, f"case {case.name}: {fault!r}"[:500]))
            continue
        good = error < BOUNDS[case.format[0]]
        found.append((good, f"case {case.name}: error {error:.1e}"))
    return found


def _small_ops(reduced: bool) -> Iterator[tuple[bool, str]]:
    for dtype in (torch.bfloat16, torch.float16):
        for name, op in ELEMENTWISE.items():
            outcome = op(dtype, _device())
            yield outcome.good, f"case {name} {dtype}: {outcome}"
    for stored in (KVDType.BF16, KVDType.I8, KVDType.E4M3, KVDType.E5M2):
        outcome = check_rope_write(torch.bfloat16, _device(), stored=stored)
        yield outcome.good, f"case rope_write {stored}: {outcome}"
    rows, vocab = (6, 200) if reduced else (48, 128256)
    wrong = sample_faults(_device(), rows, vocab)
    yield wrong == 0, f"case sample: {wrong} of {rows} rows draw another token"


def _sanitizer(reduced: bool) -> Iterator[tuple[bool, str]]:
    """The small case under compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer")
    if reduced:
        yield _small_case() == 0, "the small case, without the sanitizer"
        return
    if tool is None:
        print("  not run: compute-sanitizer is not on the PATH")
        return
    command = [tool, "--error-exitcode", "9", sys.executable, "-m", "kernels.triton.gpu_check"]
    try:
        done = subprocess.run(
            [*command, "--small-case"],
            capture_output=True,
            text=True,
            timeout=_SANITIZER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield False, f"compute-sanitizer took longer than {_SANITIZER_LIMIT_S} s"
        return
    good = done.returncode == 0
    yield good, "compute-sanitizer" if good else (done.stdout + done.stderr)[-2000:]


def _small_case() -> int:
    """One case of each kernel, with pages checked on the device too."""
    cases = pairwise_cases()
    chosen = [
        next(case for case in cases if case.kind == kind and case.head_dim == 64)
        for kind in (("decode", 0), ("mixed", 0), ("cascade", 0))
    ]
    good = all(one for one, _ in _run_cases(chosen, debug=True))
    good &= all(op(torch.bfloat16, _device()).good for op in ELEMENTWISE.values())
    good &= check_rope_write(torch.bfloat16, _device(), stored=KVDType.E4M3).good
    return 0 if good else 1


def _models(reduced: bool) -> Iterator[tuple[bool, str]]:
    shapes, num_tokens = (SMALL_SHAPES, 3) if reduced else (SHAPES, 64)
    for name, spec in shapes:
        found = agreement(spec, num_tokens)
        line = f"{name}: float32 chooses the reference's {num_tokens} tokens: {found.exact}; "
        line += f"bfloat16 {found.same} of them, else one as likely: {found.near}"
        yield found.exact and found.near, line


def _speed(reduced: bool) -> Iterator[tuple[bool, str]]:
    sizes = REDUCED if reduced else FULL
    device, capability = _device(), _capability()
    peaks = measure_peaks(device, sizes)
    rates = f"copy {peaks.bandwidth / 1e9:.0f} GB/s, "
    print(f"{rates}bf16 product {peaks.matrix_rate / 1e12:.1f} TFLOP/s")
    print(f"{'op':<52}{'ms':>9}{'GB/s':>8}{'TFLOP/s':>9}{'share':>7}{'wanted':>8}", flush=True)
    for row in itertools.chain(
        small_rows(device, sizes), attention_rows(device, capability, sizes)
    ):
        _print_row(row, peaks)
    once, plain = cascade_ratio(device, capability, sizes)
    print(
        f"cascade, {sizes.branches} branches over {sizes.shared}: {once * 1e3:.3f} ms, "
        f"{plain / once:.1f} x plain decode (wanted {_CASCADE_TARGET:.0f} x)",
        flush=True,
    )
    yield True, "case everything was timed"


def _print_row(row: Row, peaks: Peaks) -> None:
    gigabytes = row.num_bytes / row.seconds / 1e9
    teraflops = row.flops / row.seconds / 1e12
    share = (
        gigabytes * 1e9 / peaks.bandwidth if row.num_bytes else teraflops * 1e12 / peaks.matrix_rate
    )
    wanted = f"{row.target:.0%}" if row.target else ""
    print(
        f"{row.name:<52}{row.seconds * 1e3:>9.3f}{gigabytes:>8.0f}{teraflops:>9.1f}"
        f"{share:>7.0%}{wanted:>8}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
