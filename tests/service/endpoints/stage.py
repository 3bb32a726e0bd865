"""A live server whose engine says what a test wants next."""

from engine.scripted import Script
from engine.types import EngineRequest


class Stage:
    """The script of whatever is asked next, which can be set while the server runs, and the
    requests its engine got."""

    def __init__(self) -> None:
        self.script = Script()
        self.requests: list[EngineRequest] = []

    def __call__(self, request: EngineRequest) -> Script:
        self.requests.append(request)
        return self.script
