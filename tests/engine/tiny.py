"""A tiny random decoder in memory, a core over it, and a driver that watches the laws."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

import numpy as np

from engine.models import LoadedModel
from engine.runtime import assemble_core
from engine.scheduling.core import EngineCore
from engine.scheduling.output import OutputRules
from engine.text import Vocabulary
from engine.types import (
    EngineConfig,
    EngineEvent,
    EngineRequest,
    Finished,
    KeepPrefix,
    PromptLogprobs,
    SamplingParams,
    Started,
    TokenDelta,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from kernels.contract import (
    Backend,
    DecoderSpec,
    DecoderWeights,
    ForwardBatch,
    KVLayout,
    LayerWeights,
    StepLogits,
    Weight,
    WeightType,
    do_nothing,
)
from kernels.registry import Selection, select_backend
from kernels.weight_shapes import layer_shapes

PAGE = 16
VOCAB = 128
EOS = 127
SPEC = DecoderSpec(
    family="tiny",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_context=512,
    norm_eps=1e-5,
    rope_inv_freq=tuple(10000.0 ** (-i / 8) for i in range(8)),
)
_LAYER_FIELDS = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


def tiny_model(spec: DecoderSpec = SPEC) -> LoadedModel:
    """Random float32 weights; sharp enough logits that no two tokens tie."""
    rng = np.random.default_rng(7)

    def weight(name: str, shape: tuple[int, ...]) -> Weight:
        scale = 1.0 if len(shape) == 1 else 2.0 * shape[-1] ** -0.5
        values = rng.normal(0.0, scale, shape).astype(np.float32)
        if len(shape) == 1:
            values = np.abs(values) + np.float32(0.5)
        rows = values.reshape(1 if len(shape) == 1 else shape[0], -1)
        return Weight(name, WeightType.F32, shape, rows.view(np.uint8))

    shapes = layer_shapes(spec)
    weights = DecoderWeights(
        embedding=weight("embedding", (spec.vocab_size, spec.hidden_size)),
        layers=tuple(
            LayerWeights(**{name: weight(f"{i}.{name}", shapes[name]) for name in _LAYER_FIELDS})
            for i in range(spec.num_layers)
        ),
        final_norm=weight("final_norm", (spec.hidden_size,)),
    )
    return LoadedModel("tiny", "tiny-7", spec, weights)


MODEL = tiny_model()
VOCABULARY = Vocabulary(tuple(bytes((i,)) for i in range(VOCAB)), {EOS})


def tiny_core(
    *,
    num_pages: int = 64,
    max_context: int = 0,
    token_budget: int = 64,
    decode_token_budget: int = 32,
    max_running: int = 64,
    max_waiting: int = 1024,
    selection: Selection | None = None,
    clock_ns: Callable[[], int] = monotonic_ns,
    itl_target_ms: float = 0.0,
    ttft_target_ms: float = 0.0,
    cache_disk_pages: int = 0,
    idle_audit_s: float = 0.0,
    speculation: bool = False,
) -> EngineCore:
    """An engine over the tiny model, on the best backend of this machine or a given one."""
    layout = KVLayout(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, PAGE)
    config = EngineConfig(
        model="tiny",
        kv_memory_bytes=num_pages * layout.page_bytes,
        max_context=max_context or min(SPEC.max_context, num_pages * PAGE),
        token_budget=token_budget,
        decode_token_budget=decode_token_budget,
        max_running=max_running,
        max_waiting=max_waiting,
        itl_target_ms=itl_target_ms,
        ttft_target_ms=ttft_target_ms,
        threads=1,
        cache_disk_bytes=cache_disk_pages * layout.page_bytes,
        idle_audit_s=idle_audit_s,
        speculation=speculation,
    )
    chosen = selection or select_backend("auto", threads=1, exact=False)
    rules = OutputRules(VOCABULARY, frozenset({EOS}))
    return assemble_core(config, MODEL, rules, chosen, clock_ns=clock_ns)


def prompt(seed: int, length: int) -> list[int]:
    """Random ordinary tokens."""
    return np.random.default_rng(seed).integers(1, EOS, length).tolist()  # type: ignore[no-any-return]


@dataclass
class Answer:
    """What a request got so far."""

    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    scored: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from position 1 on."""


