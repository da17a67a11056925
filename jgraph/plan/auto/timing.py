"""Step simulator: jobs on tasks, messages on links, and when each of them ends.

Each task runs one job at a time, in the order of the list as far as what they take is
there. Tasks of one host slow each other down while they compute. What a job makes
leaves for each other task in one message when the job is done; a link carries one
message at a time, while tasks compute on.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph.errors import InternalError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import CostModel

_STARTS = -1


@final
@dataclass(frozen=True, slots=True)
class Job:
    """What a task computes at one go.

    Attributes:
      task: where.
      seconds: it takes while its host does nothing else.
      takes: numbers of the values that it needs.
      makes: numbers of the values that it makes.
      nbytes: memory that it needs beside values that lie ready.
      after: jobs, by their place in the list, that must be done before.
    """

    task: TaskName
    seconds: float
    takes: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    nbytes: int = 0
    after: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Jobs:
    """A step: its jobs, each after those whose values it takes.

    Attributes:
      jobs: in an order in which they can run.
      nbytes: of each value.
      feeds: values that the driver has from the beginning.
      fetches: values that the driver must have in the end.
      driver: the task where steps begin and end.
    """

    jobs: tuple[Job, ...]
    nbytes: Mapping[int, int]
    feeds: tuple[int, ...]
    fetches: tuple[int, ...]
    driver: TaskName


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """When everything of a step happens, in seconds since its client asks for it.

    Attributes:
      seconds: until the client has the fetches.
      begins: of each job.
      ends: of each job.
      sent: bytes between tasks.
      peaks: the most bytes of values at a time, by task.
    """

    seconds: float
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    sent: int
    peaks: Mapping[TaskName, int]


def timing_of(step: Jobs, model: CostModel) -> Timing:
    """Returns when the jobs of a step run.

    Args:
      step: what runs.
      model: of tasks and links; knows all of the jobs'.
    """
    run = _Run(step, model)
    run.begin()
    while run.advance():
        pass
    return run.result()


@final
@dataclass(slots=True)
class _Run:
    step: Jobs
    model: CostModel
    now: float = 0.0
    missing: list[int] = field(default_factory=list)
    waiting: dict[tuple[int, TaskName], list[int]] = field(default_factory=dict)
    followers: dict[int, list[int]] = field(default_factory=dict)
    ready: dict[TaskName, list[int]] = field(default_factory=dict)
    running: dict[TaskName, tuple[int, float]] = field(default_factory=dict)
    arrivals: list[tuple[float, TaskName, int, tuple[int, ...]]] = field(
        default_factory=list
    )
    link_free: dict[tuple[TaskName, TaskName], float] = field(default_factory=dict)
    users: dict[int, set[TaskName]] = field(default_factory=dict)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    uses: Counter[tuple[int, TaskName]] = field(default_factory=Counter)
    resident: Counter[TaskName] = field(default_factory=Counter)
    peak: dict[TaskName, int] = field(default_factory=dict)
    sent: int = 0
    last: float = 0.0

    def begin(self) -> None:
        step = self.step
        self.begins = [0.0] * len(step.jobs)
        self.ends = [0.0] * len(step.jobs)
        for index, job in enumerate(step.jobs):
            self.missing.append(len(job.takes) + len(job.after) + 1)
            for value in job.takes:
                self.waiting.setdefault((value, job.task), []).append(index)
                self.users.setdefault(value, set()).add(job.task)
                self.uses[value, job.task] += 1
            for first in job.after:
                self.followers.setdefault(first, []).append(index)
        for value in step.fetches:
            self.users.setdefault(value, set()).add(step.driver)
            self.uses[value, step.driver] += 1
        fed = sum(step.nbytes[v] for v in step.feeds)
        self.now = self.model.call.seconds(fed)
        starting: dict[TaskName, list[int]] = {step.driver: []}
        for index, job in enumerate(step.jobs):
            starting.setdefault(job.task, []).append(index)
        for task, jobs in starting.items():
            self.peak[task] = 0
            delay = self.model.link(step.driver, task).latency_s
            entry = (self.now + delay, task, _STARTS, tuple(jobs))
            heapq.heappush(self.arrivals, entry)
        self._publish(step.driver, step.feeds)

    def advance(self) -> bool:
        """Goes on to the next end of a job or arrival; False when all is over."""
        for task, jobs in self.ready.items():
            if jobs and task not in self.running:
                self._start(task, heapq.heappop(jobs))
        ends = [
            (self.now + remaining * self._slowdown(task), task)
            for task, (_, remaining) in self.running.items()
        ]
        end = min(ends, default=None)
        if end is None and not self.arrivals:
            return False
        arrives = bool(self.arrivals) and (end is None or self.arrivals[0][0] <= end[0])
        then = self.arrivals[0][0] if arrives or end is None else end[0]
        self._compute_until(then)
        if arrives:
            _, task, kind, found = heapq.heappop(self.arrivals)
            self._arrive(task, kind, found)
        elif end is not None:
            self._end(end[1])
        self.last = max(self.last, self.now)
        return True

    def result(self) -> Timing:
        if any(self.missing):
            raise InternalError("jobs of a step wait for each other for ever")
        step = self.step
        tasks = {job.task for job in step.jobs}
        ends = [self._report_time(task) for task in tasks] or [self.now]
        back = sum(step.nbytes[v] for v in step.fetches) / self.model.call.bytes_per_s
        return Timing(
            max([self.last, *ends]) + back,
            tuple(self.begins),
            tuple(self.ends),
            self.sent,
            dict(self.peak),
        )

    def _report_time(self, task: TaskName) -> float:
        """Returns when the driver hears that a task is done."""
        ended = max(
            end
            for end, job in zip(self.ends, self.step.jobs, strict=True)
            if job.task == task
        )
        return ended + self.model.link(task, self.step.driver).latency_s

    def _slowdown(self, task: TaskName) -> float:
        host = self.model.tasks[task].host
        busy = sum(self.model.tasks[other].host == host for other in self.running)
        return self.model.slowdown(host, busy)

    def _compute_until(self, then: float) -> None:
        passed = max(0.0, then - self.now)
        slow = {task: self._slowdown(task) for task in self.running}
        for task, (job, remaining) in self.running.items():
            self.running[task] = job, max(0.0, remaining - passed / slow[task])
        self.now = max(self.now, then)

    def _start(self, task: TaskName, index: int) -> None:
        job = self.step.jobs[index]
        self.running[task] = index, job.seconds
        self.begins[index] = self.now
        input_nbytes = sum(self.step.nbytes[v] for v in job.takes)
        now = self.resident[task] - input_nbytes + max(input_nbytes, job.nbytes)
        self.peak[task] = max(self.peak[task], now)

    def _end(self, task: TaskName) -> None:
        index, _ = self.running.pop(task)
        job = self.step.jobs[index]
        self.ends[index] = self.now
        self._publish(task, job.makes)
        for value in job.takes:
            self._used(value, task)
        for follower in self.followers.get(index, ()):
            self._count_down(follower)

    def _publish(self, task: TaskName, values: Sequence[int]) -> None:
        """Hands values to those of the task that wait, and sends them to others."""
        leaving: dict[TaskName, list[int]] = {}
        for value in values:
            for user in self.users.get(value, ()):
                if user == task:
                    self._hand_over(task, value)
                else:
                    leaving.setdefault(user, []).append(value)
        for dst in sorted(leaving):
            self._send(task, dst, tuple(leaving[dst]))

    def _send(self, src: TaskName, dst: TaskName, values: tuple[int, ...]) -> None:
        link = self.model.link(src, dst)
        nbytes = sum(self.step.nbytes[v] for v in values)
        self.sent += nbytes
        free = (
            max(self.now, self.link_free.get((src, dst), 0.0))
            + nbytes / link.bytes_per_s
        )
        self.link_free[src, dst] = free
        heapq.heappush(self.arrivals, (free + link.latency_s, dst, 0, values))

    def _arrive(self, task: TaskName, kind: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            if kind == _STARTS:
                self._count_down(number)
            else:
                self._hand_over(task, number)

    def _hand_over(self, task: TaskName, value: int) -> None:
        self.resident[task] += self.step.nbytes[value]
        self.peak[task] = max(self.peak[task], self.resident[task])
        for index in self.waiting.get((value, task), ()):
            self._count_down(index)

    def _used(self, value: int, task: TaskName) -> None:
        self.uses[value, task] -= 1
        if not self.uses[value, task]:
            self.resident[task] -= self.step.nbytes[value]

    def _count_down(self, index: int) -> None:
        self.missing[index] -= 1
        if not self.missing[index]:
            ready = self.ready.setdefault(self.step.jobs[index].task, [])
            heapq.heappush(ready, index)
