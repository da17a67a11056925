"""CostModel: how fast the tasks of a cluster compute, and the links between them."""

import json
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.work import Work
from jgraph.plan.placement.collectors import collectors
from jgraph.view import markup

_FORMAT = 1


@final
@dataclass(frozen=True, slots=True)
class TaskSpeed:
    """How fast a task computes when no other task of its host does.

    Attributes:
      host: where it is; tasks of one host share its cores.
      flops_per_s: floating-point operations of a large matrix product.
      elements_per_s: simple operations on one element each, in the cache.
      slow_per_s: exponentials and their like.
      bytes_per_s: read and written by an operation that only moves.
      kernel_s: of each operation that XLA runs for itself, beside its work.
      segment_s: of each segment, beside its work.
    """

    host: str
    flops_per_s: float
    elements_per_s: float
    slow_per_s: float
    bytes_per_s: float
    kernel_s: float = 2e-6
    segment_s: float = 100e-6

    def seconds(self, work: Work) -> float:
        """Returns how long work takes, without what a segment costs by itself."""
        computing = work.elements / self.elements_per_s + work.slow / self.slow_per_s
        moving = work.nbytes / self.bytes_per_s
        return (
            work.flops / self.flops_per_s
            + max(computing, moving)
            + work.kernels * self.kernel_s
        )


