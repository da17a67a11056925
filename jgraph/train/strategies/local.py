"""Training in this process: the whole step is one XLA program, state stays in place."""

import math
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from jgraph.clock import Clock, SystemClock
from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch, Progressed
from jgraph.coordination.step.finite import FiniteCheck
from jgraph.errors import JGError
from jgraph.graph.graph import Graph, eval_graph
from jgraph.runtime.data.batches import Array, LeasedBatches
from jgraph.train.data.data import Dataset
from jgraph.train.privacy.options import Privacy, check_privacy
from jgraph.train.run.members import RunMembers
from jgraph.train.run.rounds import Rounds
from jgraph.train.state.local_state import LocalState
from jgraph.train.state.runner import (
    Chunk,
    Order,
    Position,
    Staleness,
    position_in,
    stack,
)
from jgraph.train.step.applied import IdCheck, id_check_of, split
from jgraph.train.step.train_step import TrainStep
from jgraph.view import markup

# JAX dispatches without waiting. More steps in flight than this gain nothing and hold
# the memory of their batches.
_IN_FLIGHT = 16
_ASK_FOR = 64


@final
@dataclass(frozen=True, slots=True)
class Local:
    """Train in this process, without a cluster.

    Args:
      privacy: hides what each example adds, see ``Privacy``.

    Raises:
      ConfigError: a privacy of another unit.

    Example:
      >>> Local()
      Local(privacy=None)
    """

    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        check_privacy(self.privacy, "Local", "example")

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(slots=True)
class _Compiled:
    graph: Graph
    names: list[str]
    step: Callable[..., tuple[list[Any], list[Any]]]
    finite: FiniteCheck | None
    ids: IdCheck | None


