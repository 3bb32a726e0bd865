"""While nothing runs, the cache's books are checked; what is wrong is dropped and told, and the
engine serves on."""

import logging
from dataclasses import dataclass

from prefix_cache.cache import PrefixCache

_log = logging.getLogger(__name__)
_TOLD = 20


@dataclass(slots=True)
class IdleAudit:
    """An audit `pause_ns` after the last request ended (0: none), once for each rest."""

    cache: PrefixCache
    pause_ns: int
    due_ns: int = 0
    num_audits: int = 0
    num_differences: int = 0
    num_quarantined_pages: int = 0

    def rest(self, now_ns: int) -> None:
        """Nothing runs any more."""
        self.due_ns = now_ns + self.pause_ns if self.pause_ns else 0

    def run_if_due(self, now_ns: int, *, is_idle: bool) -> None:
        """Audit and repair, if the time has come and nothing runs."""
        if not 0 < self.due_ns <= now_ns:
            return
        self.due_ns = 0
        if not is_idle:
            return
        repair = self.cache.repair()
        self.num_audits += 1
        self.num_differences += len(repair.differences)
        self.num_quarantined_pages += repair.num_pages
        if repair.differences:
            told = "; ".join(repair.differences[:_TOLD])
            _log.error("the cache's books were wrong, %d pages dropped: %s", repair.num_pages, told)
