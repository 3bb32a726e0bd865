"""Requests as lanes over time: what the engine shows of them and what the edge stamped, joined."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from engine.types import Phase
from engine.views import LaneView
from service.events import RequestRecord

KEPT_RECORDS: Final = 64
"""Requests that ended while nobody watched, for whoever comes next."""
KEPT_NS: Final = 90_000_000_000
MAX_TOKENS_TOLD: Final = 4096

Milliseconds = Callable[[int], float]


class EndedRequests:
    """A `RecordSink` that remembers the last ones."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=KEPT_RECORDS)
        self.num_ended = 0

    def finish(self, record: RequestRecord) -> None:
        """Refused requests never had a lane."""
        if record.usage is not None:
            self._records.append(record)
            self.num_ended += 1

    def since(self, num_ended: int) -> Iterable[RequestRecord]:
        """Those that ended after so many had, as far as they are remembered, oldest first."""
        new = min(self.num_ended - num_ended, len(self._records))
        return list(islice(self._records, len(self._records) - new, None))


@dataclass(slots=True, eq=False)
class _Lane:
    record: RequestRecord
    view: LaneView | None = None
    num_told: int = 0
    told: dict[str, Any] | None = None


class Lanes:
    """The lanes of the last minute and a half. `advance` gives what is new since the call before,
    `snapshot` all of it; both in milliseconds on the scale of `ms`, ready for JSON."""

    def __init__(
        self, open_records: Mapping[str, RequestRecord], ended: EndedRequests, ms: Milliseconds
    ) -> None:
        self._open = open_records
        self._ended = ended
        self._ms = ms
        self._lanes: dict[str, _Lane] = {}
        self._num_ended = 0

    def advance(self, views: Iterable[LaneView], now_ns: int) -> list[dict[str, Any]]:
        """Take a view of the engine's live requests; the lanes that changed, each with its new
        tokens only."""
        for view in views:
            record = self._open.get(view.id)
            if record is not None:
                self._lanes.setdefault(view.id, _Lane(record)).view = view
        for record in self._ended.since(self._num_ended):
            self._lanes.setdefault(record.response_id, _Lane(record)).view = None
        self._num_ended = self._ended.num_ended
        for name in [name for name, lane in self._lanes.items() if _is_old(lane, now_ns)]:
            del self._lanes[name]
        return [news for lane in self._lanes.values() if (news := self._news(lane))]

    def snapshot(self) -> list[dict[str, Any]]:
        """Every lane as it was told last."""
        return [
            {**lane.told, "tokens": self._tokens(lane, 0)}
            for lane in self._lanes.values()
            if lane.told
        ]

    def _news(self, lane: _Lane) -> dict[str, Any] | None:
        """O(1) for a lane that has ended and was told so."""
        if lane.told and lane.told["end"] is not None:
            return None
        shown = self._show(lane)
        num_tokens = len(lane.record.token_ns)
        if shown == lane.told and num_tokens == lane.num_told:
            return None
        told_before, lane.num_told, lane.told = lane.num_told, num_tokens, shown
        return {**shown, "tokens": self._tokens(lane, told_before)}

    def _tokens(self, lane: _Lane, start: int) -> list[float]:
        """Those told, from `start` on."""
        start = max(start, lane.num_told - MAX_TOKENS_TOLD)
        return [self._ms(time_ns) for time_ns in lane.record.token_ns[start : lane.num_told]]

    def _show(self, lane: _Lane) -> dict[str, Any]:
        record, view, ms = lane.record, lane.view, self._ms
        usage = record.usage
        shown: dict[str, Any] = {
            "id": record.response_id,
            "tenant": record.tenant,
            "operation": record.operation,
            "begin": ms(record.start_ns),
            "end": ms(record.end_ns) if record.end_ns else None,
        }
        if view is not None and not record.end_ns:
            return shown | {
                "status": view.status,
                "prompt": view.num_prompt_tokens,
                "cached": view.num_cached_tokens,
                "computed": view.num_computed_tokens,
                "since": ms(view.since_ns),
                "phases": [*map(self._phase, (*record.phases, *view.phases))],
            }
        reason = record.finish_reason
        return shown | {
            "status": record.error_type or (reason.value if reason else "running"),
            "prompt": usage.prompt_tokens if usage else 0,
            "cached": usage.cached_tokens if usage else 0,
            "since": ms(record.end_ns),
            "phases": [*map(self._phase, record.phases)],
        }

    def _phase(self, phase: Phase) -> tuple[str, float, float, int]:
        return phase.name, self._ms(phase.start_ns), self._ms(phase.end_ns), phase.num_tokens


def _is_old(lane: _Lane, now_ns: int) -> bool:
    end_ns = lane.record.end_ns
    return bool(end_ns) and now_ns - end_ns > KEPT_NS
