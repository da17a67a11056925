"""Metrics history of a run, by metric, and its plot."""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName
from jgraph.runtime.data.batches import Array
from jgraph.train.hash_tables.hash_state import COUNTS
from jgraph.train.model.metrics import as_float64, is_complex
from jgraph.train.run.members import RunMembers
from jgraph.train.run.plot import Curve, Panel, Plot, draw_plot
from jgraph.train.run.profile import Profile, make_profile
from jgraph.train.run.rounds import Rounds
from jgraph.train.state.runner import Chunk, Events, Staleness

if TYPE_CHECKING:
    import pandas


@final
@dataclass(slots=True)
class _Stretch:
    """Steps between two losses of tasks.

    ``first`` updates were applied before it. Its chunks are dated since the run began.
    """

    first: int
    chunks: list[Chunk] = field(default_factory=list)

    def until(self, step: int) -> "_Stretch":
        """Returns it without what came after ``step``, by time."""
        if not self.chunks:
            return self
        order = np.argsort(_seconds(self.chunks), kind="stable")
        stays = np.zeros(len(order), bool)
        stays[order[: step - self.first]] = True
        ends = np.cumsum([len(chunk) for chunk in self.chunks])[:-1]
        counts = [int(part.sum()) for part in np.split(stays, ends)]
        cut = [c.first(n) for c, n in zip(self.chunks, counts, strict=True) if n]
        return _Stretch(self.first, cut)


