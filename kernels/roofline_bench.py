"""The roof, the fitted step-time model and measured steps, side by side.

python -m kernels.roofline_bench [--threads N] [--repeats N]

The model is fitted to some shapes and judged on others. All are measured in turns, and a time is
the median. The roof of a step is the longer of its bytes at the measured bandwidth and its
operations at the measured rate, the best before and after; the verdict names which. Run it on an
idle machine; it takes half a minute.
"""

import argparse
import sys
from functools import partial

from kernels.bench import SMOL, Bench, Part, interleaved_s, side_by_side
from kernels.contract import BackendUnavailable, KVLayout, WeightType
from kernels.cpu.backend import CpuBackend
from kernels.peaks import measure_peaks
from kernels.roofline import BatchShape, StepCosts, WeightBytes
from kernels.step_model import StepTimeModel

CONTEXT = 512
POOL_TOKENS = 40 * CONTEXT
FITTED = (
    *((f"decode {n}", side_by_side(n, CONTEXT - 1)) for n in (1, 2, 4, 12, 24)),
    *((f"decode {n} at 1500", side_by_side(n, 1499)) for n in (1, 12)),
    *((f"chunk {n}", [Part(0, n)]) for n in (32, 48, 128, 192, 384, 640)),
    *((f"chunk {n} after 1024", [Part(1024, n)]) for n in (48, 192, 384)),
)
JUDGED = (
    *((f"decode {n}", side_by_side(n, CONTEXT - 1)) for n in (1, 8, 16)),
    *((f"chunk {n}", [Part(0, n)]) for n in (64, 256, 512)),
)


def shape_of(parts: list[Part]) -> BatchShape:
    return BatchShape(tuple((part.new, part.end) for part in parts), len(parts))


def weight_type(name: str) -> WeightType:
    """SmolLM2-135M's file: the embedding, which is the head too, in 8 bits."""
    return WeightType.Q8_0 if name == "embedding" else WeightType.Q4_1


def report(backend: CpuBackend, repeats: int) -> bool:
    """Print the table; whether every judged shape is within a tenth."""
    peaks = measure_peaks(backend)
    bench = Bench(backend, SMOL, WeightType.Q4_1, POOL_TOKENS, repeats)
    kv = KVLayout(SMOL.num_layers, SMOL.num_kv_heads, SMOL.head_dim)
    costs = StepCosts(SMOL, WeightBytes.stored_as(SMOL, weight_type, tied=True), kv)
    shapes = [shape_of(parts) for _, parts in (*FITTED, *JUDGED)]
    steps = [
        partial(backend.step, bench.model, bench.kv, bench.batch(*parts))
        for _, parts in (*FITTED, *JUDGED)
    ]
    seconds = interleaved_s(steps, repeats)
    peaks = peaks.best_of(measure_peaks(backend))
    model = StepTimeModel.fit(shapes[: len(FITTED)], seconds[: len(FITTED)])
    out = sys.stdout
    out.write(f"{backend.numeric_mode}, {backend.threads} threads; ")
    out.write(f"{peaks.bytes_per_s / 1e9:.1f} GB/s, {peaks.flops_per_s / 1e9:.0f} GFLOP/s\n")
    out.write(f"{'step':<14}{'measured':>10}{'model':>9}{'error':>8}{'roof':>8}{'intensity':>11}")
    out.write(f"{'MBU':>6}{'MFU':>6}  bound by\n")
    good = True
    for (name, _), shape, taken in zip(
        JUDGED, shapes[len(FITTED) :], seconds[len(FITTED) :], strict=True
    ):
        flops, memory = costs.cost(shape.sequences, shape.num_rows)
        by_memory, by_compute = memory / peaks.bytes_per_s, flops / peaks.flops_per_s
        error = model.predict(shape) / taken - 1
        good = good and abs(error) <= 0.1
        out.write(f"{name:<14}{taken * 1e3:>7.2f} ms{model.predict(shape) * 1e3:>9.2f}")
        out.write(f"{error:>8.1%}{max(by_memory, by_compute) * 1e3:>8.2f}{flops / memory:>11.1f}")
        verdict = "bandwidth" if by_memory >= by_compute else "compute"
        out.write(f"{by_memory / taken:>6.0%}{by_compute / taken:>6.0%}  {verdict}\n")
    return good


def main() -> int:
    """1 where the model is more than a tenth off."""
    parser = argparse.ArgumentParser(prog="python -m kernels.roofline_bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--repeats", type=int, default=15, help="of each step")
    options = parser.parse_args()
    try:
        backend = CpuBackend(options.threads)
    except BackendUnavailable as unavailable:
        sys.exit(str(unavailable))
    try:
        return 0 if report(backend, options.repeats) else 1
    finally:
        backend.close()


if __name__ == "__main__":
    sys.exit(main())
