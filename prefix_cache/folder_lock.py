"""One cache per folder: two that write the same files would each delete what the other keeps."""

import errno
import fcntl
import os
import stat
import time
import weakref
from pathlib import Path
from typing import Final

_NAME: Final = "lock"
_WAIT_S: Final = 2.0
"""A process that was killed keeps its lock until the system has taken its memory back."""
_AGAIN_S: Final = 0.02


class FolderInUseError(Exception):
    """Another cache has the folder. `holder` is its process, 0 where that is not known."""

    def __init__(self, folder: Path, holder: int) -> None:
        super().__init__(f"{folder} is in use" + (f" by process {holder}" if holder else ""))
        self.folder = folder
        self.holder = holder


class FolderLock:
    """A folder that nobody else has, until `close` or the end of the process, however it ends."""

    def __init__(self, folder: Path, wait_s: float = _WAIT_S) -> None:
        """Makes the folder if need be, and a file in it. Waits at most so long for another holder
        to end. Raises FolderInUseError; OSError, with the path at fault, where there can be no such
        folder or lock."""
        _make(folder)
        descriptor = _open(folder / _NAME)
        self._close = weakref.finalize(self, os.close, descriptor)
        give_up_s = time.monotonic() + wait_s
        while not _take(descriptor):
            if time.monotonic() >= give_up_s:
                holder = os.pread(descriptor, 20, 0)
                raise FolderInUseError(folder, int(holder) if holder.isdigit() else 0)
            time.sleep(_AGAIN_S)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Let go of it; done once it is done."""
        self._close()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        what = "this link leads nowhere" if folder.is_symlink() else "this is no folder"
        raise NotADirectoryError(errno.ENOTDIR, what, str(folder)) from None


def _open(path: Path) -> int:
    """A file that is the folder's own: what a link leads to is not written."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "this is a symbolic link", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return descriptor


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
