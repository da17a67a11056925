"""Evaluations of one run: on the evaluator task if there is one, else here."""

import contextvars
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, final

from jgraph.errors import ClusterError, JGError

_LOG = logging.getLogger("jgraph.evaluate")


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """The state that was evaluated: values of all variables, the tree, the position."""

    values: Sequence[Any]
    tree: Any
    position: Mapping[str, Any] | None


@final
@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of a copy of the model with ``step`` updates, and the copy if kept."""

    step: int
    values: Mapping[str, float]
    copy: Copy | None = field(default=None, repr=False)


T = TypeVar("T")

Evaluate: TypeAlias = Callable[[], Evaluation]
"""Evaluates a copy of the model as it is now."""

EvaluateHalted: TypeAlias = Callable[[Callable[[], bool]], Evaluation]
"""Likewise while loops stand still. It is given what lets them go on, once the copy is
there, and returns whether they stood still until then."""


@final
class Evaluations:
    """Evaluates when told to; used by one thread.

    The evaluator task is asked in a thread of its own, for one evaluation at a time.
    Requests that come meanwhile become one more, of the model as it then is.
    After the first error of the evaluator task, which is logged, this process does it.

    Args:
      here: evaluates in this process.
      evaluator_task: evaluates elsewhere; its waits have deadlines of their own.
      halted: evaluates here what loops that stand still have.

    Example:
      >>> evaluations = Evaluations(lambda: Evaluation(10, {"loss": 0.5}))
      >>> evaluations.begin()
      >>> evaluations.take()
      [Evaluation(step=10, values={'loss': 0.5})]
      >>> evaluations.begin()  # the same copy, which is told once
      >>> evaluations.finish(10)
      []
    """

    def __init__(
        self,
        here: Evaluate,
        evaluator_task: Evaluate | None = None,
        halted: EvaluateHalted | None = None,
    ) -> None:
        self._here: Evaluate | None = here
        self._halted = halted
        self._evaluator_task = evaluator_task
        self._under_way: Future[Evaluation] | None = None
        self._again = False
        self._results: list[Evaluation] = []
        self._newest: int | None = None

    @property
    def are_here(self) -> bool:
        """Whether this process evaluates, and so needs the whole model."""
        return self._evaluator_task is None

    def begin(self) -> None:
        """Evaluates the model of now, or of a little later."""
        if self._evaluator_task is None:
            self._evaluate_here()
        elif self._under_way is None:
            self._under_way = in_thread(self._evaluator_task, "jgraph-evaluate")
        else:
            self._again = True

    def begin_halted(self, go_on: Callable[[], bool]) -> None:
        """Evaluates the model that loops have which stand still, until ``go_on``.

        Not if they do not stand still, or do not answer: a run finds out by itself what
        was lost.
        """
        if self._halted is None:
            go_on()
            return
        try:
            self._note(self._halted(go_on))
        except ClusterError as error:
            _LOG.info("not evaluated now: %s", error)

    def take(self) -> list[Evaluation]:
        """Returns what was evaluated since the last call."""
        if self._under_way is not None and self._under_way.done():
            again, self._again = self._again, False
            self._settle(self._under_way)
            if again and self._evaluator_task is not None:
                self.begin()
        results, self._results = self._results, []
        return results

    def finish(self, step: int) -> list[Evaluation]:
        """Evaluates what came out, if that was not done, and returns what is left.

        Args:
          step: updates applied in the end.
        """
        self._again = False
        self._wait()
        if self._newest is None or self._newest < step:
            self.begin()
            self._wait()
        return self.take()

    def _wait(self) -> None:
        if self._under_way is not None:
            wait([self._under_way])
            self._settle(self._under_way)

    def _settle(self, future: Future[Evaluation]) -> None:
        self._under_way = None
        error = future.exception()
        if error is None:
            self._note(future.result())
            return
        self._evaluator_task = None
        try:
            self._evaluate_here()
        except JGError as also:
            self._here = None
            _LOG.warning(
                "the evaluator task failed (%s), and so did this client (%s); the run "
                "is not evaluated from now on",
                *(error, also),
            )
        else:
            _LOG.warning(
                "the evaluator task failed; this client evaluates from now on: %s",
                error,
            )

    def _evaluate_here(self) -> None:
        if self._here is not None:
            self._note(self._here())

    def _note(self, evaluation: Evaluation) -> None:
        if evaluation.step == self._newest:
            return  # the same copy again: a fast run was over before it was evaluated
        self._results.append(evaluation)
        self._newest = evaluation.step


def in_thread(fn: Callable[[], T], name: str) -> Future[T]:
    """Calls a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # noqa: BLE001  # told by whoever asks
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()
    return future
