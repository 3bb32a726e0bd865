"""A core whose steps take a known time on a clock of its own, and compute nothing."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.models import LoadedModel
from engine.runtime import assemble_core
from engine.scheduling.core import EngineCore
from engine.scheduling.output import OutputRules
from engine.types import (
    EngineConfig,
    EngineEvent,
    EngineRequest,
    Finished,
    SamplingParams,
    Started,
    TokenDelta,
    pack_tokens,
)
from kernels.contract import ForwardBatch, KVDType, KVLayout, StepLogits, do_nothing
from kernels.registry import Selection
from tests.engine.tiny import EOS, MODEL, PAGE, SPEC, VOCABULARY

CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class Machine:
    """Milliseconds per step, row of logits, token, key that a chunk reads, and pair of a longer
    one; the defaults are those of two cores. `spread` is the relative noise of a step, `stalls` the
    share of steps that take five times as long."""

    step: float = 2.0
    row: float = 0.66
    token: float = 0.21
    key: float = 0.7e-3
    pair: float = 0.1e-3
    spread: float = 0.03
    stalls: float = 0.0

    def step_ms(self, batch: ForwardBatch) -> float:
        """The time of a step without noise."""
        lengths = np.diff(batch.cu_seqlens_q)
        pasts = batch.seq_lens - lengths
        pairs = lengths * pasts + lengths * (lengths + 1) / 2
        lone = lengths == 1
        return float(
            self.step
            + self.row * batch.logit_rows.size
            + self.token * batch.token_ids.size
            + self.key * (batch.seq_lens[lone].sum() + pasts[~lone].sum())
            + self.pair * pairs[~lone].sum()
        )


@dataclass
class _Loaded:
    spec: Any
    weight_bytes: int = 0


@dataclass
class _Pages:
    layout: KVLayout
    num_pages: int


class SimulatedBackend:
    """A backend that lets the clock pass as `machine` says; a token says which one follows it."""

    name = "simulated"
    numeric_mode = "simulated"
    kv_dtype = KVDType.F16

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now_ns = 1_000_000_000
        self.batches: list[ForwardBatch] = []
        self._rng = random.Random(5)

    def free_device_bytes(self) -> int | None:
        return None

    def load(self, spec: Any, weights: Any) -> _Loaded:
        return _Loaded(spec)

    def alloc_kv(self, layout: KVLayout, num_pages: int) -> _Pages:
        return _Pages(layout, num_pages)

    def copy_pages(self, kv: Any, src: Any, dst: Any) -> None:
        return

    def export_page(self, kv: Any, page: int) -> bytes:
        return b""

    def prepare(self, model: Any, kv: Any, batch: ForwardBatch) -> None:
        return

    def import_page(self, kv: Any, page: int, data: bytes) -> None:
        return

    def step(
        self,
        model: Any,
        kv: Any,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        meanwhile()
        machine = self.machine
        ms = machine.step_ms(batch) * self._rng.lognormvariate(0.0, machine.spread)
        ms *= 5 if self._rng.random() < machine.stalls else 1
        self.now_ns += int(ms * 1e6)
        self.batches.append(batch)
        tokens = (batch.token_ids[batch.logit_rows] * 7 + 3) % EOS
        ids = np.repeat(tokens[:, None], batch.num_top, axis=1).astype(np.int32)
        logits = np.zeros(ids.shape, dtype=np.float32)
        return StepLogits(None, ids, logits, np.zeros(len(ids), dtype=np.float32))

    def close(self) -> None:
        return


@dataclass
class Life:
    """When things happened to a request."""

    added_ns: int
    started_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.token_ns[0] - self.added_ns) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        return [float(gap) / 1e6 for gap in np.diff(self.token_ns)]


class Simulation:
    """A core on the simulated machine, and what happened to its requests."""

    def __init__(
        self, machine: Machine | None = None, *, num_pages: int = 4096, **config: Any
    ) -> None:
        self.backend = SimulatedBackend(machine or Machine())
        config = {"speculation": False, **config}
        layout = KVLayout(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, PAGE)
        spec = replace(SPEC, max_context=CONTEXT)
        self.core: EngineCore = assemble_core(
            EngineConfig(
                model="simulated",
                kv_memory_bytes=num_pages * layout.page_bytes,
                max_context=min(CONTEXT, num_pages * PAGE),
                **config,
            ),
            LoadedModel("simulated", "simulated", spec, MODEL.weights),
            OutputRules(VOCABULARY, frozenset({EOS})),
            Selection(self.backend, "simulated", "a test"),
            clock_ns=lambda: self.backend.now_ns,
        )
        self.lives: dict[str, Life] = {}
        self._rng = np.random.default_rng(3)

    @property
    def now_ms(self) -> float:
        return self.backend.now_ns / 1e6

    def tokens(self, length: int) -> list[int]:
        """A prompt like no other."""
        return self._rng.integers(1, EOS, length).tolist()  # type: ignore[no-any-return]

    def add(self, prompt: int | list[int], max_tokens: int = 1, **fields: Any) -> str:
        """Ask for so many tokens after a prompt, given or of that length."""
        name = f"r{len(self.lives)}"
        tokens = self.tokens(prompt) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens, ignore_eos=True)
        fields = {"credits": 65536, **fields}
        self.lives[name] = Life(self.backend.now_ns)
        self.core.add(EngineRequest(name, pack_tokens(tokens), sampling, **fields))
        return name

    def step(self) -> list[EngineEvent]:
        events = list(self.core.step())
        for event in events:
            life = self.lives[event.request_id]
            match event:
                case Started():
                    life.started_ns = event.time_ns
                case TokenDelta():
                    life.token_ns.append(event.time_ns)
                case Finished():
                    assert life.finished is None
                    life.finished = event
        return events

    def run_for(self, ms: float) -> None:
        """Step until so much time has passed, or nothing is left to do."""
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms and self.core.has_work:
            self.step()

    def run_until_first_token(self, name: str) -> None:
        while not self.lives[name].token_ns:
            self.step()

    def run(self) -> None:
        while self.core.has_work:
            self.step()
