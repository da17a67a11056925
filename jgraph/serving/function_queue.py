"""Requests of one function on their way: put together, run, taken apart.

The shell of ``coordination.serving.batching`` and ``joining``: what is short runs on
the event loop, since a thread costs more, unless others should join it.
"""

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import numpy as np

from jgraph.clock import Clock, WallClock
from jgraph.coordination.serving.batching import (
    FULL,
    LARGE,
    Batching,
    Came,
    Event,
    Execute,
    Freed,
    Left,
    Limits,
    Piece,
    Refuse,
    Tick,
    WakeAt,
)
from jgraph.coordination.serving.joining import Joining
from jgraph.errors import (
    DeadlineError,
    JGError,
    MessageTooLargeError,
    ModelNotReadyError,
    NonFiniteError,
    OverloadedError,
)
from jgraph.serving.answering import NO_FACTS, NOBODY, Answered, Function
from jgraph.serving.exported_model import LoadedFunction
from jgraph.serving.signature import Array, TensorSpec, is_finite
from jgraph.serving.statistics import Statistics

LONG_S: Final = 0.02
"""What takes so long is no short execution that the machine held up."""
WARM_RUNS: Final = 3
"""Of each number of rows, after the first one, unless one is long."""


@final
@dataclass(slots=True)
class _Asked:
    """A request under way.

    Attributes:
      inputs: in the order of the function.
      rows: how many.
      came: when.
      answer: becomes its outputs.
      parts: answers of its pieces so far, by the first row.
      waited_s: until its first piece ran; None: it waits.
    """

    inputs: list[Array]
    rows: int
    came: float
    answer: "asyncio.Future[Answered]"
    parts: dict[int, Answered] = field(default_factory=dict)
    waited_s: float | None = None


