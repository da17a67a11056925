"""Synchronous aggregation: the arbiter picks the contributions of each update.

Two machines. Every ps has a ``SyncGate``: it lets a replica's step read only at a
version that the replica has not contributed to, and keeps what replicas contribute.
One ps has the ``Arbiter``: it hears from every ps which contributions are there, and
decides once, for all ps and so for all variables, which of them are averaged.

A contribution is known by its version (the updates applied to what it was computed
from) and its data slot: a slot that is computed twice is one contribution. It counts if
every ps let it read at one and the same version, and has it before that version is
decided; the others are late, dropped, and counted for their replica. Who decides also
deals out the data, so that each batch counts exactly once; see ``sync_data``.

With a ``RoundRule`` only some replicas are invited to an update; see ``rounds``. With a
``SumRule`` the ps see sums alone of these; see ``secure_rounds``.

    gate     open at v --(decided v)--> closed --(applied)--> open at v+1
    arbiter  collecting v --(enough)--> applying --(applied)--> collecting v+1

Source: tensorflow/python/training/sync_replicas_optimizer.py, whose accumulators decide
for each variable alone, so that one step may mix sets of replicas.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.coordination.data.slots import Lease
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.secure import sum_round
from jgraph.coordination.sync import roster
from jgraph.coordination.sync.collected import Collected
from jgraph.coordination.sync.roster import Roster, Steps
from jgraph.coordination.sync.rounds import (
    RoundRecord,
    RoundRule,
    Rounds,
    not_to_count,
)
from jgraph.coordination.sync.secure_rounds import (
    MOST_VOIDS,
    SecureRounds,
    SumCame,
    SumFailed,
    SumRule,
    SumStepLate,
    Unmasked,
)
from jgraph.coordination.sync.tally import Everywhere, Tally
from jgraph.errors import DeadlineError, JGError, NonFiniteError, SecureSumError
from jgraph.graph.ir import TaskName

Step: TypeAlias = roster.Step


@final
@dataclass(frozen=True, slots=True)
class Contributed:
    """A ps has what steps contributed, each for a slot; all let in at ``version``.

    In rounds a slot below 0 says that it is not finite, see ``not_to_count``.
    """

    shard: TaskName
    steps: Sequence[Step]
    version: int
    slots: Sequence[int]


@final
@dataclass(frozen=True, slots=True)
class DataAsked:
    """A replica would like ``batches`` more; with ``idle`` it holds none.

    ``piece_s``: how long it takes for one, in seconds; 0: that is not known. ``done``:
    batches that it has done so far.
    """

    replica: str
    batches: int
    idle: bool = False
    piece_s: float = 0.0
    done: int = 0


@final
@dataclass(frozen=True, slots=True)
class AskEnded:
    """A replica whose question was not answered asks no more, or asks anew."""

    replica: str


@final
@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica went away; it contributes no more."""

    replica: str


@final
@dataclass(frozen=True, slots=True)
class Applied:
    """The update that was decided last has been applied on every ps."""


@final
@dataclass(frozen=True, slots=True)
class NotApplied:
    """The update that was decided last changed nothing: it was not finite."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more can be decided; an update under way may be there in part."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class TimeIsUp:
    """An update has been waited for too long."""

    timeout_s: float


@final
@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody asked to stop after the update under way; with ``pause`` for a while."""

    pause: bool = False


