"""A folder belongs to one cache at a time, and to nobody when its holder is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prefix_cache.folder_lock import FolderInUseError, FolderLock

HOLD = """
import sys
from pathlib import Path
from prefix_cache.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_is_told_who_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    lock = FolderLock(folder)
    with pytest.raises(FolderInUseError) as told:
        FolderLock(folder, wait_s=0.05)
    assert (told.value.folder, told.value.holder) == (folder, os.getpid())
    lock.close()
    lock.close()
    FolderLock(folder, wait_s=0.0).close()


def test_another_folder_is_free(tmp_path: Path) -> None:
    locks = [FolderLock(tmp_path / name, wait_s=0.0) for name in ("a", "b")]
    for lock in locks:
        lock.close()


def test_a_killed_holder_has_it_no_longer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(FolderInUseError) as told:
            FolderLock(tmp_path, wait_s=0.0)
        assert told.value.holder == holder.pid
        holder.kill()
        FolderLock(tmp_path, wait_s=30.0).close()


def test_a_lock_that_is_a_link_is_told_and_what_it_leads_to_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not a lock")
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "lock").symlink_to(precious)
    with pytest.raises(OSError, match=r"symbolic link.*cache/lock"):
        FolderLock(folder)
    assert precious.read_text() == "not a lock"


def test_a_link_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    with pytest.raises(FolderInUseError):
        FolderLock(tmp_path / "link", wait_s=0.0)
    lock.close()


def test_a_place_that_can_be_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FolderLock(tmp_path / "file" / "cache")
