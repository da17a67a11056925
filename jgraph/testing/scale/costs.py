"""Costs: CPU of a step, a frame and a byte, and the network, as they were measured.

``python -m benchmarks calibrate`` measures them. A simulation says of each where it is
from, so that a figure is never more certain than what it was made of.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, final

from jgraph.errors import ConfigError
from jgraph.plan.auto.cost_model import Link, TaskSpeed
from jgraph.testing.scale.queues import MessageCost

_FORMAT: Final = 1
CROWD: Final = 5
"""Tasks that calibration crowds its machine with: four workers and a ps."""
MEASURED: Final = pathlib.Path(__file__).with_name("cost_model.json")
"""The calibration that comes with the package."""


@final
@dataclass(frozen=True, slots=True)
class Costs:
    """What calibration found, in seconds of CPU unless said otherwise.

    A byte counts at each side, whichever way it goes.

    Attributes:
      date: when it was measured.
      machine: where.
      cores: of that machine.
      transport: what carried the bytes, "network" or "auto" (shared memory).
      worker_step_s: of a worker for a step.
      worker_ps_s: of a worker for a step, for each ps.
      worker_byte_s: of a worker for a byte read or sent.
      push_s: of a ps for an asynchronous step, its update included.
      push_byte_s: of a ps for a byte of one.
      contribution_s: of a ps for a synchronous step.
      contribution_byte_s: of a ps for a byte of one.
      update_s: of a ps for a synchronous update.
      update_byte_s: of a ps for a byte of the mean.
      frame_s: of a small frame, at each side.
      step_id_s: of the name of a step in a frame, at each side.
      arbiter_event_s: of an event of the arbiter.
      gate_event_s: of an event of a gate.
      dispatch_event_s: of an ask for batches.
      crowding_async: how many times as much a step costs, beside its bytes, while
        ``CROWD`` tasks want the cores of that machine.
      crowding_sync: the same of synchronous steps.
      crowding_bytes: the same of bytes.
      link: seconds of a message that are no CPU, and bytes per second of a task's
        network, each way.
      speed: how fast a worker computes.
    """

    date: str
    machine: str
    cores: int
    transport: str
    worker_step_s: float
    worker_ps_s: float
    worker_byte_s: float
    push_s: float
    push_byte_s: float
    contribution_s: float
    contribution_byte_s: float
    update_s: float
    update_byte_s: float
    frame_s: float
    step_id_s: float
    arbiter_event_s: float
    gate_event_s: float
    dispatch_event_s: float
    crowding_async: float
    crowding_sync: float
    crowding_bytes: float
    link: Link
    speed: TaskSpeed

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value}"
            for name, value in self.seconds().items()
            if not (math.isfinite(value) and value >= 0)
        ]
        if self.link.latency_s < 0 or not self.link.bytes_per_s > 0:
            wrong.append(f"the link has {self.link}")
        if wrong:
            raise ConfigError(
                f"a cost is a number of seconds from 0 on, and {', '.join(wrong)}; "
                "measure anew with python -m benchmarks calibrate"
            )

    def seconds(self) -> dict[str, float]:
        """Returns the costs that are numbers of seconds, and the crowding, by name."""
        measured = (
            f.name for f in fields(self) if f.name.endswith("_s") or "crowd" in f.name
        )
        return {name: getattr(self, name) for name in measured}

    def on_network(
        self, bytes_per_s: float | None = None, latency_s: float | None = None
    ) -> "Costs":
        """Returns the same with another network.

        Args:
          bytes_per_s: of a task, each way; as measured if unset.
          latency_s: of a message; as measured if unset.
        """
        return replace(
            self,
            link=Link(
                self.link.latency_s if latency_s is None else latency_s,
                self.link.bytes_per_s if bytes_per_s is None else bytes_per_s,
            ),
        )

    def crowded(self, mode: str, tasks: int, cores: float) -> "Costs":
        """Returns the same on a host whose tasks take turns on its cores.

        A task that gets a core finds there what it left in the caches unless another
        had that core meanwhile. So what crowding adds is in proportion to the share of
        the tasks that wait, ``1 - cores / tasks``: as much as measured with ``CROWD``
        tasks, more with more of them, and never more than where all others wait.

        Args:
          mode: "sync" or "async".
          tasks: how many.
          cores: that they share.
        """
        share = _waiting(tasks, cores) / (_waiting(CROWD, self.cores) or 1.0)
        full = self.crowding_sync if mode == "sync" else self.crowding_async
        times = {"byte": self.crowding_bytes, "step": full}
        changed: dict[str, Any] = {
            name: value
            * (1 + share * (times["byte" if "byte" in name else "step"] - 1))
            for name, value in self.seconds().items()
            if "crowd" not in name and "event" not in name
        }
        return replace(self, **changed)

    def message(self, mode: str) -> MessageCost:
        """Returns what a message of a step costs a ps: half a step, and its bytes."""
        if mode == "sync":
            return MessageCost(self.contribution_s / 2, self.contribution_byte_s)
        return MessageCost(self.push_s / 2, self.push_byte_s)

    def __str__(self) -> str:
        lines = [
            f"measured {self.date} on {self.machine} ({self.cores} cores), frames by "
            f"{self.transport}:"
        ]
        for name, value in self.seconds().items():
            lines.append(f"  {name} {_text(name, value)}")
        link = self.link
        lines.append(
            f"  link {1e6 * link.latency_s:.3g} us and {link.bytes_per_s / 1e9:.3g} "
            "GB/s of each task, each way"
        )
        return "\n".join(lines)


def _waiting(tasks: int, cores: float) -> float:
    """Returns which share of tasks that all have work to do has no core."""
    return max(0.0, 1 - cores / tasks)


def _text(name: str, value: float) -> str:
    if "crowd" in name:
        return f"{value:.3g} x"
    if name.endswith("byte_s"):
        return f"{1e9 * value:.3g} ns per byte"
    return f"{1e6 * value:.3g} us"


def save_costs(
    costs_by_name: Mapping[str, Costs], path: str | os.PathLike[str]
) -> None:
    """Writes the costs of each transport as JSON.

    Raises:
      ConfigError: a place that cannot be written.
    """
    values = {
        "format": _FORMAT,
        "transports": {n: asdict(c) for n, c in costs_by_name.items()},
    }
    try:
        text = json.dumps(values, indent=1) + "\n"
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the costs to {os.fspath(path)} ({error.strerror}); choose "
            "another path"
        ) from error


def load_costs(
    path: str | os.PathLike[str] = MEASURED, transport: str = "network"
) -> Costs:
    """Reads what ``save_costs`` wrote.

    Args:
      path: the file; what comes with the package if unset.
      transport: which of its transports.

    Raises:
      ConfigError: there is no such file, no such transport in it, a cost below 0, or
        another format.
    """
    where = os.fspath(path)
    try:
        values = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read costs from {where}: {error}; write them with python -m "
            "benchmarks calibrate"
        ) from error
    try:
        if values["format"] != _FORMAT:
            raise ConfigError(
                f"the costs in {where} have format {values['format']}, and this jgraph "
                f"reads {_FORMAT}; measure anew with python -m benchmarks calibrate"
            )
        known: Mapping[str, Any] = values["transports"]
        if transport not in known:
            raise ConfigError(
                f"{where} has no costs of the transport '{transport}', only of "
                f"{', '.join(sorted(known)) or 'none'}; measure them with python -m "
                "benchmarks calibrate"
            )
        row = dict(known[transport])
        if "link" not in row:
            raise ConfigError(
                f"the costs in {where} have no link, so bytes would take no time; "
                "measure anew with python -m benchmarks calibrate"
            )
        link, speed = Link(**row.pop("link")), TaskSpeed(**row.pop("speed"))
        return Costs(**row, link=link, speed=speed)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where} has no costs ({type(error).__name__}: {error}); write them with "
            "python -m benchmarks calibrate"
        ) from error
