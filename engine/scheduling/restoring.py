"""Requests that wait for pages from disk, beside those that run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.execution.page_reader import PageReader
from engine.scheduling.request import Request
from prefix_cache.restore import Restore, Restores

_MOST_BYTES: Final = 8 << 20
"""Put into the device's memory between two steps: a millisecond or two."""
_PATIENCE_S: Final = 0.005
"""How long a step without work waits for pages; commands wait as long."""


@dataclass(slots=True)
class Restoring:
    """Reads on a thread of its own, writes to the device on the engine's, a few pages at a time.

    A request whose prefix is on disk, and cheaper to read than to compute, waits until that has
    ended, and is matched then as any; the others go on. Who needs the same pages waits for the
    same restore. Each request asks once until it runs: what is evicted again
    meanwhile is computed.
    """

    restores: Restores
    import_page: Callable[[int, bytes], None]
    page_bytes: int
    reader: PageReader
    _open: dict[Restore, int] = field(default_factory=dict)
    """How many of its pages are in the device's memory."""

    @property
    def pending(self) -> bool:
        """Whether any restore is under way."""
        return bool(self._open)

    def holds_back(self, request: Request, compute_ms: Callable[[int, int], float]) -> bool:
        """Whether the request waits for pages from disk; begins to read them."""
        if request.restore is None and not request.was_restored and not request.is_scoring:
            prompt = request.token_ids[:-1]
            restore = self.restores.begin(request.namespace, prompt, compute_ms)
            if restore is not None and restore not in self._open:
                self._open[restore] = 0
                self.reader.submit(restore)
            request.restore = restore
        if request.restore is None:
            return False
        if not request.restore.ended:
            return True
        told, request.restore.num_tokens = request.restore.num_tokens, 0
        request.num_disk_tokens += told
        request.num_restored_tokens += told
        request.restore, request.was_restored = None, True
        return False

    def collect(self) -> None:
        """Take over what was read, so much of it as a step has time for."""
        if not self._open:
            return
        start_s = time.perf_counter()
        pages = self.reader.take(max(1, _MOST_BYTES // self.page_bytes))
        for restore, data in pages:
            num_good = self._open[restore]
            if data is not None:
                self.import_page(restore.target(num_good), data)
                num_good += 1
                self._open[restore] = num_good
            if data is None or num_good == len(restore.pages):
                del self._open[restore]
                self.restores.end(restore, num_good, damaged=data is None)
        if pages:
            self.restores.tier.note_import((time.perf_counter() - start_s) * 1e3 / len(pages))

    def wait(self) -> None:
        """A step had nothing to compute: let it be one that waits for pages."""
        if self._open:
            self.reader.wait(_PATIENCE_S)

    def close(self) -> None:
        """Give up what is under way; the cache has it back, as far as it came."""
        self.reader.close()
        for restore, num_good in self._open.items():
            self.restores.end(restore, num_good)
        self._open.clear()
