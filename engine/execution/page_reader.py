"""A thread that reads pages back from disk while the engine's own thread computes."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from prefix_cache.restore import Restore
from prefix_cache.tiers import DiskPage

_MOST_AHEAD: Final = 32
"""Pages read and not taken yet."""


class PageReader:
    """Reads what is submitted, in order, and keeps it until it is taken. A restore is read up to
    its first bad page. The thread begins with the first submission."""

    def __init__(self, read: Callable[[DiskPage], bytes | None]) -> None:
        """`read` gives a page, or None where it is not what was written; called on the thread."""
        self._read = read
        self._changed = threading.Condition()
        self._wanted: deque[Restore] = deque()
        self._found: deque[tuple[Restore, bytes | None]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, restore: Restore) -> None:
        """Read its pages."""
        with self._changed:
            self._wanted.append(restore)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="page-reader", daemon=True)
            self._thread.start()

    def take(self, most: int) -> list[tuple[Restore, bytes | None]]:
        """What was read since, in order; None for a bad page, after which nothing follows."""
        with self._changed:
            taken = [self._found.popleft() for _ in range(min(most, len(self._found)))]
            self._changed.notify_all()
        return taken

    def wait(self, timeout_s: float) -> bool:
        """Until there is something to take; whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._found), timeout_s)

    def close(self) -> None:
        """End the thread; what it has not read is not read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (restore := self._next()) is not None:
            for page in restore.pages:
                try:
                    data = self._read(page)
                except OSError:
                    data = None
                if not self._put(restore, data):
                    return
                if data is None:
                    break

    def _next(self) -> Restore | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._wanted))
            return None if self._closed else self._wanted.popleft()

    def _put(self, restore: Restore, data: bytes | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._found) < _MOST_AHEAD)
            self._found.append((restore, data))
            self._changed.notify_all()
            return not self._closed
