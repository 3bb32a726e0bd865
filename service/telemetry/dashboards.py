"""A Grafana dashboard for Prometheus, made from the one list of metrics.

python -m service.telemetry.dashboards > headwater.json

Every query names metrics through `metric_list`, so a panel cannot ask for what is not told.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any, Final

from service.telemetry import metric_list as m
from service.telemetry.metric_list import Kind, Metric

UID: Final = "headwater"
_WIDTH: Final = 24
_HEIGHT: Final = 8
_QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: (query, legend) of each line, and Grafana's name of the unit."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: Metric, by: str = "") -> str:
    """A counter's growth per second, summed, or by a label."""
    assert metric.kind is Kind.COUNTER
    assert not by or by in metric.labels
    total = f"rate({metric.prometheus}_total[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def gauge(metric: Metric) -> str:
    """A gauge as it is."""
    assert metric.kind is Kind.GAUGE
    return metric.prometheus


def quantile(metric: Metric, share: float) -> str:
    """Of a histogram, over the rate's interval."""
    assert metric.kind is Kind.HISTOGRAM
    buckets = f"rate({metric.prometheus}_bucket[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({buckets}))"


def _quantiles(title: str, metric: Metric, unit: str = "s") -> Panel:
    lines = tuple((quantile(metric, share), f"p{share * 100:.0f}") for share in _QUANTILES)
    return Panel(title, unit, lines)


def _by(title: str, metric: Metric, label: str, unit: str) -> Panel:
    query = rate(metric, label) if metric.kind is Kind.COUNTER else gauge(metric)
    return Panel(title, unit, ((query, f"{{{{{label}}}}}"),))


PANELS: Final = (
    Panel(
        "Requests",
        "short",
        (
            (gauge(m.RUNNING), "running"),
            (gauge(m.WAITING), "waiting"),
            (gauge(m.PAUSED), "paused: a slow reader"),
        ),
    ),
    _by("Requests ended", m.FINISHED, "finished_reason", "reqps"),
    _by("Requests refused", m.REJECTED, "reason", "reqps"),
    _quantiles("Time to first token", m.VLLM_TTFT),
    _quantiles("Between tokens", m.VLLM_ITL),
    Panel(
        "The target between tokens",
        "s",
        ((gauge(m.ITL_TARGET), "target"), (gauge(m.ITL_ACHIEVED), "last steps, {{quantile}}")),
    ),
    Panel(
        "Least share of prompts",
        "short",
        ((rate(m.FLOOR_STEPS), "long steps/s on purpose"),),
    ),
    Panel("Step time model", "percentunit", ((gauge(m.STEP_ERROR), "difference from prediction"),)),
    _quantiles("Whole request", m.VLLM_E2E),
    _quantiles("Queue", m.VLLM_QUEUE),
    Panel("Age of the queue", "s", ((gauge(m.QUEUE_AGE), "the first that waits"),)),
    Panel("Prompts that wait", "short", ((gauge(m.QUEUE_TOKENS), "tokens"),)),
    Panel(
        "Tokens",
        "short",
        (
            (rate(m.PROMPT_TOKENS), "prompt/s"),
            (rate(m.CACHED_TOKENS), "of them cached/s"),
            (rate(m.GENERATION_TOKENS), "generated/s"),
            (rate(m.FORCED_TOKENS), "of them forced by a grammar/s"),
        ),
    ),
    Panel(
        "Speculation",
        "short",
        (
            (rate(m.DRAFT_TOKENS), "drafts/s"),
            (rate(m.ACCEPTED_TOKENS), "of them said/s"),
            (f"{rate(m.DRAFT_TOKENS)} / {rate(m.DRAFTS)}", "drafts a time"),
        ),
    ),
    Panel(
        "Prompt from the cache",
        "percentunit",
        ((f"{rate(m.CACHE_HITS)} / {rate(m.CACHE_QUERIES)}", "hits"),),
    ),
    _by("Pages", m.PAGES, "state", "short"),
    _by("Evictions", m.EVICTED, "reason", "short"),
    Panel(
        "Pages on disk",
        "short",
        (
            (gauge(m.DISK_PAGES), "kept"),
            (rate(m.RESTORED), "restored/s"),
            (rate(m.DAMAGED), "damaged/s"),
        ),
    ),
    Panel(
        "Leases",
        "short",
        (
            (gauge(m.LEASES), "leases"),
            (gauge(m.LEASED_PAGES), "pages"),
            (gauge(m.LEASING_TENANTS), "tenants"),
        ),
    ),
    Panel(
        "Audits of the idle cache",
        "short",
        ((rate(m.AUDIT_DIFFERENCES), "differences/s"), (rate(m.QUARANTINED), "pages dropped/s")),
    ),
    Panel("Preemptions", "short", ((rate(m.PREEMPTIONS), "preemptions/s"),)),
    _quantiles("Step", m.STEP),
    _quantiles("Prefill chunk", m.CHUNK, "short"),
    _by("Memory bandwidth used", m.MBU, "phase", "percentunit"),
    _by("Operations used", m.MFU, "phase", "percentunit"),
    _by("Steps without a kernel", m.HOST_SHARE, "phase", "percentunit"),
    Panel(
        "Bound by",
        "short",
        ((gauge(m.VERDICT), "{{phase}}: {{verdict}}"),),
    ),
    Panel(
        "Unsent",
        "bytes",
        ((gauge(m.UNSENT_BYTES), "bytes for clients"),),
    ),
    Panel(
        "Engine",
        "short",
        ((gauge(m.ENGINE_UP), "takes requests"), (rate(m.DROPPED), "traces lost/s")),
    ),
    _by("HTTP answers", m.HTTP_REQUESTS, "status", "reqps"),
)


def grafana() -> dict[str, Any]:
    """The dashboard, for Grafana's import."""
    columns = 3
    width = _WIDTH // columns
    panels = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {
                "x": index % columns * width,
                "y": index // columns * _HEIGHT,
                "w": width,
                "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
                for number, (query, legend) in enumerate(panel.queries)
            ],
        }
        for index, panel in enumerate(PANELS)
    ]
    return {
        "uid": UID,
        "title": "Headwater",
        "tags": ["headwater", "llm"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(grafana(), indent=1) + "\n")
