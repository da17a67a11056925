"""Pipeline schedules: the order of forward and backward passes on each task.

A batch is cut into microbatches. Each stage of a model does a forward and a backward
pass on each of them. A schedule is a table of passes, a row per task; stage ``s`` is on
the task of row ``s % rows``. A row is done from left to right, each pass as soon as
what it needs is there.

Sources: GPipe (Huang et al., 2019); 1F1B as PipeDream-flush (Narayanan et al., 2021,
"Memory-Efficient Pipeline-Parallel DNN Training"); interleaved (Narayanan et al., 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM").
"""

import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final, get_args

from jgraph.counts import is_count
from jgraph.errors import InternalError, PipelineError
from jgraph.view.bars import Bar, Lane, draw_bars
from jgraph.view.svg import Picture

_LETTERS = 88  # of a line of text

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "interleaved"]


@final
@dataclass(frozen=True, slots=True, order=True)
class Pass:
    """The forward or backward pass of one stage on one microbatch.

    Example:
      >>> str(Pass(2, 0, backward=True))
      'B0@2'
    """

    stage: int
    microbatch: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.microbatch}@{self.stage}"


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Who runs what, in which order; print it to see it in time.

    Attributes:
      name: of the rule that made it.
      stages: number of stages.
      microbatches: number of microbatches.
      rows: per task its passes, in order.
    """

    name: str
    stages: int
    microbatches: int
    rows: tuple[tuple[Pass, ...], ...]

    def row_of(self, stage: int) -> int:
        """Returns the number of the task that a stage is on."""
        return stage % len(self.rows)

    def needs(self, work: Pass) -> list[Pass]:
        """Returns the passes whose results a pass takes."""
        stage, microbatch = work.stage, work.microbatch
        if not work.backward:
            return [Pass(stage - 1, microbatch)] if stage else []
        found = [Pass(stage, microbatch)]
        if stage + 1 < self.stages:
            found.append(Pass(stage + 1, microbatch, backward=True))
        return found

    def most_held(self) -> list[int]:
        """Returns, per task, of how many passes it keeps activations at a time."""
        most = []
        for row in self.rows:
            held = peak = 0
            for work in row:
                held += -1 if work.backward else 1
                peak = max(peak, held)
            most.append(peak)
        return most

    def show(self, path: str | pathlib.Path | None = None) -> Picture:
        """Returns a picture of the schedule in time: a lane for each task.

        Args:
          path: also write it there; ends in ``.html`` or ``.svg``.

        Raises:
          ConfigError: another ending, or a place that cannot be written.

        Example:
          >>> schedule("1f1b", stages=2, tasks=2, microbatches=2).show().title
          '1f1b: 2 stages on 2 tasks, 2 microbatches, bubble 33.3%, at most 2 held'
        """
        picture = simulate(self).picture()
        if path is not None:
            picture.save(path)
        return picture

    def __str__(self) -> str:
        return simulate(self).text()

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule in time.

    Attributes:
      schedule: what was simulated.
      begins: when each pass begins, in the order of their beginnings.
      ends: when each pass ends.
    """

    schedule: Schedule
    begins: dict[Pass, float]
    ends: dict[Pass, float]

    @property
    def length(self) -> float:
        """Time from the first beginning to the last end."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The part of the tasks' time in which they wait."""
        busy = sum(self.ends[work] - begin for work, begin in self.begins.items())
        return 1 - busy / (self.length * len(self.schedule.rows))

    @property
    def headline(self) -> str:
        """The rule, the sizes, the bubble and the passes held, in one line."""
        schedule = self.schedule
        return (
            f"{schedule.name}: {schedule.stages} stages on {len(schedule.rows)} tasks, "
            f"{schedule.microbatches} microbatches, bubble {self.bubble:.1%}, "
            f"at most {max(schedule.most_held())} held"
        )

    def text(self) -> str:
        """Returns a table: a row per task, a column per unit of time.

        A table that is wider than 88 letters goes on below, from the time that is said.
        """
        width = max(len(str(work)) for work in self.ends) + 1
        columns = round(self.length)
        table = []
        for row in self.schedule.rows:
            cells = ["."] * columns
            for work in row:
                for at in range(round(self.begins[work]), round(self.ends[work])):
                    cells[at] = str(work)
            table.append(cells)
        number = len(str(len(table) - 1))
        most = max(1, (_LETTERS - number - 4) // width)
        lines = [self.headline]
        for first in range(0, columns, most):
            if first:
                lines.append(f"  from time {first} on:")
            lines += [
                f"  {task:>{number}}: "
                + "".join(c.ljust(width) for c in cells[first : first + most])
                for task, cells in enumerate(table)
            ]
        return "\n".join(line.rstrip() for line in lines)

    def picture(self) -> Picture:
        """Returns a chart: a lane for each task, a bar for each pass."""
        lanes = []
        for number, row in enumerate(self.schedule.rows):
            bars = tuple(
                Bar(
                    self.begins[work],
                    self.ends[work],
                    str(work),
                    f"{'backward' if work.backward else 'forward'} pass of stage "
                    f"{work.stage} on microbatch {work.microbatch}",
                    "backward" if work.backward else "forward",
                )
                for work in row
            )
            lanes.append(Lane(f"task {number}", (bars,)))
        return draw_bars(self.headline, "", lanes)


def schedule(name: str, *, stages: int, tasks: int, microbatches: int) -> Schedule:
    """Returns the table of a schedule.

    Args:
      name: ``"gpipe"``: all forward passes, then all backward passes. ``"1f1b"``: the
        same bubble, with activations of at most ``stages`` microbatches held.
        ``"interleaved"``: each task has ``stages / tasks`` stages, which divides the
        bubble by that number.
      stages: number of stages.
      tasks: number of tasks.
      microbatches: number of microbatches.

    Raises:
      PipelineError: no such schedule, or numbers that it cannot have.

    Example:
      >>> print(schedule("1f1b", stages=2, tasks=2, microbatches=2))
      1f1b: 2 stages on 2 tasks, 2 microbatches, bubble 33.3%, at most 2 held
        0: F0@0 F1@0 .    .    B0@0 B0@0 .    B1@0 B1@0
        1: .    F0@1 B0@1 B0@1 F1@1 B1@1 B1@1 .    .
    """
    _check(name, stages, tasks, microbatches)
    chunks = stages // tasks
    warmups: dict[str, Callable[[int], int]] = {
        "gpipe": lambda _: microbatches,
        "1f1b": lambda task: tasks - task,
        "interleaved": lambda task: 2 * (tasks - task - 1) + (chunks - 1) * tasks + 1,
    }
    rows = []
    for task in range(tasks):
        forwards = _forwards(task, tasks, chunks, microbatches)
        backwards = [
            Pass(task + tasks * (chunks - 1) - (p.stage - task), p.microbatch, True)
            for p in forwards
        ]
        rows.append(_alternate(forwards, backwards, warmups[name](task)))
    return Schedule(name, stages, microbatches, tuple(rows))


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    send: float = 0.0,
) -> Timeline:
    """Runs a schedule on a clock of its own.

    Args:
      schedule: the schedule.
      forward: time of a forward pass.
      backward: time of a backward pass.
      send: time from the end of a pass until another task has its result.

    Raises:
      InternalError: passes wait for each other.
    """
    run = _Run(schedule, forward, backward, send)
    while any(run.remaining):
        run.advance()
    order = sorted(run.begins, key=lambda p: (run.begins[p], schedule.row_of(p.stage)))
    return Timeline(schedule, {work: run.begins[work] for work in order}, run.ends)


