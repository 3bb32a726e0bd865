"""Faults injected into a real server of the real model, under load.

Whatever breaks: every request ends with one terminal event, the server answers again, and the
pages are all accounted for."""

import json
import random
import re
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import pytest

from tests.faults.control import Fault, ask_for, asked_for
from tests.faults.disk import damage, full, small_disk
from tests.faults.live import PATHS, FaultyServer, body_of, ends_of, serving, until

COMPLETIONS = "/v1/completions"
STATUSES = {200, 500, 503, 529}
INJECTED: Final[tuple[Fault | Literal["disk full", "disk corrupt"], ...]] = (
    "disk full",
    "raise",
    "nan",
    "disk corrupt",
    "tokenizer",
    "stall",
    "kill",
)
ARGUMENTS = ("--kv-memory", "256MiB", "--engine-restarts", "1000")
ON_DISK = ("--kv-memory", "32MiB", "--max-context", "1024", "--cache-disk", "128MiB")
DISK_SIZE = "192m"
"""More than the second tier may use: it is full only when a test fills it."""
NO_ROOM = "the second tier keeps only what fits"


class Load:
    """Clients that ask one thing after another, of all kinds, look at each end, and try again when
    they are told to."""

    def __init__(self, server: FaultyServer, num_clients: int) -> None:
        self._url = server.url
        self._stop = threading.Event()
        self.num_good = 0
        self.num_failed = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._client, args=(seed,)) for seed in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let all requests end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request never ended"

    def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            while not self._stop.is_set():
                path, stream = rng.choice(PATHS), rng.random() < 0.7
                text = f"{rng.randint(0, 20)} " + "and on it goes " * rng.choice((1, 10, 60))
                length = rng.randint(1, 30)
                body = body_of(path, stream=stream, text=text, max_tokens=length)
                answer = http.post(path, json=body)
                with self._lock:
                    self._look(path, stream, answer)
                if "retry-after-ms" in answer.headers:
                    self._stop.wait(int(answer.headers["retry-after-ms"]) / 1000)

    def _look(self, path: str, stream: bool, answer: httpx.Response) -> None:
        if answer.status_code not in STATUSES:
            self.faults.append(f"{path}: {answer.status_code} {answer.text}")
        elif answer.status_code != 200:
            self.num_failed += 1
            if not answer.json()["error"]["message"]:
                self.faults.append(f"{path}: {answer.text}")
        elif not stream:
            self.num_good += 1
        elif len(ends := ends_of(path, answer.text)) != 1:
            self.faults.append(f"{path}: ended with {ends}")
        elif "error" in json.dumps(ends[0]).replace('"error": null', ""):
            self.num_failed += 1
        else:
            self.num_good += 1


def seconds_to_answer(server: FaultyServer) -> float:
    """How long until a request succeeds."""
    body = body_of(COMPLETIONS, stream=False, max_tokens=1)
    return until(lambda: server.http.post(COMPLETIONS, json=body).status_code == 200)


def check_pages(server: FaultyServer) -> None:
    """Law 2, recounted, with nothing running."""
    until(lambda: (s := server.stats())["running"] + s["waiting"] == 0)
    audit = server.http.get("/test/audit")
    assert audit.status_code == 200, audit.text
    pool = audit.json()
    assert pool["referenced"] == 0
    assert pool["free"] + pool["cached"] + pool["pinned"] == pool["total"]


def complete(server: FaultyServer, prompt: str) -> httpx.Response:
    body = {"model": "default", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return server.http.post(COMPLETIONS, json=body)


def cached(answer: httpx.Response) -> int:
    usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_one_of_each(tmp_path: Path) -> None:
    # Computed in one step, which is the one that is spoilt.
    prompt = "Once upon a midnight dreary, while I pondered, weak and weary, "
    with serving(tmp_path, *ARGUMENTS) as server:
        good = complete(server, prompt + "0").raise_for_status().json()["choices"]
        server.http.post("/admin/cache/flush").raise_for_status()

        ask_for(tmp_path, "nan")
        spoilt = complete(server, prompt + "0")
        assert spoilt.status_code == 500
        assert "not finite" in spoilt.json()["error"]["message"]
        again = complete(server, prompt + "0")
        assert cached(again) == 0, "a page of the spoilt step was published"
        assert again.json()["choices"] == good
        assert cached(complete(server, prompt + "0")) > 0

        ask_for(tmp_path, "raise")
        raised = complete(server, "another")
        assert raised.status_code == 500
        assert "injected into the step" in raised.json()["error"]["message"]

        for path in PATHS:
            for stream in (False, True):
                ask_for(tmp_path, "tokenizer")
                broken = server.http.post(path, json=body_of(path, stream=stream, text="x" * 9))
                assert broken.status_code == 500
                assert ("type" in broken.json()) == (path == "/v1/messages")
                assert "its log has the cause" in broken.json()["error"]["message"]
        assert complete(server, prompt + "0").json()["choices"] == good
        check_pages(server)
        assert "injected into the tokenizer" in server.log
        # What was logged was wanted; what is left over is not.
        log = tmp_path / "log"
        log.write_text(log.read_text().replace("Traceback", "traceback"))


def test_neighbours_of_a_spoilt_request_go_on(tmp_path: Path) -> None:
    with serving(tmp_path, *ARGUMENTS) as server:
        answers: list[httpx.Response] = []

        def post(number: int) -> None:
            body = body_of(COMPLETIONS, stream=False, text=f"{number} is", max_tokens=200)
            answers.append(httpx.post(server.url + COMPLETIONS, json=body, timeout=60))

        threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        server.wait_running(4)
        ask_for(tmp_path, "nan")
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 500]
        check_pages(server)


