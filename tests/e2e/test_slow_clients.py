"""Many slow clients beside fast ones, and a huge prompt beside streams, on servers of their own."""

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import Server, serve
from tests.service.raw import unchunked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "served"
NAMED = ("--served-model-name", MODEL)
CHAT = "/v1/chat/completions"
NUM_SLOW, SLOW_TOKENS = 64, 4096
NUM_FAST, FAST_TOKENS = 8, 1000
ROUNDS = 4
TARGET_MS = 50
MIB = 1 << 20
END_OF_CHUNKS = b"\r\n0\r\n\r\n"


def script(folder: Path, **fields: Any) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps(fields))
    return str(path)


def body(num_tokens: int, text: str = "hi") -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }


def text_of(data: bytes) -> str:
    frames = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert frames.pop() == "[DONE]"
    choices = (choice for frame in frames for choice in json.loads(frame)["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def ask(server: Server, num_tokens: int) -> str:
    with httpx.Client(trust_env=False, timeout=120) as client:
        return text_of(client.post(server.url + CHAT, json=body(num_tokens)).content)


def fast_round_s(server: Server) -> float:
    """How long the fast ones take, all at once."""
    start_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_FAST) as pool:
        texts = list(pool.map(lambda _: ask(server, FAST_TOKENS), range(NUM_FAST)))
    assert len(set(texts)) == 1
    return time.perf_counter() - start_s


def p99_ms(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=100)[98] * 1e3


def resident_bytes(server: Server) -> int:
    """Of the serving process; the engine is another."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


@contextmanager
def slow_client(server: Server) -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    data = json.dumps(body(SLOW_TOKENS)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(120)
        sock.connect((address.hostname, address.port))
        sock.sendall(head.encode() + data)
        yield sock


def wait_until_paused(server: Server) -> int:
    """The output tokens, once none were added for two seconds of asking."""
    outputs, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 2.0:
        now = server.pool()["num_output_tokens"]
        if now != outputs:
            outputs, since_s = now, time.monotonic()
    return outputs


def test_slow_readers_cost_their_neighbours_nothing(tmp_path: Path) -> None:
    """64 clients that read 10 bytes per second beside 8 fast ones. Their kernels acknowledge so
    little so seldom that the default write timeout would take them for gone."""
    file = script(tmp_path, delay_s=0.004)
    with serve(*NAMED, "--script", file, "--write-timeout", "600") as server, ExitStack() as stack:
        whole = ask(server, SLOW_TOKENS)
        fast_round_s(server)
        lone_s = [fast_round_s(server) for _ in range(ROUNDS)]
        before = server.pool()["num_output_tokens"]
        slow = [stack.enter_context(slow_client(server)) for _ in range(NUM_SLOW)]
        got = [bytearray() for _ in slow]
        resumed = threading.Event()

        def dawdle() -> None:
            while not resumed.wait(1.0):
                for sock, data in zip(slow, got, strict=True):
                    data += sock.recv(10)

        dawdling = threading.Thread(target=dawdle)
        dawdling.start()
        paused = wait_until_paused(server) - before
        assert server.pool()["running"] == NUM_SLOW
        assert paused < NUM_SLOW * SLOW_TOKENS / 2, "they were not paused"
        held = resident_bytes(server)
        beside_s = [fast_round_s(server) for _ in range(ROUNDS)]
        grown = resident_bytes(server) - held
        assert server.pool()["running"] == NUM_SLOW
        assert min(beside_s) <= 1.05 * min(lone_s)
        assert grown < 8 * MIB
        resumed.set()
        dawdling.join()

        def finish(index: int) -> str:
            while END_OF_CHUNKS not in got[index][-8:]:
                piece = slow[index].recv(1 << 16)
                assert piece, "the connection ended early"
                got[index] += piece
            return text_of(unchunked(bytes(got[index])))

        with ThreadPoolExecutor(NUM_SLOW) as pool:
            assert set(pool.map(finish, range(NUM_SLOW))) == {whole}


@pytest.mark.parametrize("model", ["scripted", "real"])
def test_a_huge_prompt_stops_neither_health_nor_streams(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 MB beside 4 streams: the script's engine takes them, the real model's context does not.
    After vllm-project/vllm#24910, where such a body froze everything for 30 s."""
    arguments = ["--itl-target-ms", str(TARGET_MS)]
    if model == "scripted":
        fields = {"delay_s": 0.02, "max_context": 4_000_000, "num_pages": 300_000}
        arguments += ["--script", script(tmp_path, **fields)]
    huge = "the river remembers every stone it has passed and " * (8 * MIB // 50)
    with serve(*NAMED, *arguments) as server, ThreadPoolExecutor(8) as pool:
        over = threading.Event()
        gaps_s: list[float] = []

        def stream() -> None:
            while not over.is_set():  # whose model has ended its answer asks again
                with httpx.stream(
                    "POST", server.url + CHAT, json=body(4000), timeout=120, trust_env=False
                ) as answer:
                    last_s = 0.0
                    for _ in answer.iter_raw():
                        now_s = time.perf_counter()
                        if last_s:
                            gaps_s.append(now_s - last_s)
                        last_s = now_s
                        if over.is_set():
                            return

        def poll(until: threading.Event) -> list[float]:
            times_s = []
            with httpx.Client(base_url=server.url, trust_env=False) as client:
                while not until.wait(0.05):
                    start_s = time.perf_counter()
                    client.get("/health").raise_for_status()
                    times_s.append(time.perf_counter() - start_s)
            return times_s

        streams = [pool.submit(stream) for _ in range(4)]
        while len(gaps_s) < 40:
            pass
        alone = threading.Event()
        polled_alone = pool.submit(poll, alone)
        gaps_s.clear()
        alone.wait(3.0)
        alone.set()
        alone_ms = p99_ms(polled_alone.result()), p99_ms(gaps_s)
        gaps_s.clear()
        polled = pool.submit(poll, over)
        data = json.dumps(body(5, huge)).encode()
        until_s = time.monotonic() + 12.0
        while time.monotonic() < until_s:
            answer = httpx.post(server.url + CHAT, content=data, timeout=120, trust_env=False)
            assert answer.status_code == (200 if model == "scripted" else 400), answer.text[:300]
        over.set()
        times_s = polled.result()
        for each in streams:
            each.result()
    health_ms, gap_ms = p99_ms(times_s), p99_ms(gaps_s)
    with capsys.disabled():
        print(  # noqa: T201 (what the run is for)
            f"\n{model}: p99 of /health {health_ms:.0f} ms ({alone_ms[0]:.0f} before), of the "
            f"streams' gaps {gap_ms:.0f} ms ({alone_ms[1]:.0f} before), the longest "
            f"{max(gaps_s) * 1e3:.0f} ms; target {TARGET_MS} ms"
        )
    # A machine that is busy with other things is judged by what it did before.
    assert health_ms < max(100, 3 * alone_ms[0]), f"{len(times_s)} polls"
    assert gap_ms < max(2 * TARGET_MS, 3 * alone_ms[1])
