"""Inputs of the steps of a replica loop: a batch for each, kept until it is over."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.coordination.step.replica_loop import Event, StepFailed, StepNotStarted
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.compute_errors import as_error
from jgraph.server.loops.data_feed import DataFeed, NumberedBatch
from jgraph.server.loops.sum_part import SumPart


@final
@dataclass(slots=True)
class FedStep:
    """A step that has its batch, until it is over: one that is refused comes again.

    Attributes:
      feeds: by name.
      pieces: of which the batch is.
      wanted_s: when the step was to begin.
      started_s: when it did.
    """

    feeds: dict[str, Any]
    pieces: int
    wanted_s: float
    started_s: float = 0.0


@final
class StepInputs:
    """Gives each step of a loop its batch, in order, and again to one that is refused.

    Args:
      order: of the loop.
      feed: gives the batches.
      part: in secure sums; None: it has none.
      drive: begins a step that has its batch.
      take: takes the event that a step gets none.
    """

    def __init__(
        self,
        order: pb.RunLoop,
        feed: DataFeed,
        part: SumPart | None,
        drive: Callable[[int, FedStep], None],
        take: Callable[[Event], None],
    ) -> None:
        self._order = order
        self._feed = feed
        self._part = part
        self._drive, self._take = drive, take
        # Steps that wait for a batch, in order, and since when.
        self._unfed: deque[tuple[int, float]] = deque()
        self._is_taking = False
        self._fed: dict[int, FedStep] = {}
        self._numbers = {}
        if order.replica_feed:
            self._numbers[order.replica_feed] = np.asarray(order.replica, np.int32)

    def start(self, step: int, now: float) -> None:
        """Begins a step as soon as it has its batch."""
        if (fed := self._fed.get(step)) is not None:
            fed.wanted_s = now
            self._drive(step, fed)
        else:
            self._unfed.append((step, now))
            self._take_batch()

    def give_up(self, *, over: bool) -> None:
        """Gives up the steps that wait for a batch; with ``over`` there is no more."""
        while self._unfed:
            self._unfed.pop()
            self._take(StepNotStarted(over=over))

    def forget(self, step: int) -> None:
        """Drops the batch of a step that is over."""
        self._fed.pop(step, None)

    def close(self) -> None:
        """Takes no batch any more, and has no part in sums."""
        self._feed.close()
        if self._part is not None:
            self._part.close()

    def _take_batch(self) -> None:
        if self._unfed and not self._is_taking:
            self._is_taking = True
            self._feed.take(self._batch_ready)

    def _batch_ready(self, batch: NumberedBatch | BaseException | None) -> None:
        self._is_taking = False
        if not self._unfed:  # stopped meanwhile
            return
        step, wanted_s = self._unfed[0]
        match batch:
            case None:
                self.give_up(over=True)
            case NumberedBatch():
                self._unfed.popleft()
                feeds = self._feeds(step, batch)
                fed = self._fed[step] = FedStep(feeds, batch.pieces, wanted_s)
                self._drive(step, fed)
                self._take_batch()
            case error:
                task = TaskName(self._order.task)
                self._take(StepFailed(step, as_error(error, task)))

    def _feeds(self, step: int, batch: NumberedBatch) -> dict[str, Any]:
        feeds = {**batch.fields, **self._numbers}
        for name, value in [
            (self._order.step_feed, step),
            (self._order.batch_feed, batch.number),
            (self._order.pieces_feed, batch.pieces),
        ]:
            if name:
                feeds[name] = np.asarray(value, np.int32)
        if self._part is not None:
            feeds["mask"] = self._part.mask(batch.number)
        return feeds
