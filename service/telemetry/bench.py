"""What watching costs: the same requests with every trace and metric exported, and with none.

python -m service.telemetry.bench [--seconds N] [--tokens N]

Two servers, one exporting traces (all sampled) and metrics to a collector of this process and
scraped as often, the other not, are asked the same in turns: pairs of requests, the order of each
pair the other way round. What counts is CPU time, to the nanosecond, of both processes of a server
all the pair long, so that what is exported meanwhile counts too. First with the embedded model:
the share that watching adds. Then with scripted tokens in the model's place, where the same work
around it can be told to some microseconds: what watching adds to a request, as a share of the
model's request. What is counted without being exported is in both; its cost is measured by itself
here, as is the engine's weighing of a step in `engine.meter_bench`.
"""

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.types import FinishReason, Phase
from service.events import RequestRecord, Usage
from service.telemetry.request_log import RequestLog
from service.telemetry.request_metrics import RequestMetrics
from service.telemetry.samples import Counts

_READY = re.compile(r"http://127\.0\.0\.1:\d+")
EXPORT_S = 15
"""Prometheus's usual interval of scrapes, and here that of exports too."""
MOST = 0.02
"""What watching may add to a request's CPU time."""
MOST_OF_ENGINE = 0.005
"""The same, of the engine's process, where the step loop runs."""


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
class _Spent:
    """CPU seconds of a server's processes."""

    edge_s: float
    engine_s: float

    def __sub__(self, other: "_Spent") -> "_Spent":
        return _Spent(self.edge_s - other.edge_s, self.engine_s - other.engine_s)

    @property
    def total_s(self) -> float:
        return self.edge_s + self.engine_s


@dataclass(frozen=True, slots=True)
class _Server:
    url: str
    process: "subprocess.Popen[str]"

    def spent(self) -> _Spent:
        """So far; the engine is the first child, and one that waits to take its place does
        nothing."""
        pid = self.process.pid
        engine, *_ = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return _Spent(_cpu_s(pid), _cpu_s(int(engine)))

    def ask(self, text: str, tokens: int) -> None:
        """A streamed answer, read to its end."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()

    def scrape(self, ended: threading.Event) -> None:
        """As Prometheus does, until `ended`."""
        while not ended.wait(EXPORT_S):
            with urllib.request.urlopen(f"{self.url}/metrics") as answer:
                answer.read()


def _cpu_s(pid: int) -> float:
    """Of a process, in all threads: clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def _start(environment: dict[str, str], *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A process that becomes a server; `_server_of` waits until it is one."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        [*command, "--log-level", "warning"],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _server_of(process: "subprocess.Popen[str]") -> _Server:
    """Exits where it cannot start."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if found := _READY.search(line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return _Server(found[0], process)
    sys.exit("".join(said))


def compare(seconds: float, tokens: int, *arguments: str) -> list[tuple[_Spent, _Spent]]:
    """What each pair of requests cost, (watched, not watched), of servers started with the
    arguments."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    watched = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_METRIC_EXPORT_INTERVAL": str(EXPORT_S * 1000),
    }
    unwatched = {"OTEL_SDK_DISABLED": "true"}
    ended = threading.Event()
    pairs: list[tuple[_Spent, _Spent]] = []
    with _start(watched, *arguments) as one, _start(unwatched, *arguments) as other:
        on, off = _server_of(one), _server_of(other)
        for server in (on, off):
            server.ask("Hello.", tokens)
        scraping = threading.Thread(target=on.scrape, args=(ended,))
        scraping.start()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            text = f"{len(pairs)}: tell me about rivers."
            before = on.spent(), off.spent()
            for server in (on, off) if len(pairs) % 2 else (off, on):
                server.ask(text, tokens)
            pairs.append((on.spent() - before[0], off.spent() - before[1]))
        ended.set()
        scraping.join()
    collector.shutdown()
    return pairs


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds that watching adds to a request, with the half width of its 95 % interval, beside
    what one costs that is not watched."""

    mean_s: float
    error_s: float
    base_s: float

    @staticmethod
    def of(pairs: Sequence[tuple[float, float]]) -> "Added":
        """Of pairs (watched, not watched)."""
        added = [on - off for on, off in pairs]
        error_s = 1.96 * statistics.stdev(added) / math.sqrt(len(added))
        return Added(statistics.fmean(added), error_s, statistics.fmean(off for _, off in pairs))

    def beside(self, base_s: float) -> "Added":
        """The same addition to something else."""
        return Added(self.mean_s, self.error_s, base_s)

    @property
    def most(self) -> float:
        """The interval's upper end, as a share."""
        return (self.mean_s + self.error_s) / self.base_s

    def __str__(self) -> str:
        """As a share."""
        return f"{self.mean_s / self.base_s:+.2%} (± {self.error_s / self.base_s:.2%})"


def _added(pairs: Sequence[tuple[_Spent, _Spent]]) -> tuple[Added, Added]:
    """To both processes together, and to the engine's."""
    return (
        Added.of([(on.total_s, off.total_s) for on, off in pairs]),
        Added.of([(on.engine_s, off.engine_s) for on, off in pairs]),
    )


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


def main() -> int:
    """1 where more is added than may be."""
    parser = argparse.ArgumentParser(prog="python -m service.telemetry.bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=12, help="of asking, each time")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    seconds, tokens = options.seconds, options.tokens
    out = sys.stdout.write

    real = compare(seconds, tokens)
    both, engine = _added(real)
    out(f"CPU per request of {tokens} tokens, {len(real)} pairs, {both.base_s * 1e3:.1f} ms\n")
    out(f"  watching adds {both} to both processes, {engine} to the engine's\n")

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.json")
        script.write_text(json.dumps({"delay_s": 0.0}))
        scripted = compare(seconds, tokens, "--script", str(script))
    exact, exact_engine = _added(scripted)
    share, share_engine = exact.beside(both.base_s), exact_engine.beside(engine.base_s)
    out(f"with scripted tokens in the model's place, {len(scripted)} pairs\n")
    out(f"  {exact.mean_s * 1e6:.0f} us (± {exact.error_s * 1e6:.0f}) are added to a request, ")
    out(f"{share} of the model's\n  {exact_engine.mean_s * 1e6:.0f} us ")
    out(f"(± {exact_engine.error_s * 1e6:.0f}) of it to the engine's process, {share_engine}\n")
    counted_s = counting_s(tokens)
    out(f"counting a request, watched or not: {counted_s * 1e6:.0f} us, ")
    out(f"{counted_s / both.base_s:.3%} of it\n")
    good = share.most <= MOST and share_engine.most <= MOST_OF_ENGINE
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
