"""Input pipeline of a replica loop: requests leases, prefetches batches, reports.

Nothing here is on the path of a step: the next batches are read, and the next leases
held, while the step before is still computed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias, final

from jgraph.clock import Clock
from jgraph.cluster.fed_data import FedReader
from jgraph.cluster.loop_messages import deal_of, dealt_of
from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch
from jgraph.coordination.data.slots import Lease, Piece, SlotPlan
from jgraph.coordination.data.stock import Stock
from jgraph.coordination.liveness.master_lease import LeaseTracker
from jgraph.errors import (
    ClusterUnreachableError,
    DeadlineError,
    JGError,
    TaskLostError,
)
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.cost import Cost
from jgraph.runtime.data.batches import LeasedBatches, Reader
from jgraph.server.loops.master_lease import MasterLease
from jgraph.server.steps.task_host import TaskHost

_UNANSWERED: Final = (ClusterUnreachableError, DeadlineError, TaskLostError)
# Batches read and waiting; their memory is a few batches.
_READY = 2
# Leases in memory, where all batches of one are read together.
_FETCHED = 2


@final
@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch, and its number: the same whoever trains on it, and whenever.

    It is of ``pieces`` batches of the plan, and has the number of the first.
    """

    number: int
    fields: dict[str, Any]
    pieces: int = 1


Read: TypeAlias = NumberedBatch | BaseException | None
Taken: TypeAlias = Callable[[Read], None]
Ask: TypeAlias = Callable[[int, int, bool, int], Awaitable[pb.DataDeal]]
"""Asks the master: (batches done, wanted, nothing held, received)."""


@final
class BatchReader:
    """Reads batches of leases, in threads or from the client.

    Args:
      plan: the slots.
      reader: where the examples are; of a ``FedReader`` the loop ends, as if all were
        done, when the client says that there are no more.
      shell: threads for reading.
      feeds: by name of a field, the feed that it is for; else that of the same name.
      replica: whose batches they are.
    """

    def __init__(
        self,
        plan: SlotPlan,
        reader: Reader | FedReader,
        shell: TaskHost,
        feeds: Mapping[str, str] | None = None,
        replica: int = 0,
    ) -> None:
        self._plan = plan
        self._order = BatchOrder(plan)
        self._source = (
            reader
            if isinstance(reader, FedReader)
            else LeasedBatches(reader, plan, replica)
        )
        self._shell = shell
        self._feeds = feeds or {}
        self._cost = Cost(kind="read")
        # A hundredth of that, which need not wait for a thread.
        self._cost_of_cutting = Cost(kind="read")

    def read(self, lease: Lease, index: int, then: Taken) -> None:
        """Calls ``then`` with a batch, an error, or None if the client has no more."""
        source = self._source
        if isinstance(source, FedReader):
            want = partial(self._want, source, lease, index, then)
            self._shell.submit(lambda: self._plan.where(lease, index), want, self._cost)
        else:
            cost = self._cost_of_cutting if source.has_read(lease) else self._cost
            self._shell.submit(
                lambda: self._numbered(lease, index, source.read(lease, index)),
                then,
                cost,
            )

    def dealt(self, deal: pb.DataDeal) -> Sequence[Lease]:
        """Returns what an answer deals.

        Raises:
          MalformedMessageError: it is more than there is.
        """
        return dealt_of(deal, self._order)

    def is_due(self, lease: Lease) -> bool:
        """Whether a lease is to be fetched before its batches are read."""
        source = self._source
        if isinstance(source, FedReader):
            return False
        return source.by_lease and not source.has_read(lease)

    def fetch(self, lease: Lease, then: Callable[[BaseException | None], None]) -> None:
        """Reads all batches of a lease into memory, then calls ``then``."""
        source = self._source
        assert isinstance(source, LeasedBatches)  # else none is due
        self._shell.submit(partial(source.fetch, lease), then, self._cost)

    def read_together(self, leases: Sequence[Lease], most: int, then: Taken) -> None:
        """Calls ``then`` with all batches of these leases as one, or an error.

        Args:
          leases: of ``most`` batches at most.
          most: the arrays have room for so many.
          then: called once.
        """
        source, first = self._source, leases[0]
        assert isinstance(source, LeasedBatches)  # the client refuses others

        def read() -> NumberedBatch:
            fields = source.read_together(leases, most)
            batch = self._numbered(first, first.first, fields)
            return replace(batch, pieces=sum(lease.batches for lease in leases))

        self._shell.submit(read, then, self._cost)

    def close(self) -> None:
        """Wants nothing more of the client."""
        if isinstance(self._source, FedReader):
            self._source.withdraw()

    def _numbered(
        self, lease: Lease, index: int, fields: Mapping[str, Any]
    ) -> NumberedBatch:
        number = self._plan.number(lease.epoch, lease.slot, index)
        feeds = {self._feeds.get(name, name): a for name, a in fields.items()}
        return NumberedBatch(number, feeds)

    def _want(
        self,
        fed: FedReader,
        lease: Lease,
        index: int,
        then: Taken,
        pieces: list[Piece] | BaseException,
    ) -> None:
        """Wants a batch of the client, whose place in the data is known by now."""
        if isinstance(pieces, BaseException):
            then(pieces)
            return

        def came(fields: dict[str, Any] | BaseException | None) -> None:
            if fields is None or isinstance(fields, BaseException):
                then(fields)
            else:
                then(self._numbered(lease, index, fields))

        (piece,) = pieces  # what only the client can read is one part
        batch = self._plan.number(lease.epoch, lease.slot, index)
        fed.want(piece.part, piece.rows, batch, came)


