"""What OpenTelemetry's standard variables ask for. The SDK reads the others (endpoints, headers,
sampler, resource) by itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_PREFIX: Final = "OTEL_EXPORTER_OTLP"
_DEFAULT_INTERVAL_MS: Final = 60_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """`traces` and `metrics`: the protocol they are exported by, "http/protobuf" or "grpc"; ""
    for none. Metrics are exported every `interval_s`. `captures_content`: traces, if there
    are any, tell what was said: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true."""

    traces: str = ""
    metrics: str = ""
    captures_content: bool = False
    interval_s: float = _DEFAULT_INTERVAL_MS / 1000


def read_telemetry(environment: Mapping[str, str]) -> TelemetrySettings:
    """A signal is exported where a variable names an endpoint for it, or for all."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return TelemetrySettings()
    traces = _protocol(environment, "TRACES")
    asked = environment.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "")
    return TelemetrySettings(
        traces=traces,
        captures_content=bool(traces) and asked.strip().lower() == "true",
        metrics=_protocol(environment, "METRICS"),
        interval_s=_interval_ms(environment.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000,
    )


def _protocol(environment: Mapping[str, str], signal: str) -> str:
    if environment.get(f"OTEL_{signal}_EXPORTER", "otlp") != "otlp":
        return ""
    endpoints = (f"{_PREFIX}_ENDPOINT", f"{_PREFIX}_{signal}_ENDPOINT")
    if not any(environment.get(name) for name in endpoints):
        return ""
    asked = (f"{_PREFIX}_{signal}_PROTOCOL", f"{_PREFIX}_PROTOCOL")
    names = [value for name in asked if (value := environment.get(name))]
    return "grpc" if names[:1] == ["grpc"] else "http/protobuf"


def _interval_ms(text: str) -> float:
    try:
        interval = float(text)
    except ValueError:
        return _DEFAULT_INTERVAL_MS
    return interval if 0 < interval < math.inf else _DEFAULT_INTERVAL_MS