@final
class History:
    """Metrics of every step, in the order in which the steps were done.

    Thread safe: a run writes while the user reads.

    Args:
      first_step: updates applied before this run.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._stretches = [_Stretch(first_step)]
        self._count = 0  # in the last stretch
        self._drops: dict[TaskName, int] = {}  # in the last stretch
        self._readings: list[tuple[int, float, dict[str, float]]] = []
        self._lock = threading.Lock()
        self.staleness: Staleness = {}
        """How old gradients were, once the run has ended."""
        self.members = RunMembers()
        """Who took part, once the run has ended."""
        self.rounds = Rounds()
        """Who took part in its rounds, once the run has ended."""
        self.events: Events = ()
        """What happened in hash tables, as far as was asked; at the end all of it."""
        self._untold = 0

    @property
    def steps(self) -> int:
        """Updates applied, those of earlier runs included."""
        with self._lock:
            return self._stretches[-1].first + self._count + self._untold

    @property
    def names(self) -> list[str]:
        """Names that ``metrics`` knows."""
        with self._lock:
            train = {name for chunk in self._chunks() for name in chunk.metrics}
            read = {name for _, _, row in self._readings for name in row}
        return sorted(train) + sorted(read)

    def ended(self, steps: int) -> None:
        """Notes how many updates the state has, of earlier runs too.

        These may be more than there are metrics of: a worker tells of its steps now and
        then, and may be lost before. Or fewer: it tells of what it has computed, and a
        ps that is lost may not have applied that. Which of the metrics these are nobody
        knows; all stay.
        """
        with self._lock:
            stretch = self._stretches[-1]
            self._untold = steps - stretch.first - self._count

    def add(self, chunk: Chunk) -> None:
        """Appends what a replica did."""
        with self._lock:
            self._stretches[-1].chunks.append(chunk)
            self._count += len(chunk)
            self._drops.update(chunk.dropped)

    def go_back(self, step: int) -> None:
        """Forgets all after ``step``: it is done again."""
        with self._lock:
            stays = [s.until(step) for s in self._stretches if s.first < step]
            self._stretches = [*stays, _Stretch(step)]
            self._count, self._drops = 0, {}
            self._readings = [row for row in self._readings if row[0] <= step]

    def dropped(self) -> dict[TaskName, int]:
        """Returns late gradients by worker; see ``Run.dropped``."""
        with self._lock:
            return dict(self._drops)

    def add_evaluation(
        self, step: int, seconds: float, values: Mapping[str, float]
    ) -> None:
        """Appends what a model was worth; names get the prefix ``eval_``."""
        row = {f"eval_{name}": value for name, value in values.items()}
        with self._lock:
            self._readings.append((step, seconds, row))

    def add_epsilon(self, step: int, seconds: float, epsilon: float) -> None:
        """Appends what privacy was spent after so many updates."""
        with self._lock:
            self._readings.append((step, seconds, {"epsilon": epsilon}))

    def add_events(self, seconds: float, events: Events) -> None:
        """Appends how hash tables stand now; names get the prefix ``table_``."""
        if events:
            self.events = events
            row = {f"table_{n}": sum(getattr(e, n) for e in events) for n in COUNTS}
            with self._lock:
                step = self._stretches[-1].first + self._count
                self._readings.append((step, seconds, row))

    def metrics(self, name: str) -> dict[str, Array]:
        """Returns one metric as arrays of equal length; see ``Run.metrics``."""
        if name not in self.names:
            known = ", ".join(self.names) or "none yet, as no step is done"
            raise ConfigError(f"the run has no metric '{name}'; it has {known}")
        with self._lock:
            rows = [(s, t, r[name]) for s, t, r in self._readings if name in r]
            stretches = [replace(s, chunks=list(s.chunks)) for s in self._stretches]
        if rows:
            steps, seconds, values = zip(*rows, strict=True)
            return {
                "step": np.asarray(steps),
                "value": np.asarray(values),
                "seconds": np.asarray(seconds),
            }
        parts = [_by_time(stretch, name) for stretch in stretches]
        return {
            key: np.concatenate([part[key] for part in parts if part])
            for key in ("step", "value", "seconds", "replica")
        }

    def to_frame(self) -> "pandas.DataFrame":
        """Returns all metrics as a table of pandas; see ``Run.to_frame``."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("to_frame() needs pandas; pip install pandas") from error
        trained, evaluated = [], []
        for name in self.names:
            found = self.metrics(name)
            # A metric with several values has a list in each row.
            values = found.pop("value")
            of_steps = values if values.ndim == 1 else list(values)
            column = pd.DataFrame({**found, name: of_steps})
            if "replica" in found:
                trained.append(column.set_index(["step", "seconds", "replica"]))
            else:
                column = column.drop(columns="seconds").drop_duplicates(
                    "step", keep="last"
                )
                evaluated.append(column.set_index("step"))
        if not trained:
            return pd.DataFrame(columns=["step", "seconds", "replica"])
        frame = pd.concat(trained, axis=1).reset_index()
        if evaluated:
            readings = pd.concat(evaluated, axis=1)
            frame = frame.merge(readings, how="left", left_on="step", right_index=True)
        return frame

    def profile(self) -> Profile:
        """Returns where the time of the steps went; see ``Run.profile``."""
        with self._lock:
            chunks = self._chunks()
        return make_profile(chunks)

    def last(self, name: str) -> float:
        """Returns the newest value of a metric, NaN if it is no single real number."""
        value = self.metrics(name)["value"][-1]
        one = np.ndim(value) == 0 and not is_complex(value)
        return float(value) if one else math.nan

    def plot(self, *names: str) -> Plot:
        """Draws metrics over steps; see ``Run.plot``."""
        return draw_plot(self._panels(names))

    def _panels(self, names: Sequence[str]) -> list[Panel]:
        if names:
            return [Panel([self._curve(name)]) for name in names]
        eval_names = [n for n in self.names if n.startswith("eval_")]
        first = [self._curve("loss")]
        if "eval_loss" in eval_names:
            first.append(self._curve("eval_loss"))
        others = []
        for name in eval_names:
            if name != "eval_loss":
                train_name = name.removeprefix("eval_")
                others += [
                    self._curve(n) for n in (name, train_name) if n in self.names
                ]
        return [Panel(first)] + ([Panel(others)] if others else [])

    def _curve(self, name: str) -> Curve:
        metric = self.metrics(name)
        if metric["value"].ndim != 1 or is_complex(metric["value"]):
            raise ConfigError(
                f"metric '{name}' has values of the shape "
                f"{metric['value'].shape[1:]} and type {metric['value'].dtype}, which "
                "have no curve; plot a real number"
            )
        values = as_float64(metric["value"])
        return Curve(name, metric["step"], values, "replica" in metric)

    def _chunks(self) -> list[Chunk]:
        return [chunk for stretch in self._stretches for chunk in stretch.chunks]


def _by_time(stretch: _Stretch, name: str) -> dict[str, Array]:
    chunks = [chunk for chunk in stretch.chunks if name in chunk.metrics]
    if not chunks:
        return {}
    seconds = _seconds(chunks)
    order = np.argsort(seconds, kind="stable")
    values = np.concatenate([chunk.metrics[name] for chunk in chunks])
    replicas = np.concatenate([np.full(len(c), c.replica) for c in chunks])
    return {
        "step": stretch.first + 1 + np.arange(len(order)),
        "value": values[order],
        "seconds": seconds[order],
        "replica": replicas[order],
    }


def _seconds(chunks: Sequence[Chunk]) -> Array:
    """Returns when steps were done, by one clock for all replicas."""
    starts: dict[int, float] = {}
    parts = []
    for chunk in reversed(chunks):
        # What is known later of when a loop began is known better: it is less.
        least = min(chunk.began, starts.get(chunk.replica, chunk.began))
        starts[chunk.replica] = least
        parts.append(chunk.seconds + least)
    seconds: Array = np.concatenate(parts[::-1])
    return seconds
