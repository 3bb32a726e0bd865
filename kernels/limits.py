"""The most that this machine allows the embedded model, as tokens per second by streams, in JSON.

python -m kernels.limits [--threads N] [--context N] STREAMS ...

A step of so many streams takes at least as long as the memory needs for its bytes (the weights
once, each stream's keys and values) and as the processor needs for its multiply-adds; both rates
are measured now.
"""

import argparse
import json
import sys

from kernels.bench import SMOL
from kernels.contract import BackendUnavailable, KVLayout
from kernels.cpu.backend import CpuBackend
from kernels.peaks import Peaks, measure_peaks
from kernels.roofline import StepCosts, WeightBytes
from kernels.roofline_bench import weight_type


def limits(peaks: Peaks, context: int, streams: list[int]) -> dict[int, float]:
    """Tokens per second of steps that decode a token for each stream after `context` tokens."""
    kv = KVLayout(SMOL.num_layers, SMOL.num_kv_heads, SMOL.head_dim)
    costs = StepCosts(SMOL, WeightBytes.stored_as(SMOL, weight_type, tied=True), kv)
    found = {}
    for count in streams:
        flops, memory = costs.cost([(1, context)] * count, count)
        found[count] = count / max(memory / peaks.bytes_per_s, flops / peaks.flops_per_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.limits", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--context", type=int, default=128, help="tokens of each stream")
    parser.add_argument("streams", type=int, nargs="+")
    options = parser.parse_args()
    try:
        backend = CpuBackend(options.threads)
    except BackendUnavailable as unavailable:
        sys.exit(str(unavailable))
    try:
        found = limits(measure_peaks(backend), options.context, options.streams)
    finally:
        backend.close()
    sys.stdout.write(json.dumps({count: round(speed, 1) for count, speed in found.items()}) + "\n")


if __name__ == "__main__":
    main()
