"""OpenTelemetry export of a trace: steps, their parts on tasks, and nodes, as spans.

Spans are made of what tasks noted anyway, after the fact and in the process that asks:
a step never meets OpenTelemetry, so it costs nothing while nobody exports.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from jgraph import __version__
from jgraph.coordination.timeline.cluster_trace import ClusterTrace
from jgraph.coordination.timeline.node_times import NodeTime
from jgraph.coordination.timeline.step_parts import StepPart
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_STEPS: Final = 100
_SEND_S: Final = 10
_SPANS: Final = 512
"""Of a message, as OpenTelemetry's own processor has: gRPC takes 4 MB of one."""
_EXTRA: Final = "pip install 'jgraph[otel]'"
_GRPC_EXTRA: Final = "pip install 'jgraph[otel-grpc]'"
_PROTOCOL: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC: Final = "grpc"
_HTTP: Final = "http/protobuf"


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """Returns what sends spans to a collector by OTLP.

    The protocol is what OpenTelemetry's own variables say,
    ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` or else ``OTEL_EXPORTER_OTLP_PROTOCOL``:
    ``http/protobuf``, as where neither is set, or ``grpc``. The other variables of
    the exporters hold too, such as ``OTEL_EXPORTER_OTLP_HEADERS``.

    Args:
      endpoint: of the collector: ``http://localhost:4318``; by gRPC usually
        ``http://localhost:4317``, where ``https`` means TLS.

    Raises:
      ConfigError: that is none, there is no such protocol, or a package is missing.
    """
    protocol = next((p for p in map(os.environ.get, _PROTOCOL) if p), _HTTP)
    port = 4317 if protocol == _GRPC else 4318
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"'{endpoint}' is no collector of OpenTelemetry; write for example "
            f"http://localhost:{port}"
        )
    if protocol not in (_GRPC, _HTTP):
        raise ConfigError(
            f"OTLP is sent by {_HTTP} or {_GRPC}, not by '{protocol}'; type: "
            f"export {_PROTOCOL[1]}={_HTTP}"
        )
    if protocol == _GRPC:
        return _by_grpc(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ConfigError(f"OpenTelemetry needs its packages: {_EXTRA}") from error
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_S)


def _by_grpc(endpoint: str) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ConfigError(
            f"OTLP over gRPC needs its package: {_GRPC_EXTRA}; or send by HTTP: "
            f"export {_PROTOCOL[1]}={_HTTP}"
        ) from error
    exporter: SpanExporter = OTLPSpanExporter(endpoint, timeout=_SEND_S)
    return exporter


def export(trace: ClusterTrace, exporter: "SpanExporter", steps: int = _STEPS) -> int:
    """Sends the last steps of a trace; returns how many spans there were.

    A step is a span of its driver's task, and each part of it a child; the nodes of a
    part are children of that, and one that received a message has a link to the one
    that sent it. A task is a service instance.

    Args:
      trace: with the time of day at its time 0.
      exporter: of OpenTelemetry's SDK.
      steps: how many.

    Raises:
      ConfigError: a package is missing, or the exporter could not send.
    """
    try:
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise ConfigError(f"OpenTelemetry needs its packages: {_EXTRA}") from error
    parts = trace.last(steps)
    spans = _Spans(trace, exporter)
    of_step: dict[tuple[str, int], list[StepPart]] = {}
    for part in parts:
        of_step.setdefault((part.handle, part.step), []).append(part)
    for step in of_step.values():
        spans.step(step)
    for begin in range(0, len(spans.finished), _SPANS):
        some = spans.finished[begin : begin + _SPANS]
        if exporter.export(some) != SpanExportResult.SUCCESS:
            raise ConfigError(
                f"the collector did not take {len(spans.finished) - begin:,} of "
                f"{len(spans.finished):,} spans; is it there, and is the protocol that "
                f"of its port ({_HTTP}: 4318, {_GRPC}: 4317)? {_PROTOCOL[1]} says "
                "which is sent"
            )
    return len(spans.finished)


class _Spans:
    """Makes spans of parts of steps; they are over when they are made."""

    def __init__(self, trace: ClusterTrace, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._began_ns = round(1e9 * trace.began)
        self.finished: list[Any] = []
        self._tracers: Mapping[TaskName, Any] = {
            task: TracerProvider(
                resource=Resource(
                    {
                        "service.name": "jgraph",
                        "service.version": __version__,
                        "service.instance.id": str(task),
                        "jgraph.clock_error_s": error_s,
                    }
                ),
                shutdown_on_exit=False,
            ).get_tracer("jgraph", __version__)
            for task, error_s in trace.clock_error_s.items()
        }

    def step(self, parts: list[StepPart]) -> None:
        """Makes the spans of one step, all of whose parts these are."""
        from opentelemetry import trace as api

        driver = next((p for p in parts if p.task == p.driver), parts[0])
        ended_s = max(part.over_s for part in parts)
        facts = {"jgraph.program": driver.program, "jgraph.step": driver.step}
        root = self._begun(driver.task, driver.program, driver.asked_s, facts, None)
        sent: dict[str, Any] = {}
        rest: list[tuple[Any, float]] = []
        nodes: list[tuple[Any, NodeTime]] = []
        for part in parts:
            waits = {"jgraph.waited_for_turn_s": max(0.0, part.began_s - part.asked_s)}
            name = f"{part.program} on {part.task}"
            own = self._begun(part.task, name, part.asked_s, waits, root)
            rest.append((own, part.over_s))
            nodes += [(own, node) for node in part.nodes]
        # Who sent comes first: a link begins at a span that is there.
        for own, node in sorted(nodes, key=lambda one: one[1].kind == "recv"):
            label = f"{node.kind} {node.label}".rstrip()
            facts = {"jgraph.node": node.node, "jgraph.bytes": node.nbytes}
            links = []
            if node.kind == "recv" and node.key in sent:
                links = [api.Link(sent[node.key].get_span_context())]
            span = self._begun(node.task, label, node.ready_s, facts, own, links)
            if node.kind == "send":
                sent[node.key] = span
            self._end(span, node.end_s)
        for span, over_s in [*rest, (root, ended_s)]:
            self._end(span, over_s)

    def _begun(
        self,
        task: TaskName,
        name: str,
        at_s: float,
        facts: Mapping[str, Any],
        parent: Any,
        links: list[Any] | None = None,
    ) -> Any:
        from opentelemetry import trace as api

        context = None if parent is None else api.set_span_in_context(parent)
        return self._tracers[task].start_span(
            name,
            context=context,
            attributes=dict(facts),
            links=links or [],
            start_time=self._ns(at_s),
        )

    def _end(self, span: Any, at_s: float) -> None:
        span.end(end_time=self._ns(at_s))
        self.finished.append(span)

    def _ns(self, at_s: float) -> int:
        return self._began_ns + round(1e9 * at_s)
