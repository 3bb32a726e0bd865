"""How much prompt work a step has room for, so that running streams keep their pace.

Three ways, chosen at start: by a target for the time between tokens, by a fixed number of tokens,
or by neither. A step with nobody to wait for it is bounded too, in the first and the last way: it
is what an abort, or a request that comes now, waits for.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.scheduling.request import Request
from engine.scheduling.step_plan import ScheduledChunk
from engine.scheduling.step_time import StepTimeModel, StepWork, num_pairs

LONE_STEP_MS: Final = 250.0
"""Predicted length of a step that no stream waits for."""
FREE_STRETCH: Final = 8.0
"""Without a target a step takes up to so many times what its streams alone would take: prompts
keep about 7/8 of their speed, whatever the machine."""
PREFILL_FLOOR: Final = 1 / 8
"""Where streams alone fill the target, prompts still get this share of what the streams take."""
_MARGIN_RANGE: Final = (0.9, 2.0)
_MARGIN_STEP: Final = 0.05
_WITHIN: Final = 0.95
"""The share of steps that shall stay below the target."""
_REMEMBERED: Final = 512


@dataclass(slots=True)
class Room:
    """What is left of a step for prompts: `tokens`, and `ms` by the model's costs."""

    tokens: int
    ms: float
    model: StepTimeModel

    @property
    def is_spent(self) -> bool:
        return self.tokens < 1 or self.ms <= 0

    def copy(self) -> "Room":
        """As much room, to try out who would get it."""
        return Room(self.tokens, self.ms, self.model)

    def halve(self) -> "Room":
        """Give away half of it."""
        half = Room(self.tokens // 2, self.ms / 2, self.model)
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
            if length:
                self.ms -= reading_ms + self.model.longer_ms(past, length)
        self.tokens -= length
        return length

    def _fitting(self, past: int, ms: float) -> int:
        """The most tokens that make a chunk so much longer: the root of a square."""
        square = self.model.pair_ms / 2
        linear = self.model.token_ms + self.model.pair_ms * (past + 0.5)
        left = max(0.0, ms)
        return int(2 * left / (linear + math.sqrt(linear * linear + 4 * square * left)))


class ItlController:
    """Gives prompts the room that the target leaves, and learns from each step how much that is.

    With a target, the predicted step times a margin equals the target; the margin moves so that
    95 of 100 such steps stay below it. There is no waiting: a step that has no prompt to compute
    is as short as its streams allow.
    """

    def __init__(
        self, *, token_budget: int, fixed_chunk: int, page_size: int, itl_target_ms: float
    ) -> None:
        """`token_budget` bounds the new tokens of every step; `fixed_chunk`, if not 0, those of a
        step with streams, instead of any time. `itl_target_ms` 0 is no target. `num_floor_steps`
        counts those that computed prompts though streams alone filled the target."""
        self.model = StepTimeModel()
        self.target_ms = itl_target_ms
        self._token_budget = token_budget
        self._fixed_chunk = fixed_chunk
        self._page_size = page_size
        self.num_floor_steps = 0
        self._at_floor = False
        self._margin = 1.1
        self._gaps_ms: deque[float] = deque(maxlen=_REMEMBERED)
        self._chunks: deque[int] = deque(maxlen=_REMEMBERED)

    def room(self, decodes: Sequence[Request]) -> Room:
        """The room for prompts in a step that computes a token of each of `decodes`."""
        num_streams = len(decodes)
        self._at_floor = False
        if self._fixed_chunk:
            budget = self._token_budget
            if num_streams:
                budget = min(budget, self._fixed_chunk) - num_streams
            return Room(max(budget, self._page_size), math.inf, self.model)
        tokens = max(self._token_budget - num_streams, 1)
        streams_ms = self.streams_ms(decodes)
        if not num_streams:
            return Room(tokens, LONE_STEP_MS - streams_ms, self.model)
        whole_ms = FREE_STRETCH * streams_ms
        if self.target_ms:
            whole_ms = self.target_ms / self._margin
        left_ms, floor_ms = whole_ms - streams_ms, PREFILL_FLOOR * streams_ms
        self._at_floor = left_ms < floor_ms
        return Room(tokens, max(left_ms, floor_ms), self.model)

    def streams_ms(self, decodes: Sequence[Request]) -> float:
        """A step that computes a token of each of them."""
        num_keys = sum(request.num_tokens for request in decodes)
        return self.model.predict(StepWork(len(decodes), len(decodes), num_keys))

    def most_streams(self, num_keys: int) -> int:
        """How many streams of so many tokens each leave all within the target and prompts their
        floor; at least one."""
        if not self.target_ms:
            return 1 << 20
        fixed_ms = self.model.predict(StepWork())
        stream_ms = self.model.predict(StepWork(1, 1, num_keys)) - fixed_ms
        return max(1, int((self.target_ms / (1 + PREFILL_FLOOR) - fixed_ms) / stream_ms))

    def learn(self, chunks: Sequence[ScheduledChunk], took_ms: float) -> None:
        """A step computed these chunks, `took_ms` after the last one's tokens."""
        work = StepWork.of(chunks)
        streams = [chunk for chunk in chunks if chunk.start >= chunk.request.prefill_end]
        lengths = [c.end - c.start for c in chunks if c.start < c.request.prefill_end]
        self.model.learn(work, took_ms)
        if streams:
            self._gaps_ms.append(took_ms)
        self._chunks.extend(lengths)
        if streams and lengths and self._at_floor:
            self.num_floor_steps += 1
        if streams and lengths and self.target_ms:
            late = took_ms > self.target_ms
            low, high = _MARGIN_RANGE
            move = _MARGIN_STEP * (_WITHIN if late else _WITHIN - 1)
            self._margin = min(max(self._margin * math.exp(move), low), high)

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
        return float(np.quantile(self._gaps_ms, quantile)) if self._gaps_ms else 0.0

    def chunk_tokens(self, quantile: float) -> int:
        """A quantile of the last chunks of prompts; 0 without any."""
        return int(np.quantile(self._chunks, quantile)) if self._chunks else 0