@final
class FunctionQueue:
    """Answers requests to one function of a loaded version.

    Args:
      function: what to run.
      limits: what it takes at a time.
      statistics: where to count.
      clock: for deadlines.
      threads: where long executions run.
      refuses_nonfinite: answers with values that are not finite are errors.
    """

    def __init__(
        self,
        function: Function,
        limits: Limits,
        statistics: Statistics,
        clock: Clock,
        threads: Executor,
        *,
        refuses_nonfinite: bool = False,
    ) -> None:
        self._refuses_nonfinite = refuses_nonfinite
        self._function = function
        outputs = enumerate(function.signature.outputs)
        self._floats = [(n, spec.name) for n, spec in outputs if spec.is_float]
        """Places and names of outputs that may have values which are not finite."""
        self._limits = limits
        self._statistics = statistics
        self._clock = clock
        self._threads = threads
        self._wall = WallClock()
        self._machine = Batching(limits)
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._joining = Joining(limits)

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """What the signature of the function says of its outputs."""
        return self._function.signature.outputs

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return self._machine.queued_rows

    def warm(self, example: Sequence[Array]) -> None:
        """Runs the function for each number of rows that executions will have."""
        sizes = self._limits.buckets if self._limits.merges else (1,)
        for rows in sizes:
            inputs = list(example)
            if self._function.signature.is_batched:
                inputs = [np.repeat(one[:1], rows, axis=0) for one in example]
            self._try(inputs)
            for _ in range(WARM_RUNS):
                began_s = self._clock.now()
                self._try(inputs)
                took_s = self._clock.now() - began_s
                self._joining.took(rows, took_s)
                if took_s >= LONG_S:
                    break

    def _try(self, inputs: Sequence[Array]) -> None:
        if isinstance(self._function, LoadedFunction):
            self._function.checked_outputs(inputs)
        else:
            self._function.prepare(inputs)

    def at_once(
        self, inputs: list[Array], rows: int, deadline: float
    ) -> Answered | None:
        """Returns the answer for a request that need not wait; None for one that must.

        Raises:
          NonFiniteError: as the model's options say.
        """
        function = self._function
        if rows == 0:
            self._succeeded(rows, 0.0)
            outputs = [spec.empty() for spec in function.signature.outputs]
            if isinstance(function, LoadedFunction):
                return Answered(outputs)
            return Answered(outputs, function.facts)
        joining = self._joining
        if not (joining.runs_at_once(rows) and isinstance(function, LoadedFunction)):
            return None
        now = self._clock.now()
        if not self._machine.runs_at_once(rows, deadline, now):
            return None
        return self._computed(function, inputs, rows, now)

    @property
    def is_quick(self) -> bool:
        """Whether some requests need not wait."""
        return self._joining.runs_some_at_once

    async def answer(self, inputs: list[Array], rows: int, deadline: float) -> Answered:
        """Returns the answer for a request, with those of others where it waits.

        Raises:
          OverloadedError: too much waits already.
          MessageTooLargeError: it has more rows than may wait.
          DeadlineError: its deadline passed first.
        """
        if (soon := self.at_once(inputs, rows, deadline)) is not None:
            return soon
        now = self._clock.now()
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._asked[number] = asked = _Asked(inputs, rows, now, future)
        self._tell(Came(number, rows, deadline, now))
        try:
            answered = await asked.answer
        except (Exception, asyncio.CancelledError) as error:
            left_at = self._clock.now()
            if isinstance(error, Exception):
                code = getattr(error, "code", JGError.code)
                self._statistics.failed(code, left_at - now)
            # Also after an error: of a request that was cut, pieces may wait still.
            self._tell(Left(number, left_at))
            raise
        finally:
            del self._asked[number]
        self._succeeded(rows, self._clock.now() - now)
        return answered

    def _succeeded(self, rows: int, seconds: float) -> None:
        self._statistics.answered(rows, seconds, self._wall.now())

    def _computed(
        self, function: LoadedFunction, inputs: list[Array], rows: int, now: float
    ) -> Answered:
        """Returns the answer for a request that waits for no other, as it is."""
        statistics = self._statistics
        try:
            outputs = function(inputs)
            self._check_finite(outputs)
        except Exception as error:
            code = getattr(error, "code", JGError.code)
            statistics.failed(code, self._clock.now() - now)
            raise
        took_s = self._clock.now() - now
        self._joining.took(rows, took_s)
        self._joining.ran_at_once()
        statistics.ran_alone(rows, took_s, self._wall.now())
        return Answered(outputs, NO_FACTS, NOBODY)

    def _check_finite(self, outputs: Sequence[Array]) -> None:
        """Counts an answer with values that are not finite, or refuses it.

        Raises:
          NonFiniteError: the model's options say so.
        """
        for place, name in self._floats:
            if not is_finite(outputs[place]):
                self._statistics.nonfinite += 1
                if self._refuses_nonfinite:
                    raise NonFiniteError(
                        f"the output '{name}' has values that are not finite, and "
                        "this model answers with none; look at the inputs, or at the "
                        "version"
                    )
                return

    def _tell(self, event: Event) -> None:
        for instruction in self._machine.handle(event):
            match instruction:
                case Execute():
                    self._execute(instruction)
                case Refuse(request, why):
                    self._refuse(request, why)
                case WakeAt(at):
                    self._wake_at(at)

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(at - self._clock.now(), 0.0), self._woken, at)

    def _woken(self, at: float) -> None:
        self._timer = None
        self._tell(Tick(max(at, self._clock.now())))

    def _refuse(self, request: int, why: str) -> None:
        asked = self._asked.get(request)
        if asked is None or asked.answer.done():
            return
        limit = self._limits.max_queued_rows
        if why == FULL:
            wait_s = self._expected_wait_s()
            error: JGError = OverloadedError(
                f"{self.queued_rows} rows wait already, of {limit} that may; send the "
                f"request again in {wait_s} s",
                retry_after_s=wait_s,
            )
        elif why == LARGE:
            error = MessageTooLargeError(
                f"a request of {asked.rows} rows, and {limit} may wait; send fewer at "
                "a time"
            )
        else:
            error = DeadlineError(
                "the request's deadline passed before it could be computed; give it "
                "more time, or send fewer requests at a time"
            )
        asked.answer.set_exception(error)

    def _expected_wait_s(self) -> int:
        most = self._limits.max_rows
        took_s = self._joining.expected_s(most)
        return max(1, round(self.queued_rows / most * took_s / self._limits.slots))

    def _execute(self, run: Execute) -> None:
        began_s = self._clock.now()
        inputs = self._together(run)
        for piece in run.pieces:
            asked = self._asked[piece.request]
            if asked.waited_s is None:
                asked.waited_s = began_s - asked.came
                self._statistics.queue.add(asked.waited_s)
        ready = self._clock.now()
        self._statistics.compute_input.add(ready - began_s)
        loop, function = asyncio.get_running_loop(), self._function
        future: asyncio.Future[Answered] | asyncio.Future[tuple[list[Array], float]]
        if not isinstance(function, LoadedFunction):
            future = loop.create_task(function.answer(inputs))
        elif self._joining.runs_here(run.bucket):
            try:
                outputs: Answered | BaseException = Answered(function(inputs))
            except Exception as error:  # noqa: BLE001  # is told to whoever asked
                outputs = error
            self._done(run, self._clock.now() - ready, outputs)
            loop.call_soon(self._free, run.slot)
            return
        else:
            future = loop.run_in_executor(self._threads, self._timed, function, inputs)
        future.add_done_callback(partial(self._ended, run, ready))

    def _timed(
        self, function: LoadedFunction, inputs: Sequence[Array]
    ) -> tuple[list[Array], float]:
        """Returns the outputs, and how long they took, without the way to a thread."""
        began_s = self._clock.now()
        outputs = function(inputs)
        return outputs, self._clock.now() - began_s

    def _ended(
        self, run: Execute, began_s: float, future: "asyncio.Future[Any]"
    ) -> None:
        took_s = self._clock.now() - began_s
        answered: Answered | BaseException
        if future.cancelled():  # the server ends
            answered = ModelNotReadyError("this server is about to end; ask another")
        elif (error := future.exception()) is not None:
            answered = error
        else:
            found: Answered | tuple[list[Array], float] = future.result()
            if isinstance(found, tuple):
                outputs, took_s = found
                found = Answered(outputs)
            answered = found
        others = len(run.pieces) > 1 or self.queued_rows > 0
        self._joining.ran_aside(had_company=others)
        self._done(run, took_s, answered)
        self._free(run.slot)

    def _free(self, slot: int) -> None:
        self._tell(Freed(slot, self._clock.now()))

    def _together(self, run: Execute) -> list[Array]:
        """Returns the inputs of an execution; padded with the last row."""
        first = self._asked[run.pieces[0].request]
        if len(run.pieces) == 1 and first.rows == run.bucket:
            return first.inputs
        missing = run.bucket - sum(piece.rows for piece in run.pieces)
        together = []
        for place in range(len(first.inputs)):
            parts = [
                self._asked[one.request].inputs[place][one.first : one.first + one.rows]
                for one in run.pieces
            ]
            if missing:
                parts.append(np.repeat(parts[-1][-1:], missing, axis=0))
            together.append(np.concatenate(parts))
        return together

    def _done(
        self, run: Execute, took_s: float, answered: Answered | BaseException
    ) -> None:
        self._joining.took(run.bucket, took_s)
        self._statistics.executions += 1
        self._statistics.compute_infer.add(took_s)
        at = 0
        for piece in run.pieces:
            asked = self._asked.get(piece.request)
            if asked is not None and not asked.answer.done():
                if isinstance(answered, BaseException):
                    asked.answer.set_exception(answered)
                else:
                    self._give(asked, piece, answered, at)
            at += piece.rows

    def _give(self, asked: _Asked, piece: Piece, answered: Answered, at: int) -> None:
        if answered.refused:
            mine = sorted(n for n in answered.refused if at <= n < at + piece.rows)
            if mine:
                asked.answer.set_exception(answered.refused[mine[0]])
                return
        if not self._function.signature.is_batched:
            self._set(asked, answered)
            return
        outputs = [one[at : at + piece.rows] for one in answered.outputs]
        part = Answered(outputs, answered.facts)
        if piece.rows == asked.rows:
            self._set(asked, part)
            return
        asked.parts[piece.first] = part
        if sum(len(one.outputs[0]) for one in asked.parts.values()) == asked.rows:
            parts = [asked.parts[first].outputs for first in sorted(asked.parts)]
            whole = [np.concatenate(one) for one in zip(*parts, strict=True)]
            self._set(asked, Answered(whole, part.facts))

    def _set(self, asked: _Asked, answered: Answered) -> None:
        try:
            self._check_finite(answered.outputs)
        except NonFiniteError as error:
            asked.answer.set_exception(error)
        else:
            asked.answer.set_result(answered)
