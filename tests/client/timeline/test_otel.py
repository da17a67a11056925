"""Steps become spans of OpenTelemetry, and nothing of it is loaded before."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from jgraph.client.timeline.otel import export, otlp_exporter
from jgraph.errors import ConfigError
from tests.support.flights import PS, WORKER, imagined_trace
from tests.support.free_port import free_port

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter",
    reason="needs jgraph[otel]",
    exc_type=ImportError,
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


def test_what_is_no_collector_is_said_so() -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318"):
        otlp_exporter("localhost:4318")


@pytest.mark.nightly
def test_a_collector_that_is_not_there_is_said_so() -> None:
    exporter = otlp_exporter(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="did not take 10 spans"):
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
