"""Statistics of served versions: counts and nanoseconds, and Prometheus text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from jgraph.errors import ConfigError

PARTS: Final = ("success", "fail", "queue", "compute_input", "compute_infer")
EXTRA: Final = "pip install 'jgraph[serve]'"


@final
@dataclass(slots=True)
class Durations:
    """How often something was, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts what took so long."""
        self.count += count
        self.ns += int(seconds * 1e9)


@final
@dataclass(slots=True)
class Statistics:
    """What a version has done since it was loaded.

    Attributes:
      rows: answered.
      executions: of its code; less than requests where these ran together.
      last_ms: when the last answer was, in milliseconds since 1970.
      success: requests that were answered, from when they came.
      fail: requests that were not.
      queue: how long requests waited.
      compute_input: putting requests together.
      compute_infer: running the code.
      nonfinite: answers with values that are not finite, refused or not.
      refused: refused requests by code of the error.
      mirrored: copies of requests of another version, by what came of them: ``same``,
        ``different`` or ``failed``.
    """

    rows: int = 0
    executions: int = 0
    nonfinite: int = 0
    last_ms: int = 0
    success: Durations = field(default_factory=Durations)
    fail: Durations = field(default_factory=Durations)
    queue: Durations = field(default_factory=Durations)
    compute_input: Durations = field(default_factory=Durations)
    compute_infer: Durations = field(default_factory=Durations)
    refused: dict[str, int] = field(default_factory=dict)
    mirrored: dict[str, int] = field(default_factory=dict)

    @property
    def durations(self) -> Mapping[str, Durations]:
        """Its durations, by name."""
        return {part: getattr(self, part) for part in PARTS}

    def answered(self, rows: int, seconds: float, now: float) -> None:
        """Counts a request that was answered, at a time of the day."""
        self.success.add(seconds)
        self.rows += rows
        self.last_ms = int(now * 1000)

    def ran_alone(self, rows: int, seconds: float, now: float) -> None:
        """Counts a request that waited for nothing, and was answered."""
        ns = int(seconds * 1e9)
        self.executions += 1
        self.rows += rows
        self.queue.count += 1
        self.compute_input.count += 1
        for part in (self.compute_infer, self.success):
            part.count += 1
            part.ns += ns
        self.last_ms = int(now * 1000)

    def failed(self, code: str, seconds: float) -> None:
        """Counts a request that was refused with an error of this code."""
        self.fail.add(seconds)
        self.refused[code] = self.refused.get(code, 0) + 1


Row: TypeAlias = tuple[str, int, int, Statistics]
"""Model, version, rows that wait, and what it did."""


@final
class Metrics:
    """Metrics of all versions, as Prometheus asks for them.

    Args:
      rows: gives what there is now.

    Raises:
      ConfigError: prometheus-client is not installed.
    """

    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise ConfigError(f"/metrics needs prometheus-client: {EXTRA}") from error
        self._rows = rows
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Returns all of it in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Yields families of metrics; Prometheus's client calls it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = ["model", "version"]
        counter: Callable[..., Any] = lambda name, about, *more: CounterMetricFamily(
            f"jgraph_serve_{name}", about, labels=[*names, *more]
        )
        requests = counter("requests", "Requests answered.")
        refused = counter("refused", "Requests refused, by code.", "code")
        rows = counter("rows", "Rows answered.")
        executions = counter("executions", "Executions of the model's code.")
        nonfinite = counter("nonfinite", "Answers with values that are not finite.")
        mirrored = counter(
            "mirrored", "Copies of requests of other versions, by outcome.", "outcome"
        )
        seconds = counter("seconds", "Seconds spent, by part.", "part")
        queued = GaugeMetricFamily(
            "jgraph_serve_queued_rows", "Rows that wait.", labels=names
        )
        for model, version, waiting, one in self._rows():
            who = [model, str(version)]
            requests.add_metric(who, one.success.count)
            rows.add_metric(who, one.rows)
            executions.add_metric(who, one.executions)
            nonfinite.add_metric(who, one.nonfinite)
            queued.add_metric(who, waiting)
            for code, count in one.refused.items():
                refused.add_metric([*who, code], count)
            for outcome, count in one.mirrored.items():
                mirrored.add_metric([*who, outcome], count)
            for part, duration in one.durations.items():
                seconds.add_metric([*who, part], duration.ns / 1e9)
        yield from (requests, refused, rows, executions, nonfinite)
        yield from (mirrored, seconds, queued)