@final
class _Progress:
    """What of the batches that were dealt to a loop is done, in their order.

    Attributes:
      done: batches whose steps are done, and those of all before them.
    """

    def __init__(self) -> None:
        self.done = 0
        self._acknowledged: set[int] = set()  # later than the oldest that is not
        self._reported = 0  # of those that are done
        self._unreported: deque[Lease] = deque()

    def deal(self, leases: Iterable[Lease]) -> None:
        self._unreported.extend(leases)

    def acknowledge(self, number: int) -> None:
        self._acknowledged.add(number)
        while self.done in self._acknowledged:
            self._acknowledged.remove(self.done)
            self.done += 1

    def report(self) -> list[Lease]:
        """Returns which batches are done of those that it has not returned before."""
        done: list[Lease] = []
        while self._reported < self.done:
            ready, rest = self._unreported.popleft().cut(self.done - self._reported)
            self._reported += ready.batches
            done.append(ready)
            if rest is not None:
                self._unreported.appendleft(rest)
        return done


@final
class _LeaseQueue:
    """Leases of which one batch is read after the other, fetched before their turn.

    Args:
      reader: fetches them.
      go_on: called when one is fetched, or cannot be.
    """

    def __init__(self, reader: BatchReader, go_on: Callable[[], None]) -> None:
        self._reader = reader
        self._go_on = go_on
        self._leases: deque[Lease] = deque()
        self._index = 0  # in the first one
        self._fetching: Lease | None = None
        self._damaged: Lease | None = None  # could not be fetched: its read says why
        self._has_new = False  # nobody has looked yet whether they are to be fetched

    def extend(self, leases: Iterable[Lease]) -> None:
        self._leases.extend(leases)
        self._has_new = True

    def clear(self) -> None:
        self._leases.clear()

    def next(self) -> tuple[Lease, int] | None:
        """Returns the batch that is read next, if it can be read now."""
        if not self._leases or self._leases[0] is self._fetching:
            return None
        lease = self._leases[0]
        index = lease.first + self._index
        self._index += 1
        if self._index == lease.batches:
            self._leases.popleft()
            self._index = 0
            self._has_new = True
        return lease, index

    def fetch_ahead(self) -> None:
        """Fetches the lease that is read, and while that is, the one after it.

        What a lease takes is so spread over the steps of the one before.
        """
        if not self._has_new or self._fetching is not None:
            return
        for lease in islice(self._leases, _FETCHED):
            if lease is self._damaged:
                return
            if self._reader.is_due(lease):
                self._fetching = lease
                self._reader.fetch(lease, partial(self._fetch_over, lease))
                return
        self._has_new = False

    def _fetch_over(self, lease: Lease, error: BaseException | None) -> None:
        self._fetching = None
        if error is not None:
            self._damaged = lease
        self._go_on()


