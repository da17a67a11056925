"""A run of secure rounds on simulated tasks: the ps see sums alone.

Who decides, members and keys are real: ``Arbiter`` with a ``SumRule``, ``SumMember``
and ``MaskedSum``. Each ps adds what members contribute under their masks, takes the
masks off, and compares with the batches of those who were decided.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from jgraph.coordination.data.slots import Lease
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.secure import sum_round
from jgraph.coordination.sync import aggregation
from jgraph.coordination.sync.aggregation import Step
from jgraph.coordination.sync.rounds import RoundRecord, RoundRule
from jgraph.coordination.sync.secure_rounds import (
    MOST_VOIDS,
    SumCame,
    SumFailed,
    SumStepLate,
    Unmasked,
    sum_rule,
)
from jgraph.errors import SecureSumError
from jgraph.graph.ir import TaskName
from jgraph.rpc.security.secure_sum import MaskedSum, SumMember, Told
from tests.support.simulation.leader import Leader, Order
from tests.support.simulation.network import Message
from tests.support.simulation.sync_tasks import Contributed, GatedShard, loop_name
from tests.support.simulation.sync_world import SyncWorld
from tests.support.simulation.tasks import Loop, Step as LoopStep

ANSWER_S: Final = 2.0
STEP_S: Final = 3.0
ROUND_S: Final = 4.0
_UNMASK_S: Final = 0.05
_SLOW: Final = 0.02
"""Of the steps of members."""
LEAST: Final = 3
"""Members of a round."""


def words(batch: int) -> Any:
    """Returns what a member makes of a batch."""
    return np.array([1, batch, batch * batch], np.uint32)


def of(world: Any) -> "SecureWorld":
    """Returns the world of these tasks, which is none of other rounds."""
    assert isinstance(world, SecureWorld)
    return world


class SecureLoop(Loop):
    """The loop of a member, as ``SumPart`` makes it of its rules and its data."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        chance = self.world.sim.chance
        self.member = SumMember(
            self.worker.task,
            threshold=of(self.world).rule.threshold,
            entropy=chance.randbytes,
        )
        self.sum = 0  # number of the sum that it has a part in
        self.dealt_lease: Sequence[Lease] = ()
        self.agrees = False
        self.masks: dict[int, Any] = {}

    def dealt(self, leases: Sequence[Lease] | None, number: int = 0) -> None:
        if not (leases and number):
            super().dealt(leases)
            return
        self.sum, self.dealt_lease, self.agrees = number, leases, True
        self.masks = {}
        keys = self.member.begin(number)
        self.say("keys", keys)

    def say(self, step: str, what: Any) -> None:
        self.send(self.dealer, ("sum", self.name, self.life, self.sum, step, what))

    def told(self, kind: str, *what: Any) -> None:
        _, number, step, content = what
        if kind != "sum" or number != self.sum:
            return
        try:
            self.answer(step, content)
        except SecureSumError:
            self.answer("void", None)

    def answer(self, step: str, content: Any) -> None:
        match step:
            case "exchange":
                self.say("exchange", self.member.share(self.sum, content))
            case "masked":
                zeros = np.zeros(len(words(0)), np.uint32)
                mask = self.member.mask(self.sum, content, zeros)
                (lease,) = self.dealt_lease
                place = lease.epoch, lease.slot, lease.first
                self.masks = {self.world.plan.number(*place): mask}
                self.agrees = False
                super().dealt(self.dealt_lease)
            case "reveal":
                inside, outside = content
                told = self.member.reveal(self.sum, inside, outside)
                self.say("reveal", told)
            case "void" if self.agrees:
                self.agrees, self.sum = False, 0
                super().dealt(())
            case "void":
                self.sum = 0

    def computed(self, number: int) -> None:
        self.newest_masks = dict(self.masks)
        self.masks = {}
        super().computed(number)

    def compute_s(self, step: LoopStep) -> float:
        chance = self.world.sim.chance
        return chance.random() * (2 * ROUND_S if chance.random() < _SLOW else 0.05)

    def given(self, step: LoopStep, shard: TaskName) -> Message:
        return (self.newest_masks[step.batch] + words(step.batch),)


