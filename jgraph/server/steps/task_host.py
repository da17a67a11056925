"""Task host of the step executor: threads for its work, transport for its values."""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import numpy as np

from jgraph import _compat
from jgraph.graph.ir import TaskName
from jgraph.plan.program.row_values import put_together
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.cost import Cost, available_cores, runs_at_once
from jgraph.runtime.rendezvous import StepKey
from jgraph.server.process_setup import give_back_memory
from jgraph.server.steps.messages import StepMessages
from jgraph.server.task_context import TaskContext

T = TypeVar("T")

_LARGE_BYTES = 1 << 20
_LATER_S = (2e-3, 50e-3)
_SHORT_S = 100e-6
"""What computes for longer at once does not keep messages waiting."""


@final
class TaskHost:
    """Runs an executor's work in threads and posts its values.

    XLA releases the GIL and uses its own threads; these only wait for it, so there are
    a few more of them than cores.

    Attributes:
      now: returns monotonic time in seconds.
      messages: what leaves for other tasks.
      computes_at_once: whether the event loop's thread computes now.
    """

    def __init__(self, context: TaskContext) -> None:
        self._context = context
        self.messages = StepMessages(context.transport, self._is_crowded)
        self._clock = context.clock
        self.now = context.clock.now
        self._loop = asyncio.get_running_loop()
        self._hand_over = Cost()
        self._counting = threading.Lock()
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._cores = available_cores()
        self.computes_at_once = False
        self._joining: set[asyncio.Task[np.ndarray[Any, Any] | None]] = set()
        self._pool = ThreadPoolExecutor(
            max_workers=4 + self._cores, thread_name_prefix="jgraph-work"
        )

    def _is_crowded(self) -> bool:
        return self._context.tasks_here > self._cores

    def busy(self) -> dict[str, float]:
        """Returns the CPU seconds of work by kind; XLA's own threads do not count."""
        with self._counting:
            return dict(self._busy)

    def submit(
        self,
        work: Callable[[], T],
        done: Callable[[T | BaseException], None],
        cost: Cost,
    ) -> None:
        """Runs ``work`` in a thread, then ``done`` on the event loop.

        Work known to take less than handing it to a thread and back runs at once. On
        a busy machine handing over takes longer, as threads wait for a core.
        """
        if runs_at_once(cost, self._hand_over, self._cores):
            if cost.seconds is not None and cost.seconds > _SHORT_S:
                self.messages.post()
            self.computes_at_once = True
            result, began, seconds, _ = self._perform(work, cost)
            self.computes_at_once = False
            cost.learn(seconds)
            cost.began_s, cost.ended_s = began, began + seconds
            done(result)
        else:
            self._pool.submit(self._perform_there, work, done, cost, self._clock.now())

    def _perform(
        self, work: Callable[[], T], cost: Cost
    ) -> tuple[T | BaseException, float, float, float]:
        """Returns what came of it, when it began, its seconds, and those on a core."""
        result: T | BaseException
        began, used = self._clock.now(), time.thread_time()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # becomes the step's outcome
            result = error
        seconds, used = self._clock.now() - began, time.thread_time() - used
        with self._counting:
            self._busy[cost.kind] += used
        return result, began, seconds, used

    def _perform_there(
        self,
        work: Callable[[], T],
        done: Callable[[T | BaseException], None],
        cost: Cost,
        asked: float,
    ) -> None:
        came = self._clock.now() - asked
        result, began, seconds, used = self._perform(work, cost)
        ended = self._clock.now()

        def back() -> None:
            cost.learn_in_thread(seconds, used)
            cost.began_s, cost.ended_s = began, began + seconds
            self._hand_over.learn(came + self._clock.now() - ended)
            done(result)

        self._loop.call_soon_threadsafe(back)

    def join(
        self,
        parts: Sequence[np.ndarray[Any, Any]],
        done: Callable[[np.ndarray[Any, Any] | BaseException], None],
        cost: Cost,
    ) -> None:
        """Puts arrays one after the other: mapped so, or else by a copy in a thread."""
        began = self._clock.now()

        def is_over(joining: "asyncio.Task[np.ndarray[Any, Any] | None]") -> None:
            self._joining.discard(joining)
            if joining.cancelled():
                return
            outcome = joining.exception() or joining.result()
            if outcome is None:
                self.submit(lambda: put_together(parts), done, cost)
            else:
                cost.began_s, cost.ended_s = began, self._clock.now()
                done(outcome)

        joining = self._loop.create_task(self._context.transport.join(parts))
        self._joining.add(joining)
        joining.add_done_callback(is_over)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread and waits for it."""
        return await self._loop.run_in_executor(self._pool, work)

    def send(
        self,
        dst: TaskName,
        step: StepKey,
        key: str,
        values: Sequence[np.ndarray[Any, Any]],
    ) -> None:
        """Posts values of a step to another task."""
        nbytes = sum(value.nbytes for value in values)
        if nbytes >= _LARGE_BYTES:
            # What they were computed from goes back to its sender: it is the memory
            # for the answer. XLA lets go of some of it a little later.
            _compat.release_arguments()
            for later_s in _LATER_S:
                self._loop.call_later(later_s, _compat.release_arguments)
        header = pb.Values(handle=step[0], step_id=step[1], key=key)
        self.messages.values(dst, header, tuple(values))

    def withdraw(self, step: StepKey) -> None:
        """Drops the values of a failed step that have not left yet."""
        self.messages.withdraw(step)

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` after that time, on the event loop."""
        self._loop.call_later(seconds, callback)

    async def give_back_memory(self) -> None:
        """For when work is over that comes once, see ``process_setup``."""
        await self._context.transport.give_back_memory()
        await asyncio.to_thread(give_back_memory)

    def close(self) -> None:
        """Lets running work end and takes no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
