"""vllm-project/vllm#31503, #55634, #22545, #29928, #49135; sgl-project/sglang#38210, #5525: aborted
requests vanish from per-request metrics but count in totals, gauges stick when all requests are
cancelled, a milestone never reached gives latencies of the host's uptime, cached tokens are wrong
for n > 1. The whole sum is `tests/e2e/test_metrics.py`."""

import contextlib
import math
import socket
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from engine.scripted import Script, ScriptStep
from tests.service.calls import ask, body
from tests.service.conftest import LiveServer, run_server
from tests.service.raw import chat_request, connected, read_until

ENDLESS = Script((ScriptStep((97,), delay_s=0.002),), repeat=True)
SILENT = Script(finish=None)
NUM = 5


def scrape(server: LiveServer) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """Samples summed over labels, and buckets by bound."""
    sums: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    text = server.http.get("/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
            if "le" in sample.labels:
                buckets[sample.name][float(sample.labels["le"])] += sample.value
    return sums, buckets


def settled(server: LiveServer) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """A scrape once nothing runs and every cut request has been counted."""
    while True:
        sums, buckets = scrape(server)
        if not sums["vllm:num_requests_running"] and len(server.records) == NUM:
            return sums, buckets


def test_requests_cut_while_they_speak_count_everywhere_and_leave_no_gauge_behind() -> None:
    with run_server(ENDLESS) as server:
        with contextlib.ExitStack() as stack:
            socks: list[socket.socket] = []
            for _ in range(NUM):
                sock = stack.enter_context(connected(server))
                sock.sendall(chat_request(body(stream=True, max_tokens=3000)))
                socks.append(sock)
            for sock in socks:
                read_until(sock, b"data: ", 4)
            assert scrape(server)[0]["vllm:num_requests_running"] == NUM
        sums, _ = settled(server)
    assert sums["vllm:request_success_total"] == NUM
    assert sums["vllm:e2e_request_latency_seconds_count"] == NUM
    assert sums["vllm:request_prompt_tokens_sum"] == sums["vllm:prompt_tokens_total"] > 0
    assert sums["vllm:request_generation_tokens_sum"] == sums["vllm:generation_tokens_total"] > 0
    for gauge in (
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "headwater_unsent_bytes",
    ):
        assert sums[gauge] == 0


def test_a_token_that_never_came_gives_no_latency() -> None:
    with run_server(SILENT) as server:
        for number in range(NUM):
            with connected(server) as sock:
                sock.sendall(chat_request(body(stream=True)))
                while not scrape(server)[0]["vllm:num_requests_running"]:
                    pass
            server.ended(number + 1)  # the next to run is the next one
        sums, buckets = settled(server)
    assert sums["vllm:request_success_total"] == NUM
    for name in ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"):
        assert sums[f"{name}_count"] == 0
    for name, by_bound in buckets.items():
        if "_seconds_" in name:
            assert by_bound[min(b for b in by_bound if b >= 60)] == by_bound[math.inf], name


def test_choices_count_their_cached_tokens_each() -> None:
    script = Script((ScriptStep((97, 98)),), num_cached_tokens=5)
    with run_server(script) as server:
        usage = ask(server, n=4)["usage"]
        sums, _ = scrape(server)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    assert sums["vllm:prompt_tokens_total"] == 4 * usage["prompt_tokens"]
    assert sums["vllm:prefix_cache_hits_total"] == 4 * 5
    computed = 4 * (usage["prompt_tokens"] - 5)
    assert sums["vllm:request_prefill_kv_computed_tokens_sum"] == computed
    assert sums["vllm:request_generation_tokens_sum"] == usage["completion_tokens"] == 8
    assert sums["vllm:request_params_n_count"] == 1 and sums["vllm:request_params_n_sum"] == 4
