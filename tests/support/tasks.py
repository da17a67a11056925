"""Several tasks in one thread: executors joined by direct calls, work done at once."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.cost import Cost
from jgraph.runtime.executor import Outcome, StepTimes
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.task import TaskRuntime

T = TypeVar("T")


class Tasks:
    """Tasks whose messages wait in one queue until ``deliver_all``."""

    def __init__(self, *names: str) -> None:
        self.cache = CompileCache()
        self.runtimes: dict[str, TaskRuntime] = {}
        self.messages: deque[tuple[TaskName, StepKey, str, Sequence[Any]]] = deque()
        self.outcomes: dict[tuple[str, StepKey], Outcome] = {}
        self.threads: deque[Callable[[], None]] | None = None
        """Work that goes on in threads; None: work is done at once."""
        for name in names:
            self.runtimes[name] = TaskRuntime(TaskName(name), self, self.cache)

    def now(self) -> float:
        return 0.0

    def submit(
        self,
        work: Callable[[], T],
        done: Callable[[T | BaseException], None],
        cost: Cost,
    ) -> None:
        def thread() -> None:
            result: T | BaseException
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  # becomes the step's outcome
                result = error
            done(result)

        if self.threads is None:
            thread()
        else:
            self.threads.append(thread)

    def send(
        self,
        dst: TaskName,
        step: StepKey,
        key: str,
        values: Sequence[np.ndarray[Any, Any]],
    ) -> None:
        self.messages.append((dst, step, key, values))

    def join(
        self,
        parts: Sequence[np.ndarray[Any, Any]],
        done: Callable[[np.ndarray[Any, Any] | BaseException], None],
        cost: Cost,
    ) -> None:
        done(np.concatenate(parts))

    def withdraw(self, step: StepKey) -> None:
        self.messages = deque(m for m in self.messages if m[1] != step)

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        callback()

    def register(self, handle: str, program: Program) -> None:
        participants = [partition.task for partition in program.partitions]
        for task in participants:
            runtime = self.runtimes[task]
            runtime.register(handle, program, runtime.load(program), participants)

    def start(
        self,
        handle: str,
        step_id: int,
        feeds: Mapping[str, Any],
        *,
        ordered: bool = False,
        ahead: int = 0,
    ) -> StepKey:
        step = handle, step_id
        program = next(iter(self.runtimes.values())).program(handle)
        for partition in program.partitions:
            self.runtimes[partition.task].start_step(
                step,
                self._record(partition.task, step),
                feeds=feeds if partition.task == program.driver else None,
                ordered=ordered,
                ahead=ahead,
            )
        return step

    def _record(self, task: str, step: StepKey) -> Callable[[Outcome, StepTimes], None]:
        def record(outcome: Outcome, times: StepTimes) -> None:
            assert (task, step) not in self.outcomes
            self.outcomes[task, step] = outcome

        return record

    def deliver_one(self) -> None:
        dst, step, key, values = self.messages.popleft()
        self.runtimes[dst].deliver(step, key, values)

    def deliver_all(self) -> None:
        while self.messages:
            self.deliver_one()

    def run(self, handle: str, step_id: int, feeds: Mapping[str, Any]) -> list[Any]:
        step = self.start(handle, step_id, feeds)
        self.deliver_all()
        program = next(iter(self.runtimes.values())).program(handle)
        outcome = self.outcomes[program.driver, step]
        assert not isinstance(outcome, BaseException), outcome
        return outcome
