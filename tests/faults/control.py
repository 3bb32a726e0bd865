"""Faults that a test asks for in another process: a file of the fault's name in a folder, taken
away when the fault happens."""

import os
from pathlib import Path
from typing import Literal, TypeAlias

FOLDER_VARIABLE = "TEST_FAULTS"
ALL_TASKS = "these were all tasks"
"""What ends the list of tasks that SIGUSR1 brings into the server's log."""

Fault: TypeAlias = Literal["raise", "nan", "hang", "tokenizer", "stall", "kill"]


def ask_for(folder: Path, fault: Fault) -> None:
    """Make it happen once, at the next occasion."""
    (folder / fault).touch()


def asked_for(folder: Path, fault: Fault) -> bool:
    """Whether it has not happened yet."""
    return (folder / fault).exists()


def take(fault: Fault) -> bool:
    """Whether the fault is to happen here and now."""
    try:
        os.unlink(os.path.join(os.environ[FOLDER_VARIABLE], fault))
    except FileNotFoundError:
        return False
    return True
