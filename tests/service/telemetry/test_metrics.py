"""What `/metrics` tells, in both of Prometheus's formats, and how it counts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from engine.scripted import Script, ScriptStep, text_script
from service.telemetry import metric_list as m
from service.telemetry.samples import Buckets, Counts
from tests.service.calls import CHAT, ask, body
from tests.service.conftest import LiveServer, quick, run_server
from tests.service.raw import chat_request, connected


def numbers(server: LiveServer) -> dict[str, float]:
    """Every sample's value, summed over its labels."""
    told: dict[str, float] = {}
    text = server.http.get("/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            told[sample.name] = told.get(sample.name, 0) + sample.value
    return told


def test_every_family_is_one_of_the_list_and_has_its_labels() -> None:
    with run_server(text_script("abc")) as server:
        ask(server)
        text = server.http.get("/metrics").text
    known = {metric.prometheus: metric for metric in m.METRICS}
    families = list(text_string_to_metric_families(text))
    assert len(families) > 30
    for family in families:
        metric = known[family.name]
        assert family.type == metric.kind.value
        labels = {name.replace(".", "_") for name in metric.labels}
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels


def test_names_are_told_once() -> None:
    names = [metric.prometheus for metric in m.METRICS]
    assert len(set(names)) == len(names) == len({metric.name for metric in m.METRICS})


def test_openmetrics_is_told_to_who_prefers_it() -> None:
    with run_server(text_script("abc")) as server:
        ask(server)
        accept = {"accept": "application/openmetrics-text;version=1.0.0"}
        answer = server.http.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(answer.text)}  # type: ignore[no-untyped-call]
    assert "vllm:request_success" in names


def test_a_silent_request_is_a_gauge_while_it_runs_and_no_sample_of_what_it_never_reached() -> None:
    with run_server(Script(finish=None)) as server:
        with connected(server) as sock:
            sock.sendall(chat_request(body(stream=True)))
            while numbers(server)["vllm:num_requests_running"] != 1:
                pass
        while (told := numbers(server))["vllm:num_requests_running"]:
            pass
        server.ended()
        told = numbers(server)
    assert told["vllm:request_success_total"] == 1
    assert told["vllm:e2e_request_latency_seconds_count"] == 1
    assert "vllm:time_to_first_token_seconds_count" not in told
    assert "vllm:request_decode_time_seconds_count" not in told
    assert told["vllm:num_requests_waiting"] == told["vllm:kv_cache_usage_perc"] == 0


def test_what_a_slow_reader_does_not_take_is_counted_and_is_gone_with_it() -> None:
    endless = Script((ScriptStep((7,), text=b"abcdefgh" * 512),), repeat=True)
    with run_server(endless, settings=quick(send_buffer_bytes=4096)) as server:
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(chat_request(body(stream=True, max_tokens=4000)))
            while not numbers(server)["headwater_unsent_bytes"]:
                pass
        server.wait_for_idle()
        while numbers(server)["headwater_unsent_bytes"]:
            pass


def test_unknown_paths_and_methods_do_not_multiply() -> None:
    with run_server(text_script("abc")) as server:
        for index in range(5):
            server.http.get(f"/no/such/{index}")
            server.http.request(("PUT", "PATCH", "TRACE")[index % 3], CHAT)
        text = server.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("http_requests_total{")]
    assert sorted(line.partition("{")[2] for line in lines) == [
        'handler="/v1/chat/completions",method="other",status="4xx"} 5.0',
        'handler="none",method="GET",status="4xx"} 5.0',
    ]


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_refused_request_is_counted_by_its_error(name: str) -> None:
    with run_server(text_script("abc")) as server:
        fields = {key: value for key, value in body().items() if key != name}
        assert server.http.post(CHAT, json=fields).status_code == 400
        told = numbers(server)
        (record,) = server.ended()
    assert told["vllm:admission_rejections_total"] == 1
    assert "vllm:request_success_total" not in told
    assert record.error_type and record.start_ns < record.end_ns


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(0, 50))
def test_many_values_at_once_are_counted_as_one_by_one(values: list[float], cut: int) -> None:
    one, many = Counts(), Counts()
    for value in values:
        one.observe(m.VLLM_ITL, (), value)
    for part in (values[:cut], values[cut:]):
        many.observe_all(m.VLLM_ITL, (), np.array(part))
    if not values:
        return
    (left,) = one.samples()
    (right,) = many.samples()
    assert isinstance(left.value, Buckets) and isinstance(right.value, Buckets)
    assert left.value.counts == right.value.counts
    assert math.isclose(left.value.total, right.value.total, abs_tol=1e-9)
    for index, bound in enumerate(m.VLLM_ITL.bounds):
        at_most = sum(left.value.counts[: index + 1])
        assert at_most == sum(value <= bound for value in values)
