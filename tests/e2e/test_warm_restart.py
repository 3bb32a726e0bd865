"""What was cached is cached after a restart; whatever happens to the writer, never a wrong page."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ROOT, Server, free_port, serve
from tests.e2e.conversations import cached_tokens, chat, system_prompt, text_of

TOPICS = ("ferry", "comet", "bakery")
QUESTION = "What is the second rule?"


def ask_all(server: Server) -> list[tuple[str, int, int]]:
    """Text, cached and prompt tokens of the answer on each topic."""
    answers = [chat(server, system_prompt(topic, 14), QUESTION) for topic in TOPICS]
    return [(text_of(a), cached_tokens(a), a["usage"]["prompt_tokens"]) for a in answers]


def test_the_first_requests_after_a_restart_hit(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    with serve("--cache-dir", folder, "--kv-memory", "256MiB") as server:
        cold = ask_all(server)
        before = ask_all(server)
        lease = server.http.post("/v1/cache/leases", json={"prompt": "keep me " * 40, "ttl": "1h"})
        assert lease.status_code == 200, lease.text
    with serve("--cache-dir", folder, "--kv-memory", "256MiB") as server:
        after = ask_all(server)
        (kept,) = server.http.get("/v1/cache/leases").json()["data"]
        server.flush()
        assert server.pool()["pinned"] == kept["tokens"] // 16
    assert [text for text, _, _ in after] == [text for text, _, _ in cold]
    assert sum(cached for _, cached, _ in after) >= 0.9 * sum(cached for _, cached, _ in before)
    assert kept["id"] == lease.json()["id"]
    assert 3500 < kept["remaining_seconds"] < 3600


def test_a_foreign_or_broken_folder_is_told_and_the_start_is_cold(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with serve("--cache-dir", str(folder), "--kv-memory", "256MiB") as server:
        ask_all(server)
    with serve("--cache-dir", str(folder), "--kv-memory", "256MiB", "--exact") as server:
        assert server.pool()["cached"] == 0
        cold = ask_all(server)
    (pages,) = folder.glob("pages-*")
    pages.write_bytes(b"\0" * pages.stat().st_size)
    with serve("--cache-dir", str(folder), "--kv-memory", "256MiB", "--exact") as server:
        assert server.pool()["cached"] == 0
        assert ask_all(server) == cold


def test_what_is_on_disk_outlives_a_restart(tmp_path: Path) -> None:
    """Three prompts of which the memory holds two: what is on disk then comes back after it."""
    systems = [system_prompt(topic, 60) for topic in TOPICS]
    sizes = ("--kv-memory", "64MiB", "--cache-disk", "256MiB", "--cache-dir", str(tmp_path))
    told: list[list[dict[str, Any]]] = []
    for _ in range(2):
        with serve(*sizes) as server:
            num_on_disk = server.pool()["num_disk_pages"]
            told.append([chat(server, system, QUESTION, cache_report=True) for system in systems])
    assert num_on_disk > 0
    for before, after in zip(*told, strict=True):
        assert before["choices"] == after["choices"]
    reports = [answer["usage"]["cache"] for answer in told[1]]
    assert sum(report["disk_tokens"] for report in reports) > 300
    assert sum(report["cached_tokens"] for report in reports) > 3000


def test_a_start_that_fails_keeps_what_is_on_disk(tmp_path: Path) -> None:
    """A file of prompts that only a started engine can refuse: it has taken over the folder."""
    folder, prompts = tmp_path / "cache", tmp_path / "prompts.jsonl"
    sizes = ("--kv-memory", "64MiB", "--cache-disk", "256MiB", "--cache-dir", str(folder))
    with serve(*sizes) as server:
        for topic in TOPICS:
            chat(server, system_prompt(topic, 60), QUESTION)
        num_on_disk = server.pool()["num_disk_pages"]
    assert num_on_disk > 0
    prompts.write_text('{"prompt": "hello", "model": "no-such-model"}')
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "service",
            "serve",
            "--port",
            "0",
            "--prewarm",
            str(prompts),
            *sizes,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "line 1: " in ended.stderr and "no-such-model" in ended.stderr
    with serve(*sizes) as server:
        assert server.pool()["num_disk_pages"] == num_on_disk


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sizes", [("--kv-memory", "256MiB"), ("--kv-memory", "40MiB", "--cache-disk", "128MiB")]
)
def test_a_writer_killed_at_any_moment_leaves_no_wrong_page(
    tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    """20 times: end the server, and kill all of it while it writes; also with pages on disk."""
    folder = tmp_path / "cache"
    rng = random.Random(5)
    with serve("--cache-dir", str(folder), *sizes) as server:
        texts = [text for text, _, _ in ask_all(server)]
    num_restored = 0
    for _ in range(20):
        process, url = _start(folder, sizes)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            server = Server(url, http, process)
            num_restored += server.pool()["cached"] > 0
            assert [text for text, _, _ in ask_all(server)] == texts
            chat(server, system_prompt(f"new {rng.random()}", 20), "More?")
            process.send_signal(signal.SIGTERM)
        time.sleep(rng.random() * 0.25)  # the moment is what is tested, not waited for
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert num_restored >= 15, "a former snapshot survives its successor's end"


def _start(folder: Path, sizes: tuple[str, ...]) -> tuple["subprocess.Popen[str]", str]:
    """A server in a process group of its own."""
    port = free_port()
    command = [sys.executable, "-m", "service", "serve", "--port", str(port)]
    command += ["--cache-dir", str(folder), *sizes]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            ready = httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            ready = False
        # Another program may have got the port meanwhile; what it answers is not ours to judge.
        assert process.poll() is None, "the server ended at its start"
        if ready:
            return process, url
        time.sleep(0.05)
    pytest.fail("the server did not start")