@dataclass(slots=True)
class _Run:
    schedule: Schedule
    forward: float
    backward: float
    send: float
    remaining: list[list[Pass]] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    begins: dict[Pass, float] = field(default_factory=dict)
    ends: dict[Pass, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remaining = [list(reversed(row)) for row in self.schedule.rows]
        self.free = [0.0] * len(self.remaining)

    def advance(self) -> None:
        """Runs the next pass of every task that has what it needs."""
        ran = False
        for task, row in enumerate(self.remaining):
            while row and all(p in self.ends for p in self.schedule.needs(row[-1])):
                work = row.pop()
                there = [self._arrival(p, task) for p in self.schedule.needs(work)]
                begin = max([self.free[task], *there])
                took = self.backward if work.backward else self.forward
                self.begins[work] = begin
                self.ends[work] = self.free[task] = begin + took
                ran = True
        if not ran:
            stuck = ", ".join(str(row[-1]) for row in self.remaining if row)
            raise InternalError.of(
                f"passes of '{self.schedule.name}' that wait for ever ({stuck})"
            )

    def _arrival(self, work: Pass, task: int) -> float:
        away = self.schedule.row_of(work.stage) != task
        return self.ends[work] + (self.send if away else 0.0)


def _forwards(task: int, tasks: int, chunks: int, microbatches: int) -> list[Pass]:
    """Returns the forward passes of a task: ``tasks`` microbatches at a time.

    These go through all stages of the task before the next ones do.
    """
    return [
        Pass(task + tasks * chunk, microbatch)
        for first in range(0, microbatches, tasks)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + tasks, microbatches))
    ]


def _alternate(
    forwards: Sequence[Pass], backwards: Sequence[Pass], warmup: int
) -> tuple[Pass, ...]:
    """Returns ``warmup`` forward passes, then a backward and a forward one in turns."""
    row = list(forwards[:warmup])
    for number, work in enumerate(backwards):
        row.append(work)
        row.extend(forwards[warmup + number : warmup + number + 1])
    return tuple(row)


def _check(name: str, stages: int, tasks: int, microbatches: int) -> None:
    if name not in get_args(ScheduleName):
        raise PipelineError(
            f"schedule is {name!r}; there are 'gpipe', '1f1b' and 'interleaved'"
        )
    if stages < 1:
        raise PipelineError("a pipeline needs a stage; stages is empty")
    if not is_count(microbatches, 1):
        raise PipelineError(
            f"microbatches is {microbatches!r}; a batch is cut into 1 or more"
        )
    if tasks < 1:
        raise PipelineError("a pipeline needs a task; tasks is empty")
    if tasks > stages:
        raise PipelineError(
            f"{stages} stages cannot use {tasks} tasks; give at most one task per stage"
        )
    if name != "interleaved":
        if stages > tasks:
            raise PipelineError(
                f"'{name}' runs one stage on a task, and there are {stages} stages for "
                f"{tasks} tasks; give as many tasks, or schedule='interleaved'"
            )
    elif stages % tasks or microbatches % tasks:
        what, count = (
            ("stages", stages) if stages % tasks else ("microbatches", microbatches)
        )
        raise PipelineError(
            f"'interleaved' on {tasks} tasks needs {what} that {tasks} divides, and "
            f"{what} is {count}; give a multiple of {tasks}"
        )
