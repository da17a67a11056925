"""Stateful metrics of Flax, updated batch by batch: ``nnx.MultiMetric``."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypeAlias, final

import numpy as np
from flax import nnx

from jgraph.errors import ConfigError
from jgraph.train.model.adapters import Metric
from jgraph.train.model.trees import Tree

Metrics: TypeAlias = Mapping[str, Metric] | Metric | tuple[nnx.Metric, Metric]
"""What a Trainer evaluates; see there."""


@final
@dataclass(frozen=True, slots=True)
class StatefulMetrics:
    """Metrics, and the function that says what they are updated with.

    Attributes:
      fn: called as a metric of a Trainer; returns the arguments of ``update``.
      graph: of the metrics.
      empty: their state before the first batch.
    """

    fn: Callable[[Any, Any], Mapping[str, Any]]
    graph: Any
    empty: Tree

    def values(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """Returns what a batch adds; can be traced.

        Raises:
          ConfigError: ``fn`` returned no dict.
        """
        values = self.fn(model, batch)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"the function beside the metrics returned a {type(values).__name__}; "
                "return what update takes, such as {'logits': …, 'labels': …}"
            )
        return values

    def update(self, state: Tree, values: Mapping[str, Any]) -> Tree:
        """Returns the state after a batch; can be traced."""
        metric = nnx.merge(self.graph, state)
        metric.update(**values)
        return nnx.state(metric)

    def compute(self, state: Tree) -> dict[str, float]:
        """Returns the metrics by name; one with several values gives several."""
        outcome = nnx.merge(self.graph, state).compute()
        by_name = outcome if isinstance(outcome, Mapping) else {"metric": outcome}
        flat: dict[str, Any] = {}
        for name, value in by_name.items():
            if is_dataclass(value) and not isinstance(value, type):
                flat |= {f"{name}_{k}": v for k, v in asdict(value).items()}
            else:
                flat[name] = value
        return {name: float(np.asarray(value)) for name, value in flat.items()}


def split_metrics(
    metrics: Metrics | None,
) -> tuple[dict[str, Metric], StatefulMetrics | None]:
    """Returns functions by name, and what is updated batch by batch.

    Raises:
      ConfigError: neither a dict of functions, nor metrics with their function.
    """
    match metrics:
        case None:
            return {}, None
        case (nnx.Metric() as metric, fn) if callable(fn):
            fresh = nnx.clone(metric)
            fresh.reset()
            return {}, StatefulMetrics(fn, *nnx.split(fresh))
        case nnx.Metric() | type():
            pass
        case fn if callable(fn):
            name = getattr(fn, "__name__", "metric")
            return {"metric" if name == "<lambda>" else name: fn}, None
        case Mapping() if all(map(callable, metrics.values())):
            names: list[object] = [*metrics]
            if unnamed := [name for name in names if not isinstance(name, str)]:
                raise ConfigError(
                    f"metrics has the name {unnamed[0]!r:.60}; names of metrics are "
                    "text, {'accuracy': fn}"
                )
            return dict(metrics), None
    raise ConfigError(
        f"metrics is {metrics!r:.80}; give functions by name, {{'accuracy': fn}}, or "
        "(nnx.MultiMetric(…), fn), where fn(model, batch) returns what update takes"
    )
