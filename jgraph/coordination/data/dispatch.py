"""Data dispatch: leases of batches to workers; the batches of lost ones dealt again.

Batches wait in the order of the epoch. A worker asks for some ahead of need and gets
leases, pieces of slots; a fast one asks more often. It tells how many batches it has
done since it began, counted in the order in which it got them, so a report that is lost
or comes twice does no harm. When it is lost, what it held and had not told goes to
others: batches that it may have done already, which are counted as dealt again.

Every batch that a lost worker held becomes a suspect. What it held is dealt again piece
by piece, each alone, and batch by batch once that ended another worker and who else was
lost is known: so the third death has one cause only, whose name the run then ends with.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import DEATHS, Lease, SlotPlan
from jgraph.errors import JGError, TaskLostError

LEASE_S = 120.0
SETTLE_S = 1.0  # after a loss, until those that came with it are known too
_MOST = 4096  # batches of one answer, whatever is asked for


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """A worker wants ``batches`` more; it has done ``done`` since it began.

    With ``idle`` it holds nothing and waits for the answer. ``received``: how many have
    reached it since it began; what was dealt beyond is dealt to it once more, as the
    answer was lost. None: all.
    """

    worker: str
    done: int
    batches: int
    idle: bool = False
    received: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Progressed:
    """A worker has done ``done`` batches since it began."""

    worker: str
    done: int


@final
@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker went away, whatever it was doing."""

    worker: str


@final
@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker ended in order and gives back what it holds."""

    worker: str


@final
@dataclass(frozen=True, slots=True)
class LinkLost:
    """A worker lives and ended its loop, as another task is gone or not reached.

    What it held may be under way still, and is dealt again; it ended nobody.
    """

    worker: str


@final
@dataclass(frozen=True, slots=True)
class WaitEnded:
    """An idle worker waits no longer for its answer; it may ask again."""

    worker: str


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; look for leases that have passed."""


Event: TypeAlias = (
    Asked | Progressed | WorkerLost | WorkerEnded | LinkLost | WaitEnded | TimePassed
)


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """Answer a worker with these leases; none: it has enough for now."""

    worker: str
    leases: tuple[Lease, ...]


@final
@dataclass(frozen=True, slots=True)
class Over:
    """Answer a worker that all batches of the run are done."""

    worker: str


@final
@dataclass(frozen=True, slots=True)
class Expel:
    """End the loop of a worker that was silent for too long."""

    worker: str
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Fail:
    """End the run: the data ends workers."""

    error: JGError


Instruction: TypeAlias = Deal | Over | Expel | Fail


@final
@dataclass(slots=True)
class _Worker:
    heard_at: float
    done: int = 0
    held: deque[int] = field(default_factory=deque)  # places, as it got them


