"""Cluster benchmark: compute speed of each task, latency and bandwidth of each link."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.client.connection import Connection
from jgraph.client.programs import Programs
from jgraph.clock import Clock, SystemClock
from jgraph.coordination.probes import (
    LinkProbe,
    Seen,
    SpeedProbe,
    alike,
    bandwidth,
    links_of,
    seen,
    typical,
)
from jgraph.coordination.step.run_metadata import RunMetadata, run_metadata
from jgraph.errors import DeadlineError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.plan.auto.cost_model import CostModel, Link
from jgraph.plan.plan import plan
from jgraph.plan.program.program import Program

MEASURE_S = 120.0
_WARM, _ROUNDS, _IN_A_ROW = 1, 5, 5
_NUMBER = np.asarray(0.5, np.float32)
_CALLS = np.ones(1, np.float32), np.ones(1 << 20, np.float32)


def measure(
    cluster: Connection, *, timeout_s: float = MEASURE_S, clock: Clock | None = None
) -> CostModel:
    """Returns how fast the tasks of a cluster are, and the links between them.

    Runs steps of some milliseconds, which takes some seconds with what is compiled for
    them: on each task alone, on all tasks of a host at once, and over every link in
    both directions, one after the other, with frames of the transport that steps use.
    Nothing else should run meanwhile.

    Args:
      cluster: a ``LocalCluster`` or what ``jg.connect`` gave.
      timeout_s: limit for all of it, in seconds.
      clock: what time is read from.

    Raises:
      TaskLostError: a task does not answer; it is named.
      DeadlineError: it took longer; tells what was being measured.
    """
    return _Measuring(cluster, timeout_s, clock or SystemClock()).model()


@final
@dataclass(frozen=True, slots=True)
class _Probe:
    """A registered step that measures something."""

    what: str
    handle: str
    program: Program
    feed: np.ndarray[Any, Any]


@final
class _Measuring:
    """One measurement: all probes in turns, so that a slow moment hits all of them."""

    def __init__(self, cluster: Connection, timeout_s: float, clock: Clock) -> None:
        self._cluster = cluster
        self._tasks = cluster.tasks()
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = clock.now() + timeout_s
        self._programs = Programs(cluster)
        hosts = cluster.spec.hosts
        self._hosts = {task: hosts[task] for task in self._tasks}

    def model(self) -> CostModel:
        try:
            return self._model()
        finally:
            self._programs.unregister_all()

    def _model(self) -> CostModel:
        crowds = [c for h in dict.fromkeys(self._hosts.values()) if (c := self._at(h))]
        groups = [*((task,) for task in self._tasks), *crowds]
        pairs = [(a, b) for a in self._tasks for b in self._tasks if a != b]
        sends = LinkProbe(tuple(pairs)).send
        probes = self._registered(
            [
                *((SpeedProbe(g).compute, _NUMBER, " and ".join(g)) for g in groups),
                (sends, _NUMBER, "the links"),
                *((self._first, x, "the client's calls") for x in _CALLS),
            ]
        )
        at = len(groups)
        speeds, links, calls = probes[:at], probes[at : at + 1], probes[at + 1 :]
        metadata: dict[str, list[RunMetadata]] = {
            p.handle: [] for p in [*speeds, *links]
        }
        call_times: dict[str, list[float]] = {probe.handle: [] for probe in calls}
        for _ in range(_WARM + _ROUNDS):
            for probe in [*speeds, *(links if pairs else [])]:
                metadata[probe.handle].append(self._traced(probe))
            for probe in calls:
                call_times[probe.handle] += [
                    self._called(probe) for _ in range(_IN_A_ROW)
                ]
        times = {
            group: {task: seen(metadata[probe.handle][_WARM:], task) for task in group}
            for group, probe in zip(groups, speeds, strict=True)
        }
        task_speeds = {
            task: typical(
                alike({t: times[t,][t] for t in self._like(task)}, task)
            ).speed(self._hosts[task])
            for task in self._tasks
        }
        small, large = (call_times[probe.handle] for probe in calls)
        master = task_speeds[self._cluster.master]
        nbytes = _CALLS[1].nbytes - _CALLS[0].nbytes
        moving = bandwidth(small, large, nbytes, master.bytes_per_s)
        latency = max(statistics.median(small) - master.segment_s, 0.0)
        return CostModel(
            tasks=task_speeds,
            links=links_of(metadata[links[0].handle][_WARM:], pairs, task_speeds),
            call=Link(latency, moving),
            crowding={h: _crowding(times, self._at(h)) for h in self._hosts.values()},
        )

    def _at(self, host: str) -> tuple[TaskName, ...]:
        """Returns the tasks of a host where there are several."""
        tasks = tuple(task for task in self._tasks if self._hosts[task] == host)
        return tasks if len(tasks) > 1 else ()

    def _like(self, task: TaskName) -> list[TaskName]:
        """Returns the tasks that should be as fast as one: of its host, on its kind."""
        kinds = self._cluster.platforms
        return [
            t
            for t in self._tasks
            if self._hosts[t] == self._hosts[task] and kinds.get(t) == kinds.get(task)
        ]

    def _first(self, x: Any) -> Any:
        with device(self._cluster.master):
            return x[0] * 2.0

    def _called(self, probe: _Probe) -> float:
        start_s = self._clock.now()
        self._programs.run(probe.handle, [probe.feed], self._remaining_s(probe.what))
        return self._clock.now() - start_s

    def _traced(self, probe: _Probe) -> RunMetadata:
        remaining_s = self._remaining_s(probe.what)
        _, parts = self._programs.run_traced(probe.handle, [probe.feed], remaining_s)
        return run_metadata(probe.program, parts)

    def _registered(
        self, steps: Sequence[tuple[Callable[[Any], Any], np.ndarray[Any, Any], str]]
    ) -> list[_Probe]:
        """Returns probes of functions, feeds and what they measure.

        Tasks compile the programs of all side by side.
        """
        programs = [self._planned(fn, feed, what) for fn, feed, what in steps]
        handles = self._programs.register_all(programs)
        self._remaining_s("the programs for it")
        return [
            _Probe(what, handle, program, feed)
            for (_, feed, what), handle, program in zip(
                steps, handles, programs, strict=True
            )
        ]

    def _planned(
        self, fn: Callable[[Any], Any], feed: np.ndarray[Any, Any], what: str
    ) -> Program:
        self._remaining_s(what)
        with device(None):
            graph, _ = trace(fn, feed, name="measure")
        return plan(
            graph,
            tasks=self._tasks,
            driver=self._cluster.master,
            platforms=self._cluster.platforms,
        ).program

    def _remaining_s(self, what: str) -> float:
        remaining_s = self._deadline - self._clock.now()
        if remaining_s <= 0:
            raise DeadlineError(
                f"measuring the cluster took longer than {self._timeout_s:g} s; it was "
                f"at {what}. Give it longer: timeout_s"
            )
        return remaining_s


def _crowding(
    times: Mapping[tuple[TaskName, ...], Mapping[TaskName, Seen]],
    together: tuple[TaskName, ...],
) -> float:
    """Returns how many times as long tasks take that all compute."""
    if not together:
        return 1.0
    ratios = (
        times[together][task].computing / times[task,][task].computing
        for task in together
    )
    return max(1.0, statistics.mean(ratios))
