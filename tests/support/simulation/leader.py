"""A simulated loop that decides the updates of synchronous training."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jgraph.coordination.data.slots import Lease
from jgraph.coordination.data.sync_data import SyncData, rounds_for
from jgraph.coordination.liveness import master_lease
from jgraph.coordination.liveness.master_lease import LeaseTracker
from jgraph.coordination.sync import aggregation
from jgraph.coordination.sync.aggregation import Arbiter, Step
from jgraph.errors import TaskLostError
from jgraph.graph.ir import TaskName
from tests.support.simulation.network import Message

if TYPE_CHECKING:
    from tests.support.simulation.sync_tasks import GatedShard
    from tests.support.simulation.sync_world import SyncWorld

PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Order:
    """What a loop that decides is told when it begins.

    Attributes:
      replicas: where each is that takes part, by its handle.
      position: where in the data it begins.
      version: updates applied so far.
      steps: how many to decide.
    """

    replicas: dict[str, TaskName]
    position: dict[str, Any] | None
    version: int
    steps: int


@dataclass(frozen=True)
class Told:
    """What such a loop says of itself.

    Attributes:
      state: "running", or how it ended.
      version: updates applied.
      position: where in the data it is.
      lost: the task that it lost.
      error: why it failed.
    """

    state: str
    version: int
    position: dict[str, Any]
    lost: str = ""
    error: str = ""


NEVER: Final = Told("never", 0, {})
"""Of a loop that never began, and never will: its master was replaced."""


class Leader:
    """The loop of synchronous training, as ``ArbiterLoop`` makes it of machines.

    Args:
      world: the run.
      shard: where it runs.
      name: of the loop.
      master: who hears its reports.
    """

    def __init__(
        self, world: "SyncWorld", shard: "GatedShard", name: str, master: TaskName
    ) -> None:
        order = world.orders[name]
        self.world = world
        self.shard = shard
        self.name = name
        self.master = master
        self.life = world.life
        self.replicas = order.replicas
        self.version = order.version
        self.data = self.ledger(order)
        self.machine = Arbiter(
            world.shards,
            order.replicas,
            self.data,
            wanted=world.wanted,
            version=order.version,
            steps=order.steps,
            **self.rules(),
        )
        self.done: Counter[int] = Counter()
        self.events: deque[aggregation.Event] = deque()
        self.handling = False
        self.answer: Sequence[Lease] | None = None
        self.is_applying = self.is_over = False
        self.told: Told | None = None
        self.accounts: list[TaskName] = []
        self.progress_at = self.heard_at = world.sim.now
        self.supervision = LeaseTracker(world.sim.now)
        self.asking = False
        world.leads(self)
        self.supervise()

    def ledger(self, order: Order) -> SyncData:
        """Returns the ledger of what it deals."""
        plan, rounds = self.world.plan, rounds_for(len(order.replicas))
        return SyncData(plan, order.replicas, order.position, rounds=rounds)

    def rules(self) -> dict[str, Any]:
        """Returns by what it decides beside how many contribute."""
        return {}

    # ------------------------------------------------------------ what happens

    def contributed(
        self,
        src: TaskName,
        steps: tuple[Step, ...],
        version: int,
        slots: tuple[int, ...],
    ) -> None:
        self.take(aggregation.Contributed(src, steps, version, slots))

    def applied(self, version: int) -> None:
        """One ps has applied an update."""
        self.done[version] += 1
        if self.done[version] == len(self.world.shards) and not self.is_over:
            self.version, self.is_applying = version + 1, False
            self.progress_at = self.world.sim.now
            self.report("running")
            self.take(aggregation.Applied())

    def stop(self, *, pause: bool = False) -> None:
        self.take(aggregation.StopAsked(pause))

    def asked(
        self, src: TaskName, loop: str, number: int, asked: aggregation.DataAsked
    ) -> None:
        """Answers a replica that asks for batches."""
        self.take(asked)
        self.send(src, ("deal", loop, number, self.answer))

    def account(self, master: TaskName) -> None:
        """Tells another master what was done, when no more will be."""
        if self.told is not None:
            self.send(master, ("account", self.name, self.told))
        else:
            self.accounts.append(master)
            self.stop()

    def lost(self, task: TaskName) -> None:
        """A task is not reached any more: a ps, who listens, or one with replicas."""
        if task in self.world.shards and not self.is_over:
            error = TaskLostError(f"{task} was lost", task=task)
            self.take(aggregation.Failed(error))
        for handle, at in self.replicas.items():
            if at == task:
                if not self.is_over:
                    self.world.lost_handles.add(handle)
                self.take(aggregation.ReplicaLost(handle))
        if task == self.master:
            self.stop()

    def look(self) -> None:
        """Time passes."""
        if self.world.sim.now - self.progress_at > PATIENCE_S:
            self.take(aggregation.TimeIsUp(PATIENCE_S))

    # ------------------------------------------------------------ its master

    def supervise(self) -> None:
        """Asks the master, time and again, whether it is there."""
        if not self.is_over and self.shard.process.alive:
            self.obey(master_lease.TimePassed())
            self.world.sim.later(self.supervision.look_every_s, self.supervise)

    def heard(self) -> None:
        """The master has answered."""
        self.asking, self.heard_at = False, self.world.sim.now
        self.obey(master_lease.Answered())

    def obey(self, event: master_lease.Event) -> None:
        for instruction in self.supervision.handle(event, self.world.sim.now):
            match instruction:
                case master_lease.Pause():
                    self.world.pauses += 1
                    self.take(aggregation.MasterSilent())
                case master_lease.GoOn():
                    self.take(aggregation.MasterHeard())
                case master_lease.Ask() if not self.asking:
                    self.asking = True
                    self.send(self.master, ("there?", self.name))

    # ------------------------------------------------------------ what it does

    def take(self, event: aggregation.Event) -> None:
        self.events.append(event)
        if self.handling:
            return
        self.handling = True
        while self.events:
            for instruction in self.machine.handle(self.events.popleft()):
                self.perform(instruction)
        self.handling = False

    def perform(self, instruction: aggregation.Instruction) -> None:
        match instruction:
            case aggregation.Decide(_, steps):
                self.world.decides(self)
                self.is_applying = True
                self.tell_all("decided", steps)
            case aggregation.Void(step):
                self.tell_all("voided", step)
            case aggregation.DealData(_, leases):
                self.answer = leases
            case aggregation.End(state, error):
                self.is_over = True
                self.tell_all("closed")
                lost = "" if error is None else str(error.details.get("task", ""))
                self.report(state, lost, "" if error is None else str(error))

    def report(self, state: str, lost: str = "", error: str = "") -> None:
        told = Told(state, self.version, self.data.state(), lost, error)
        self.send(self.master, ("report", self.name, self.version, told, state, lost))
        if state != "running":
            self.told = told
            for master in self.accounts:
                self.account(master)

    def tell_all(self, kind: str, *what: Any) -> None:
        for shard in self.world.shards:
            self.shard.tell(shard, self.shard.said(kind, *what))

    def send(self, task: TaskName, message: Message) -> None:
        self.world.net.send(self.shard.process, task, message)
