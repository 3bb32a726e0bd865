"""The cache's pages beyond the engine's life: read when it starts, written when it has drained."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.execution.runner import ModelRunner
from prefix_cache import snapshot
from prefix_cache.cache import PrefixCache
from prefix_cache.folder_lock import FolderLock
from prefix_cache.snapshot import Identity
from prefix_cache.tiers import DiskTier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedCache:
    """A folder for one cache and the memory of its pages; whatever is wrong with it is logged, and
    the engine starts cold or ends all the same. `lock` is let go by `close`."""

    folder: Path
    identity: Identity
    cache: PrefixCache
    runner: ModelRunner[Any, Any]
    tier: DiskTier | None = None
    lock: FolderLock | None = None

    def load(self) -> None:
        """Take over what a former engine wrote."""
        start_s = time.monotonic()
        restored = snapshot.load(
            self.folder, self.identity, self.cache, self.runner.import_page, self.tier
        )
        if restored.num_pages or restored.num_disk_pages:
            _log.info(
                "restored %d pages (%d tokens), %d on disk, and %d leases from %s in %.1f s",
                restored.num_pages,
                restored.num_tokens,
                restored.num_disk_pages,
                restored.num_leases,
                self.folder,
                time.monotonic() - start_s,
            )
        if restored.refused:
            _log.warning("not restored from %s: %s", self.folder, restored.refused)

    def save(self) -> None:
        """Write what is cached; nothing runs."""
        start_s = time.monotonic()
        try:
            num_pages = snapshot.save(
                self.folder, self.identity, self.cache, self.runner.export_page, self.tier
            )
        except OSError as error:
            _log.warning("the cache was not saved in %s: %s", self.folder, error)
            return
        _log.info(
            "saved %d pages in %s in %.1f s", num_pages, self.folder, time.monotonic() - start_s
        )

    def close(self) -> None:
        """Let others have the folder."""
        if self.lock is not None:
            self.lock.close()
