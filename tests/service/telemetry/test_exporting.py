"""Traces and metrics where no collector answers."""

import logging
import time

import pytest

from engine.scripted import ScriptedCore, in_order
from engine.transport import start_thread_engine
from service.config import Settings
from service.services import build_services
from service.telemetry import exporting
from service.telemetry.exporting import LAST_TRY_S
from service.telemetry.otlp_metrics import MetricsExport
from service.telemetry.tracing import RequestTracer
from tests.faults.live import free_port
from tests.service.conftest import INFO, byte_assets
from tests.service.telemetry.test_tracing import record


def test_an_absent_collector_is_told_once_and_delays_the_end_little(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    tracer = RequestTracer(exporting.span_exporter("http/protobuf"))
    with caplog.at_level(logging.WARNING):
        tracer.finish(record())
        begin_s = time.monotonic()
        tracer.close()
        took_s = time.monotonic() - begin_s
    ours = [each for each in caplog.records if each.name == "service.telemetry.exporting"]
    assert len(ours) == 1
    assert "does not answer" in ours[0].getMessage()
    assert took_s < LAST_TRY_S + 10  # of the 30 s that the exporter would try


def test_a_collector_known_to_be_away_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    exporter = exporting.span_exporter("http/protobuf")
    exporter.export([])
    exporter.export([])
    exporter.end_soon()
    assert len([each for each in caplog.records if "does not answer" in each.getMessage()]) == 1
    exporter.shutdown()


@pytest.mark.anyio
@pytest.mark.parametrize("known", [True, False])
async def test_metrics_without_a_collector_are_told_of_once_and_delay_the_end_little(
    known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2" if known else "30")
    engine = await start_thread_engine(lambda: ScriptedCore(in_order([]), info=INFO))
    try:
        metrics = build_services(Settings(), engine, byte_assets()).metrics
        export = MetricsExport(metrics, exporting.metric_exporter("http/protobuf"), 60)
        if known:
            await export.export()
            await export.export()
        begin_s = time.monotonic()
        await export.end()
        took_s = time.monotonic() - begin_s
        export.close()
    finally:
        await engine.close()
    assert len([each for each in caplog.records if "does not answer" in each.getMessage()]) == 1
    assert took_s < LAST_TRY_S + 10  # of the 30 s that the exporter would try
