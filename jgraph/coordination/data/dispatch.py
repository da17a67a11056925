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

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

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
class WaitEnded:
    """An idle worker waits no longer for its answer; it may ask again."""

    worker: str


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened; look for leases that have passed."""


Event: TypeAlias = (
    Asked | Progressed | WorkerLost | WorkerEnded | WaitEnded | TimePassed
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
    held: deque[Lease] = field(default_factory=deque)
    wanted: int = 0  # it waits for an answer with so many

    @property
    def batches(self) -> int:
        return sum(lease.batches for lease in self.held)

    def last(self, batches: int) -> tuple[Lease, ...]:
        """Returns the last so many that it holds."""
        before, last = self.batches - batches, list[Lease]()
        for lease in self.held:
            rest = lease if before <= 0 else lease.cut(before)[1]
            before -= lease.batches
            if rest is not None:
                last.append(rest)
        return tuple(last)


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
        self._left = budget  # not dealt
        self._shares = 2 * max(1, workers)
        self._lease_s = lease_s
        self._workers: dict[str, _Worker] = {}
        self._gone: set[str] = set()
        self._deaths: Counter[tuple[int, int, int]] = Counter()  # by batch
        self._now = self._lost_at = 0.0
        self._failed = False
        self._returned: deque[Lease] = deque()
        self._epoch = self._index = self._first = 0
        self.done = 0
        """Batches done, over all runs."""
        self.again = 0
        """Batches dealt again, over all runs; each may have been done twice."""
        if position is None:
            self._skip(skip)
        else:
            self._restore(position)
        self._order = plan.order(self._epoch)

    # ------------------------------------------------------------ position

    def state(self) -> dict[str, Any]:
        """Returns the position as plain data: where the next batch is, and holes.

        What workers hold counts as not done.
        """
        held = [lease for worker in self._workers.values() for lease in worker.held]
        unfinished = sorted(
            [lease.epoch, lease.slot, lease.first, lease.batches]
            for lease in [*held, *self._returned]
        )
        return {
            "plan": self.plan.to_dict(),
            "epoch": self._epoch,
            "index": self._index,
            "first": self._first,
            "unfinished": unfinished,
            "done": self.done,
            "again": self.again,
        }

    def _skip(self, batches: int) -> None:
        self._epoch, batches = divmod(batches, self.plan.batches_per_epoch)
        self._order = self.plan.order(self._epoch)
        while batches >= (size := self.plan.span(self._order[self._index]).batches):
            batches -= size
            self._index += 1
        self._first = batches

    def _restore(self, position: Mapping[str, Any]) -> None:
        self.done, self.again = int(position["done"]), int(position["again"])
        if not self.plan.is_that_of(position):
            self._epoch = int(position["epoch"]) + 1
            return
        self._epoch, self._index = int(position["epoch"]), int(position["index"])
        self._first = int(position["first"])
        self._returned.extend(Lease(*map(int, u)) for u in position["unfinished"])

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
            case WaitEnded(name):
                if name in self._workers:
                    self._workers[name].wanted = 0
                return []
            case TimePassed():
                return self._expire()

    def _asked(self, asked: Asked) -> list[Instruction]:
        name = asked.worker
        if name in self._gone:
            return [Expel(name, _silent(name, self._lease_s))]
        worker = self._workers.setdefault(name, _Worker(self._now))
        self._progress(name, asked.done)
        if asked.received is not None:
            missing = worker.last(worker.done + worker.batches - asked.received)
            if missing:
                return [Deal(name, missing), *self._answer_waiting()]
        if asked.idle:
            worker.wanted = max(1, asked.batches)
            return self._answer_waiting()
        leases = self._deal(worker, asked.batches)
        return [Deal(name, leases), *self._answer_waiting()]

    def _progress(self, name: str, done: int) -> None:
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.heard_at = self._now
        new = min(done - worker.done, worker.batches)
        while new > 0:
            ready, rest = worker.held.popleft().cut(new)
            new -= ready.batches
            worker.done += ready.batches
            self.done += ready.batches
            for batch in ready.each():
                self._deaths.pop(batch, None)  # it let its worker live
            if rest is not None:
                worker.held.appendleft(rest)

    def _answer_waiting(self) -> list[Instruction]:
        answers: list[Instruction] = []
        for name, worker in self._workers.items():
            if not worker.wanted:
                continue
            leases = self._deal(worker, worker.wanted)
            if leases:
                worker.wanted = 0
                answers.append(Deal(name, leases))
        if not self._left and not any(w.held for w in self._workers.values()):
            for name, worker in self._workers.items():
                if worker.wanted:
                    worker.wanted = 0
                    answers.append(Over(name))
        return answers

    # ------------------------------------------------------------ losses

    def _lose(self, name: str) -> list[Instruction]:
        held, self._lost_at = self._give_back(name), self._now
        self.again += sum(lease.batches for lease in held)
        for lease in held:
            self._deaths.update(lease.each())
            for batch in lease.each():
                if (deaths := self._deaths[batch]) >= DEATHS:
                    self._failed = True
                    return [Fail(self.plan.deadly(Lease(*batch, 1), deaths))]
        return []

    def _give_back(self, name: str) -> list[Lease]:
        """Forgets a worker, which must not come back; returns what it held."""
        self._gone.add(name)
        worker = self._workers.pop(name, None)
        if worker is None:
            return []
        self._left += worker.batches
        self._returned.extendleft(reversed(worker.held))
        return list(worker.held)

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
        wanted = min(batches, _MOST, -(-self._left // self._shares))
        dealt: list[Lease] = []
        while wanted > 0:
            lease = self._take(worker, wanted)
            if lease is None:
                break
            dealt.append(lease)
            worker.held.append(lease)
            self._left -= lease.batches
            wanted -= lease.batches
        return tuple(dealt)

    def _take(self, worker: _Worker, most: int) -> Lease | None:
        if any(self._is_suspect(lease) for lease in worker.held):
            return None
        for lease in self._returned:
            if self._is_suspect(lease) and worker.held:
                continue
            is_last = max(self._deaths[b] for b in lease.each()) == DEATHS - 1
            if is_last and self._now < self._lost_at + SETTLE_S:
                continue
            self._returned.remove(lease)
            first, rest = lease.cut(1 if is_last else most)
            if rest is not None:
                self._returned.appendleft(rest)
            return first
        if sum(lease.batches for lease in self._returned) >= self._left:
            return None  # suspects, and the run does not end without them
        if self._index == len(self.plan):
            if self._returned:  # suspects: an epoch ends with all its batches
                return None
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self.plan.order(self._epoch)
        slot = int(self._order[self._index])
        left = self.plan.span(slot).batches - self._first
        lease, rest = Lease(self._epoch, slot, self._first, left).cut(most)
        self._first = 0 if rest is None else rest.first
        self._index += rest is None
        return lease

    def _is_suspect(self, lease: Lease) -> bool:
        return bool(self._deaths) and any(b in self._deaths for b in lease.each())


def _silent(worker: str, lease_s: float) -> TaskLostError:
    return TaskLostError(
        f"worker loop '{worker}' was silent for {lease_s:g} s while it held data; its "
        "batches were given to others"
    )
