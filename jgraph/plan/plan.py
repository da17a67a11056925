"""Plan: a graph, its placement, and the program that runs it."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

from jgraph.errors import ConfigError, UnknownDeviceError
from jgraph.graph.check import check, check_device
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey
from jgraph.graph.sizes import ASSUMED_SIZE
from jgraph.loading import uncollected
from jgraph.plan.analysis.affinity import companions
from jgraph.plan.analysis.flow import analyze
from jgraph.plan.auto.auto import AutoPlanner, Prediction
from jgraph.plan.auto.work import Work, work_of
from jgraph.plan.partition.assemble import Assembler, Edge, SegmentInfo
from jgraph.plan.partition.segments import cut
from jgraph.plan.partition.updates import lost_updates
from jgraph.plan.placement.colocate import with_resolved_stamps
from jgraph.plan.placement.place import place, state_groups
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.placement.tasks import Tasks, assign_variables
from jgraph.plan.program.program import Program
from jgraph.plan.sharding.shard import shard
from jgraph.plan.show import plan_picture
from jgraph.plan.table import sharding_lines, table
from jgraph.plan.traffic import Held, Message, Piece, StepTraffic, pieces_of
from jgraph.view import markup
from jgraph.view.svg import Picture
from jgraph.view.units import bytes_text, count_text


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A graph, where its parts go, and the program that runs it.

    Attributes:
      graph: what was planned, over the shards of sharded variables.
      program: what the tasks run.
      placement: task of each equation of the graph; None for those that nothing
        needs and those that are repeated at each use.
      variable_tasks: task of each variable, by (container, name).
      segments: what is compiled, in the order in which it can run.
      edges: the messages of one step.
      prediction: what a step takes, where ``jg.auto`` placed it.
      pieces: gives those of the driver's step between hosts.
    """

    graph: Graph
    program: Program
    placement: tuple[TaskName | None, ...]
    variable_tasks: Mapping[VariableKey, TaskName]
    segments: tuple[SegmentInfo, ...]
    edges: tuple[Edge, ...]
    prediction: Prediction | None = None
    pieces: Callable[[], tuple[Piece, ...]] = field(
        default=tuple, repr=False, compare=False
    )

    @property
    def nbytes_per_step(self) -> int:
        """Bytes of values that one step sends between tasks."""
        return sum(edge.nbytes for edge in self.edges)

    def task_of(self, name: str) -> TaskName:
        """Returns the task of a variable.

        Raises:
          ConfigError: the graph uses no variable of that name, or several in different
            containers; ``variable_tasks`` has them by (container, name).

        Example:
          >>> import jax.numpy as jnp
          >>> import jgraph as jg
          >>> w = jg.Variable("w", jnp.zeros(3), device="/job:ps/task:0")
          >>> ps, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
          >>> graph = jg.function(lambda: w[...]).graph()
          >>> plan(graph, tasks=[ps, worker], driver=worker).task_of("w")
          '/job:ps/task:0'
        """
        keys = [key for key in self.variable_tasks if key[1] == name]
        if len(keys) != 1:
            names = ", ".join(sorted({name for _, name in self.variable_tasks})[:10])
            many = ", ".join(sorted(f"'{container}'" for container, _ in keys))
            raise ConfigError(
                f"variable '{name}' is in the containers {many}; ask "
                f"plan.variable_tasks[container, '{name}']"
                if keys
                else f"'{self.program.name}' uses no variable '{name}'; its variables "
                f"are {names or 'none'}"
            )
        return self.variable_tasks[keys[0]]

    def show(self, path: str | pathlib.Path | None = None) -> Picture:
        """Returns a picture: tasks, segments, variables, messages with their bytes.

        A click on a segment opens its equations, Escape goes back; the wheel zooms.

        Args:
          path: also write it there; ends in ``.html`` or ``.svg``.
        """
        picture = plan_picture(self.program, self.segments, self.graph)
        if path is not None:
            picture.save(path)
        return picture

    def traffic(self) -> StepTraffic:
        """Returns its messages, variables and work, without code."""
        work: dict[TaskName, Work] = {}
        for segment in self.segments:
            work[segment.task] = work.get(segment.task, Work()) + work_of(segment.body)
        return StepTraffic(
            name=self.program.name,
            driver=self.program.driver,
            variables=tuple(
                Held(v.name, self.variable_tasks[v.key], nbytes_of(v))
                for v in self.graph.variables
            ),
            messages=tuple(Message(e.src, e.dst, e.nbytes) for e in self.edges),
            work=work,
            pieces=self.pieces(),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes its traffic, from which ``jgraph simulate`` predicts other clusters.

        Raises:
          ConfigError: a place that cannot be written.
        """
        self.traffic().save(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> StepTraffic:
        """Reads what ``save`` wrote: the traffic, as code is not in it.

        Raises:
          ConfigError: there is no such file, or no plan in it.
        """
        return StepTraffic.load(path)

    def _repr_html_(self) -> str:
        return self.show()._repr_html_() + markup.lines(str(self))

    def __str__(self) -> str:
        specs = self.graph.variables
        title = (
            f"plan '{self.program.name}', driver {self.program.driver}: "
            f"{count_text(len(self.segments), 'segment')} on "
            f"{count_text(len(self.program.partitions), 'task')}, "
            f"{bytes_text(self.nbytes_per_step)} per step"
        )
        homes = [(v, self.variable_tasks[v.key]) for v in specs]
        text = table(title, homes, self.segments, self.edges)
        notes = [*sharding_lines(self.graph), *self.graph.notes]
        if any(type_.symbols for _, type_ in self.program.feeds):
            notes.append(f"bytes are those of sizes of {ASSUMED_SIZE} for each name")
        lines = [] if self.prediction is None else [str(self.prediction)]
        return "\n".join([text, *lines, *notes])

    def __repr__(self) -> str:
        return str(self).split("\n", 1)[0]


@uncollected()
def plan(
    graph: Graph,
    *,
    tasks: Sequence[TaskName],
    driver: TaskName,
    default: DeviceSpec | None = None,
    variable_tasks: Mapping[VariableKey, TaskName] | None = None,
    platforms: Mapping[TaskName, tuple[str, ...]] | None = None,
    soft_placement: bool = False,
    also_for: Sequence[str] = (),
    auto: AutoPlanner | None = None,
    one_host: bool = False,
) -> Plan:
    """Places a graph on tasks, cuts it, and compiles it to a program.

    Args:
      graph: what to run.
      tasks: canonical names of the cluster's tasks.
      driver: the task where feeds enter and fetches leave.
      default: outermost device scope: completes partial device specs of its own job,
        and is where things go that nothing else decides (``driver`` if unset).
      variable_tasks: tasks of variables by key; they win over the variables' own.
      platforms: kinds of device per task; ``("cpu",)`` if unset.
      soft_placement: an operation that asks for a kind of device that its task does
        not have runs on the one that it has.
      also_for: kinds of device that all segments are exported for, beside those of
        their tasks.
      auto: places what nobody has placed, by predicted time and memory; if unset,
        that is done by bytes on the wire.
      one_host: all tasks are on one host, where large values do not travel while
        segments compute: what handles them wants the same cores.

    Raises:
      UnknownDeviceError: a device names a job or task that is not in ``tasks``, or a
        kind of device that its task does not compute on.
      PlacementError: an operation cannot live where it was put.
      NotExportableError: JAX cannot export an operation.
      MemoryLimitError: ``auto`` has limits of memory, and nothing keeps them.
    """
    where = Tasks(tuple(tasks), driver, default or DeviceSpec())
    if driver not in where.names:
        raise UnknownDeviceError(
            f"the driver '{driver}' is not one of the tasks {', '.join(tasks)}",
            device=driver,
        )
    check(graph, where.names)
    flow = analyze(shard(graph))
    graph = flow.graph
    prediction = None
    if auto is not None:
        arranged = auto.arrange(flow, where, variable_tasks or {})
        prediction, variable_tasks = arranged.prediction, arranged.variable_tasks
        graph = arranged.graph
        flow = replace(flow, graph=graph)
    homes = assign_variables(
        graph.variables,
        where,
        variable_tasks or {},
        together=state_groups(flow),
        near=companions(flow),
    )
    known = {v.key: task for v, task in zip(graph.variables, homes, strict=True)}
    graph = with_resolved_stamps(graph, {**(variable_tasks or {}), **known})
    flow = replace(flow, graph=graph)
    placed = place(flow, where, homes)
    if not soft_placement:
        for i, task in placed.items():
            check_device(graph, i, task, (platforms or {}).get(task))
    kinds = {
        task: tuple(dict.fromkeys([*(platforms or {}).get(task, ("cpu",)), *also_for]))
        for task in where.names
    }
    notes = *graph.notes, *lost_updates(flow, placed)
    segmentation = partial(cut, flow, placed, driver)
    assembler = Assembler(segmentation(buckets=not one_host), driver, kinds)
    program = assembler.program()
    return Plan(
        graph=replace(graph, notes=notes),
        program=program,
        placement=tuple(placed.get(i) for i in range(len(graph.equations))),
        variable_tasks=known,
        segments=tuple(assembler.segments),
        edges=tuple(assembler.edges),
        prediction=prediction,
        pieces=lambda: pieces_of(segmentation(buckets=True), driver),
    )
