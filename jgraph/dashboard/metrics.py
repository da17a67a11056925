"""Metrics of a cluster by the conventions of Prometheus: one table of names.

The collector reads a view, and asks no task: a scrape costs the cluster nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

View: TypeAlias = Mapping[str, Any]
Sample: TypeAlias = tuple[tuple[str, ...], float | None]


@final
@dataclass(frozen=True, slots=True)
class Metric:
    """One name.

    Attributes:
      name: with its unit; of a counter it ends in ``_total``.
      help: what it is.
      labels: names of them.
      samples: finds them in a view.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[View], Iterable[Sample]]

    @property
    def is_counter(self) -> bool:
        """Whether it only grows, but for restarts."""
        return self.name.endswith("_total")


def _of_tasks(key: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for task, facts in view["tasks"].items():
            if isinstance(facts.get(key), int | float):
                yield (task,), facts[key]

    return samples


def _of_runs(key: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for run, facts in view["runs"].items():
            if facts.get("state") == "running" and isinstance(
                facts.get(key), int | float
            ):
                yield (run,), facts[key]

    return samples


def _info(view: View) -> Iterator[Sample]:
    for task, facts in view["tasks"].items():
        names = ("platform", "jax", "jgraph", "incarnation")
        yield (task, *(str(facts.get(name) or "") for name in names)), 1.0


def _up(view: View) -> Iterator[Sample]:
    for task, facts in view["tasks"].items():
        yield (task,), float(not facts["missed"] and not view["silent"])


def _busy(view: View) -> Iterator[Sample]:
    for task, facts in view["tasks"].items():
        for kind, seconds in facts["busy_s"].items():
            yield (task, kind), seconds


def _bytes(sign: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for row in view["traffic"].values():
            for path, key in (
                ("stream", f"bytes_{sign}"),
                ("shared", f"shared_bytes_{sign}"),
            ):
                yield (row["from"], row["to"], path), row[key]

    return samples


def _frames(view: View) -> Iterator[Sample]:
    for row in view["traffic"].values():
        yield (row["from"], row["to"]), row["frames_sent"]


def _calls(key: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for row in view["calls"].values():
            yield (row["task"], row["method"]), row[key]

    return samples


def _gates(key: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for row in view["gates"].values():
            if isinstance(row[key], int | float):
                yield (row["task"], row["gate"]), row[key]

    return samples


def _run_metrics(view: View) -> Iterator[Sample]:
    for run, facts in view["runs"].items():
        if facts.get("state") == "running":
            for name, value in facts["metrics"].items():
                if value is not None:
                    yield (run, name), value


def _parts(view: View) -> Iterator[Sample]:
    for run, worker, facts in _workers(view):
        for part, seconds in facts["parts"].items():
            yield (run, worker, part), seconds


def _quantiles(view: View) -> Iterator[Sample]:
    for run, worker, facts in _workers(view):
        for share, milliseconds in facts["step_ms"].items():
            quantile = f"{int(share[1:]) / 100:g}"
            yield (run, worker, quantile), milliseconds / 1000


def _dropped(view: View) -> Iterator[Sample]:
    for run, worker, facts in _workers(view):
        yield (run, worker), facts["dropped"]


def _workers(view: View) -> Iterator[tuple[str, str, View]]:
    for run, facts in view["runs"].items():
        if facts.get("state") == "running":
            for worker, row in facts["workers"].items():
                yield run, worker, row


def _saves(key: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for task, row in view["saves"].items():
            yield (task,), row.get(key)

    return samples


def _tables(key: str) -> Callable[[View], Iterator[Sample]]:
    def samples(view: View) -> Iterator[Sample]:
        for task, tables in view["tables"].items():
            for table, row in tables.items():
                yield (task, table), row.get(key)

    return samples


def _alarms(view: View) -> Iterator[Sample]:
    for alarm in view["alarms"]:
        yield (alarm["id"], alarm["level"]), 1.0


_TASK: Final = ("task",)
_PEERS: Final = ("task", "peer", "path")
_CALL: Final = ("task", "method")
_GATE: Final = ("task", "gate")
_WORKER: Final = ("run", "worker")
_TABLE: Final = ("task", "table")

METRICS: Final = (
    Metric(
        "jgraph_task_info",
        "Versions of a task, and its process.",
        (*_TASK, "platform", "jax", "jgraph", "incarnation"),
        _info,
    ),
    Metric("jgraph_task_up", "1 if the task answers.", _TASK, _up),
    Metric(
        "jgraph_task_restarts_total",
        "Processes of a task after the first that was seen.",
        _TASK,
        _of_tasks("restarts"),
    ),
    Metric(
        "jgraph_task_cpu_seconds_total",
        "CPU time by kind of work; 'process' is all of it.",
        (*_TASK, "kind"),
        _busy,
    ),
    Metric(
        "jgraph_task_resident_memory_bytes",
        "Memory of the process.",
        _TASK,
        _of_tasks("rss_bytes"),
    ),
    Metric(
        "jgraph_task_variable_bytes",
        "Memory of the variables.",
        _TASK,
        _of_tasks("variable_bytes"),
    ),
    Metric(
        "jgraph_task_compilations_total",
        "Segments that were compiled.",
        _TASK,
        _of_tasks("compilations"),
    ),
    Metric(
        "jgraph_transport_sent_bytes_total",
        "Bytes sent to another task.",
        _PEERS,
        _bytes("sent"),
    ),
    Metric(
        "jgraph_transport_received_bytes_total",
        "Bytes received from another task.",
        _PEERS,
        _bytes("received"),
    ),
    Metric(
        "jgraph_transport_sent_frames_total",
        "Frames sent to another task.",
        ("task", "peer"),
        _frames,
    ),
    Metric("jgraph_calls_total", "Calls that are over.", _CALL, _calls("count")),
    Metric("jgraph_call_seconds_total", "Time of all calls.", _CALL, _calls("seconds")),
    Metric("jgraph_call_errors_total", "Calls that failed.", _CALL, _calls("errors")),
    Metric(
        "jgraph_gate_waiting_steps",
        "Steps that may not read yet.",
        _GATE,
        _gates("waiting"),
    ),
    Metric("jgraph_run_step", "Updates so far.", ("run",), _of_runs("step")),
    Metric(
        "jgraph_run_steps_per_second",
        "Updates per second.",
        ("run",),
        _of_runs("steps_per_s"),
    ),
    Metric(
        "jgraph_run_examples_per_second",
        "Examples per second.",
        ("run",),
        _of_runs("examples_per_s"),
    ),
    Metric(
        "jgraph_run_metric", "A metric's newest value.", ("run", "name"), _run_metrics
    ),
    Metric(
        "jgraph_run_worker_step_seconds",
        "Quantiles of a worker's newest steps.",
        (*_WORKER, "quantile"),
        _quantiles,
    ),
    Metric(
        "jgraph_run_part_seconds",
        "What a step's time went to, in the last report.",
        (*_WORKER, "part"),
        _parts,
    ),
    Metric(
        "jgraph_run_dropped_total",
        "Contributions that came too late.",
        _WORKER,
        _dropped,
    ),
    Metric(
        "jgraph_run_recoveries_total",
        "How often a run went back to a checkpoint.",
        ("run",),
        _of_runs("recoveries"),
    ),
    Metric(
        "jgraph_checkpoint_last_success_time_seconds",
        "When a task wrote its part of a checkpoint last.",
        _TASK,
        _saves("last"),
    ),
    Metric(
        "jgraph_checkpoint_duration_seconds",
        "How long that took.",
        _TASK,
        _saves("seconds"),
    ),
    Metric("jgraph_checkpoint_bytes", "How much that was.", _TASK, _saves("nbytes")),
    Metric(
        "jgraph_checkpoint_failures_total",
        "Parts of checkpoints that could not be written.",
        _TASK,
        _saves("failures"),
    ),
    Metric("jgraph_hash_table_rows", "Rows of a shard.", _TABLE, _tables("rows")),
    Metric("jgraph_hash_table_bytes", "Memory of a shard.", _TABLE, _tables("nbytes")),
    Metric(
        "jgraph_hash_table_budget_bytes",
        "What a shard may take.",
        _TABLE,
        _tables("capacity_bytes"),
    ),
    Metric(
        "jgraph_hash_table_evicted_total",
        "Rows that were given up.",
        _TABLE,
        _tables("evicted"),
    ),
    Metric("jgraph_alarm", "1 as long as it lasts.", ("id", "level"), _alarms),
)
"""All names, in the order of the page."""


@final
class _Collector:
    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        view = self._view()
        for metric in METRICS:
            family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            found = family(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.samples(view):
                if isinstance(value, int | float):
                    found.add_metric(labels, value)
            yield found


def exposition(view: Callable[[], View]) -> Callable[[], tuple[bytes, str]]:
    """Returns what makes the text that Prometheus reads, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)
