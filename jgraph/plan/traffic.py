"""Traffic of a step: its messages, variables and work by task, as plain data.

What ``Plan.save`` writes, and a simulation of other sizes of the cluster reads: no
code, no values.
"""

import json
import os
import pathlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from jgraph.errors import ConfigError
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.work import Work, work_of
from jgraph.plan.partition.segments import Segmentation

_FORMAT = 1


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A variable: where it is, and its bytes."""

    name: str
    task: TaskName
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that one task sends another in a step."""

    src: TaskName
    dst: TaskName
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a worker's step, and what travels while those beside it compute.

    Attributes:
      read: bytes from ps that it is the first to take.
      work: what it computes.
      written: bytes to ps that leave when it has run.
    """

    read: int
    work: Work
    written: int


def pieces_of(cut: Segmentation, driver: TaskName) -> tuple[Piece, ...]:
    """Returns the pieces of a worker's step, in order; nothing if it is all one.

    Args:
      cut: of the step, with buckets.
      driver: the worker.
    """
    flow, clusters = cut.flow, cut.clusters
    home = {root: n for n, cluster in enumerate(clusters) for root in cluster.roots}
    read, written = Counter[int](), Counter[int]()
    for value, users in cut.users.items():
        maker = home.get(flow.producer.get(value, -1))
        if maker is None:
            continue
        nbytes = flow.type_of(value).nbytes
        if is_ps(clusters[maker].task):
            first = next((u for u in users if clusters[u].task == driver), maker)
            read[first] += nbytes
        elif any(is_ps(clusters[user].task) for user in users):
            written[maker] += nbytes
    pieces = tuple(
        Piece(read[n], work_of([flow.ops[i].equation for i in cluster.ops]), written[n])
        for n, cluster in enumerate(clusters)
        if cluster.task == driver and cluster.kind == "segment"
    )
    return pieces if len(pieces) > 1 else ()


@final
@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What a step of one worker computes and sends.

    Attributes:
      name: of the program.
      driver: the worker.
      variables: those that the step uses.
      messages: in the order of the plan.
      work: of each task.
      pieces: of the worker's step between hosts, if values travel while it computes.

    Example:
      >>> ps, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
      >>> sent = Message(ps, worker, 8), Message(worker, ps, 8)
      >>> step = StepTraffic("step", worker, (Held("w", ps, 8),), sent, {})
      >>> step.read, step.written, StepTraffic.from_dict(step.to_dict()) == step
      (8, 8, True)
    """

    name: str
    driver: TaskName
    variables: tuple[Held, ...]
    messages: tuple[Message, ...]
    work: Mapping[TaskName, Work]
    pieces: tuple[Piece, ...] = ()

    @property
    def read(self) -> int:
        """Bytes from ps to the worker."""
        return sum(m.nbytes for m in self.messages if is_ps(m.src) > is_ps(m.dst))

    @property
    def written(self) -> int:
        """Bytes from the worker to ps."""
        return sum(m.nbytes for m in self.messages if is_ps(m.src) < is_ps(m.dst))

    @property
    def on_ps(self) -> tuple[Held, ...]:
        """The variables that a ps has."""
        return tuple(v for v in self.variables if is_ps(v.task))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as ``Plan.save`` writes them."""
        return {
            "format": _FORMAT,
            "name": self.name,
            "driver": self.driver,
            "variables": [asdict(v) for v in self.variables],
            "messages": [asdict(m) for m in self.messages],
            "work": {task: asdict(work) for task, work in self.work.items()},
            "pieces": [asdict(piece) for piece in self.pieces],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StepTraffic":
        """Reads what ``to_dict`` gave.

        Raises:
          ConfigError: it is no plan, or of another format.
        """
        try:
            if values["format"] != _FORMAT:
                raise ConfigError(
                    f"the plan has format {values['format']}, and this jgraph reads "
                    f"{_FORMAT}; write it anew with trainer.plan(…).save('plan.json')"
                )
            step = cls(
                str(values["name"]),
                TaskName(values["driver"]),
                tuple(Held(**row) for row in values["variables"]),
                tuple(Message(**row) for row in values["messages"]),
                {TaskName(t): Work(**w) for t, w in values["work"].items()},
                tuple(
                    Piece(row["read"], Work(**row["work"]), row["written"])
                    for row in values.get("pieces", ())
                ),
            )
            negative: list[Held | Message | Piece] = [
                *(r for r in step.variables + step.messages if r.nbytes < 0),
                *(p for p in step.pieces if min(p.read, p.written) < 0),
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"this is no plan ({type(error).__name__}: {error}); write one with "
                "trainer.plan(…).save('plan.json')"
            ) from error
        if negative:
            raise ConfigError(
                f"the plan has {negative[0]}, and bytes are 0 or more; write it anew "
                "with trainer.plan(…).save('plan.json')"
            )
        return step

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
                f"cannot write the plan to {os.fspath(path)} ({error.strerror}); "
                "choose another path"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StepTraffic":
        """Reads what ``save`` wrote.

        Raises:
          ConfigError: there is no such file, or no plan in it.
        """
        try:
            values = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read a plan from {os.fspath(path)}: {error}; write one with "
                "trainer.plan(…).save('plan.json')"
            ) from error
        return cls.from_dict(values)
