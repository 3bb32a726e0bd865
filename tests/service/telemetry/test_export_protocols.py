"""Exporters by protocol: gRPC against a real receiver, and a sentence where it is missing."""

import time
from concurrent import futures
from typing import Any

import pytest

from service.events import RequestRecord
from service.telemetry import exporting
from service.telemetry.exporting import ExportError
from service.telemetry.tracing import RequestTracer

grpc = pytest.importorskip("grpc", reason="the otlp-grpc extra is not installed")


class Collector:
    """What a gRPC server received as serialised ExportTraceServiceRequests."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def handler(self) -> Any:
        method = grpc.unary_unary_rpc_method_handler(self._export)
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        return grpc.method_handlers_generic_handler(service, {"Export": method})

    def _export(self, request: bytes, context: object) -> bytes:
        self.requests.append(request)
        return b""


def test_spans_arrive_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((collector.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    try:
        tracer = RequestTracer(exporting.span_exporter("grpc"))
        now = time.monotonic_ns()
        record = RequestRecord(operation="chat", model="tiny", start_ns=now - 1000)
        record.close(now)
        tracer.finish(record)
        tracer.close()
    finally:
        server.stop(None).wait(10)
    (received,) = collector.requests
    decoded = ExportTraceServiceRequest.FromString(received)
    spans = decoded.resource_spans[0].scope_spans[0].spans
    assert sorted(span.name for span in spans) == ["chat tiny", "edge"]


@pytest.mark.parametrize("make", [exporting.span_exporter, exporting.metric_exporter])
def test_without_the_package_grpc_is_refused_in_a_sentence(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(exporting, "import_module", missing)
    with pytest.raises(ExportError, match=r"otlp-grpc"):
        make("grpc")
    assert make("http/protobuf") is not None