@final
class LocalRunner:
    """Runs the graph of a step as one jitted function with donated variables."""

    def __init__(self, step: TrainStep, clock: Clock | None = None) -> None:
        self._step = step
        self._clock = clock or SystemClock()
        self.state = LocalState(step)
        self._compiled: dict[Any, _Compiled] = {}
        self._last: _Compiled | None = None
        self._dispatch: Dispatch | None = None
        self._first = 0  # updates applied before the run
        self._refusal: JGError | None = None  # of a batch, which ends the run

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """See ``Runner.prepare``."""
        batch = dataset.step_avals(batch_size)
        key = f"{batch} {dataset.note}"
        if key not in self._compiled:
            graph = dataset.noted(self._step.graph(batch))
            names = self._step.metric_names(graph)

            def step(values: list[Any], *feeds: Any) -> tuple[list[Any], list[Any]]:
                return eval_graph(graph, values, feeds)

            # Ahead of time: errors, and JAX's settings, are those of the caller's
            # thread, whichever thread runs the steps.
            jit_step = jax.jit(step, donate_argnums=0)
            lowering = jit_step.lower(self.state.arrays, *(f.aval for f in graph.feeds))
            finite = self._step.finite_check(graph)
            ids = id_check_of(self._step, batch)
            run = lowering.compile()
            self._compiled[key] = _Compiled(graph, names, run, finite, ids)
        self._last = self._compiled[key]

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """See ``Runner.run``."""
        self.prepare(order.dataset, order.batch_size)
        assert self._last is not None
        self._first, self._refusal = self.state.global_step(), None
        dispatch = self._deal_from(order, self._first)
        try:
            yield from self._steps(order, self._last, dispatch)
            if self._refusal is not None:
                raise self._refusal
        finally:
            self.state.position, self._dispatch = dispatch.state(), None

    def _steps(
        self, order: Order, compiled: _Compiled, dispatch: Dispatch
    ) -> Generator[Chunk, None, None]:
        first, now = self._first, self._clock.now
        all_feeds = self._feeds(order, compiled, dispatch)
        start_s = report_s = now()
        gathering = 0.0
        outputs: list[tuple[int, float, list[Any]]] = []
        recent: deque[list[Any]] = deque(maxlen=_IN_FLIGHT)
        finite = compiled.finite
        for number in range(first, first + order.steps):
            ask_s = now()
            feeds = next(all_feeds, None)
            if feeds is None:
                break  # there is no more data, or this batch has an id without a row
            gathering += now() - ask_s
            out = self._one(compiled, feeds)
            if finite is None:
                dispatch.handle(Progressed("", number - first + 1), 0.0)
            time = now()
            outputs.append((number, time - start_s, out))
            if len(recent) == _IN_FLIGHT:
                recent[0][0].block_until_ready()
                if finite is not None and not (
                    np.asarray(recent[0][finite.fetch]).all()
                ):
                    break  # those that follow it change nothing
            recent.append(out)
            is_due = any((number + 1) % every == 0 for every in order.boundaries)
            if is_due or time - report_s >= order.report_every_s:
                yield from self._told(compiled, outputs, gathering, now() - report_s)
                outputs, report_s, gathering = [], now(), 0.0
            if order.stop.is_set():
                break
        if outputs:
            yield from self._told(compiled, outputs, gathering, now() - report_s)

    def _told(
        self,
        compiled: _Compiled,
        outputs: list[tuple[int, float, list[Any]]],
        gathering: float,
        duration_s: float,
    ) -> Generator[Chunk, None, None]:
        """Yields the steps that were applied.

        Raises:
          JGError: one was not, as it did not pass a check.
        """
        chunk = _chunk(outputs, compiled.names, gathering, duration_s)
        good, error = split(chunk, compiled.finite)
        assert self._dispatch is not None  # run has set it
        if len(good):
            count = int(good.steps[-1]) + 1 - self._first
            self._dispatch.handle(Progressed("", count), 0.0)
            yield good
        if error is not None:
            raise error

    def _deal_from(self, order: Order, first: int) -> Dispatch:
        """Goes on in the data; what deals it is also where it is."""
        plan = order.dataset.plan(order.batch_size, order.seed)
        position = position_in(plan, self.position(), first)
        self._dispatch = Dispatch(
            plan, budget=order.steps, workers=1, position=position
        )
        return self._dispatch

    def _feeds(
        self, order: Order, compiled: _Compiled, dispatch: Dispatch
    ) -> Iterator[list[Any]]:
        """Yields what each step takes, up to a batch that none may take.

        The ids of a batch are looked at before the step on the batch before it begins.
        JAX computes in the order of calls: behind that step, what the look sees would
        be there only when the step is done, and the next could not be called meanwhile.
        """
        ids, replica = compiled.ids, np.int32(0)
        batches = enumerate(self._batches(order, dispatch), self._first)
        if ids is None:
            for number, batch in batches:
                yield [*batch, np.int32(number), replica]
            return
        looks = (
            (number, batch, ids.look(np.int32(number), replica, *batch))
            for number, batch in batches
        )
        ahead = next(looks, None)
        while ahead is not None:
            (number, batch, bad_ids), ahead = ahead, next(looks, None)
            self._refusal = ids.error(bad_ids, number)
            if self._refusal is not None:
                return
            yield [*batch, np.int32(number), replica]

    def _batches(self, order: Order, dispatch: Dispatch) -> Iterator[Iterable[Array]]:
        reader = LeasedBatches(order.dataset.reader(), dispatch.plan)
        count = 0
        while count < order.steps:
            # What is done is told when it is known to be applied.
            (deal,) = dispatch.handle(Asked("", 0, _ASK_FOR), 0.0)
            assert isinstance(deal, Deal)  # the budget is that of the loop
            for lease in deal.leases:
                for index in range(lease.first, lease.first + lease.batches):
                    try:
                        fields = reader.read(lease, index)
                    except EOFError:
                        return
                    yield fields.values()
                    count += 1

    def _one(self, compiled: _Compiled, feeds: list[Any]) -> list[Any]:
        if self._step.private is not None:
            shape = compiled.graph.feeds[-1].aval.shape
            bits = secrets.token_bytes(4 * math.prod(shape))
            feeds.append(np.frombuffer(bits, np.uint32).reshape(shape))
        with self.state.lock:
            out, self.state.arrays = compiled.step(self.state.arrays, *feeds)
        return out

    def position(self) -> Position:
        """See ``Runner.position``."""
        dispatch = self._dispatch
        return self.state.position if dispatch is None else dispatch.state()

    def members(self) -> RunMembers:
        """See ``Runner.members``."""
        return RunMembers()

    def rounds(self) -> Rounds:
        """See ``Runner.rounds``."""
        return Rounds()

    def staleness(self) -> Staleness:
        """See ``Runner.staleness``."""
        return {}  # every gradient is of the newest values

    def plan(self) -> Any:
        """Returns the graph of the step: all of it runs here."""
        return None if self._last is None else self._last.graph


def _chunk(
    outputs: list[tuple[int, float, list[Any]]],
    names: list[str],
    gathering: float,
    duration_s: float,
) -> Chunk:
    numbers, seconds, rows = zip(*outputs, strict=True)
    return Chunk(
        replica=0,
        steps=np.asarray(numbers, np.int64),
        seconds=np.asarray(seconds, np.float64),
        metrics=stack(rows, names),
        times={"input": gathering, "compute": duration_s - gathering},
    )
