"""Law 6: what `/metrics` tells adds up to what was asked, whoever cut their request short."""

import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Server, serve

CHAT = "/v1/chat/completions"
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting_by_reason",
    "headwater_queue_tokens",
    "headwater_queue_age_seconds",
    "headwater_requests_paused",
    "headwater_unsent_bytes",
)
SETTLED_S = 1.0


@dataclass(slots=True)
class Told:
    """A scrape: sums over all labels, and every histogram's buckets summed by bound."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_label: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, dict[float, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )


def scrape(server: Server) -> Told:
    told = Told()
    text = server.http.get("/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            told.sums[sample.name] += sample.value
            for value in sample.labels.values():
                told.by_label[sample.name, value] += sample.value
            if sample.name.endswith("_bucket"):
                told.buckets[sample.name][float(sample.labels["le"])] += sample.value
    return told


def settled(server: Server) -> Told:
    """The first scrape in which every gauge is back at 0, which must come within a second."""
    end_s = time.monotonic() + SETTLED_S
    while True:
        told = scrape(server)
        left = {name: told.sums[name] for name in GAUGES if told.sums[name]}
        if not left:
            return told
        assert time.monotonic() < end_s, f"still not 0 after {SETTLED_S} s: {left}"


def answered(server: Server, text: str, **fields: object) -> tuple[str, dict[str, int]]:
    """A finished request's text and usage."""
    body = {"model": "default", "messages": [{"role": "user", "content": text}], **fields}
    answer = server.http.post(CHAT, json=body).raise_for_status().json()
    usage: dict[str, int] = answer["usage"]
    usage["cached"] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage


def ask(server: Server, text: str, **fields: object) -> dict[str, int]:
    return answered(server, text, **fields)[1]


def half_predicted(server: Server) -> list[dict[str, int]]:
    """The usages of two equal requests, of which the second has drafts that come and some that
    do not: half of its answer is foretold, and what follows it is wrong.
    """
    text = "Tell me about the sea."
    answer, first = answered(server, text, max_tokens=30, temperature=0)
    foretold = answer[: len(answer) // 2] + " # 7 # 7 # 7 # 7 # 7 # 7"
    prediction = {"type": "content", "content": foretold}
    second = ask(server, text, max_tokens=30, temperature=0, prediction=prediction)
    return [first, second]


def cut(server: Server, text: str) -> None:
    """Leave a stream after its second piece."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    with server.http.stream("POST", CHAT, json=body) as stream:
        pieces = 0
        for line in stream.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                pieces += 1
            if pieces == 2:
                break


def refused(server: Server, index: int) -> None:
    bodies = (
        {"model": "default"},
        {"model": "default", "messages": [], "max_tokens": -1},
        {"model": "default", "messages": [{"role": "user", "content": "x"}], "top_p": 7},
        {"model": "no such model", "messages": [{"role": "user", "content": "x"}]},
        {
            "model": "default",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 10**6,
        },
    )
    assert 400 <= server.http.post(CHAT, json=bodies[index]).status_code < 500


def test_every_sum_agrees_and_every_gauge_returns_to_zero() -> None:
    with serve("--kv-memory", "256MiB") as server:
        start_s = time.monotonic()
        usages = [ask(server, f"Say hello number {i}.", max_tokens=8) for i in range(5)]
        usages += half_predicted(server)
        for i in range(5):
            cut(server, f"Tell me a long story, number {i}.")
            refused(server, i)
        many = ask(server, "Say one word.", max_tokens=6, n=4, temperature=1.0, seed=1)
        told = settled(server)
        wall_s = time.monotonic() - start_s
        pool = server.pool()
    sums = told.sums
    by_reason = {
        reason: told.by_label["vllm:request_success_total", reason]
        for reason in ("stop", "length", "abort", "error", "deadline")
    }
    assert by_reason["abort"] == 5
    assert by_reason["stop"] + by_reason["length"] == 7 + 4
    assert by_reason["error"] == by_reason["deadline"] == 0
    assert sums["vllm:admission_rejections_total"] == 5
    assert sums["vllm:request_params_n_count"] == 7 + 5 + 1
    assert sums["gen_ai_server_request_duration_seconds_count"] == 7 + 5 + 5 + 4
    assert sums["gen_ai_server_time_to_first_token_seconds_count"] == 7 + 4
    assert sums["vllm:e2e_request_latency_seconds_count"] == 16
    assert sums["vllm:request_prompt_tokens_count"] == 16

    prompt, output = sums["vllm:prompt_tokens_total"], sums["vllm:generation_tokens_total"]
    assert prompt == sums["vllm:request_prompt_tokens_sum"] == pool["num_prompt_tokens"]
    assert output == sums["vllm:request_generation_tokens_sum"] == pool["num_output_tokens"]
    cached = sums["vllm:prefix_cache_hits_total"]
    assert prompt - cached == sums["vllm:request_prefill_kv_computed_tokens_sum"]
    assert cached == sums["vllm:prompt_tokens_cached_total"] == pool["num_cached_tokens"]
    assert sums["vllm:prefix_cache_queries_total"] == prompt
    assert sums["vllm:prompt_tokens_by_source_total"] == prompt
    assert sums["gen_ai_client_token_usage_sum"] == prompt + output
    assert sums["headwater_prefill_chunk_sum"] <= sums["vllm:iteration_tokens_total_sum"]
    # Drafts that did not come were computed, but do not stay.
    drafted = sums["vllm:spec_decode_num_draft_tokens_total"]
    accepted = sums["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < drafted
    assert (
        sums["vllm:iteration_tokens_total_sum"] == pool["num_computed_tokens"] + drafted - accepted
    )

    finished_output = sum(usage["completion_tokens"] for usage in [*usages, many])
    assert output >= finished_output + 5 * 2
    # Three copies of the prompt of n=4 take all of it but the last token from the first.
    least_cached = sum(usage["cached"] for usage in [*usages, many])
    assert cached >= least_cached + 3 * (many["prompt_tokens"] - 1) - 3 * 16

    for name, buckets in told.buckets.items():
        if "_seconds_" not in name:
            continue
        above = min(bound for bound in buckets if bound >= wall_s)
        assert buckets[above] == buckets[math.inf], f"{name} has samples above the wall time"
        family = name.removesuffix("_bucket")
        assert buckets[math.inf] == sums[f"{family}_count"]
        assert 0 <= sums[f"{family}_sum"] <= wall_s * sums[f"{family}_count"]
