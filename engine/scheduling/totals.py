"""What an engine has done since it started."""

from dataclasses import dataclass

from engine.scheduling.output import Said
from engine.scheduling.step_plan import ScheduledChunk


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def note(self, chunk: ScheduledChunk, said: Said) -> None:
        """A request says something."""
        self.output_tokens += len(said.token_ids)
        self.forced_tokens += said.num_forced
        self.drafts += bool(chunk.drafts)
        self.draft_tokens += len(chunk.drafts)
        self.accepted_tokens += said.num_accepted
        chunk.request.num_draft_tokens += len(chunk.drafts)
        chunk.request.num_accepted_tokens += said.num_accepted
