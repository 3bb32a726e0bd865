"""How fast the CPU backend steps here, beside the limits of the machine, measured in the same run.

python -m kernels.bench [--threads N] [--quick] [--avx2]

Weights are random in the shape and storage of SmolLM2-135M in Q4_1, then of a 1B model in
Llama-3.2's shape in Q4_0; speed does not depend on their values. The time of a row is the median of
repeated steps; rows that are compared take turns. Run it on an idle machine.

GB/s counts the weights and each sequence's keys and values once; GMAC/s the products of the linear
layers and of attention. Either is followed by its share of the limit.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kernels.contract import (
    BackendUnavailable,
    DecoderSpec,
    ForwardBatch,
    KVDType,
    KVLayout,
    PrefixGroup,
    WeightType,
)
from kernels.cpu.backend import CpuBackend, CpuKVPool, CpuModel
from kernels.random_weights import random_weights

SMOL = DecoderSpec(
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
LLAMA_1B = replace(
    SMOL,
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    rope_inv_freq=tuple(500000.0 ** (-i / 32) for i in range(32)),
)
PAGE_SIZE = 16
SHARED = 2016
BANDWIDTH_BYTES = 256 << 20
MAC_ROUNDS = 4_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of one sequence after `past` tokens, which lie in the pages from `first_page` on,
    or, below `shared` tokens, in those from page 0 on."""

    past: int
    new: int = 1
    first_page: int = 0
    shared: int = 0

    @property
    def end(self) -> int:
        return self.past + self.new

    @property
    def pages(self) -> list[int]:
        common = self.shared // PAGE_SIZE
        return [*range(common), *range(self.first_page, self.first_page + self.own_pages)]

    @property
    def own_pages(self) -> int:
        return -(-self.end // PAGE_SIZE) - self.shared // PAGE_SIZE


def side_by_side(count: int, past: int, *, shared: int = 0, first_page: int = 0) -> list[Part]:
    """Decodes over pages of their own, or behind the same `shared` tokens."""
    width = Part(past, shared=shared).own_pages
    return [Part(past, 1, first_page + i * width, shared) for i in range(count)]


def make_batch(spec: DecoderSpec, parts: Sequence[Part], *, grouped: bool = False) -> ForwardBatch:
    """The step of all parts, each wanting the top logits of its last token."""
    counts = [part.new for part in parts]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = np.full((len(parts), max(len(part.pages) for part in parts)), -1, dtype=np.int32)
    for row, part in zip(table, parts, strict=True):
        row[: len(part.pages)] = part.pages
    positions = np.concatenate([np.arange(part.past, part.end) for part in parts])
    sequence = np.repeat(np.arange(len(parts)), counts)
    slots = table[sequence, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, positions.size)
    num_pages = parts[0].shared // PAGE_SIZE
    group = PrefixGroup(tuple(range(len(parts))), num_pages)
    return ForwardBatch(
        token_ids=tokens.astype(np.int32),
        positions=positions.astype(np.int32),
        cu_seqlens_q=ends,
        seq_lens=np.array([part.end for part in parts], dtype=np.int32),
        page_table=table,
        slot_mapping=slots.astype(np.int32),
        logit_rows=ends[1:] - 1,
        num_top=20,
        groups=(group,) if grouped else (),
    )


def interleaved_s(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median duration of each, in seconds; they take turns, after one round that is not counted."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + repeats):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


class Bench:
    """One model on one backend, its pages, and the machine's limits."""

    def __init__(
        self, backend: CpuBackend, spec: DecoderSpec, storage: WeightType, tokens: int, repeats: int
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.repeats = repeats
        self.model: CpuModel = backend.load(
            spec,
            random_weights(
                spec,
                np.random.default_rng(0),
                lambda name: WeightType.Q8_0 if name == "embedding" else storage,
            ),
        )
        self.kv = self.filled_pages(backend.kv_dtype, tokens)

    def filled_pages(self, dtype: KVDType, tokens: int) -> CpuKVPool:
        """A pool of pages that hold what a step has computed: stale memory could hold slow
        denormals."""
        spec = self.spec
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, dtype)
        kv = self.backend.alloc_kv(layout, tokens // PAGE_SIZE)
        self.backend.step(self.model, kv, make_batch(spec, [Part(0, 512)]))
        first = np.arange(512 // PAGE_SIZE, dtype=np.int32)
        for start in range(first.size, kv.num_pages, first.size):
            count = min(first.size, kv.num_pages - start)
            self.backend.copy_pages(kv, first[:count], first[:count] + start)
        return kv

    def measure_limits(self) -> None:
        data = np.ones(BANDWIDTH_BYTES, dtype=np.uint8)
        multiply = [
            partial(self.backend.multiply, integer, MAC_ROUNDS) for integer in (False, True)
        ]
        read_s, *mac_s = interleaved_s(
            [partial(self.backend.read_memory, data), *multiply], max(5, self.repeats)
        )
        macs = [run() / seconds for run, seconds in zip(multiply, mac_s, strict=True)]
        self.read_limit, self.float_limit, self.int_limit = BANDWIDTH_BYTES / read_s, *macs
        _print(
            f"limits: memory read {self.read_limit / 1e9:.1f} GB/s, float32 "
            f"{self.float_limit / 1e9:.0f} GMAC/s, 8-bit {self.int_limit / 1e9:.0f} GMAC/s"
        )

    def rows(
        self, named: Sequence[tuple[str, ForwardBatch]], pools: Sequence[CpuKVPool] = ()
    ) -> list[float]:
        """Print a row per step, measured in turns; seconds of each. `pools`: the pages of each,
        where they are not the bench's own."""
        pools = pools or [self.kv] * len(named)
        steps = [
            partial(self.backend.step, self.model, kv, batch)
            for (_, batch), kv in zip(named, pools, strict=True)
        ]
        seconds = interleaved_s(steps, self.repeats)
        for (name, batch), kv, taken in zip(named, pools, seconds, strict=True):
            rate = self.bytes_read(batch, kv) / taken
            macs = self.products(batch) / taken
            _print(
                f"{name:<38}{taken * 1e3:>9.2f}{batch.token_ids.size / taken:>9.0f}"
                f"{rate / 1e9:>8.1f}{rate / self.read_limit:>6.0%}"
                f"{macs / 1e9:>9.1f}{macs / self.int_limit:>6.0%}"
            )
        return seconds

    def batch(self, *parts: Part, grouped: bool = False) -> ForwardBatch:
        return make_batch(self.spec, parts, grouped=grouped)

    def bytes_read(self, batch: ForwardBatch, kv: CpuKVPool) -> int:
        pages = -(-batch.seq_lens // PAGE_SIZE)
        used = np.arange(batch.page_table.shape[1])[None, :] < pages[:, None]
        distinct = np.unique(batch.page_table[used]).size
        return self.model.weight_bytes + distinct * kv.layout.page_bytes

    def products(self, batch: ForwardBatch) -> int:
        spec = self.spec
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention = 2 * heads * int((batch.positions.astype(np.int64) + 1).sum())
        linear = spec.hidden_size * (2 * heads + 2 * kv + 3 * spec.intermediate_size)
        layers = spec.num_layers * (linear * batch.token_ids.size + attention)
        return layers + spec.vocab_size * spec.hidden_size * batch.logit_rows.size


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _header(title: str) -> None:
    _print(f"\n{title:<38}{'ms':>9}{'tok/s':>9}{'GB/s':>8}{'':>6}{'GMAC/s':>9}{'':>6}")


def decode_rows(bench: Bench) -> None:
    _header("decode")
    bench.rows(
        [
            (f"{n} at {context}", bench.batch(*side_by_side(n, context - 1)))
            for n, context in (
                *((1, 64), (1, 512), (1, 1700), (4, 512)),
                *((8, 128), (16, 128), (8, 512), (16, 512)),
            )
        ]
    )


def page_rows(bench: Bench) -> None:
    _header("16 at 512, by how pages are kept")
    batch = bench.batch(*side_by_side(16, 511))
    bench.rows(
        [
            ("float16 (--kv-dtype f16)", batch),
            ("bfloat16 (--kv-dtype bf16)", batch),
            ("8-bit codes (--kv-dtype int8)", batch),
        ],
        [bench.filled_pages(dtype, 16 * 512) for dtype in (KVDType.F16, KVDType.BF16, KVDType.I8)],
    )


def cascade_rows(bench: Bench) -> None:
    _header(f"16 streams, {SHARED} tokens of prefix")
    shared = side_by_side(16, SHARED + 8, shared=SHARED, first_page=SHARED // PAGE_SIZE)
    names = ("shared, read once a group", "shared, no groups", "copies of their own")
    seconds = bench.rows(
        list(
            zip(
                names,
                (
                    bench.batch(*shared, grouped=True),
                    bench.batch(*shared),
                    bench.batch(*side_by_side(16, SHARED + 8)),
                ),
                strict=True,
            )
        )
    )
    _print(
        f"  without groups {seconds[1] / seconds[0]:.2f} times the step, "
        f"over copies {seconds[2] / seconds[0]:.2f} times"
    )


def prefill_rows(
    bench: Bench, whole: Sequence[int], pasts: Sequence[int], chunks: Sequence[int]
) -> None:
    _header("prefill")
    for new in whole:
        bench.rows([(f"{new} tokens", bench.batch(Part(0, new)))])
    bench.rows(
        [
            (f"chunk of {new} after {past}", bench.batch(Part(past, new)))
            for past in pasts
            for new in chunks
        ]
    )


def mixed_rows(bench: Bench) -> None:
    _header("chunk of 64 with 8 decodes")
    decodes = side_by_side(8, 511)
    chunk = Part(0, 64, first_page=8 * 512 // PAGE_SIZE)
    chunk_s, decodes_s, both_s = bench.rows(
        [
            ("chunk alone", bench.batch(chunk)),
            ("8 decodes at 512 alone", bench.batch(*decodes)),
            ("both in one step", bench.batch(chunk, *decodes)),
        ]
    )
    _print(f"  both {both_s / (chunk_s + decodes_s):.2f} of the sum")


def large_rows(backend: CpuBackend, repeats: int) -> None:
    bench = Bench(backend, LLAMA_1B, WeightType.Q4_0, 8 * 512, repeats)
    _print(f"\n1B in Llama-3.2's shape, Q4_0, {bench.model.weight_bytes / 1e6:.0f} MB")
    bench.measure_limits()
    _header("1B")
    for name, parts in (
        ("decode 1 at 512", side_by_side(1, 511)),
        ("decode 8 at 512", side_by_side(8, 511)),
        ("prefill 512", [Part(0, 512)]),
    ):
        bench.rows([(name, bench.batch(*parts))])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument(
        "--quick", action="store_true", help="few repeats, no long prefills, no 1B model"
    )
    parser.add_argument("--avx2", action="store_true", help="no AVX-512, even where it is there")
    options = parser.parse_args()
    try:
        backend = CpuBackend(options.threads, isa="avx2" if options.avx2 else None)
    except BackendUnavailable as unavailable:
        sys.exit(str(unavailable))
    repeats = 3 if options.quick else 15
    bench = Bench(backend, SMOL, WeightType.Q4_1, 16 * (SHARED + 16), repeats)
    _print(f"{backend.numeric_mode}, {backend.kv_dtype} pages, {backend.threads} threads")
    _print(f"SmolLM2-135M's shape, Q4_1, {bench.model.weight_bytes / 1e6:.1f} MB")
    bench.measure_limits()
    decode_rows(bench)
    page_rows(bench)
    cascade_rows(bench)
    mixed_rows(bench)
    if options.quick:
        prefill_rows(bench, (512,), (2048, 8192), (64,))
    else:
        prefill_rows(bench, (512, 2048), (0, 2048, 4096, 8192), (64, 512))
        large_rows(backend, 5)
    backend.close()


if __name__ == "__main__":
    main()