@final
class DataFeed:
    """Gives batches to a loop until the master says that all are done.

    Args:
      reader: reads them.
      ask: asks for leases.
      clock: measures how fast batches go.
      supervised: asks again where an answer does not come, and gives no batch while
        none came for too long; else that is an error.
      pieces: all batches of one answer are given as one, of so many at most; 0: each is
        given by itself.
    """

    def __init__(
        self,
        reader: BatchReader,
        ask: Ask,
        clock: Clock,
        *,
        supervised: bool = False,
        pieces: int = 0,
    ) -> None:
        self._reader = reader
        self._ask = ask
        self._clock = clock
        self._pieces = pieces
        self._leases = _LeaseQueue(reader, self._go_on)
        self._together: deque[Sequence[Lease]] = deque()
        self._ready: deque[NumberedBatch] = deque()
        self._held = 0  # in leases, being read, and ready
        self._reading = False
        self._waiting: Taken | None = None
        self._error: BaseException | None = None
        self._over = self._dry = self._ended = False
        self._stock = Stock(clock.now())
        self._progress = _Progress()
        self._taken = 0
        self._received = 0
        self._lease = MasterLease(
            partial(self._ask_master, 0, idle=False),
            LeaseTracker(clock.now()),
            clock,
            self._fail,
            is_silence=lambda error: supervised and _is_silence(error),
        )
        if supervised:
            self._lease.begin()

    @property
    def done(self) -> int:
        """Batches whose steps are done, in the order in which they were dealt."""
        return self._progress.done

    def take(self, then: Taken) -> None:
        """Calls ``then`` with the next batch, an error, or None after the last one."""
        self._waiting = then
        self._go_on()

    def acknowledge(self, taken: int) -> None:
        """Says that the step of batch number ``taken``, counted as taken, is done."""
        self._progress.acknowledge(taken)
        if self._waiting is not None:
            self._go_on()

    def take_done(self) -> list[Lease]:
        """Returns which batches are done of those that it has not returned before.

        Given in pieces, they are known to who deals.
        """
        return [] if self._pieces else self._progress.report()

    def close(self) -> None:
        """Asks and reads no more."""
        self._over = True
        self._waiting = None
        self._leases.clear()
        self._together.clear()
        self._reader.close()
        self._lease.close()

    def _go_on(self) -> None:
        if self._waiting is None:
            pass
        elif self._ready and not self._lease.has_ended:
            then, self._waiting = self._waiting, None
            self._taken += 1
            self._held -= 1
            then(self._ready.popleft())
        elif self._error is not None or (self._over and not self._held):
            then, self._waiting = self._waiting, None
            then(self._error)
        # After the step has been started, and what the one before sends has left:
        # neither waits for this.
        asyncio.get_running_loop().call_soon(self._read_ahead)
        self._ask_ahead()

    # ------------------------------------------------------------ reading

    def _read_ahead(self) -> None:
        if self._reading:
            return
        self._leases.fetch_ahead()
        if len(self._ready) >= _READY:
            return
        if self._together:
            self._reading = True
            leases = self._together.popleft()
            self._reader.read_together(leases, self._pieces, self._read_over)
            return
        if (batch := self._leases.next()) is not None:
            self._reading = True
            self._reader.read(*batch, self._read_over)

    def _read_over(self, read: Read) -> None:
        self._reading = False
        if isinstance(read, BaseException):
            self._fail(read)
            return
        if read is None:
            self._over = self._ended = True
            self._leases.clear()
            self._held = len(self._ready)
        else:
            self._ready.append(read)
        self._go_on()

    # ------------------------------------------------------------ asking

    def _ask_ahead(self) -> None:
        if self._lease.asks or self._over or self._error is not None:
            return
        idle = not self._held and self.done == self._taken
        if idle or (not self._dry and self._held < self._stock.least):
            self._stock.learn(self._taken, self._clock.now())
            self._ask_master(max(1, self._stock.enough - self._held), idle=idle)

    def _ask_master(self, wanted: int, *, idle: bool) -> None:
        question = lambda: self._ask(self.done, wanted, idle, self._received)
        self._lease.ask(question, partial(self._take_deal, wanted))

    def _take_deal(self, wanted: int, deal: pb.DataDeal) -> None:
        self._over = self._over or deal.over
        try:
            leases = [] if self._ended else self._reader.dealt(deal)
        except JGError as error:
            self._fail(error)
            return
        if wanted:
            self._dry = not leases  # asking again at once would give nothing either
        if self._pieces:
            self._together.extend([leases] if leases else [])
            batches = min(1, len(leases))
        else:
            self._leases.extend(leases)
            self._progress.deal(leases)
            batches = sum(lease.batches for lease in leases)
        self._held += batches
        self._received += batches
        self._go_on()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._go_on()


def _is_silence(error: JGError) -> bool:
    return isinstance(error, _UNANSWERED) and "address" in error.details


def deal_alone(dispatch: Dispatch) -> Ask:
    """Returns what to ask where one loop has data of its own and no master deals."""

    async def ask(done: int, batches: int, idle: bool, _: int) -> pb.DataDeal:
        (answer,) = dispatch.handle(Asked("", done, batches, idle), 0.0)
        return deal_of(answer.leases if isinstance(answer, Deal) else None)

    return ask