@final
@dataclass(frozen=True, slots=True)
class GoOnAsked:
    """What was to be done while the machine stood still, after ``version``, is done."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class MasterSilent:
    """The master of the run has not been heard of for too long; see ``supervision``."""


@final
@dataclass(frozen=True, slots=True)
class MasterHeard:
    """The master is there again."""


Event: TypeAlias = (
    Contributed
    | DataAsked
    | AskEnded
    | ReplicaLost
    | Applied
    | NotApplied
    | Failed
    | TimeIsUp
    | StopAsked
    | GoOnAsked
    | MasterSilent
    | MasterHeard
    | SumCame
    | SumStepLate
    | Unmasked
    | SumFailed
)


@final
@dataclass(frozen=True, slots=True)
class Decide:
    """Apply the mean of what these steps contributed, in this order: that of slots."""

    version: int
    steps: Sequence[Step]


@final
@dataclass(frozen=True, slots=True)
class Void:
    """Forget a contribution that was not of one version; its replica tries again."""

    step: Step


@final
@dataclass(frozen=True, slots=True)
class DealData:
    """Answer a replica with these leases; none: not now; None: nothing any more."""

    replica: str
    leases: Sequence[Lease] | None


@final
@dataclass(frozen=True, slots=True)
class Halt:
    """So many updates are applied on every ps, and none begins before ``GoOnAsked``."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class End:
    """No more updates from here.

    Attributes:
      state: "done", "stopped", "paused": another arbiter goes on, "alone": no replica
        is left, or "failed".
      error: why it failed.
    """

    state: str
    error: JGError | None = None


@final
@dataclass(frozen=True, slots=True)
class BeginSum:
    """A secure sum of these members begins."""

    number: int
    members: tuple[TaskName, ...]


@final
@dataclass(frozen=True, slots=True)
class SumSays:
    """Do what the secure sum of this number needs."""

    number: int
    what: sum_round.Instruction


@final
@dataclass(frozen=True, slots=True)
class GiveUpSum:
    """There is no sum; the round begins again."""

    record: RoundRecord


Instruction: TypeAlias = (
    Decide | Void | DealData | Halt | End | BeginSum | SumSays | GiveUpSum
)


