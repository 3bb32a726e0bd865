"""What OpenTelemetry's standard variables ask for."""

import pytest

from service.telemetry.settings import read_telemetry


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("", "")),
        ({"ENDPOINT": "http://c"}, ("http/protobuf", "http/protobuf")),
        ({"TRACES_ENDPOINT": "http://c"}, ("http/protobuf", "")),
        ({"METRICS_ENDPOINT": "http://c"}, ("", "http/protobuf")),
        ({"ENDPOINT": ""}, ("", "")),
        ({"ENDPOINT": "http://c", "PROTOCOL": "grpc"}, ("grpc", "grpc")),
        (
            {"ENDPOINT": "http://c", "PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/protobuf"},
            ("http/protobuf", "grpc"),
        ),
    ],
)
def test_telemetry_goes_where_the_standard_variables_say(
    environment: dict[str, str], expected: tuple[str, str]
) -> None:
    given = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environment.items()}
    settings = read_telemetry(given)
    assert (settings.traces, settings.metrics) == expected
    off = read_telemetry({**given, "OTEL_SDK_DISABLED": "TRUE"})
    assert (off.traces, off.metrics) == ("", "")
    assert read_telemetry({**given, "OTEL_TRACES_EXPORTER": "none"}).traces == ""


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 60), ("5000", 5), ("nonsense", 60), ("-1", 60), ("inf", 60)]
)
def test_metrics_are_exported_at_the_standard_interval(text: str, seconds: float) -> None:
    assert read_telemetry({"OTEL_METRIC_EXPORT_INTERVAL": text}).interval_s == seconds
