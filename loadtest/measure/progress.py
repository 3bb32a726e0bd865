"""What a run has measured until now."""

from dataclasses import dataclass, field

from loadtest.measure.client import ClientLoad
from loadtest.measure.sample import Sample


@dataclass(slots=True)
class Progress:
    """A run as it goes; its owner is the loop that runs it, anyone there may look.

    `samples` are requests that are over, `in_flight` those that are not. `num_skipped` turns
    will not be sent, because one before them in their conversation failed. `pss_peak_bytes` is
    the server's, where its memory was watched.
    """

    num_turns: int
    samples: list[Sample] = field(default_factory=list)
    in_flight: dict[int, Sample] = field(default_factory=dict)
    num_skipped: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    client: ClientLoad = field(default_factory=lambda: ClientLoad(0.0, 0.0, 0.0, 0.0))
    interrupted: bool = False
    pss_peak_bytes: int | None = None
