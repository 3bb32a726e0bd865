"""The end of a server whose orderly end does not come."""

import asyncio
import faulthandler
import math
import os
import sys
import threading
import time
from typing import Final

EXIT_STUCK: Final = 4
"""The exit code of a server that had to be ended so."""
TICK_S: Final = 0.25
_TELL_S: Final = 5.0
"""How long it may take to say what is waited for: who reads standard error may be stuck too."""


class LastResort:
    """Ends this process by force once a time is over, after it has told on standard error what
    every task of the running event loop and every thread waits for. An engine ends with its edge.

    Time is counted in its own ticks: whoever stops the process for a while and lets it go on does
    not take that while from it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._left_s = math.inf
        self._thread: threading.Thread | None = None

    def end_within(self, seconds: float) -> None:
        """From now on the process has at most so long; never longer than was said before."""
        with self._lock:
            self._left_s = min(self._left_s, seconds)
        if self._thread is None:
            self._thread = threading.Thread(target=self._count, name="last-resort", daemon=True)
            self._thread.start()

    def _count(self) -> None:
        while self._left_s > 0:
            time.sleep(TICK_S)
            with self._lock:
                self._left_s -= TICK_S
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(_TELL_S)
        os._exit(EXIT_STUCK)

    def _tell(self) -> None:
        sys.stderr.write(
            "headwater: the server was told to end, has not ended in its time, and is ended by "
            "force; please report this, with what it waits for:\n"
        )
        for task in asyncio.all_tasks(self._loop):
            task.print_stack(file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr)
