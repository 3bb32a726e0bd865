"""The Grafana dashboard asks only for what `/metrics` tells."""

import json
import re
import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

from engine.scripted import text_script
from service.telemetry import metric_list as m
from service.telemetry.dashboards import PANELS, grafana
from service.telemetry.metric_list import METRICS, Kind
from tests.service.calls import CHAT, ask, body
from tests.service.conftest import run_server

FUNCTIONS = {"sum", "by", "rate", "histogram_quantile", "le"}


NOT_DRAWN = {
    m.TTFT_TARGET,  # 0 where nothing is promised; what is reached is drawn
    m.STEPS,  # what MBU, MFU and the host's share are made of
    m.STEP_WALL,
    m.STEP_KERNEL,
    m.STEP_FLOPS,
    m.STEP_MEMORY,
    m.INTENSITY,
    m.PEAK_BANDWIDTH,
    m.PEAK_FLOPS,
}


def sample_names() -> set[str]:
    names: set[str] = set()
    for metric in METRICS:
        if metric.kind is Kind.COUNTER:
            names.add(f"{metric.prometheus}_total")
        elif metric.kind is Kind.HISTOGRAM:
            names |= {f"{metric.prometheus}{end}" for end in ("_bucket", "_sum", "_count")}
        else:
            names.add(metric.prometheus)
    return names


def asked(expression: str) -> set[str]:
    """Names of samples in a query: what is neither a function, a label list nor an interval."""
    bare = re.sub(r"\[[^]]*\]|by \([^)]*\)", "", expression)
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - FUNCTIONS


def test_no_panel_stands_twice() -> None:
    titles = [panel.title for panel in PANELS]
    assert sorted(titles) == sorted(set(titles))


def test_every_query_names_samples_of_the_list() -> None:
    known = sample_names()
    for panel in PANELS:
        for expression, _ in panel.queries:
            names = asked(expression)
            assert names and names <= known, panel.title


def test_every_metric_of_our_own_is_drawn() -> None:
    drawn = {name for panel in PANELS for query, _ in panel.queries for name in asked(query)}
    for metric in METRICS:
        if metric.name.startswith("headwater.") and metric not in NOT_DRAWN:
            ends = ("", "_total", "_bucket")
            assert any(f"{metric.prometheus}{end}" in drawn for end in ends), metric.name


def test_what_a_served_request_leaves_is_found_by_the_dashboard() -> None:
    with run_server(text_script("abc")) as server:
        ask(server)
        server.http.post(CHAT, json={**body(), "top_p": 7})
        text = server.http.get("/metrics").text
    told = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    wanted = {
        "vllm:num_requests_running",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:admission_rejections_total",
        "headwater_pages",
        "headwater_step_duration_seconds_bucket",
    }
    queries = " ".join(query for panel in PANELS for query, _ in panel.queries)
    assert wanted <= told and wanted <= asked(queries)


def test_panels_do_not_overlap_and_have_an_id_each() -> None:
    panels = grafana()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"])
        for panel in panels
        for dx in range(panel["gridPos"]["w"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_command_writes_json() -> None:
    command = [sys.executable, "-m", "service.telemetry.dashboards"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == grafana()