@final
@dataclass(frozen=True, slots=True)
class Link:
    """How long a message takes from one task to another.

    Attributes:
      latency_s: of one that is next to nothing.
      bytes_per_s: of a large one.

    Example:
      >>> Link(latency_s=0.001, bytes_per_s=1e6).seconds(2_000)
      0.003
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Returns the time from sending to having it."""
        return self.latency_s + nbytes / self.bytes_per_s


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """Speeds of a cluster's tasks and links, from which ``jg.auto`` predicts a step.

    ``jg.auto(cluster)`` measures one; ``jgraph doctor --links --json`` prints one.

    Attributes:
      tasks: the speed of each.
      links: by (from, to), for every ordered pair of tasks.
      call: what a client's call of a step costs beside the step, and the link that
        feeds and fetches pass.
      crowding: by host, how many times longer a computation takes while all tasks of
        the host compute; 1 if they do not slow each other.

    Example:
      >>> task = TaskName("/job:worker/task:0")
      >>> speed = TaskSpeed("host", 1e10, 1e9, 1e8, 1e10)
      >>> model = CostModel({task: speed}, {}, Link(1e-4, 1e9), {})
      >>> CostModel.from_dict(model.to_dict()) == model
      True
    """

    tasks: Mapping[TaskName, TaskSpeed]
    links: Mapping[tuple[TaskName, TaskName], Link]
    call: Link
    crowding: Mapping[str, float]

    def slowdown(self, host: str, busy: int) -> float:
        """Returns how many times as long work takes while so many tasks compute."""
        there = sum(speed.host == host for speed in self.tasks.values())
        full = self.crowding.get(host, 1.0)
        return 1.0 + (full - 1.0) * (busy - 1) / max(1, there - 1)

    def link(self, src: TaskName, dst: TaskName) -> Link:
        """Returns the link between two tasks; one of a task to itself takes no time."""
        return Link(0.0, math.inf) if src == dst else self.links[src, dst]

    def exchange_s(
        self,
        nbytes: float,
        holders: Sequence[TaskName],
        workers: Sequence[TaskName],
        least_on_host: float = math.inf,
    ) -> float:
        """Returns how long the busiest link of a synchronous step is busy, in seconds.

        Every worker sends each holder its part of the gradients, and gets that part of
        the parameters. What tasks of one host say to each other shares the memory of
        that host, and its cores: there a message without bytes is work as well. What
        hosts say to each other shares the link of each, in each direction.

        Args:
          nbytes: of the parameters, which are cut evenly over the holders.
          holders: sum gradients, and have the parameters.
          workers: one that is a holder sends itself nothing.
          least_on_host: so many workers of a host sum on it what leaves it, where some
            of them are holders; see ``jgraph.plan.placement.collectors``.

        Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN
        Training in Heterogeneous GPU/CPU Clusters", 2020 (BytePS); Kim et al.,
        "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", 2019.

        Example:
          >>> ps, *workers = tasks = [TaskName(name) for name in ("ps", "w0", "w1")]
          >>> speeds = {t: TaskSpeed(f"at {t}", 1e10, 1e9, 1e8, 1e10) for t in tasks}
          >>> links = {(a, b): Link(1e-4, 1e9) for a in tasks for b in tasks if a != b}
          >>> model = CostModel(speeds, links, Link(1e-4, 1e9), {})
          >>> [model.exchange_s(1e9, holders, workers) for holders in ([ps], workers)]
          [4.0, 1.0]
        """
        part = nbytes / len(holders)
        hosts = {task: speed.host for task, speed in self.tasks.items()}
        found = collectors(holders, workers, hosts, least_on_host)
        gradients: list[tuple[TaskName, TaskName]] = []
        for holder in holders:
            at = {w: found.get((hosts[w], holder), holder) for w in workers}
            gradients += at.items()
            gradients += [(first, holder) for first in {*at.values()}]
        parameters = [(holder, worker) for holder in holders for worker in workers]
        return self._busiest_s(part, gradients) + self._busiest_s(part, parameters)

    def _busiest_s(
        self, nbytes: float, pairs: Iterable[tuple[TaskName, TaskName]]
    ) -> float:
        """Returns how long the busiest link is busy if each pair exchanges so much."""
        busy = defaultdict[tuple[str, str], float](float)
        for src, dst in pairs:
            link = self.link(src, dst)
            seconds = nbytes / link.bytes_per_s
            one, other = self.tasks[src].host, self.tasks[dst].host
            if one == other:
                busy["memory", one] += link.latency_s + seconds
            else:  # many messages may be on their way at a time
                busy["out", one] += seconds
                busy["in", other] += seconds
        return max(busy.values(), default=0.0)

    def check(self, tasks: Sequence[TaskName]) -> None:
        """Refuses tasks that it does not know, or a link that it lacks.

        Raises:
          ConfigError: names them.
        """
        unknown = [task for task in tasks if task not in self.tasks]
        pairs = [(a, b) for a in tasks for b in tasks if a != b]
        unlinked = [f"{a} to {b}" for a, b in pairs if (a, b) not in self.links]
        if unknown or unlinked:
            some = ", ".join([*unknown, *unlinked][:5])
            raise ConfigError(
                f"the cost model knows nothing of {some}; it is of another cluster: "
                "measure this one with jgraph doctor --links, or leave cost_model out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as ``jgraph doctor --links --json`` prints them."""
        return {
            "format": _FORMAT,
            "tasks": {task: asdict(speed) for task, speed in self.tasks.items()},
            "links": [
                {"from": a, "to": b, **asdict(link)}
                for (a, b), link in self.links.items()
            ],
            "call": asdict(self.call),
            "crowding": dict(self.crowding),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostModel":
        """Reads what ``to_dict`` gave.

        Raises:
          ConfigError: it is no cost model, or of another format.
        """
        try:
            if values["format"] != _FORMAT:
                raise ConfigError(
                    f"the cost model has format {values['format']}, and this jgraph "
                    f"reads {_FORMAT}; measure anew with jgraph doctor --links --json"
                )
            model = cls(
                {TaskName(t): TaskSpeed(**s) for t, s in values["tasks"].items()},
                {
                    (TaskName(row["from"]), TaskName(row["to"])): Link(
                        row["latency_s"], row["bytes_per_s"]
                    )
                    for row in values["links"]
                },
                Link(**values["call"]),
                dict(values["crowding"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"this is no cost model ({type(error).__name__}: {error}); write one "
                "with jgraph doctor --links --json"
            ) from error
        return model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON.

        Raises:
          ConfigError: a place that cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1)
        try:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the cost model to {os.fspath(path)} "
                f"({error.strerror}); choose another path"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CostModel":
        """Reads what ``save``, or ``jgraph doctor --links --json``, wrote.

        Raises:
          ConfigError: there is no such file, or no cost model in it.
        """
        try:
            values = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read a cost model from {os.fspath(path)}: {error}; write one "
                "with jgraph doctor --links --json"
            ) from error
        return cls.from_dict(values)

    def __str__(self) -> str:
        lines = ["task, host: product, elementwise, exp, memory, per segment"]
        for task, s in self.tasks.items():
            lines.append(
                f"  {task}, {s.host}: {s.flops_per_s / 1e9:.1f} GFLOP/s, "
                f"{s.elements_per_s / 1e9:.2f} G/s, {s.slow_per_s / 1e9:.2f} G/s, "
                f"{s.bytes_per_s / 1e9:.1f} GB/s, {1e6 * s.segment_s:.0f} us"
            )
        for host, times in self.crowding.items():
            lines.append(f"  {host}: {times:.2f} x as long when all its tasks compute")
        lines.append("link: latency, bandwidth")
        for (a, b), link in self.links.items():
            lines.append(f"  {a} to {b}: {_link_text(link)}")
        return "\n".join([*lines, f"  client to its master: {_link_text(self.call)}"])

    def _repr_html_(self) -> str:
        return markup.lines(str(self))


def _link_text(link: Link) -> str:
    return f"{1e6 * link.latency_s:.0f} us, {link.bytes_per_s / 1e9:.2f} GB/s"
