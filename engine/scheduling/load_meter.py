"""How fast prompts are computed and places become free: measured, for those who would wait."""

from collections.abc import Sequence
from typing import Final

from engine.scheduling.itl_controller import ItlController
from engine.scheduling.request import Request
from engine.stats import EngineLoad

_MEMORY_S: Final = 3.0
"""The rate of prompt tokens is that of about so many seconds of full steps."""
_OF_A_REQUEST: Final = 0.05
"""How much one request changes what is expected of the next."""
_OF_A_STEP: Final = 0.02
_FIRST_OUTPUT: Final = 512
"""Tokens that answers are expected to have, if they may, before the first has ended."""


class LoadMeter:
    """Rates under the load there is. The rate of prompt tokens comes from steps that could not
    take all there was; before the first of them, from the model's cost of a token."""

    def __init__(self, controller: ItlController, max_running: int) -> None:
        self._controller = controller
        self._max_running = max_running
        self._tokens = 0.0
        self._seconds = 0.0
        self._computed_share = 1.0
        self._output_tokens = 0.0
        self._stream_step_s = 0.0

    def note_step(
        self, num_prompt_tokens: int, took_s: float, *, full: bool, streams: bool
    ) -> None:
        """A step ended. `full`: some prompt got less than it wanted."""
        if full:
            kept = max(0.0, 1 - took_s / _MEMORY_S)
            self._tokens = self._tokens * kept + num_prompt_tokens
            self._seconds = self._seconds * kept + took_s
        if streams:
            known = self._stream_step_s or took_s
            self._stream_step_s = known + _OF_A_STEP * (took_s - known)

    def note_start(self, request: Request) -> None:
        """A request was admitted: how much of its prompt has to be computed."""
        share = request.num_uncomputed_tokens / request.num_tokens
        self._computed_share += _OF_A_REQUEST * (share - self._computed_share)

    def note_end(self, request: Request) -> None:
        """A request ended: how much it said."""
        count = request.num_output_tokens
        if count:
            known = self._output_tokens or count
            self._output_tokens = known + _OF_A_REQUEST * (count - known)

    def load(self, running: Sequence[Request]) -> EngineLoad:
        """As it stands after a step."""
        moving = [request for request in running if not request.paused]
        limit = self.most_running(moving)
        free = max(0, limit - len(moving))
        controller = self._controller
        # A crowd that has just come has no slow steps behind it yet: the model knows them before.
        crowd_s = controller.streams_ms(moving) / 1e3
        token_s = max(self._stream_step_s, crowd_s, controller.target_ms / 1e3)
        waits = sorted(self._left(request) * token_s for request in moving)
        waits = waits[max(0, len(moving) - limit) :]  # more than may run by now: those end first
        return EngineLoad(
            prefill_tokens_per_s=self._rate(),
            computed_share=self._computed_share,
            prefill_tokens=sum(r.num_uncomputed_tokens for r in moving if not r.is_decoding),
            free_places=free,
            place_waits_s=tuple(round(wait, 3) for wait in waits),
            life_s=(self._output_tokens or _FIRST_OUTPUT) * token_s,
        )

    def most_running(self, moving: Sequence[Request]) -> int:
        """How many may run at a time, each as long as these are expected to become on the average:
        by number, and by the target for the time between tokens."""
        if not moving:
            return self._max_running
        return self._most(sum(map(self._keys, moving)) / len(moving))

    def has_place(self, new: Request, moving: Sequence[Request], num_admitted: int) -> bool:
        """Whether one more may run beside these and so many others like it: a short one beside a
        long one, where there would be none for two long ones. A prompt takes a place from when it
        will be computed: until then one that says little may come and go."""
        num_new = num_admitted + 1
        ends_s = self._left(new) * max(self._stream_step_s, self._controller.target_ms / 1e3)
        beside = [r for r in moving if r.is_decoding or self._computing_s(r) <= ends_s]
        num = len(beside) + num_new
        num_keys = sum(map(self._keys, beside)) + num_new * self._keys(new)
        return num <= self._most(num_keys / num)

    def _computing_s(self, request: Request) -> float:
        """How long its prompt takes yet, if nothing else is computed."""
        rate = self._rate()
        return request.num_uncomputed_tokens / rate if rate else 0.0

    def _most(self, num_keys: float) -> int:
        return min(self._max_running, self._controller.most_streams(int(num_keys)))

    def _keys(self, request: Request) -> float:
        """Tokens it is expected to have at its end."""
        return request.num_tokens + self._left(request)

    def _left(self, request: Request) -> float:
        """Tokens it is expected to say yet: as others did, as far as it may; one that has said
        more than others do goes on for a while."""
        most = request.max_new_tokens
        expected = min(self._output_tokens or _FIRST_OUTPUT, most)
        said = request.num_output_tokens
        return min(max(expected - said, expected / 8), most - said)

    def _rate(self) -> float:
        if self._tokens:
            return self._tokens / self._seconds
        return 1e3 / self._controller.model.token_ms if self._controller.model.num_steps else 0.0
