"""Gates, an arbiter and replicas whose messages are delivered in any order.

Order is kept from one sender to one receiver, as transports do.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Lease, Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.sync.aggregation import (
    Applied,
    Arbiter,
    Contributed,
    DataAsked,
    DealData,
    Decide,
    End,
    Event,
    ReplicaLost,
    Step,
    Void,
)
from jgraph.coordination.sync.sync_gate import (
    Choose,
    Closed,
    ContributionCame,
    Decided,
    Drop,
    Event as GateEvent,
    Keep,
    KeepOf,
    LetIn,
    Refuse,
    StepAsked,
    StepEnded,
    SyncGate,
    Tell,
    TellDue,
    TellLater,
    TurnEnded,
    UpdateApplied,
    Voided,
)
from jgraph.errors import CancelledStepError
from jgraph.graph.ir import TaskName

Message: TypeAlias = Callable[[], None]
Link: TypeAlias = tuple[str, str]


@dataclass
class Replica:
    """Asks every ps, contributes to all when all have let it in, and asks again."""

    name: str
    batches: deque[int] = field(default_factory=deque)
    number: int = 0
    let_in: set[int] = field(default_factory=set)
    over: bool = False

    @property
    def step(self) -> Step:
        return self.name, self.number


class World:
    """All of them; with ``turns`` gates take what comes together as one event."""

    def __init__(
        self,
        shards: int,
        replicas: int,
        *,
        wanted: int,
        steps: int,
        turns: bool = False,
    ) -> None:
        self.turns = turns
        self.came: list[dict[Step, int]] = [{} for _ in range(shards)]
        self.asked: list[list[Step]] = [[] for _ in range(shards)]
        self.gates = [SyncGate(version=0) for _ in range(shards)]
        self.names = [TaskName(f"/job:ps/task:{i}") for i in range(shards)]
        self.replicas = {f"w{i}": Replica(f"w{i}") for i in range(replicas)}
        tasks = {r: TaskName(f"/job:worker/task:{r[1:]}") for r in self.replicas}
        plan = SlotPlan([Part("a", 3), Part("b", 7)], 1, 0, shuffle="slots")
        self.order = BatchOrder(plan)
        self.data = SyncData(plan, self.replicas)
        self.arbiter = Arbiter(
            self.names, tasks, self.data, wanted=wanted, version=0, steps=steps
        )
        self.kept: list[set[Step]] = [set() for _ in range(shards)]
        self.decided: list[tuple[int, tuple[Step, ...]]] = []
        self.averaged: defaultdict[int, list[tuple[Step, ...]]] = defaultdict(list)
        self.slots: dict[Step, int] = {}
        self.end: End | None = None
        self.unapplied = 0
        self.links: dict[Link, deque[Message]] = {}
        for replica in self.replicas.values():
            self.ask(replica)

    # messages

    @property
    def pending(self) -> list[Link]:
        return list(self.links)

    def deliver(self, link: Link) -> None:
        message = self.links[link].popleft()
        if not self.links[link]:
            del self.links[link]
        message()

    def post(self, src: str, dst: str, message: Message) -> None:
        self.links.setdefault((src, dst), deque()).append(message)

    # replicas

    def ask(self, replica: Replica) -> None:
        if not replica.batches:
            event_ = DataAsked(replica.name, 2, idle=True)
            self.post(replica.name, "arbiter", partial(self.tell, event_))
            return
        replica.number += 1
        replica.let_in = set()
        self.slots[replica.step] = replica.batches.popleft()
        for i in range(len(self.gates)):
            event = StepAsked(replica.step)
            self.post(replica.name, f"ps{i}", partial(self.gate, i, event))

    def dealt(self, replica: Replica, leases: Sequence[Lease] | None) -> None:
        if replica.over or leases is None:
            replica.over = True
            return
        assert leases, "an idle replica always gets something"
        for lease in leases:
            indices = range(lease.first, lease.first + lease.batches)
            number = partial(self.order.plan.number, lease.epoch, lease.slot)
            replica.batches.extend(map(number, indices))
        self.ask(replica)

    def enter(self, step: Step, shard: int) -> None:
        replica = self.replicas[step[0]]
        if replica.over or step != replica.step:
            return
        replica.let_in.add(shard)
        if len(replica.let_in) < len(self.gates):
            return
        for i in range(len(self.gates)):
            for event in (ContributionCame(step, self.slots[step]), StepEnded(step)):
                self.post(replica.name, f"ps{i}", partial(self.gate, i, event))
        self.ask(replica)

    def lose(self, index: int) -> None:
        replica = self.replicas[f"w{index}"]
        replica.over = True
        for link in [k for k in self.links if replica.name in k]:
            del self.links[link]
        self.post(replica.name, "arbiter", partial(self.tell, ReplicaLost(f"w{index}")))

    # servers

    def gate(self, shard: int, event: GateEvent) -> None:
        """Tells a gate, in a moment together with others if they come in turns."""
        came, asked = self.came[shard], self.asked[shard]
        match event:
            case ContributionCame(step, slot) if self.turns:
                if not came:
                    me = f"ps{shard}"
                    self.post(me, f"{me}'s turn", partial(self.end_turn, shard))
                came[step] = slot
            case StepEnded(step) if step in came:
                pass
            case StepAsked(step) if came:
                asked.append(step)
            case _:
                self.end_turn(shard)
                self.tell_gate(shard, event)

    def end_turn(self, shard: int) -> None:
        came, asked = self.came[shard], self.asked[shard]
        self.came[shard], self.asked[shard] = {}, []
        if came:
            turn = TurnEnded(tuple(came), tuple(came.values()), tuple(asked))
            self.tell_gate(shard, turn)

    def tell_gate(self, shard: int, event: GateEvent) -> None:
        me = f"ps{shard}"
        for instruction in self.gates[shard].handle(event):
            match instruction:
                case LetIn(steps):
                    for step in steps:
                        self.post(me, step[0], partial(self.enter, step, shard))
                case Refuse(step, _):
                    self.replicas[step[0]].over = True
                case Keep() | KeepOf():
                    self.kept[shard].update(kept_of(instruction, event))
                case Drop(step):
                    self.kept[shard].discard(step)
                case Tell(steps, version, slots):
                    event_ = Contributed(self.names[shard], steps, version, slots)
                    self.post(me, "arbiter", partial(self.tell, event_))
                case TellLater():
                    self.post(me, f"{me}'s timer", partial(self.gate, shard, TellDue()))
                case Choose(steps):
                    assert set(steps) <= self.kept[shard], "a contribution is missing"
                    self.kept[shard].clear()
                    self.averaged[shard].append(tuple(steps))
                    self.post(me, me, partial(self.apply, shard))

    def apply(self, shard: int) -> None:
        self.gate(shard, UpdateApplied())
        self.post(f"ps{shard}", "arbiter", self.applied)

    def applied(self) -> None:
        self.unapplied -= 1
        if self.unapplied == 0:
            self.tell(Applied())

    def tell(self, event: Event) -> None:
        for instruction in self.arbiter.handle(event):
            match instruction:
                case Decide(version, steps):
                    self.decided.append((version, tuple(steps)))
                    self.unapplied = len(self.gates)
                    self.to_gates(Decided(steps))
                case Void(step):
                    self.to_gates(Voided(step))
                case DealData(name, leases):
                    replica = self.replicas[name]
                    answer = partial(self.dealt, replica, leases)
                    self.post("arbiter", name, answer)
                case End():
                    self.end = instruction
                    self.to_gates(Closed(CancelledStepError("over")))

    def to_gates(self, event: GateEvent) -> None:
        for i in range(len(self.gates)):
            self.post("arbiter", f"ps{i}", partial(self.gate, i, event))

    def check(self, *, done: int, least: int) -> None:
        """What must hold when nothing more happens."""
        assert self.end == End("done"), f"stuck: {self.decided}"
        chosen = [steps for _, steps in self.decided]
        assert [version for version, _ in self.decided] == list(range(done))
        for averaged in self.averaged.values():
            assert averaged == chosen
        self.check_data(Counter(self.slots[step] for steps in chosen for step in steps))
        for steps in chosen:
            slots = [self.slots[step] for step in steps]
            assert slots == sorted(set(slots))
            assert len(steps) >= least
        assert all(gate.version == done for gate in self.gates)

    def check_data(self, counted: Counter[int]) -> None:
        """Every batch that was dealt has counted once, or is known to be left."""
        assert set(counted.values()) == {1}, "a batch counted twice"
        end, left = self.order.restored(self.data.state())
        numbers = {self.order.number(place) for place in range(end)}
        assert set(counted) == numbers - set(map(self.order.number, left))


def kept_of(instruction: Keep | KeepOf, event: GateEvent) -> Sequence[Step]:
    """Returns the steps of which a gate says, of an event, that it keeps something."""
    if isinstance(instruction, KeepOf):
        return instruction.steps
    assert isinstance(event, ContributionCame)
    return [event.step]
