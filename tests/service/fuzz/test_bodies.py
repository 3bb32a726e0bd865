"""Whatever a body is, the answer is never the server's fault, and nobody else notices."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from engine.scripted import text_script
from tests.service.calls import ask, content
from tests.service.conftest import LiveServer, run_server
from tests.service.fuzz.bodies import DIALECTS, Dialect

SAID = "ok, and whole"
REFUSALS = (400, 404, 408)


# The server's thread draws trace ids meanwhile, which hypothesis takes for the strategies' doing.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning",
    "ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning",
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script(SAID)) as running:
        yield running


def tried(server: LiveServer, dialect: Dialect, raw: bytes) -> None:
    for path in dialect.paths:
        answer = server.http.post(path, content=raw)
        if answer.status_code != 200:
            assert answer.status_code in REFUSALS, answer.text
            assert answer.json()["error"]["message"]


@contextlib.contextmanager
def neighbour(ask_again: Callable[[], str]) -> Iterator[list[str]]:
    """What somebody else gets, who asks again and again meanwhile."""
    answers: list[str] = []
    done = threading.Event()

    def live() -> None:
        while not done.is_set():
            answers.append(ask_again())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()


def fuzz(server: LiveServer, dialect: Dialect, num_bodies: int) -> None:
    """So many bodies, one after another."""

    @settings(
        max_examples=num_bodies,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(raw=dialect.bodies())
    def one(raw: bytes) -> None:
        tried(server, dialect, raw)

    one()


@pytest.mark.parametrize("name", DIALECTS)
def test_some_bodies(server: LiveServer, name: str) -> None:
    fuzz(server, DIALECTS[name], 250)
    ask(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIALECTS)
def test_five_thousand_bodies_beside_a_neighbour(server: LiveServer, name: str) -> None:
    with neighbour(lambda: content(ask(server))) as answers:
        fuzz(server, DIALECTS[name], 5000)
    assert len(answers) > 10
    assert set(answers) == {SAID}
    assert server.wait_for_idle()["running"] == 0
