"""A real browser for tests, and where its pictures go."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, sync_playwright

CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-headless-shell"))), None
)
OUT: Final = Path(__file__).parent.parent / "out"
"""Not kept by git; a CI keeps what lies there, for people to look at."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Headless, until the block ends."""
    OUT.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