class Driver:
    """Steps a core and audits after every step; fails where an event is out of its order."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}
        self._next = 0

    def add(
        self,
        tokens: list[int],
        max_tokens: int = 8,
        *,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        deadline_ns: int = 0,
        credits: int = 4096,
        tenant: str = "public",
        salt: str = "",
        weight: float = 1.0,
        keep: tuple[KeepPrefix, ...] = (),
        prediction: list[int] | None = None,
    ) -> str:
        self._next += 1
        request = EngineRequest(
            f"r{self._next}",
            pack_tokens(tokens),
            sampling or SamplingParams(max_tokens, ignore_eos=True),
            tenant=tenant,
            salt=salt,
            priority=priority,
            deadline_ns=deadline_ns,
            credits=credits,
            weight=weight,
            keep=keep,
            prediction=pack_tokens(prediction or []),
        )
        self.answers[request.id] = Answer()
        self.core.add(request)
        return request.id

    def step(self) -> list[EngineEvent]:
        events = list(self.core.step())
        for event in events:
            self._take(event)
        self.core.audit()
        return events

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is nothing to do."""
        while self.core.has_work:
            self.step()
            max_steps -= 1
            assert max_steps, "the engine does not come to rest"

    def answer(self, tokens: list[int], max_tokens: int = 8) -> Answer:
        """A lone greedy run."""
        request_id = self.add(tokens, max_tokens)
        self.run()
        return self.answers[request_id]

    def assert_idle(self) -> None:
        """Law 2 with nothing running, and law 3 and 6 for all that ran."""
        pool = self.core.audit()
        assert pool.referenced == 0
        assert pool.free + pool.cached + pool.pinned == pool.total
        ends = [answer.finished for answer in self.answers.values()]
        stats = self.core.stats()
        assert stats.running == stats.waiting == 0
        assert stats.num_requests == len(ends)
        assert stats.num_prompt_tokens == sum(end.num_prompt_tokens for end in ends if end)
        assert stats.num_cached_tokens == sum(end.num_cached_tokens for end in ends if end)
        assert stats.num_output_tokens == sum(end.num_output_tokens for end in ends if end)
        assert stats.num_preemptions == sum(end.num_preemptions for end in ends if end)
        assert all(ends)

    def _take(self, event: EngineEvent) -> None:
        answer = self.answers[event.request_id]
        assert answer.finished is None, f"{event} after the end"
        match event:
            case Started():
                assert answer.started is None
                answer.started = event
            case PromptLogprobs():
                assert answer.started is not None and not answer.tokens
                assert event.start == len(answer.scored) + 1
                answer.scored += event.logprobs
            case TokenDelta():
                assert answer.started is not None
                answer.tokens += unpack_tokens(event.token_ids).tolist()
                answer.text += event.text
                answer.logprobs += event.logprobs
            case Finished():
                answer.finished = event
                assert event.num_output_tokens == len(answer.tokens)
                _check_phases(event)


def _check_phases(end: Finished) -> None:
    """Disjoint, in order, without a gap up to the end."""
    for before, after in zip(end.phases, end.phases[1:], strict=False):
        assert before.end_ns == after.start_ns
    for phase in end.phases:
        assert phase.name in ("queue", "prefix_match", "prefill", "decode")
        assert phase.start_ns <= phase.end_ns
    if end.phases:
        assert end.phases[-1].end_ns == end.time_ns


class FaultyBackend:
    """A real backend that fails at chosen steps, before or after it has written its slots."""

    def __init__(self, backend: Backend[Any, Any], fails: Callable[[int], bool]) -> None:
        self._backend = backend
        self._fails = fails
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(
        self,
        model: Any,
        kv: Any,
        batch: ForwardBatch,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> StepLogits:
        self.num_steps += 1
        if not self._fails(self.num_steps):
            return self._backend.step(model, kv, batch, meanwhile)
        if self.num_steps % 2:
            self._backend.step(model, kv, batch, meanwhile)
        raise RuntimeError(f"injected at step {self.num_steps}")


def faulty(fails: Callable[[int], bool]) -> Selection:
    """The best backend of this machine, made faulty."""
    real = select_backend("auto", threads=1, exact=False)
    return Selection(FaultyBackend(real.backend, fails), real.name, real.reason)
