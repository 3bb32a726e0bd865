"""Our traces as a real backend shows them: arize-phoenix, from an environment of its own.

`python -m venv phx && phx/bin/pip install arize-phoenix`, then put `phx/bin` on PATH.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import free_port, serve
from tests.e2e.tracing_client import TRACES, ask_everything

PHOENIX = shutil.which("phoenix")
START_S = 240.0
ARRIVE_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PHOENIX is None, reason="arize-phoenix is not installed: no phoenix on PATH"
    ),
]


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[httpx.Client]:
    """A running Phoenix with a fresh database."""
    assert PHOENIX is not None
    port = free_port()
    environment = {
        **os.environ,
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    environment.pop("PYTHONPATH", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PHOENIX, "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
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


def _until(done: Any, limit_s: float, reason: str) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, reason
        time.sleep(0.2)  # another process's progress can only be asked for


def spans_of(http: httpx.Client) -> list[dict[str, Any]]:
    answer = http.get("/v1/projects/headwater/spans", params={"limit": 1000})
    return list(answer.json()["data"]) if answer.status_code == 200 else []


def test_phoenix_shows_every_request_as_a_model_call(tmp_path: Path) -> None:
    with phoenix(tmp_path) as http:
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{http.base_url}/v1/traces",
            "OTEL_RESOURCE_ATTRIBUTES": "openinference.project.name=headwater",
        }
        with serve("--kv-memory", "256MiB", environment=environment) as server:
            ask_everything(server)

        def arrived() -> bool:
            traces = {span["context"]["trace_id"] for span in spans_of(http)}
            return traces >= set(TRACES.values())

        _until(arrived, ARRIVE_S, "not every trace arrived")
        spans = spans_of(http)
    calls = {s["context"]["trace_id"]: s for s in spans if s["span_kind"] == "LLM"}
    assert set(calls) == set(TRACES.values()), "a request is one model call"
    chat = calls[TRACES["chat"]]["attributes"]
    assert chat["llm.token_count.completion"] == 8
    assert chat["llm.token_count.prompt"] > 0
    assert "llm.token_count.prompt_details.cache_write" in chat
    assert calls[TRACES["refused"]]["status_code"] == "ERROR"
    phases = {s["name"] for s in spans if s["span_kind"] == "CHAIN"}
    assert phases >= {"queue", "prefix_match", "prefill", "decode", "stream"}