@final
class Dispatch:
    """State machine of the data of one run.

    Args:
      plan: the slots.
      budget: batches of this run.
      workers: how many take part; nobody gets more than its share of what is left.
      lease_s: a worker that holds batches and is silent for so long is lost.
      skip: batches to leave out at the beginning.
      position: where to begin, from ``state``, in place of ``skip``. One of other data
        or another batch size tells only the epoch: the next one is begun.

    Example:
      >>> from jgraph.coordination.data.slots import Part
      >>> plan = SlotPlan([Part("data", 8)], batch_size=2, seed=0)
      >>> dispatch = Dispatch(plan, budget=2, workers=1)
      >>> dispatch.handle(Asked("a", done=0, batches=1), now=0.0)
      [Deal(worker='a', leases=(Lease(epoch=0, slot=0, first=0, batches=1),))]
    """

    def __init__(
        self,
        plan: SlotPlan,
        *,
        budget: int,
        workers: int,
        lease_s: float = LEASE_S,
        skip: int = 0,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self._book = BatchBook(plan, position, skip=skip, budget=budget)
        # Of earlier workers. Who deals to itself could not wait until it holds nothing.
        self._book.deaths.clear()
        self._shares = 2 * max(1, workers)
        self._lease_s = lease_s
        self._workers: dict[str, _Worker] = {}
        self._waiting: dict[str, int] = {}  # batches of the answers still to come
        self._former: set[str] = set()
        self._now = self._lost_at = 0.0
        self._failed = False

    @property
    def done(self) -> int:
        """Batches done, over all runs."""
        return self._book.done

    @property
    def again(self) -> int:
        """Batches dealt again, over all runs; each may have been done twice."""
        return self._book.again

    def state(self) -> dict[str, Any]:
        """Returns the position as plain data; what workers hold counts as not done."""
        return self._book.position()

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event at time ``now`` (seconds); returns what to do."""
        self._now = now
        if self._failed:
            return []
        match event:
            case Asked():
                return self._asked(event)
            case Progressed(name, done):
                self._progress(name, done)
                return self._answer_waiting()
            case WorkerLost(name):
                return [*self._lose(name), *self._answer_waiting()]
            case WorkerEnded(name):
                self._give_back(name)
                return self._answer_waiting()
            case LinkLost(name):
                self._book.again += self._give_back(name)
                return self._answer_waiting()
            case WaitEnded(name):
                self._waiting.pop(name, None)
                return []
            case TimePassed():
                return self._expire()

    def _asked(self, asked: Asked) -> list[Instruction]:
        name = asked.worker
        if name in self._former:
            return [Expel(name, _silent(name, self._lease_s))]
        worker = self._workers.setdefault(name, _Worker(self._now))
        self._progress(name, asked.done)
        if asked.received is not None:
            arrived = max(0, asked.received - worker.done)
            if missing := list(worker.held)[arrived:]:
                return [Deal(name, self._leases(missing)), *self._answer_waiting()]
        if asked.idle:
            self._waiting[name] = max(1, asked.batches)
            return self._answer_waiting()
        leases = self._deal(worker, asked.batches)
        return [Deal(name, leases), *self._answer_waiting()]

    def _progress(self, name: str, done: int) -> None:
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.heard_at = self._now
        count = max(0, min(done - worker.done, len(worker.held)))
        self._book.finish([worker.held.popleft() for _ in range(count)])
        worker.done += count

    def _answer_waiting(self) -> list[Instruction]:
        if not self._book.remaining:
            over, self._waiting = self._waiting, {}
            return [Over(name) for name in over]
        answers: list[Instruction] = []
        # However many wait, where nothing is to be dealt none is looked at.
        for name, batches in list(self._waiting.items()) if self._book.undealt else ():
            if leases := self._deal(self._workers[name], batches):
                del self._waiting[name]
                answers.append(Deal(name, leases))
        return answers

    # ------------------------------------------------------------ losses

    def _lose(self, name: str) -> list[Instruction]:
        held, self._lost_at = self._forget(name), self._now
        self._book.again += len(held)
        error = self._book.lose(held)
        if error is None:
            return []
        self._failed = True
        return [Fail(error)]

    def _give_back(self, name: str) -> int:
        held = self._forget(name)
        for place in held:
            self._book.give_back(place)
        return len(held)

    def _forget(self, name: str) -> Collection[int]:
        """Forgets a worker, which must not come back; returns what it held."""
        self._former.add(name)
        self._waiting.pop(name, None)
        worker = self._workers.pop(name, None)
        return () if worker is None else worker.held

    def _expire(self) -> list[Instruction]:
        late = [
            name
            for name, worker in self._workers.items()
            if worker.held and self._now - worker.heard_at >= self._lease_s
        ]
        instructions: list[Instruction] = []
        for name in late:
            instructions.append(Expel(name, _silent(name, self._lease_s)))
            instructions.extend(self._lose(name))
        return [*instructions, *self._answer_waiting()]

    # ------------------------------------------------------------ dealing

    def _deal(self, worker: _Worker, batches: int) -> tuple[Lease, ...]:
        # A share of what is left: at the end of a run the pieces become small, so
        # that all workers end together.
        wanted = min(batches, _MOST, -(-self._book.undealt // self._shares))
        places: list[int] = []
        while len(places) < wanted:
            taken = self._take(worker, wanted - len(places))
            if not taken:
                break
            places += taken
            worker.held += taken
        return self._leases(places)

    def _leases(self, places: Iterable[int]) -> tuple[Lease, ...]:
        return tuple(self._book.order.leases(places))

    def _take(self, worker: _Worker, most: int) -> Sequence[int]:
        """Deals new batches, one given back, or suspects of one slot; or none."""
        book, deaths = self._book, self._book.deaths
        if deaths and any(place in deaths for place in worker.held):
            return []
        if not book.given_back:
            return book.take_new(most)
        settled = self._now >= self._lost_at + SETTLE_S
        limit = 0 if worker.held else DEATHS - 1 if settled else DEATHS - 2
        place = next((p for p in book.given_back if deaths[p] <= limit), None)
        if place is None:
            # Suspects wait: the run, and an epoch, ends with all its batches.
            is_end = book.end % self.plan.batches_per_epoch == 0
            if is_end or len(book.given_back) >= book.undealt:
                return []
            return [book.take(book.end)]
        count = deaths[place]
        if count in (0, DEATHS - 1):
            return [book.take(place)]
        alike = self._leases(p for p in book.given_back if deaths[p] == count)
        return [book.take(place + n) for n in range(min(most, alike[0].batches))]


def _silent(worker: str, lease_s: float) -> TaskLostError:
    return TaskLostError(
        f"worker loop '{worker}' was silent for {lease_s:g} s while it held data; its "
        "batches were given to others"
    )