class SecureLeader(Leader):
    """The loop that decides, as ``ArbiterLoop`` and ``SumDesk`` make it of machines."""

    def __init__(self, world: SyncWorld, *args: Any) -> None:
        self.open: dict[str, tuple[TaskName, str, int]] = {}
        self.members: frozenset[TaskName] = frozenset()
        self.round_at = world.sim.now
        self.end_sum()
        super().__init__(world, *args)

    def ledger(self, order: Order) -> SyncData:
        return SyncData(self.world.plan, order.replicas, order.position, own=True)

    def rules(self) -> dict[str, Any]:
        world = of(self.world)
        return {
            "rule": RoundRule(world.fraction, LEAST, seed=world.seed),
            "sums": world.rule,
            "draw": lambda: world.sim.chance.getrandbits(64),
        }

    # ------------------------------------------------------------ questions

    def asked(
        self, src: TaskName, loop: str, number: int, asked: aggregation.DataAsked
    ) -> None:
        self.open[asked.replica] = src, loop, number
        self.take(asked)
        ends = partial(self.ask_ends, asked.replica, number)
        self.world.sim.later(ANSWER_S, ends)

    def ask_ends(self, handle: str, number: int) -> None:
        """A question that nobody answered is asked anew."""
        if handle in self.open and self.open[handle][2] == number:
            src, loop, _ = self.open.pop(handle)
            self.send(src, ("deal", loop, number, ()))
            self.take(aggregation.AskEnded(handle))

    def perform(self, instruction: aggregation.Instruction) -> None:
        match instruction:
            case aggregation.DealData(handle, leases):
                if handle in self.open:
                    src, loop, number = self.open.pop(handle)
                    its = self.number if leases else 0
                    self.send(src, ("deal", loop, number, leases, its))
            case aggregation.Decide(_, steps):
                self.world.decides(self)
                self.is_applying = True
                self.tell_all("decided", steps, self.correction)
                self.end_sum()
            case aggregation.BeginSum(number, members):
                self.begin_sum(number, members)
            case aggregation.SumSays(_, what):
                self.sum_says(what)
            case aggregation.GiveUpSum(record):
                self.gives_up(record)
            case _:
                super().perform(instruction)
                if self.is_over:
                    self.end_sum()

    def supervise(self) -> None:
        super().supervise()
        # A round goes on without who is late.
        if self.number and self.world.sim.now - self.round_at > ROUND_S:
            self.round_at = self.world.sim.now
            self.take(aggregation.TimeIsUp(ROUND_S))

    # ------------------------------------------------------------ sums

    def begin_sum(self, number: int, members: tuple[TaskName, ...]) -> None:
        self.end_sum()
        self.number, self.members = number, frozenset(members)
        self.round_at = self.world.sim.now
        self.masked = MaskedSum(number, threshold=of(self.world).rule.threshold)
        self.wait_for("keys")

    def end_sum(self) -> None:
        """Its members have no more part in it."""
        for member in sorted(self.members):
            self.say(member, "void", None)
        self.number = 0
        self.members = frozenset()
        self.boxes: dict[tuple[str, str], bytes] = {}
        self.near: dict[str, tuple[str, ...]] = {}
        self.over: set[str] = set()
        self.kinds: dict[str, set[str]] = {}
        self.correction: Any = None

    def gives_up(self, record: RoundRecord) -> None:
        """There is no sum: nobody may have told what it takes to know one."""
        of(self.world).voids.append(record.void)
        assert self.correction is None, "a sum that is given up is known"
        self.end_sum()

    def wait_for(self, step: sum_round.Step) -> None:
        late = partial(self.step_is_late, self.number, step)
        self.world.sim.later(STEP_S, late)

    def step_is_late(self, number: int, step: sum_round.Step) -> None:
        if self.shard.process.alive and not self.is_over:
            self.take(SumStepLate(number, step))

    def sum_came(
        self, src: TaskName, loop: str, number: int, step: sum_round.Step, what: Any
    ) -> None:
        """Takes what a member sends in a step of the sum."""
        handle = loop.partition("/")[0]
        if number != self.number or src not in self.members or step in self.over:
            if number != self.number:
                self.send(src, ("sum", loop, self.life, number, "void", None))
            return
        match step:
            case "keys":
                self.masked.keys.setdefault(src, what)
            case "exchange":
                self.boxes.update({(src, peer): box for peer, box in what.items()})
            case "reveal":
                self.learn(src, what)
        self.take(SumCame(handle, number, step))

    def learn(self, src: TaskName, told: Told) -> None:
        """Keeps shares; of nobody may both secrets be told of."""
        self.masked.tell(src, told)
        for kind, shares in (("seed", told.seeds), ("key", told.keys)):
            for owner in shares:
                self.kinds.setdefault(owner, set()).add(kind)
        assert all(len(kinds) == 1 for kinds in self.kinds.values()), "both were told"

    def sum_says(self, what: sum_round.Instruction) -> None:
        match what:
            case sum_round.PassKeys(member, neighbours):
                self.near[member] = neighbours
                keys = {peer: self.masked.keys[peer] for peer in neighbours}
                self.passes(member, "keys", "exchange", keys)
            case sum_round.PassShares(member, senders):
                boxes = {peer: self.boxes[peer, member] for peer in senders}
                self.passes(member, "exchange", "masked", boxes)
            case sum_round.AskShares(member, inside, outside):
                self.passes(member, "masked", "reveal", (inside, outside))
            case sum_round.Unmask(inside, outside):
                seconds = self.world.sim.chance.random() * _UNMASK_S
                unmask = partial(self.unmask, self.number, inside, outside)
                self.world.sim.later(seconds, unmask)

    def passes(
        self, member: str, step: str, then: sum_round.Step, content: Any
    ) -> None:
        """Answers a member; the first answer ends a step."""
        if step not in self.over:
            self.over.add(step)
            if then != "masked":  # in which members train
                self.wait_for(then)
        self.say(TaskName(member), then, content)

    def say(self, member: TaskName, step: str, content: Any) -> None:
        handle = next(h for h, task in self.replicas.items() if task == member)
        loop = loop_name(handle, int(self.name.rpartition("-")[2]))
        self.send(member, ("sum", loop, self.life, self.number, step, content))

    def unmask(
        self, number: int, inside: tuple[str, ...], outside: tuple[str, ...]
    ) -> None:
        if number != self.number or not self.shard.process.alive:
            return
        masked = self.masked
        masked.add(np.zeros(len(words(0)), np.uint32))
        try:
            correction = masked.unmasked(inside, outside, self.near.__getitem__)
        except SecureSumError as error:
            self.take(SumFailed(number, error.message))
        else:
            self.correction = correction
            self.take(Unmasked(number))


