"""How much prompt work a step has room for, so that running streams keep their pace.

Three ways, chosen at start: by a target for the time between tokens, by a fixed number of tokens,
or by neither. A step with nobody to wait for it is bounded too, in the first and the last way: it
is what an abort, or a request that comes now, waits for.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from engine.scheduling.recent_quantile import RecentQuantile
from engine.scheduling.request import Request
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.step_time import StepTimeModel, StepWork, num_pairs

LONE_STEP_MS: Final = 250.0
"""Predicted length of a step that no stream waits for."""
FREE_STRETCH: Final = 8.0
"""Without a target a step takes up to so many times what its streams alone would take: prompts
keep about 7/8 of their speed, whatever the machine."""
SPARE_SHARE: Final = 1 / 8
"""The target has room for this share of what the streams take, or fewer streams are let in."""
LATE_SHARE: Final = 0.04
"""So many of all steps may be late, one of them in a while on purpose."""
LONG_STEP: Final = 1.5
"""Where the target leaves the oldest prompt nothing that is worth it, it gets such a step of so
many targets as soon as the late steps leave one over, ..."""
LONG_EVERY: Final = 40
"""... or so many steps after the last."""
LONG_STEP_AT_LEAST: Final = 2.0
"""Where the streams alone exceed the target, whatever prompts do, the step takes so many times what
these take, ..."""
LONG_EVERY_AT_LEAST: Final = 8
"""... so many steps after the last."""
_MOST_OWED: Final = 2.0
_WITHIN: Final = 0.95
"""The share of steps that shall stay below the target."""
_ADDED: Final = 0.02
"""Where more than the others are late without any prompt, prompts add so many."""
_MARGIN_RANGE: Final = (0.9, 2.0)
_FIRST_MARGIN: Final = 1.1
_MARGIN_MEMORY: Final = 128
_REMEMBERED: Final = 512
_LEARN_MS: Final = 5.0
"""Short steps of streams alone are all alike: one is learned from as soon as those since the last
took so long."""


@dataclass(frozen=True, slots=True)
class LongStep:
    """What prompts would have instead of small chunks in every step: `ms` of one step in a cycle
    of `cycle_ms`, whose other steps, of `other_ms` each, are without."""

    ms: float
    cycle_ms: float
    other_ms: float


@dataclass(slots=True)
class Room:
    """What is left of a step for prompts: `tokens`, and `ms` by the model's costs. A chunk that
    does not end its prompt must be worth it: give more tokens in a while than `instead` would.
    Where there is nothing instead, the oldest prompt gets a token in any case.
    The step computes a token of `num_streams` streams. Without prompts it would take `bare_ms`:
    what it costs to leave a prompt to the next step, or infinite if the room is to be used up."""

    tokens: int
    ms: float
    model: StepTimeModel
    instead: LongStep | None = None
    num_streams: int = 0
    bare_ms: float = math.inf

    @property
    def is_spent(self) -> bool:
        return self.tokens < 1 or self.ms <= 0

    def copy(self) -> "Room":
        """As much room, to try out who would get it."""
        return replace(self)

    def halve(self) -> "Room":
        """Give away half of it."""
        half = replace(self, tokens=self.tokens // 2, ms=self.ms / 2)
        self.tokens -= half.tokens
        self.ms -= half.ms if math.isfinite(half.ms) else 0.0
        return half

    def take_back(self, other: "Room") -> None:
        """Add what the other one has left."""
        self.tokens += other.tokens
        self.ms += other.ms

    def take(self, past: int, want: int, *, begun: bool = False) -> int:
        """Use the room for as many of `want` tokens behind `past` others as fit; how many.
        `begun`: they make a chunk longer that is computed anyway, and has read what is behind."""
        length = min(want, self.tokens)
        if length > 0 and math.isfinite(self.ms):
            reading_ms = 0.0 if begun else self.model.reading_ms(past)
            length = min(length, self._fitting(past, self.ms - reading_ms))
            cost_ms = reading_ms + self.model.longer_ms(past, length)
            if not length or not (length == want or begun or self._pays(past, length, cost_ms)):
                return 0
            self.ms -= cost_ms
        self.tokens -= length
        return length

    def _pays(self, past: int, length: int, cost_ms: float) -> bool:
        """Whether chunks like this are the faster way."""
        if self.instead is None:
            return True
        other = self.instead
        in_cycle = self._fitting(past, other.ms - self.model.reading_ms(past))
        return length * other.cycle_ms >= in_cycle * (other.other_ms + cost_ms)

    def _fitting(self, past: int, ms: float) -> int:
        """The most tokens that make a chunk so much longer: the root of a square."""
        square = self.model.pair_ms / 2
        linear = self.model.token_ms + self.model.pair_ms * (past + 0.5)
        left = max(0.0, ms)
        return int(2 * left / (linear + math.sqrt(linear * linear + 4 * square * left)))


class ItlController:
    """Gives prompts the room that the target leaves, and learns from each step how much that is.

    The target is for 95 of 100 pauses. The predicted step times a margin equals it, and the margin
    is what 95 of the last 100 such steps took of what was predicted, or fewer, where more of them
    than that were late by so much that streams alone are. Where that leaves the oldest
    prompt no chunk worth computing, streams go on alone, and there is a budget of late steps: it
    grows by LATE_SHARE with each step, and each that took longer than the target, for whatever
    reason, costs one. What is left of it goes to the prompt, a step of LONG_STEP targets for each.
    There is no waiting: a step that has no prompt to compute is as short as its streams allow.
    """

    def __init__(
        self, *, token_budget: int, fixed_chunk: int, page_size: int, itl_target_ms: float
    ) -> None:
        """`token_budget` bounds the new tokens of every step; `fixed_chunk`, if not 0, those of a
        step with streams, instead of any time. `itl_target_ms` 0 is no target. `num_floor_steps`
        counts the long ones."""
        self.model = StepTimeModel()
        self.target_ms = itl_target_ms
        self._token_budget = token_budget
        self._fixed_chunk = fixed_chunk
        self._page_size = page_size
        self.num_floor_steps = 0
        self._is_long = False
        self._unlearned_ms = _LEARN_MS
        self._passes_oldest = False
        self._num_since_long = LONG_EVERY
        self._may_be_late = 1.0
        self._late_by = RecentQuantile(_MARGIN_MEMORY, _FIRST_MARGIN)
        self._gaps_ms: deque[float] = deque(maxlen=_REMEMBERED)
        self._chunks: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def is_free(self) -> bool:
        """Whether nothing was asked of steps but that all is computed soon."""
        return not (self.target_ms or self._fixed_chunk)

    def room(self, decodes: Sequence[Request]) -> Room:
        """The room for prompts in a step that computes a token of each of `decodes`."""
        num_streams = len(decodes)
        self._is_long = False
        if self._fixed_chunk:
            budget = self._token_budget
            if num_streams:
                budget = min(budget, self._fixed_chunk) - num_streams
            return Room(max(budget, self._page_size), math.inf, self.model)
        tokens = max(self._token_budget - num_streams, 1)
        streams_ms = self.streams_ms(decodes)
        bare_ms = math.inf if self.target_ms else streams_ms
        if not num_streams:
            return Room(tokens, LONE_STEP_MS - streams_ms, self.model, bare_ms=bare_ms)
        if not self.target_ms:
            free_ms = (FREE_STRETCH - 1) * streams_ms
            return Room(tokens, free_ms, self.model, None, num_streams, bare_ms)
        margin = self._margin(streams_ms)
        fits = streams_ms < self.target_ms
        every = LONG_EVERY if fits else LONG_EVERY_AT_LEAST
        may_be_long = self._num_since_long >= every or (fits and self._may_be_late >= 1)
        self._is_long = self._passes_oldest and may_be_long
        whole_ms = LONG_STEP_AT_LEAST * streams_ms
        if fits:
            whole_ms = LONG_STEP * max(self.target_ms / margin, streams_ms)
        if self._is_long:
            return Room(tokens, whole_ms - streams_ms, self.model)
        left_ms = max(0.0, self.target_ms / margin - streams_ms)
        cycle_ms = (1 / LATE_SHARE if fits else every) * streams_ms + whole_ms - streams_ms
        instead = LongStep(whole_ms - streams_ms, cycle_ms, streams_ms)
        return Room(tokens, left_ms, self.model, instead)

    def _margin(self, streams_ms: float) -> float:
        """What a step may take of its prediction. No margin keeps more steps below the target than
        streams alone do, and one that tries takes from prompts what nobody gains."""
        late = self._late_by.above(self.target_ms / streams_ms)
        share = min(_WITHIN, max(0.0, 1 - late - _ADDED))
        low, high = _MARGIN_RANGE
        return min(max(self._late_by.value(share), low), high)

    def note(self, plan: StepPlan) -> None:
        """This became of the last `room`, and is computed next."""
        self._passes_oldest = plan.passes_oldest
        num_prefills = sum(c.start < c.request.prefill_end for c in plan.chunks)
        if num_prefills == len(plan.chunks):
            return
        self._num_since_long += 1
        if num_prefills and self._is_long:
            self.num_floor_steps += 1
            self._num_since_long = 0

    def streams_ms(self, decodes: Sequence[Request]) -> float:
        """A step that computes a token of each of them."""
        num_keys = sum(request.num_tokens for request in decodes)
        return self.model.predict(StepWork(len(decodes), len(decodes), num_keys))

    def most_streams(self, num_keys: int) -> int:
        """How many streams of so many tokens each leave all within the target and prompts their
        share; at least one."""
        if not self.target_ms:
            return 1 << 20
        fixed_ms = self.model.predict(StepWork())
        stream_ms = self.model.predict(StepWork(1, 1, num_keys)) - fixed_ms
        return max(1, int((self.target_ms / (1 + SPARE_SHARE) - fixed_ms) / stream_ms))

    def learn(self, plan: StepPlan, took_ms: float) -> None:
        """A step of this plan took `took_ms`, from the last one's tokens on."""
        lengths = [c.end - c.start for c in plan.chunks if c.start < c.request.prefill_end]
        tells = bool(lengths) or plan.passes_oldest
        ratio = 1.0
        if tells or self._unlearned_ms >= _LEARN_MS or self.model.is_changing:
            work = StepWork.of(plan.chunks)
            ratio = took_ms / self.model.predict(work)
            self.model.learn(work, took_ms)
            self._unlearned_ms = 0.0
        self._unlearned_ms += took_ms
        self._chunks.extend(lengths)
        if len(lengths) == len(plan.chunks):
            return
        self._gaps_ms.append(took_ms)
        owed = self._may_be_late + LATE_SHARE - (took_ms > self.target_ms)
        self._may_be_late = min(max(owed, -_MOST_OWED), _MOST_OWED)
        if tells and not self.model.is_changing:
            self._late_by.add(ratio)

    def learn_span(self, start: int, end: int, took_ms: float, rows: int) -> None:
        """A step of tokens [start, end) of one sequence, with logits of the last `rows`, took so
        long."""
        length = end - start
        work = StepWork(1, 1, keys=end)
        if length > 1:
            work = StepWork(rows, length, pairs=num_pairs(start, length), read=start)
        self.model.learn(work, took_ms)

    def itl_ms(self, quantile: float) -> float:
        """A quantile of the last steps of running streams; 0 without any."""
        return _quantile(self._gaps_ms, quantile) if self._gaps_ms else 0.0

    def chunk_tokens(self, quantile: float) -> int:
        """A quantile of the last chunks of prompts; 0 without any."""
        return int(_quantile(self._chunks, quantile)) if self._chunks else 0


def _quantile(values: Iterable[float], share: float) -> float:
    """Of at least one; np.quantile would import 8 ms of modules in the middle of the steps."""
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * share)]
