"""Runs on a cluster: what asynchronous and synchronous training have alike."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, final

from jgraph.client.runs.follower import RunFollower
from jgraph.client.runs.holds import DrainHolds
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.errors import JGError
from jgraph.train.data.data import Dataset
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position
from jgraph.train.strategies.prepared import Prepared
from jgraph.train.strategies.rejoin import Rejoin
from jgraph.train.strategies.workers import Workers, chunks_of, end_loops


@final
class RemoteRuns:
    """Prepares runs on a cluster, and looks after their workers.

    Args:
      state: what they change.
      make: given the types of a batch, traces and plans the step.
    """

    def __init__(self, state: RemoteState, make: Callable[[Any], Prepared]) -> None:
        self._state = state
        self.workers = Workers(state)
        self._make = make
        self._prepared: dict[str, Prepared] = {}
        self.last: Prepared | None = None
        """What was prepared last."""
        self.has_replaced = False
        """Workers, or their programs, since these were registered."""
        self._follower: RunFollower | None = None

    def prepare(self, dataset: Dataset, batch_size: int) -> Prepared:
        """Returns the step for such batches, made once per shape."""
        batch = dataset.avals(batch_size)
        key = f"{batch} {dataset.note}"
        if key not in self._prepared:
            made = self._make(batch)
            made.plan = replace(made.plan, graph=dataset.noted(made.plan.graph))
            self._prepared[key] = made
        self.last = self._prepared[key]
        return self.last

    def begin(
        self, order: Order, book: Callable[[], BatchBook] | None = None
    ) -> Prepared:
        """Makes ready all that a run needs: variables, programs, copies and data.

        Args:
          order: what to train.
          book: where the run begins, if its workers train in step.
        """
        prepared = self.prepare(order.dataset, order.batch_size)
        state, workers = self._state, self.workers.tasks
        with state.lock:
            state.initialize()
            if order.save_every and not order.detached:
                state.prepare_to_keep(anew=self.has_replaced)
            if not prepared.handles or self.has_replaced:
                programs = prepared.programs(workers)
                prepared.handles = state.session.register_all(programs)
                prepared.workers = dict(zip(prepared.handles, workers, strict=False))
                self.has_replaced = False
            self._keep_copies(prepared)
            if state.copies is not None:
                state.copies.admit(0, prepared.handles[: len(workers)])
                for number, handle in enumerate(prepared.handles[len(workers) :], 1):
                    state.copies.admit(number, [handle])
            self.workers.upload(prepared.graph, order, book)
        return prepared

    def _keep_copies(self, prepared: Prepared) -> None:
        # First: what counts contributions is copied with all that a ps holds.
        self._state.clear_residuals(prepared.graph)
        if self._state.copies is not None:
            programs = [prepared.plan.program, *prepared.on_ps]
            updates = len(prepared.on_ps) or None
            self._state.copies.open(programs, updates=updates)

    def inherit(self, old: RemoteState, position: Position) -> None:
        """See ``Runner.inherit``; ``position`` is that of the old one."""
        self._state.inherit(old, position)
        if self.last is not None:
            self._keep_copies(self.last)  # before the old ones go

    @contextmanager
    def under_way(
        self, admit: Callable[[int], None]
    ) -> Iterator[tuple[Rejoin, DrainHolds]]:
        """Looks after the tasks of a run while its loops go.

        Args:
          admit: lets the worker of a replica take part again; see ``Rejoin``.
        """
        rejoin = Rejoin(self._state.cluster, admit)
        self._state.is_training = True
        try:
            yield rejoin, self._state.hold()
        except JGError:
            self.workers.forget_data()
            raise
        finally:
            rejoin.close()
            self.workers.end_feeding()
            self._state.is_training = False

    def followed(
        self, run: RunFollower, prepared: Prepared
    ) -> Generator[Chunk, None, None]:
        """Yields what a run does that its master looks after; unread, it ends.

        Args:
          run: of this client.
          prepared: its step.
        """
        state, together = self._state, run.info.synchronous
        self._follower, state.is_training = run, True
        try:
            yield from chunks_of(run, prepared.names, together=together)
        except GeneratorExit:
            end_loops(run)
            raise
        finally:
            self._follower, state.is_training = None, False
            self.has_replaced = True  # its programs have other names by now
            with suppress(JGError):  # gone, and the run with it
                state.adopt(run.position())

    def position(self) -> Position:
        """Returns where in its data a run is that no loop of this client trains."""
        follower = self._follower
        return self._state.position if follower is None else follower.position()

    def admit(self, prepared: Prepared, order: Order, replica: int) -> None:
        """Gives the worker of a replica what it needs to take part again."""
        state, worker = self._state, self.workers.tasks[replica]
        program = prepared.programs(self.workers.tasks)[replica]
        (handle,) = state.session.register_all([program])
        if state.copies is not None:
            state.copies.admit(0, [handle])
        self.workers.renew(replica, prepared.graph, order.dataset)
        state.clear_residuals(prepared.graph, [replica])
        with state.lock:
            prepared.handles[replica] = handle
            prepared.workers[handle] = worker
