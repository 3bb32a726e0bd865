"""How fast prompts were computed, and how fast streams ran together."""

import itertools
import statistics
from collections.abc import Sequence

from loadtest.measure.sample import Sample


def prefill_tok_per_s(sample: Sample) -> float | None:
    """Prompt tokens that no cache had over the time to the first token; None where the server's
    counts cannot be believed or nothing came."""
    usage = sample.believed
    if usage is None or not sample.piece_s:
        return None
    return (usage.prompt - usage.cached) / (sample.piece_s[0] - sample.sent_s)


def median_prefill_tok_per_s(good: Sequence[Sample]) -> float | None:
    """The median of all first turns; None without any."""
    speeds = [prefill_tok_per_s(one) for one in good if not one.turn and one.streamed]
    known = [speed for speed in speeds if speed is not None]
    return statistics.median(known) if known else None


def decode_tok_per_s(good: Sequence[Sample]) -> float | None:
    """Tokens per second while the most streams ran that ever ran together, each from its first
    piece to its last. A piece counts as many tokens as the pieces of its answer do on average.
    None where no stream has two pieces."""
    streams = [one for one in good if one.streamed and len(one.piece_s) > 1]
    changes = sorted(
        change for one in streams for change in ((one.piece_s[0], 1), (one.piece_s[-1], -1))
    )
    spans: dict[int, list[tuple[float, float]]] = {}
    running = 0
    for (time_s, change), (next_s, _) in itertools.pairwise(changes):
        running += change
        if next_s > time_s:
            spans.setdefault(running, []).append((time_s, next_s))
    if not spans:
        return None
    most = spans[max(spans)]
    tokens = sum(
        _num_between(one.piece_s[1:], most) * one.output_tokens / len(one.piece_s)
        for one in streams
    )
    return tokens / sum(end_s - begin_s for begin_s, end_s in most)


def _num_between(times_s: Sequence[float], spans: Sequence[tuple[float, float]]) -> int:
    """How many of the times lie in a span, its end included."""
    return sum(any(begin_s < time_s <= end_s for begin_s, end_s in spans) for time_s in times_s)
