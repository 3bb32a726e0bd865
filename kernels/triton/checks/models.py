"""Whole steps of random models against the reference: greedy tokens, one after another."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kernels.contract import (
    Backend,
    DecoderSpec,
    DecoderWeights,
    Float32Array,
    ForwardBatch,
    KVDType,
    KVLayout,
    WeightType,
)
from kernels.random_weights import random_weights
from kernels.reference import ReferenceBackend
from kernels.triton.backend import TritonBackend

PROMPT: Final = 24
_PAGE_SIZE: Final = 16
_NEAR: Final = 0.15
"""bfloat16 may choose another token where the reference's logits are this close."""


def llama_shape(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int
) -> DecoderSpec:
    """A Llama-shaped model with rotary positions of base 500,000."""
    half = head_dim // 2
    return DecoderSpec(
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context=8192,
        norm_eps=1e-5,
        rope_inv_freq=tuple(500000.0 ** (-i / half) for i in range(half)),
    )


SHAPES: Final = (
    ("135M", llama_shape(576, 30, 9, 3, 64, 1536, 49152)),
    ("1B", llama_shape(2048, 16, 32, 8, 64, 8192, 128256)),
)
SMALL_SHAPES: Final = (("tiny", llama_shape(64, 2, 4, 2, 16, 96, 133)),)


@dataclass(frozen=True, slots=True)
class Agreement:
    """exact: whether float32 chose the reference's token at every step. near: whether bfloat16,
    shown the reference's tokens, chose the same or one as likely. same: how often the same."""

    exact: bool
    near: bool
    same: int
    num_tokens: int


def agreement(spec: DecoderSpec, num_tokens: int) -> Agreement:
    """Random weights, exact in bfloat16, by seed; `num_tokens` after a prompt."""
    weights = random_weights(spec, np.random.default_rng(1), lambda name: WeightType.BF16)
    prompt = np.random.default_rng(2).integers(0, spec.vocab_size, PROMPT).tolist()
    wanted, logits = _greedy(ReferenceBackend(), spec, weights, prompt, num_tokens, KVDType.F32)
    tokens, _ = _greedy(TritonBackend(exact=True), spec, weights, prompt, num_tokens, KVDType.F32)
    _, rounded = _greedy(
        TritonBackend(), spec, weights, prompt, num_tokens, KVDType.BF16, forced=wanted
    )
    chosen = rounded.argmax(axis=1)
    gap = logits.max(axis=1) - np.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
    return Agreement(
        exact=tokens == wanted,
        near=bool(np.isfinite(rounded).all() and (gap <= _NEAR * logits.std()).all()),
        same=int((chosen == np.array(wanted)).sum()),
        num_tokens=num_tokens,
    )


def _greedy(
    backend: Backend[Any, Any],
    spec: DecoderSpec,
    weights: DecoderWeights,
    prompt: list[int],
    num_tokens: int,
    dtype: KVDType,
    forced: list[int] | None = None,
) -> tuple[list[int], Float32Array]:
    """The likeliest tokens, and logits [num_tokens, vocab]; goes on with `forced` where given."""
    model = backend.load(spec, weights)
    num_pages = -(-(len(prompt) + num_tokens) // _PAGE_SIZE)
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, _PAGE_SIZE, dtype)
    kv = backend.alloc_kv(layout, num_pages)
    pages = np.random.default_rng(3).permutation(num_pages).astype(np.int32)
    tokens: list[int] = []
    rows = []
    new, start = prompt, 0
    for step in range(num_tokens):
        full = backend.step(model, kv, _batch(new, start, pages)).full
        if full is None:
            raise RuntimeError("a step that was asked for full rows gave none")
        rows.append(full[0])
        tokens.append(int(full[0].argmax()))
        start += len(new)
        new = [tokens[-1] if forced is None else forced[step]]
    backend.close()
    return tokens, np.stack(rows)


def _batch(
    new: list[int], start: int, pages: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
) -> ForwardBatch:
    positions = np.arange(start, start + len(new), dtype=np.int32)
    slots = pages[positions // _PAGE_SIZE] * _PAGE_SIZE + positions % _PAGE_SIZE
    return ForwardBatch(
        token_ids=np.array(new, dtype=np.int32),
        positions=positions,
        cu_seqlens_q=np.array([0, len(new)], dtype=np.int32),
        seq_lens=np.array([start + len(new)], dtype=np.int32),
        page_table=pages[None].copy(),
        slot_mapping=slots.astype(np.int32),
        logit_rows=np.array([len(new) - 1], dtype=np.int32),
    )
