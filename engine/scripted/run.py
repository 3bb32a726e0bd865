"""A request of the test engine while it plays its script."""

from engine.scripted.script import Script
from engine.text.stop_matcher import StopMatcher
from engine.types import EngineRequest, Phase
from engine.views import LaneView


class Run:
    """A request that plays its script."""

    def __init__(self, request: EngineRequest, script: Script, now_ns: int) -> None:
        self.request = request
        self.script = script
        self.matcher = StopMatcher(request.sampling.stop)
        self.credits = request.credits
        self.aborted = False
        self.added_ns = now_ns
        self.started_ns = 0
        self.first_token_ns = 0
        self.due_ns = 0
        self.step = 0
        self.offset = 0
        self.num_output_tokens = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids) // 4

    @property
    def num_cached_tokens(self) -> int:
        return max(0, min(self.script.num_cached_tokens, self.num_prompt_tokens - 1))

    @property
    def at_end(self) -> bool:
        """Whether all steps were said."""
        return self.step >= len(self.script.steps)

    @property
    def speaks_ns(self) -> int:
        """When it will do something unasked; 0 for never: it waits for credit or forever."""
        if self.aborted or not self.started_ns:
            return 1
        silent = self.script.finish is None if self.at_end else not self.credits
        times = (0 if silent else self.due_ns, self.request.deadline_ns)
        return min((time_ns for time_ns in times if time_ns), default=0)

    def wait_for_step(self, said_ns: int) -> None:
        """The next step is due its delay after the last was, so that delays do not drift."""
        if self.at_end and self.script.repeat:
            self.step = 0
        delay_s = 0.0 if self.at_end else self.script.steps[self.step].delay_s
        self.due_ns = max((self.due_ns or said_ns) + int(delay_s * 1e9), said_ns)

    def phases(self, now_ns: int) -> tuple[Phase, ...]:
        """Its life so far, without the phases it did not reach."""
        queue = Phase("queue", self.added_ns, self.started_ns or now_ns)
        if not self.started_ns:
            return (queue,)
        cached = self.num_cached_tokens
        first_token_ns = self.first_token_ns or now_ns
        prefill = Phase(
            "prefill", self.started_ns, first_token_ns, self.num_prompt_tokens - cached, cached
        )
        if not self.first_token_ns:
            return queue, prefill
        decode = Phase(
            "decode", first_token_ns, now_ns, self.num_output_tokens, self.num_prompt_tokens
        )
        return queue, prefill, decode

    def lane(self, now_ns: int) -> LaneView:
        """As a watcher sees it."""
        status = "waiting"
        if self.started_ns:
            status = "running" if self.credits > 0 else "paused"
        *ended, present = self.phases(now_ns)
        cached = self.num_cached_tokens
        return LaneView(
            self.request.id,
            self.request.tenant,
            status,
            self.num_prompt_tokens,
            cached,
            self.num_prompt_tokens + self.num_output_tokens if self.first_token_ns else cached,
            self.num_output_tokens,
            present.start_ns,
            tuple(ended),
        )
