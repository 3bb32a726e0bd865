"""Our traces as a real backend shows them: arize-phoenix, from an environment of its own.

`python -m venv phx && phx/bin/pip install arize-phoenix`, then
`HEADWATER_PHOENIX=phx/bin/phoenix pytest tests/e2e/test_phoenix.py`. A picture of a trace as
Phoenix shows it goes to out/.
"""

import contextlib
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser import CHROMIUM, OUT, chromium
from tests.e2e.conftest import free_port, serve
from tests.e2e.tracing_client import PARENT, TRACES, ask_everything

PHOENIX = os.environ.get("HEADWATER_PHOENIX", "")
PROJECT = "headwater"
START_S = 240.0
ARRIVE_S = 60.0
STORED = timedelta(microseconds=1)
"""What a time may lose on its way into the database."""

Span = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PHOENIX, reason="HEADWATER_PHOENIX does not name Phoenix's executable"),
]


@dataclass(frozen=True, slots=True)
class Shown:
    """What Phoenix has of our traces, and where it shows them."""

    http: httpx.Client
    grpc_port: int
    project_id: str
    spans: list[Span]

    def root(self, name: str) -> Span:
        """The span of a request, which continues its caller's."""
        mine = [s for s in self.spans if s["context"]["trace_id"] == TRACES[name]]
        (root,) = [span for span in mine if span["parent_id"] == PARENT]
        return root

    def below(self, span: Span) -> list[Span]:
        """Its children, by their begin."""
        id = span["context"]["span_id"]
        children = [each for each in self.spans if each["parent_id"] == id]
        return sorted(children, key=lambda each: str(each["start_time"]))


@contextlib.contextmanager
def phoenix(folder: Path, grpc_port: int) -> Iterator[httpx.Client]:
    """A running Phoenix with a fresh database."""
    port = free_port()
    environment = {
        **os.environ,
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    environment.pop("PYTHONPATH", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PHOENIX, "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
            _until(lambda: _healthy(http), START_S, "Phoenix does not start")
            yield http
    finally:
        process.terminate()
        process.wait(60)


def _healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.HTTPError:
        return False


def _until(done: Callable[[], bool], limit_s: float, reason: str) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, reason
        time.sleep(0.2)  # another process's progress can only be asked for


def spans_of(http: httpx.Client) -> list[Span]:
    answer = http.get(f"/v1/projects/{PROJECT}/spans", params={"limit": 1000})
    return list(answer.json()["data"]) if answer.status_code == 200 else []


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """Everything that was asked, once it has arrived; Phoenix runs until the tests have ended."""
    grpc_port = free_port()
    with phoenix(tmp_path_factory.mktemp("phoenix"), grpc_port) as http:
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{http.base_url}/v1/traces",
            "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={PROJECT}",
        }
        with serve("--kv-memory", "256MiB", environment=environment) as server:
            ask_everything(server)

        def arrived() -> bool:
            roots = [s for s in spans_of(http) if s["parent_id"] == PARENT]
            return {span["context"]["trace_id"] for span in roots} == set(TRACES.values())

        _until(arrived, ARRIVE_S, "not every trace arrived")
        project = http.get(f"/v1/projects/{PROJECT}").raise_for_status().json()["data"]
        yield Shown(http, grpc_port, project["id"], spans_of(http))


def test_every_request_is_one_model_call(shown: Shown) -> None:
    calls: dict[str, list[Span]] = defaultdict(list)
    for span in shown.spans:
        if span["span_kind"] == "LLM":
            calls[span["context"]["trace_id"]].append(span)
    assert {trace: len(spans) for trace, spans in calls.items()} == dict.fromkeys(
        TRACES.values(), 1
    )


@pytest.mark.parametrize("name", [name for name in TRACES if name != "choices"])
def test_phases_cover_each_request(shown: Shown, name: str) -> None:
    root = shown.root(name)
    phases = [(_time(each, "start_time"), _time(each, "end_time")) for each in shown.below(root)]
    wall = _time(root, "end_time") - _time(root, "start_time")
    covered = sum((end - start for start, end in phases), timedelta())
    lost = STORED * len(phases)
    for (_, before), (after, _) in pairwise(phases):
        assert before <= after + STORED
    assert wall * 0.99 - lost <= covered <= wall + lost


@pytest.mark.parametrize("name", ["chat", "responses", "first", "fork", "messages"])
def test_a_served_request_shows_its_tokens_and_phases(shown: Shown, name: str) -> None:
    root = shown.root(name)
    assert 0 < root["attributes"]["llm.token_count.completion"] <= 8
    assert root["attributes"]["llm.token_count.prompt"] > 0
    assert "llm.token_count.prompt_details.cache_write" in root["attributes"]
    phases = [span["name"] for span in shown.below(root)]
    assert {"tokenize", "queue", "prefix_match", "prefill", "decode", "stream"} <= set(phases)


def test_choices_are_spans_of_their_own(shown: Shown) -> None:
    choices = shown.below(shown.root("choices"))
    assert {span["name"] for span in choices} == {"choice 0", "choice 1"}  # they begin together
    assert all("decode" in {s["name"] for s in shown.below(choice)} for choice in choices)


def test_who_was_cut_and_what_failed_is_told(shown: Shown) -> None:
    assert [event["name"] for event in shown.root("cut")["events"]] == [
        "first_token",
        "client_disconnected",
    ]
    for name in ("failed", "refused"):
        assert shown.root(name)["status_code"] == "ERROR"


def test_the_same_arrives_over_grpc(shown: Shown) -> None:
    pytest.importorskip("grpc", reason="the otlp-grpc extra is not installed")
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{shown.grpc_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={PROJECT}",
    }
    trace_id = "c" * 32
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    with serve("--kv-memory", "256MiB", environment=environment) as server:
        server.http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()

    def names() -> set[str]:
        spans = spans_of(shown.http)
        return {span["name"] for span in spans if span["context"]["trace_id"] == trace_id}

    _until(lambda: {"prefill", "decode", "stream"} <= names(), ARRIVE_S, "the trace is not there")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_phoenix_draws_a_trace(shown: Shown) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(f"{shown.http.base_url}/projects/{shown.project_id}/traces/{TRACES['fork']}")
        page.get_by_text("prefix_match").first.wait_for()
        page.wait_for_load_state("networkidle")
        page.screenshot(path=OUT / "phoenix-trace.png")


def _time(span: Span, name: str) -> datetime:
    return datetime.fromisoformat(span[name])