def damaged(server: FaultyServer) -> int:
    return server.stats()["num_damaged_pages"]


def evict_by_others(server: FaultyServer, seed: str) -> None:
    """More prompts than the memory has pages for."""
    for number in range(6):
        complete(server, f"{seed} {number}: " + "somebody else's words " * 80).raise_for_status()


def test_a_full_disk_and_a_corrupt_one(tmp_path: Path) -> None:
    """Each is told of; no answer fails, and none is another one."""
    prompt = "Once upon a midnight dreary, while I pondered, " * 30
    with (
        small_disk(tmp_path / "disk", DISK_SIZE) as disk,
        serving(tmp_path, *ON_DISK, "--cache-dir", str(disk)) as server,
    ):
        good = complete(server, prompt).raise_for_status().json()["choices"]
        with full(disk):
            evict_by_others(server, "full")
            assert server.log.count(NO_ROOM) == 1
            assert complete(server, prompt).json()["choices"] == good
        server.http.post("/admin/cache/flush").raise_for_status()

        complete(server, prompt)
        evict_by_others(server, "whole")
        whole = complete(server, prompt)
        assert whole.json()["choices"] == good
        assert cached(whole) > 200, "it came back from disk"
        assert damaged(server) == 0

        evict_by_others(server, "corrupt")
        damage(disk)
        corrupt = complete(server, prompt)
        assert damaged(server) == 1
        assert cached(corrupt) < 32, "what was not written came back"
        assert corrupt.json()["choices"] == good
        check_pages(server)


def inject(server: FaultyServer, folder: Path, disk: Path, fault: str, held: ExitStack) -> None:
    """Let it happen and return at once when it has; what lasts, lasts as long as `held`."""
    if fault == "kill":
        server.signal_engine(signal.SIGKILL)
    elif fault == "disk full":
        told = server.log.count(NO_ROOM)
        held.enter_context(full(disk))
        until(lambda: server.log.count(NO_ROOM) > told)
    elif fault == "disk corrupt":
        before = damaged(server)

        def met() -> bool:
            damage(disk)
            return damaged(server) > before

        until(met)
    else:
        ask_for(folder, fault)  # type: ignore[arg-type]
        until(lambda: not asked_for(folder, fault))  # type: ignore[arg-type]


def run_faults(
    server: FaultyServer, folder: Path, disk: Path, times: int, num_clients: int
) -> list[str]:
    """Inject each kind `times` times under load; the recovery times of each kind, for people."""
    prompt = "Once upon a midnight dreary, while I pondered, " * 10
    good = complete(server, prompt).raise_for_status().json()["choices"]
    load = Load(server, num_clients)
    rng = random.Random(1)
    took: dict[str, list[float]] = {}
    try:
        for number in range(times):
            for fault in INJECTED:
                threading.Event().wait(rng.random() * 0.3)
                with ExitStack() as held:
                    inject(server, folder, disk, fault, held)
                    begin_s = time.monotonic()
                    seconds_to_answer(server)
                    took.setdefault(fault, []).append(time.monotonic() - begin_s)
                    if fault.startswith("disk"):
                        assert complete(server, prompt).json()["choices"] == good
            assert not load.faults, load.faults
            server.wait_restarts(number + 1)
    finally:
        load.end()
    assert not load.faults, load.faults
    assert load.num_good > times
    assert complete(server, prompt).json()["choices"] == good
    check_pages(server)
    # Two seconds; on a machine so busy that a start takes longer, not much longer than that.
    start_s = float(re.findall(r"ready on \S+ in ([0-9.]+) s", server.log)[0])
    for kind, times_s in took.items():
        assert sorted(times_s)[len(times_s) // 2] < max(2.0, 2 * start_s), (kind, start_s, times_s)
    lines = [
        f"{fault}: answered again after {sorted(each)[len(each) // 2]:.2f} s (median), "
        f"{max(each):.2f} s (longest of {len(each)})"
        for fault, each in took.items()
    ]
    lines.append(f"the server had started in {start_s:.1f} s")
    return [*lines, f"{load.num_good} requests succeeded, {load.num_failed} were told of a failure"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_twenty_times_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*ON_DISK, "--engine-restarts", "1000")
    with (
        small_disk(tmp_path / "disk", DISK_SIZE) as disk,
        serving(tmp_path, *arguments, "--cache-dir", str(disk)) as server,
    ):
        lines = run_faults(server, tmp_path, disk, 20, 4)
        log = tmp_path / "log"
        log.write_text(log.read_text().replace("Traceback", "traceback"))
    with capsys.disabled():
        print("\n" + "\n".join(lines))  # noqa: T201 (what the run is for)
