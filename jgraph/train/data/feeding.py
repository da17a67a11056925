"""Client-fed data: sends batches read in this process to workers on request."""

import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Final, final

from jgraph.client.cluster import Cluster
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S, bulk_timeout_s
from jgraph.cluster.fed_data import WAIT_S, Wanted, about, wanted_in
from jgraph.errors import (
    ClusterBusyError,
    ClusterUnreachableError,
    DeadlineError,
    InternalError,
    JGError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame
from jgraph.runtime.data.batches import Array, Field, Reader
from jgraph.train.data.shares import Shares

_AGAIN_S: Final = 0.5
_PASSING: Final = (
    ClusterBusyError,
    ClusterUnreachableError,
    DeadlineError,
    TaskLostError,
)


@final
class Feeding:
    """Gives workers what they want of a reader of this process, until it is closed.

    A thread for each worker asks what that wants, and sends it with the next question.
    What was asked for is sent again where the answer did not come; the worker drops
    what it has.

    Args:
      cluster: of the workers.
      name: of the data set there.
      reader: of this process.
      feeds: names of the fields there, in the order of those of the reader.
      shares: of an iterable: gives workers in step their batches in its order; else a
        batch goes to the worker that asks first.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        reader: Reader,
        feeds: Sequence[str],
        shares: Shares | None = None,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._reader = reader
        self._shares = shares
        self._fields: dict[str, Field] = dict(
            zip(feeds, reader.fields.values(), strict=True)
        )
        self._lock = threading.Lock()
        self._turns: dict[TaskName, threading.Event] = {}  # set: the thread is to end
        self._asking: set[concurrent.futures.Future[Frame]] = set()
        self.is_over = False
        """Whether a worker was told that there is no more."""
        self.error: JGError | None = None
        """Why the reader gives no more."""

    def begin(self, worker: TaskName) -> None:
        """Makes the data set on a worker, and feeds it.

        Raises:
          JGError: the worker does not answer.
        """
        shuffle = self._reader.shuffle
        facts = about(self._fields, self._reader.parts, shuffle)
        order = pb.FeedData(name=self._name, about=facts)
        address = self._cluster.spec.address(worker)
        self._cluster.call("FeedData", frame(feed_data=order), to=address)
        turn = threading.Event()
        with self._lock:
            if (before := self._turns.pop(worker, None)) is not None:
                before.set()
            self._turns[worker] = turn
        threading.Thread(
            target=self._feed, args=(worker, turn), name="jgraph-feed", daemon=True
        ).start()

    def close(self) -> None:
        """Feeds no more; does not wait for what the reader is at."""
        with self._lock:
            for turn in self._turns.values():
                turn.set()
            for future in self._asking:
                future.cancel()

    def _feed(self, worker: TaskName, turn: threading.Event) -> None:
        address = self._cluster.spec.address(worker)
        answer = frame(feed_data=pb.FeedData(name=self._name))
        while not turn.is_set():
            nbytes = sum(tensor.nbytes for tensor in answer.tensors)
            limit_s = WAIT_S + CONTROL_S + bulk_timeout_s(nbytes)
            try:
                reply = self._ask(address, answer, limit_s, turn)
            except _PASSING:
                turn.wait(_AGAIN_S)
                continue
            except (JGError, concurrent.futures.CancelledError):
                return  # closed, or the worker was started again
            answer = self._answer(wanted_in(reply))

    def _ask(
        self, address: str, answer: Frame, limit_s: float, turn: threading.Event
    ) -> Frame:
        with self._lock:
            if turn.is_set():
                raise concurrent.futures.CancelledError
            ask = self._cluster.transport.ask(
                address, "FeedData", answer, timeout_s=limit_s
            )
            future = event_loop.start(ask)
            self._asking.add(future)
        try:
            return future.result()
        finally:
            with self._lock:
                self._asking.discard(future)

    def _answer(self, request: Wanted) -> Frame:
        order = pb.FeedData(name=self._name, number=request.number)
        if not request.number:
            return frame(feed_data=order)
        try:
            fields = self._read(request)
        except EOFError:
            self.is_over = order.over = True
        except Exception as error:  # noqa: BLE001  # ends the run, and is told there
            failure = error if isinstance(error, JGError) else InternalError(str(error))
            self.error = self.error or failure
            order.error.CopyFrom(to_status(failure))
        else:
            return frame(feed_data=order, tensors=list(fields.values()))
        return frame(feed_data=order)

    def _read(self, request: Wanted) -> dict[str, Array]:
        if self._shares is not None:
            return self._shares.read(request.batch)
        return self._reader.read(request.part, request.rows)