class SecureShard(GatedShard):
    """A ps that has sums under masks, and what takes these off."""

    def open(self, number: int, version: int) -> None:
        super().open(number, version)
        self.under_masks: dict[Step, Any] = {}
        self.correction: Any = None

    def of_life(self, src: TaskName, kind: str, loop: str, rest: list[Any]) -> None:
        if kind != "sum":
            super().of_life(src, kind, loop, rest)
            return
        leader = self.leaders.get(self.world.leading(int(loop.partition("/")[2])))
        if isinstance(leader, SecureLeader):
            number, step, what = rest
            leader.sum_came(src, loop, number, step, what)

    def given(self, step: Step, *more: Any) -> None:
        (self.under_masks[step],) = more

    def decided(self, steps: tuple[Step, ...], *more: Any) -> None:
        (self.correction,) = more
        super().decided(steps)

    def check_chosen(self, chosen: list[Contributed]) -> None:
        masked = [self.under_masks[step] for step, _, _ in chosen]
        total = np.add.reduce([*masked, self.correction], dtype=np.uint32)
        due = np.add.reduce([words(b) for _, b, _ in chosen], dtype=np.uint32)
        assert total.tolist() == due.tolist(), f"masks are left in {chosen}"
        assert len(chosen) >= LEAST, f"a sum of {chosen}"
        self.under_masks.clear()


class SecureWorld(SyncWorld):
    """One run of secure rounds, from its begin to its end.

    Args:
      seed: decides everything.
      fraction: of the members that a round invites.
      options: as for ``SyncWorld``.

    Attributes:
      voids: why rounds were given up.
    """

    leads_with = SecureLeader
    shards_with = SecureShard
    loops_with = SecureLoop

    def __init__(
        self, seed: int, *, fraction: float, workers: int, **options: Any
    ) -> None:
        self.seed = seed
        self.fraction = fraction
        drawn = RoundRule(fraction, LEAST).drawn(workers)
        self.rule = sum_rule(None, 10, members=drawn)
        self.voids: list[str] = []
        super().__init__(seed, workers=workers, backups=0, **options)

    def may_end(self) -> bool:
        """With too few members at the end of a round's time, or time and again."""
        voids = len(self.voids) >= MOST_VOIDS and "JG-404" in self.state
        return voids or "JG-133" in self.state
