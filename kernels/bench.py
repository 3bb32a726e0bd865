"""How fast the CPU backend steps here, beside the memory bandwidth that bounds it.

python -m kernels.bench [--threads N] [--quick]

Weights are random in the shape and storage of SmolLM2-135M in Q4_1; speed does not depend on their
values. Medians over repeated steps; run it on an idle machine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kernels.contract import BackendUnavailable, DecoderSpec, ForwardBatch, KVLayout, WeightType
from kernels.cpu.backend import CpuBackend, CpuKVPool, CpuModel
from kernels.random_weights import random_weights

SPEC = DecoderSpec(
    family="llama",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_context=8192,
    norm_eps=1e-5,
    rope_inv_freq=tuple(100000.0 ** (-i / 32) for i in range(32)),
)
PAGE_SIZE = 16
DECODE_CONTEXT = 512
DECODE_BATCHES = (1, 4, 8, 16)
PREFILL_LENGTHS = (512, 64)
PAGES_PER_SEQUENCE = DECODE_CONTEXT // PAGE_SIZE
BANDWIDTH_BYTES = 256 << 20


def storage(name: str) -> WeightType:
    """Storage of the matrices: the embedding, which is the head too, in 8 bits, the rest in 4."""
    return WeightType.Q8_0 if name == "embedding" else WeightType.Q4_1


def batch(sequences: range, new_tokens: int, context: int) -> ForwardBatch:
    """Sequences that end at `context` with so many new tokens each, and the last one's top
    logits. Each number stands for a sequence with pages of its own."""
    rng = np.random.default_rng(0)
    num_sequences = len(sequences)
    page_ids = np.arange(
        sequences.start * PAGES_PER_SEQUENCE, sequences.stop * PAGES_PER_SEQUENCE, dtype=np.int32
    )
    pages = page_ids.reshape(num_sequences, -1)
    positions = np.arange(context - new_tokens, context, dtype=np.int32)
    slots = pages[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    count = num_sequences * new_tokens
    ends = np.arange(0, count + 1, new_tokens, dtype=np.int32)
    return ForwardBatch(
        token_ids=rng.integers(0, SPEC.vocab_size, count, dtype=np.int32),
        positions=np.tile(positions, num_sequences),
        cu_seqlens_q=ends,
        seq_lens=np.full(num_sequences, context, dtype=np.int32),
        page_table=pages,
        slot_mapping=slots.ravel(),
        logit_rows=ends[1:] - 1,
        num_top=20,
    )


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Median duration of `run`, in seconds, after one run that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth(backend: CpuBackend, repeats: int) -> float:
    """Bytes per second that all threads read from memory together, one after the other."""
    data = np.ones(BANDWIDTH_BYTES, dtype=np.uint8)
    return BANDWIDTH_BYTES / median_s(partial(backend.read_memory, data), repeats)


def report(backend: CpuBackend, model: CpuModel, kv: CpuKVPool, repeats: int) -> None:
    bandwidth = read_bandwidth(backend, repeats)
    print(f"{backend.numeric_mode}, {backend.threads} threads")
    print(f"memory read: {bandwidth / 1e9:.1f} GB/s")
    print(f"weights: {model.weight_bytes / 1e6:.1f} MB")
    print(f"{'step':<26}{'ms':>9}{'tok/s':>9}{'weights GB/s':>14}{'of memory':>11}")
    steps = [
        (f"decode {n} at {DECODE_CONTEXT}", batch(range(n), 1, DECODE_CONTEXT))
        for n in DECODE_BATCHES
    ]
    steps += [(f"prefill {length}", batch(range(1), length, length)) for length in PREFILL_LENGTHS]
    for name, one in steps:
        seconds = median_s(partial(backend.step, model, kv, one), repeats)
        rate = model.weight_bytes / seconds
        print(
            f"{name:<26}{seconds * 1e3:>9.2f}{one.token_ids.size / seconds:>9.0f}"
            f"{rate / 1e9:>14.1f}{rate / bandwidth:>11.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    options = parser.parse_args()
    try:
        backend = CpuBackend(options.threads)
    except BackendUnavailable as unavailable:
        sys.exit(str(unavailable))
    model = backend.load(SPEC, random_weights(SPEC, np.random.default_rng(0), storage))
    layout = KVLayout(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, PAGE_SIZE)
    kv = backend.alloc_kv(layout, max(DECODE_BATCHES) * PAGES_PER_SEQUENCE)
    # What the decodes read is computed first: stale memory could hold slow denormals.
    for sequence in range(max(DECODE_BATCHES)):
        prefill = batch(range(sequence, sequence + 1), DECODE_CONTEXT, DECODE_CONTEXT)
        backend.step(model, kv, prefill)
    report(backend, model, kv, 3 if options.quick else 15)
    backend.close()


if __name__ == "__main__":
    main()
