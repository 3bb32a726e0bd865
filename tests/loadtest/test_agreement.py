"""The figures against others' of the same server: its own counters, and another load tester."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loadtest.measure.result import Run
from loadtest.report.files import read_json
from loadtest.transports import NAMES
from tests.e2e.conftest import ROOT, Server, serve

CLOSED = """
description = "Equal requests"
[[parts]]
kind = "conversations"
name = "equal"
user_tokens = 40
output_tokens = {tokens}
arrival = {{ kind = "closed", concurrency = {streams}, sessions_each = {each} }}
"""


def script(path: Path, first_s: float, delay_s: float, num_tokens: int) -> str:
    """A script of single tokens: the first after `first_s`, the others `delay_s` apart."""
    steps = [{"token_ids": [104], "delay_s": delay_s if i else first_s} for i in range(num_tokens)]
    path.write_text(json.dumps({"scripts": [{"steps": steps, "num_cached_tokens": 16}]}))
    return str(path)


def load(folder: Path, url: str, workload: str, *arguments: str) -> Run:
    """The run of a load test of its own process."""
    (folder / "w.toml").write_text(workload)
    command = [sys.executable, "-m", "loadtest", "run", "--url", url, "--workload"]
    command += [str(folder / "w.toml"), "--json", str(folder / "r.json"), *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (run,) = read_json(folder / "r.json").runs
    return run


def metrics(server: Server) -> dict[str, float]:
    """Each sample of /metrics by its name, summed over its labels."""
    told: dict[str, float] = {}
    for line in server.http.get("/metrics").raise_for_status().text.splitlines():
        if not line.startswith("#"):
            labelled, _, value = line.rpartition(" ")
            name = labelled.partition("{")[0]
            told[name] = told.get(name, 0.0) + float(value)
    return told


@pytest.mark.parametrize("transport", NAMES)
def test_tokens_are_those_that_the_server_counts(transport: str, tmp_path: Path) -> None:
    workload = CLOSED.format(tokens=8, streams=2, each=2)
    with serve("--script", script(tmp_path / "s.json", 0.0, 0.0, 8)) as server:
        run = load(tmp_path, server.url, workload, "--transport", transport)
        counted = server.pool()
        told = metrics(server)
    warm_up = 1
    assert not run.errors and not run.findings
    assert counted["num_requests"] == run.figures["requests"] + warm_up
    assert counted["num_output_tokens"] == run.figures["output_tokens"] + 2 * warm_up
    assert counted["num_cached_tokens"] == run.figures["cached_tokens"] + 16 * warm_up
    assert counted["num_prompt_tokens"] > run.figures["prompt_tokens"] > 4 * 40
    assert told["vllm:generation_tokens_total"] == run.figures["output_tokens"] + 2 * warm_up
    assert told["vllm:prompt_tokens_cached_total"] == run.figures["cached_tokens"] + 16 * warm_up
    assert told["vllm:prompt_tokens_total"] == counted["num_prompt_tokens"]
    assert told["gen_ai_server_request_duration_seconds_count"] == counted["num_requests"]


@pytest.mark.slow
def test_latencies_are_those_that_the_server_measures(tmp_path: Path) -> None:
    """Means, which a Prometheus histogram has exactly: of first tokens and of the tokens after."""
    workload = CLOSED.format(tokens=50, streams=4, each=10)
    with serve("--script", script(tmp_path / "s.json", 0.2, 0.02, 50)) as server:
        ours = load(tmp_path, server.url, workload).figures
        told = metrics(server)

    def mean_ms(name: str) -> float:
        return 1e3 * told[f"{name}_sum"] / told[f"{name}_count"]

    for ttft in ("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
        assert told[f"{ttft}_count"] == ours["requests"] + 1
        assert ours["ttft_mean_ms"] == pytest.approx(mean_ms(ttft), rel=0.03)
    assert ours["itl_mean_ms"] == pytest.approx(
        mean_ms("vllm:inter_token_latency_seconds"), rel=0.03
    )
    tpot = "gen_ai_server_time_per_output_token_seconds"
    assert ours["tpot_mean_ms"] == pytest.approx(mean_ms(tpot), rel=0.03)


def byte_tokenizer(folder: Path) -> str:
    """A tokenizer folder that needs no network."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class":"PreTrainedTokenizerFast"}')
    return str(folder)


def aiperf(folder: Path, url: str, model: str) -> dict[str, Any]:
    """What aiperf measures of 40 requests, four at once, 50 tokens each."""
    command = ["aiperf", "profile", "-m", model, "--url", url, "--endpoint-type", "chat"]
    command += ["--streaming", "--concurrency", "4", "--request-count", "40", "--isl", "100"]
    command += ["--osl", "50", "--osl-stddev", "0", "--extra-inputs", "ignore_eos:true"]
    command += ["--tokenizer", byte_tokenizer(folder / "tokenizer"), "--use-server-token-count"]
    command += ["--ui", "none", "--artifact-dir", str(folder / "aiperf")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=180)
    exported = (folder / "aiperf" / "profile_export_aiperf.json").read_bytes()
    figures: dict[str, Any] = msgspec.json.decode(exported)
    return figures


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aiperf") is None, reason="aiperf is not on the PATH")
def test_aiperf_measures_the_same(tmp_path: Path) -> None:
    workload = CLOSED.format(tokens=50, streams=4, each=10)
    with serve("--script", script(tmp_path / "s.json", 0.2, 0.02, 50)) as server:
        model = server.http.get("/v1/models").json()["data"][0]["id"]
        theirs = aiperf(tmp_path, server.url, model)
        ours = load(tmp_path, server.url, workload).figures
    assert ours["ttft_p50_ms"] == pytest.approx(theirs["time_to_first_token"]["p50"], rel=0.03)
    assert ours["itl_p50_ms"] == pytest.approx(theirs["inter_chunk_latency"]["p50"], rel=0.03)
    assert ours["tpot_p50_ms"] == pytest.approx(theirs["inter_token_latency"]["p50"], rel=0.03)
    rate = theirs["output_token_throughput"]["avg"]
    assert ours["output_tok_per_s"] == pytest.approx(rate, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["chat-sse", "responses-ws"])
def test_the_client_is_no_bottleneck(transport: str, tmp_path: Path) -> None:
    """A core of the client reads more than 8,000 tokens a second, each an event of its own."""
    workload = CLOSED.format(tokens=600, streams=16, each=2)
    with serve("--script", script(tmp_path / "s.json", 0.0, 0.001, 600)) as server:
        run = load(tmp_path, server.url, workload, "--transport", transport)
    assert not run.errors
    assert run.figures["output_tokens"] == 32 * 600
    assert not run.client.overloaded
    assert run.figures["output_tokens"] / (run.client.cpu_share * run.wall_s) > 8000
