"""What watching costs: the same requests with every trace and metric exported, and with none.

python -m service.telemetry.bench [--rounds N] [--requests N] [--tokens N]

Two servers on the embedded model, one exporting traces (all sampled) and metrics to a collector of
this process and scraped as often, the other not, are asked in turns. CPU seconds
are of both processes of a server (utime + stime). What is counted without being exported is in
both; its cost is measured by itself, as is the engine's weighing of a step.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.types import FinishReason, Phase
from service.events import RequestRecord, Usage
from service.telemetry.request_log import RequestLog
from service.telemetry.request_metrics import RequestMetrics
from service.telemetry.samples import Counts

_TICKS = os.sysconf("SC_CLK_TCK")
EXPORT_S = 15
"""Prometheus's usual interval of scrapes, and here that of exports too."""


class _Collector(BaseHTTPRequestHandler):
    """Takes what OTLP sends."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


@dataclass(frozen=True, slots=True)
class _Server:
    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of the edge and its engine so far."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(map(_cpu_s, (self.pid, *map(int, children))))

    def ask(self, requests: int, tokens: int) -> None:
        """Requests one after another, each with a prompt of its own."""
        for number in range(requests):
            text = f"{time.monotonic_ns()}-{number}: tell me about rivers."
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
            request = urllib.request.Request(
                f"{self.url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                answer.read()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.contextmanager
def _serve(environment: dict[str, str]) -> Iterator[_Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "service", "serve", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--log-level", "warning"],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "ready" in line:
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        yield _Server(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait()


def _scrape(server: _Server, ended: threading.Event) -> None:
    while not ended.wait(EXPORT_S):
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            answer.read()


def compare(rounds: int, requests: int, tokens: int) -> list[tuple[float, float]]:
    """CPU seconds per request (watched, not watched) of each round, which take turns to begin."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    watched = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_METRIC_EXPORT_INTERVAL": str(EXPORT_S * 1000),
    }
    ended = threading.Event()
    with _serve(watched) as on, _serve({"OTEL_SDK_DISABLED": "true"}) as off:
        for server in (on, off):
            server.ask(2, tokens)
        scraping = threading.Thread(target=_scrape, args=(on, ended))
        scraping.start()

        def cost(server: _Server) -> float:
            before_s = server.cpu_s()
            server.ask(requests, tokens)
            return (server.cpu_s() - before_s) / requests

        pairs = []
        for number in range(rounds):
            first, second = (on, off) if number % 2 else (off, on)
            costs = {first: cost(first), second: cost(second)}
            pairs.append((costs[on], costs[off]))
        ended.set()
        scraping.join()
    collector.shutdown()
    return pairs


def counting_s(tokens: int) -> float:
    """Seconds to count a finished request and make its line."""
    now = time.monotonic_ns()
    record = RequestRecord(operation="chat", model="m", start_ns=now - 10**9)
    record.usage = Usage(500, 400, tokens)
    record.finish_reason = FinishReason.STOP
    record.token_ns.extend(now + index * 10**6 for index in range(tokens))
    names = ("receive", "queue", "prefix_match", "prefill", "decode")
    record.phases = [Phase(name, now, now + 10**6) for name in names]
    record.close(now + 10**9)
    sinks = (RequestMetrics(Counts(), "m", "127.0.0.1", 8000), RequestLog())

    def finish() -> None:
        for sink in sinks:
            sink.finish(record)

    return _median_s(finish, 2000)


def _median_s(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m service.telemetry.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=20, help="in a round, on each server")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    pairs = compare(options.rounds, options.requests, options.tokens)
    on, off = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    counted_s = counting_s(options.tokens)
    out = sys.stdout.write
    out(f"CPU per request of {options.tokens} tokens, both processes, medians of {len(pairs)}:\n")
    out(f"  watched {on * 1e3:.1f} ms, not watched {off * 1e3:.1f} ms, ")
    out(f"ratio of pairs {ratio:.3f} ({min(a / b for a, b in pairs):.3f} to ")
    out(f"{max(a / b for a, b in pairs):.3f})\n")
    out(f"counting a request: {counted_s * 1e6:.0f} us, {counted_s / off:.3%} of it\n")


if __name__ == "__main__":
    main()
