"""Steps become spans of OpenTelemetry, and nothing of it is loaded before."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import grpc
import pytest

from jgraph.client.timeline import otel
from jgraph.client.timeline.otel import export, otlp_exporter
from jgraph.errors import ConfigError
from tests.support.flights import PS, WORKER, imagined_trace
from tests.support.free_port import free_port

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter",
    reason="needs jgraph[otel]",
    exc_type=ImportError,
)
trace_service_pb2_grpc = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc"
)
if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
else:
    trace_service_pb2 = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
    )
NODES = 7


def test_steps_their_parts_and_nodes_are_spans_with_links_for_messages() -> None:
    exporter = memory.InMemorySpanExporter()
    assert export(imagined_trace(), exporter, steps=2) == 2 * (1 + 2 + NODES)
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 2
    by_id = {span.context.span_id: span for span in spans}
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == ["train", "train"]
    for span in spans:
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert span.start_time >= parent.start_time - 200_000  # the clock's error
            assert span.end_time <= parent.end_time + 200_000
    received = [span for span in spans if span.name == f"recv from {PS}"]
    for span in received:
        (link,) = span.links
        assert by_id[link.context.span_id].name == f"send to {WORKER}"
    ids = {span.resource.attributes["service.instance.id"] for span in spans}
    assert ids == {PS, WORKER}


def test_a_collector_gets_them_by_http() -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class's name
            length = int(self.headers["Content-Length"])
            bodies.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert export(imagined_trace(), otlp_exporter(url), steps=1) == 3 + NODES
        thread.join()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    assert b"gradient" in body


def test_a_collector_gets_them_by_grpc_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        reason="needs jgraph[otel-grpc]",
        exc_type=ImportError,
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "tenant=yesterday")
    monkeypatch.setattr(otel, "_SPANS", 150)
    asked: list[trace_service_pb2.ExportTraceServiceRequest] = []
    tenants: list[object] = []

    class Collector:
        def Export(  # noqa: N802  # the name of the method in the protos
            self,
            request: trace_service_pb2.ExportTraceServiceRequest,
            context: grpc.ServicerContext,
        ) -> trace_service_pb2.ExportTraceServiceResponse:
            tenants.append(dict(context.invocation_metadata())["tenant"])
            asked.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        exporter = otlp_exporter(f"http://127.0.0.1:{port}")
        count = export(imagined_trace(), exporter, steps=60)
        exporter.shutdown()
    finally:
        server.stop(None).wait()
    assert count == 20 * (3 + NODES)
    assert tenants == ["yesterday", "yesterday"]  # no message is larger than allowed
    spans, services = [], set()
    for request in asked:
        for of_task in request.resource_spans:
            facts = {a.key: a.value.string_value for a in of_task.resource.attributes}
            services.add((facts["service.name"], facts["service.instance.id"]))
            spans += [span for part in of_task.scope_spans for span in part.spans]
    assert len(spans) == count
    assert services == {("jgraph", PS), ("jgraph", WORKER)}
    by_id = {span.span_id: span for span in spans}
    links = [(span, link) for span in spans for link in span.links]
    assert links
    for span, link in links:
        assert span.name.startswith("recv")
        assert by_id[link.span_id].name.startswith("send")


def test_another_protocol_is_refused_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match=r"by http/protobuf or grpc, not by 'http/j"):
        otlp_exporter("http://localhost:4318")


def test_grpc_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    missing = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install 'jgraph\[otel-grpc\]'"):
        otlp_exporter("http://localhost:4317")


def test_what_is_no_collector_is_said_so() -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318"):
        otlp_exporter("localhost:4318")


@pytest.mark.nightly
def test_a_collector_that_is_not_there_is_said_so() -> None:
    exporter = otlp_exporter(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="did not take 10 of 10 spans"):
        export(imagined_trace(), exporter, steps=1)


def test_who_does_not_export_loads_nothing_of_it() -> None:
    code = (
        "import sys, jgraph.server.server, jgraph.cli.trace\n"
        "import jgraph.client.timeline.otel\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
