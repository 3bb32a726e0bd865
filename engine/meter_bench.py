"""What weighing steps costs the step loop: python -m engine.meter_bench

Prints microseconds per step, beside the shortest real step it may cost half a percent of.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

from engine.scheduling.step_meter import StepMeter
from kernels.bench import SMOL
from kernels.contract import KVLayout, WeightType
from kernels.peaks import Peaks
from kernels.roofline import StepCosts, WeightBytes

ROUNDS = 20_000


def main() -> None:
    weights = WeightBytes.stored_as(SMOL, lambda _: WeightType.Q8_0, tied=True)
    layout = KVLayout(SMOL.num_layers, SMOL.num_kv_heads, SMOL.head_dim)
    meter = StepMeter(StepCosts(SMOL, weights, layout), Peaks(40e9, 1e12))
    for batch in (1, 8, 16, 64):
        request: Any = SimpleNamespace(prefill_end=500, add_work=lambda step: None)
        chunks: list[Any] = [
            SimpleNamespace(request=request, start=600, end=601, scored=range(0), wants_logits=True)
        ] * batch
        start = time.perf_counter()
        for number in range(ROUNDS):
            meter.note(chunks, number * 1000, number * 1000 + 900, 800)
        taken = (time.perf_counter() - start) / ROUNDS
        sys.stdout.write(f"{batch:>3} sequences: {taken * 1e6:.1f} us a step\n")


if __name__ == "__main__":
    main()