@final
class Arbiter:
    """State machine that decides what each update is the mean of.

    Args:
      shards: the ps that keep contributions; each reports every contribution.
      replicas: task of each replica, by its program handle.
      data: what these replicas are dealt; a contribution's slot is the number of its
        batch.
      wanted: contributions of an update. When fewer replicas are left, as many.
      version: updates applied so far.
      steps: how many updates to decide.
      halt_every: stand still at the multiples of each of these, in updates, so that
        they can be copied. Not at the end: there nothing goes on anyway.
      rule: how many replicas are invited to an update; None: all take part.
      sums: how their contributions are summed; None: the ps see each.
      draw: with ``sums``: random numbers that nobody knows before.

    Example:
      >>> ps, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
      >>> from jgraph.coordination.data.slots import Part, SlotPlan
      >>> data = SyncData(SlotPlan([Part("data", 4)], 2, seed=0), ["w0"])
      >>> arbiter = Arbiter([ps], {"w0": worker}, data, wanted=1, version=0, steps=1)
      >>> arbiter.handle(DataAsked("w0", batches=1))[0].leases
      (Lease(epoch=0, slot=0, first=0, batches=1),)
      >>> arbiter.handle(Contributed(ps, (("w0", 1),), version=0, slots=(0,)))
      [Decide(version=0, steps=(('w0', 1),))]
      >>> arbiter.handle(Applied())
      [End(state='done', error=None)]
    """

    def __init__(
        self,
        shards: Iterable[TaskName],
        replicas: Mapping[str, TaskName],
        data: SyncData,
        *,
        wanted: int,
        version: int,
        steps: int,
        halt_every: Iterable[int] = (),
        rule: RoundRule | None = None,
        sums: SumRule | None = None,
        draw: Callable[[], int] = int,
    ) -> None:
        self._shards = frozenset(shards)
        self._replicas = dict(replicas)
        self._alive = set(replicas)
        self._data = data
        self._wanted = wanted
        self._version = version
        self._end = version + steps
        self._halt_every = tuple(halt_every)
        self._halted = False
        self._applying = False
        self._unsupervised = False
        self._stopping = ""
        self._over = False
        # Contributions that not all ps have yet. Those that all have: slot -> step.
        self._roster = Roster(data.replicas)
        self._tally = Tally(self._shards, len(self._roster))
        self._whole = defaultdict[int, Collected](Collected)
        self._chosen: Sequence[int] = ()  # places of the batches of the newest update
        self._rounds = None
        if rule is not None:
            by_task = sorted(replicas, key=replicas.__getitem__)
            self._rounds = Rounds(rule, by_task, data, version)
        self._sums = None
        if sums is not None and rule is not None:
            self._sums = SecureRounds(sums, replicas, least=rule.least, draw=draw)
        self.round: RoundRecord | None = None
        """Who takes part in the update that was decided last, if some are invited."""
        self.dropped: Counter[str] = Counter()
        """Contributions that came too late, by replica."""

    @property
    def halted(self) -> int | None:
        """After how many updates it stands still; None: it does not."""
        return self._version if self._halted and not self._over else None

    @property
    def needed(self) -> int:
        """How many contributions the next update takes."""
        if self._sums is not None:
            return self._sums.least
        if self._rounds is not None:
            return self._rounds.needed
        return max(1, min(self._wanted, len(self._alive)))

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        if isinstance(event, DataAsked):
            return self._deal(event)
        if self._over:
            return []
        match event:
            case Contributed():
                return [*self._take(event), *self._go_on()]
            case ReplicaLost(replica):
                return self._lose(replica)
            case Applied():
                return self._applied()
            case GoOnAsked(version):
                self._halted = self._halted and version != self._version
            case StopAsked() | MasterSilent() | MasterHeard() | AskEnded():
                self._note(event)
            case NotApplied(error) | Failed(error):
                return self._finish("failed", error)
            case _:
                return self._move_on(event)
        return self._go_on()

    def _move_on(
        self, event: TimeIsUp | SumCame | SumStepLate | Unmasked | SumFailed
    ) -> list[Instruction]:
        if isinstance(event, TimeIsUp):
            return self._time_is_up(event.timeout_s)
        said = [] if self._sums is None else self._sums.handle(event)
        return [*self._of_sum(said), *self._go_on()]

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def _note(self, event: StopAsked | MasterSilent | MasterHeard | AskEnded) -> None:
        match event:
            case AskEnded(replica):
                if self._rounds is not None:
                    self._rounds.forget(replica)
            case StopAsked(pause):
                self._stopping = self._stopping or ("paused" if pause else "stopped")
            case _:
                self._unsupervised = isinstance(event, MasterSilent)

    def _applied(self) -> list[Instruction]:
        self._applying = False
        self._version += 1
        if self._rounds is not None:
            self._rounds.begin(self._version)
        if self._sums is not None:
            self._sums.close()
        if any(self._version % every == 0 for every in self._halt_every):
            self._halted = self._version < self._end and not self._stopping
        return [Halt(self._version)] if self._halted else self._go_on()

    def _deal(self, asked: DataAsked) -> list[Instruction]:
        replica = asked.replica
        if self._over or replica not in self._alive:
            return [DealData(replica, None)]
        if self._rounds is not None:
            if not asked.idle:
                return [DealData(replica, ())]
            self._rounds.ask(replica, asked.done)
            return [*self._give_up(replica), *self._invite()]
        together = len(self._alive) <= self._wanted
        self._data.learn(replica, asked.piece_s)
        leases = self._data.deal(
            replica, asked.batches, together=together, idle=asked.idle
        )
        return [DealData(replica, leases)]

    def _invite(self) -> list[Instruction]:
        """Answers the open questions of those who are invited to the next update."""
        stands = self._applying or self._halted or self._unsupervised or self._over
        if self._rounds is None or stands:
            return []
        begins: list[Instruction] = []
        if (sums := self._sums) is not None:
            if sums.stage == "none" and self._rounds.gather(sums.least):
                sums.open(self._rounds.invited)
                begins.append(BeginSum(sums.number, sums.tasks))
            if sums.stage != "keys":
                return []
        there = {step[0] for step in self._whole[self._version].each.values()}
        deals = self._rounds.deals(there, grows=sums is None)
        return [*begins, *(DealData(who, leases) for who, leases in deals)]

    def _give_up(self, replica: str) -> list[Instruction]:
        """Takes note of a member that asks, and has contributed nothing."""
        sums, rounds = self._sums, self._rounds
        if sums is None or rounds is None or replica not in rounds.invited:
            return []
        there = {step[0] for step in self._whole[self._version].each.values()}
        if not sums.has_begun(replica) or rounds.has_contributed(replica):
            return []
        if replica in there:
            return []
        rounds.give_up(replica)
        return self._of_sum(sums.lost(replica))

    def _of_sum(self, said: Sequence[sum_round.Instruction]) -> list[Instruction]:
        """Returns what a secure sum asks for; a void one is given up."""
        assert self._sums is not None or not said
        found: list[Instruction] = []
        for one in said:
            if isinstance(one, sum_round.Void):
                found += self._give_up_sum(one.reason)
            elif self._sums is not None:
                found.append(SumSays(self._sums.number, one))
        return found

    def _give_up_sum(self, reason: str) -> list[Instruction]:
        sums, rounds = self._sums, self._rounds
        assert sums is not None
        assert rounds is not None  # else no sum was begun
        found: list[Instruction] = []
        for slot, step in self._whole.pop(self._version, Collected()).each.items():
            self._data.late(slot)
            found.append(Void(step))
        found.append(GiveUpSum(rounds.void(reason)))
        if sums.voids >= MOST_VOIDS:
            why = f"round {self._version} was given up {sums.voids} times; {reason}"
            found += self._finish("failed", SecureSumError(why))
        return found

    def _time_is_up(self, timeout_s: float) -> list[Instruction]:
        if self._sums is not None and not self._applying:
            said = self._sums.time_is_up()
            if said and not any(isinstance(one, sum_round.Void) for one in said):
                return [*self._of_sum(said), *self._go_on()]
        elif self._rounds is not None and not self._applying:
            self._rounds.hurry()
            if decision := self._go_on():
                return decision
        return self._finish("failed", self._late(timeout_s))

    def _lose(self, replica: str) -> list[Instruction]:
        if replica not in self._alive:
            return self._go_on()
        self._alive.remove(replica)
        if self._rounds is not None:
            self._rounds.lose(replica)
        self._tally.lose(self._roster.number(replica))
        computed = {
            slot
            for whole in self._whole.values()
            for slot, step in whole.each.items()
            if step[0] == replica
        }
        error = self._data.lost(replica, computed)
        if error is not None:
            return self._finish("failed", error)
        said = [] if self._sums is None else self._sums.lost(replica)
        return [*self._of_sum(said), *self._go_on()]

    def _take(self, event: Contributed) -> list[Instruction]:
        steps, slots = self._numbered(event)
        everywhere = self._tally.tell(event.shard, steps, event.version)
        if not everywhere.places:
            return []  # most often: there is a ps that has not told of it yet
        if self._take_together(event.version, steps, slots, everywhere):
            return []
        said: list[Instruction] = []
        for index in everywhere.places:
            step, number = steps[index], int(slots[index])
            slot = not_to_count(number) if number < 0 else number
            if not self._data.holds(step[0], slot):
                continue  # another computes it now, as this one seemed lost
            if index in everywhere.mixed:
                self._drop(slot, step)
                said.append(Void(step))
            elif event.version < self._version + self._applying:
                self._drop(slot, step)
            elif self._sums is not None and not self._sums.takes(step[0]):
                self._data.late(slot)  # its masks are those of a sum that was given up
                said.append(Void(step))
            elif number < 0:
                said += self._leave_out(slot, step)
            else:
                self._whole[event.version].add(slot, step)
                if self._sums is not None:
                    said += self._of_sum(self._sums.contributed(step[0]))
        return said

    def _leave_out(self, slot: int, step: Step) -> list[Instruction]:
        """Takes note of a contribution that is not finite: it is in no update."""
        self._data.counted((slot,))  # the number of a round: it is not dealt again
        bad = () if self._rounds is None else self._rounds.leave_out(step[0])
        return self._finish("failed", self._not_finite(bad)) if bad else []

    def _numbered(self, event: Contributed) -> tuple[Steps, Sequence[int]]:
        """Returns the steps of replicas of this run, and their slots."""
        numbered = self._roster.numbered(event.steps)
        if numbered is not None:
            return numbered, event.slots
        both = zip(event.steps, event.slots, strict=True)
        known = [one for one in both if self._roster.knows(one[0])]
        steps = self._roster.steps([step for step, _ in known])
        return steps, [slot for _, slot in known]

    def _take_together(
        self, version: int, steps: Steps, slots: Sequence[int], there: Everywhere
    ) -> bool:
        """Takes contributions of which none is late, void or without its batch."""
        late = version < self._version + self._applying
        if late or there.mixed or self._sums is not None:
            return False
        if len(there.places) < len(steps):
            slots = [slots[index] for index in there.places]
            steps = steps.at(there.places)
        if not self._data.all_hold(steps.numbers, slots):
            return False
        self._whole[version].add_together(steps, slots)
        return True

    def _drop(self, slot: int, step: Step) -> None:
        self.dropped[step[0]] += 1
        self._data.late(slot)

    def _go_on(self) -> list[Instruction]:
        if self._applying or self._over:
            return []
        if self._version >= self._end:
            return self._finish("done")
        if self._stopping:
            return self._finish(self._stopping)
        if self._halted:
            return []
        whole = self._whole[self._version]
        if not whole and not self._alive:
            return self._finish("alone")
        if self._unsupervised or not self._is_enough(whole):
            return self._invite()
        steps, slots, late = self._choose(whole)
        del self._whole[self._version]
        self._chosen = self._data.counted(slots)
        for slot, step in late:
            self._drop(slot, step)
        self._applying = True
        if self._rounds is not None:
            self.round = self._rounds.over(step[0] for step in steps)
        return [Decide(self._version, steps)]

    def _is_enough(self, whole: Collected) -> bool:
        """Whether an update can be decided."""
        if self._sums is not None:
            return self._sums.stage == "known"
        return len(whole) >= self.needed

    def _choose(
        self, whole: Collected
    ) -> tuple[Sequence[Step], Sequence[int], list[tuple[int, Step]]]:
        """Returns what is averaged, its slots, and what came too late for it."""
        if self._sums is None:  # first come, first counted
            needed = self.needed
            late = list(whole.each.items())[needed:] if len(whole) > needed else []
            return *whole.first(needed), late
        inside = set(self._sums.inside)
        there = sorted(whole.each.items())
        chosen = [one for one in there if one[1][0] in inside]
        late = [one for one in whole.each.items() if one[1][0] not in inside]
        return tuple(step for _, step in chosen), [slot for slot, _ in chosen], late

    def _finish(self, state: str, error: JGError | None = None) -> list[Instruction]:
        if state == "failed" and self._applying:  # it may be there in part
            self._data.take_back(self._chosen)
        self._over = True
        asking = () if self._rounds is None else self._rounds.asking
        return [End(state, error), *(DealData(replica, None) for replica in asking)]

    def _not_finite(self, replicas: Sequence[str]) -> NonFiniteError:
        tasks = sorted(self._replicas[name] for name in replicas)
        return NonFiniteError(
            f"what {', '.join(tasks)} contributed to round {self._version} is NaN or "
            "infinite, and too few others are left; this round was not applied, and "
            "the run ends with those before it. Look at the data there, give "
            "Federated(…) a smaller min_clients, or the Trainer a smaller learning "
            "rate or optax.clip_by_global_norm",
            tasks=tasks,
        )

    def _late(self, timeout_s: float) -> DeadlineError:
        if self._applying:
            what, missing = "its update was not applied", sorted(self._shards)
        else:
            there = {step[0] for step in self._whole[self._version].each.values()}
            asked = self._alive if self._rounds is None else self._rounds.invited
            missing = sorted(self._replicas[r] for r in set(asked) - there)
            what = f"it has {len(there)} of {self.needed} contributions"
        if self._rounds is not None:
            return DeadlineError(
                f"round {self._version} was not over after {timeout_s:g} s: {what}; "
                f"still to come: {', '.join(missing) or 'nobody who is there'}. Look "
                "at these tasks with `jgraph status`, or give Federated(…) a smaller "
                "min_clients or a larger round_timeout_s",
                pending=missing,
            )
        return DeadlineError(
            f"global step {self._version} was not done after {timeout_s:g} s: {what}; "
            f"still to come: {', '.join(missing)}. Look at these tasks with `jgraph "
            "status`, use SyncPS(backup_workers=…), or give step_timeout_s=… a larger "
            "value",
            pending=missing,
        )
