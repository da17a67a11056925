"""Simulated ps of synchronous training, and their gates."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from jgraph.coordination.run.succession import MasterTerms
from jgraph.coordination.sync import host_sums, sync_gate
from jgraph.coordination.sync.aggregation import DataAsked, Step
from jgraph.coordination.sync.host_sums import HostSums
from jgraph.coordination.sync.read_line import ReadLine
from jgraph.coordination.sync.sync_gate import SyncGate
from jgraph.errors import (
    CopyLostError,
    FencedError,
    JGError,
    RunOverError,
    TaskLostError,
)
from jgraph.graph.ir import TaskName
from jgraph.plan.program.replay import NodeRan
from jgraph.runtime.store.change_log import Recorder
from jgraph.server.gates.timers import AGAIN_S
from tests.support.simulation.kept import DUE, History, Kept, as_arrays
from tests.support.simulation.leader import NEVER, Leader
from tests.support.simulation.network import Message
from tests.support.simulation.tasks import RUN

if TYPE_CHECKING:
    from tests.support.simulation.sync_world import SyncWorld

_APPLY_S: Final = 0.01
_LEAVES_S, _UNHEARD = 0.05, 0.1
WAITED_FOR: Final[Mapping[type, sync_gate.Event]] = {
    sync_gate.TellLater: sync_gate.TellDue(),
    sync_gate.TurnLater: sync_gate.TurnDue(),
}
_CUTS: Final = 0.02
"""How often a log begins anew when something was written."""
_IDS: Final = 10**6
"""More than a loop has steps."""


def loop_name(handle: str, number: int) -> str:
    """Returns the name of a loop of a replica: of which one that decides."""
    return f"{handle}/{number}"


def step_of(loop: str, step: int) -> Step:
    """Returns the key of a step: the ids of a replica are never used again."""
    handle, _, number = loop.partition("/")
    return handle, int(number) * _IDS + step


def of_loop(step: Step) -> tuple[str, int]:
    """Returns the loop of a step, and the step's number in it."""
    number, within = divmod(step[1], _IDS)
    return loop_name(step[0], number), within


Contributed: TypeAlias = tuple[Step, int, tuple[int, ...]]
"""A step, its batch, and the versions that it read."""


class GatedShard:
    """A ps: what each update of its variables was made of.

    Attributes:
      life: of the variables; what is older is of gates that are no more.
      history: the batches of each update, in the order in which they were averaged.
      leaders: the loops that decided here, by name.
    """

    def __init__(self, world: "SyncWorld", task: TaskName) -> None:
        self.world = world
        self.task = task
        self.life = -1
        self.opening = 0
        self.history: list[tuple[int, ...]] = []
        self.process = world.net.start(task, self.receive, self.lost)
        self.epochs = MasterTerms()
        self.leaders: dict[str, Leader] = {}
        self.dropped: set[str] = set()
        self.copies: dict[TaskName, Kept] = {}

    def forget(self) -> None:
        """Loses what it holds."""
        self.life = -1
        self.leaders = {}

    def begin(self, life: int, history: list[tuple[int, ...]]) -> None:
        """Makes the variables."""
        self.life = life
        self.history = list(history)
        self.leaders = {}
        self.dropped = set()
        self.settled: list[tuple[TaskName, Message]] = []
        undoes = self.world.durability == "replica"
        self.recorder = Recorder(self.wake, undoes=undoes)
        self.cut = 0  # number of the record with which a log begins anew
        self.copies = {}
        self.open(0, len(history))

    def open(self, number: int, version: int) -> None:
        """Opens a gate in place of the one before."""
        self.settle()
        self.opening = number
        readers = self.world.readers
        line = ReadLine(readers, self.world.present.values()) if readers else None
        self.gate = SyncGate(version, line=line)
        self.sums = HostSums(version, own=[self.task])
        self.came_sums: dict[tuple[int, TaskName], tuple[Contributed, ...]] = {}
        self.parts: dict[tuple[Step, TaskName], Contributed] = {}
        self.chosen: tuple[Step, ...] = ()
        self.own: list[Contributed] = []
        self.newest: dict[TaskName, Message] = {}
        self.readers: dict[Step, TaskName] = {}
        self.came: tuple[TaskName, Step, int, tuple[int, ...]]
        self.kept: set[Step] = set()
        self.unheard: list[tuple[Any, ...]] = []

    # ------------------------------------------------------------ orders

    @property
    def leader(self) -> Leader | None:
        """The last loop that decides here."""
        return next(reversed(self.leaders.values()), None)

    def order(self, src: TaskName, kind: str, name: Any, rest: list[Any]) -> None:
        """Carries out an order of a master, unless another took its place."""
        try:
            self.epochs.check(RUN, rest[-1])
        except FencedError:
            return
        if kind == "open":
            life, version, _ = rest
            if life == self.life:
                self.open(name, version)
                self.send(src, ("opened", name))
            return
        leader = self.leaders.get(name)
        if kind == "run":
            if rest[0] == self.life:
                self.lead(src, name)
        elif kind == "account" and leader is None:
            self.send(src, ("account", name, NEVER))
        elif leader is None:
            return
        elif kind == "account":
            leader.account(src)
        elif kind == "pause":
            leader.stop(pause=True)

    def lead(self, master: TaskName, name: str) -> None:
        """Begins to decide."""
        unheard, self.unheard = self.unheard, []
        leader = self.world.leads_with(self.world, self, name, master)
        self.leaders[name] = leader
        for told in unheard:
            leader.contributed(*told)

    # ------------------------------------------------------------ messages

    def receive(self, src: TaskName, message: Message) -> None:
        kind, loop, *rest = message
        if kind in ("open", "run", "account", "pause"):
            self.order(src, kind, loop, rest)
            return
        if kind == "ask":
            self.ask(src, loop, rest)
            return
        if kind == "there":
            if loop in self.leaders:
                self.leaders[loop].heard()
            return
        life, *rest = rest
        if life == self.life and loop.partition("/")[0] not in self.dropped:
            self.of_life(src, kind, loop, rest)

    def of_life(self, src: TaskName, kind: str, loop: str, rest: list[Any]) -> None:
        """Takes what is of the variables that there are."""
        match kind:
            case "read":
                step = step_of(loop, rest[0])
                self.readers[step] = src
                self.take(sync_gate.StepAsked(step))
            case "push":
                step = step_of(loop, rest[0])
                self.given(step, *rest[3:])
                self.contribute(src, step, rest[1], rest[2])
            case "record" | "kept" | "unkept":
                self.of_copy(src, kind, rest[0])
            case "gone" if loop in self.leaders:
                self.leaders[loop].lost(rest[0])
            case "applied":
                if self.leader is not None:
                    self.leader.applied(rest[0])
            case _:
                self.of_gate(src, kind, rest)

    def of_copy(self, src: TaskName, kind: str, said: Any) -> None:
        """Takes what is said of copies."""
        if kind == "record" and src in self.copies:
            self.copies[src].came(said)
            self.send(src, ("kept", "", self.life, said.number))
        elif kind == "kept":
            self.recorder.commit(said)
        elif kind == "unkept" and self.leader is not None:
            self.leader.lost(said)

    def of_gate(self, src: TaskName, kind: str, said: list[Any]) -> None:
        """Takes what another gate says to this one, or the arbiter."""
        opening, *rest = said
        if opening != self.opening:
            return  # it is of a gate that was here before
        match kind:
            case "contributed":
                self.hear(src, *rest)
            case "decided":
                self.decided(*rest)
            case "host_sum":
                version, given = rest
                self.came_sums[version, src] = given
                steps = tuple(step for step, _, _ in given)
                self.sum(host_sums.SumCame(self.task, src, version, steps))
            case "voided":
                self.take(sync_gate.Voided(rest[0]))
                self.settle()
            case "closed" if src != self.task and self.leader is not None:
                self.leader.lost(src)  # it lost this one, and maybe what it said
            case "closed":
                self.settle()
                self.take(sync_gate.Closed(RunOverError("the run is over")))

    def decided(self, steps: tuple[Step, ...]) -> None:
        """The arbiter chose these contributions."""
        self.take(sync_gate.Decided(steps))

    def ask(self, src: TaskName, loop: str, rest: list[Any]) -> None:
        """Answers a replica that asks for batches."""
        done, batches, idle, number = rest
        handle, _, leading = loop.partition("/")
        leader = self.leaders.get(self.world.leading(int(leading)))
        if leader is None:
            self.send(src, ("deal", loop, number, ()))
        else:
            asked = DataAsked(handle, batches, idle, done=done)
            leader.asked(src, loop, number, asked)

    def hear(
        self,
        src: TaskName,
        steps: tuple[Step, ...],
        version: int,
        slots: tuple[int, ...],
    ) -> None:
        """A ps has contributions: tells the arbiter, as soon as that is there."""
        leader = self.leader
        if leader is None or leader.is_over:
            self.unheard.append((src, steps, version, slots))
        else:
            leader.contributed(src, steps, version, slots)

    def read(self) -> Message:
        """Returns what a step reads here, beside the version."""
        return ()

    def given(self, step: Step, *more: Any) -> None:
        """Takes what else a step contributes."""

    def contribute(
        self, src: TaskName, step: Step, batch: int, versions: tuple[int, ...]
    ) -> None:
        self.came = src, step, batch, versions
        self.take(sync_gate.ContributionCame(step, batch))
        self.take(sync_gate.StepEnded(step))
        loop, number = of_loop(step)
        done = ("done", loop, self.life, number)
        if step in self.kept:
            self.settled.append((src, done))
        else:
            self.send(src, done)

    def take(self, event: sync_gate.Event) -> None:
        for instruction in self.gate.handle(event):
            match instruction:
                case sync_gate.LetIn(steps):
                    for step in steps:
                        loop, number = of_loop(step)
                        value = ("value", loop, self.life, number, self.gate.version)
                        self.send(self.readers.pop(step), (*value, *self.read()))
                        self.leave(step)
                case sync_gate.Refuse(step, error):
                    loop, number = of_loop(step)
                    lost = str(error.details.get("task", ""))
                    refused = ("refused", loop, self.life, number, lost)
                    self.send(self.readers.pop(step), refused)
                case sync_gate.Keep():
                    self.keep_part()
                case sync_gate.Drop(step):
                    self.kept.discard(step)
                    self.sum(host_sums.ContributionDropped(step))
                case sync_gate.Tell(steps, version, slots):
                    told = self.said("contributed", steps, version, slots)
                    self.tell(self.world.deciding, told)
                case sync_gate.TellLater() | sync_gate.TurnLater():
                    due = partial(self.due, self.gate, WAITED_FOR[type(instruction)])
                    self.world.sim.later(instruction.after_s, due)
                case sync_gate.Choose(chosen):
                    self.chosen = steps = tuple(chosen)
                    parts = [self.parts.get((step, self.task)) for step in steps]
                    self.own = [part for part in parts if part is not None]
                    self.sum(host_sums.UpdateDecided(steps))
                    self.kept.clear()
                    self.parts.clear()

    def keep_part(self) -> None:
        """Keeps what a step contributed: the own part, and those for owners away."""
        src, step, batch, versions = self.came
        one: Contributed = (step, batch, versions)
        self.kept.add(step)
        tasks = self.world.shards
        owners = [o for o in tasks if self.world.collector(src, o) == self.task]
        for owner in owners:
            self.parts[step, owner] = one
        others = tuple(owner for owner in owners if owner != self.task)
        own = (self.task,) if self.task in owners else ()
        self.sum(host_sums.ContributionKept(step, batch, others, own))

    def sum(self, event: host_sums.Event) -> None:
        """Tells what sums on hosts are made of, and does as it says."""
        for instruction in self.sums.handle(event):
            match instruction:
                case host_sums.SendSum(owner, version, steps):
                    given = tuple(self.parts[step, owner] for step in steps)
                    said = self.said("host_sum", version, given)
                    seconds = self.world.sim.chance.random() * _APPLY_S
                    self.newest[owner] = said
                    post = partial(self.post_sum, owner, said)
                    self.world.sim.later(seconds, post)
                case host_sums.SendAgain(owner) if owner in self.newest:
                    post = partial(self.post_sum, owner, self.newest[owner])
                    self.world.sim.later(AGAIN_S, post)
                case host_sums.Average(version, found):
                    sums = [self.came_sums[version, one] for _, one in found]
                    summed = [*self.own, *(one for sum_ in sums for one in sum_)]
                    place = {step: number for number, step in enumerate(self.chosen)}
                    summed.sort(key=lambda one: place.get(one[0], -1))
                    seconds = self.world.sim.chance.random() * _APPLY_S
                    apply = partial(self.apply, self.life, summed)
                    self.world.sim.later(seconds, apply)

    def post_sum(self, owner: TaskName, said: Message) -> None:
        """Sends a sum that a thread made, unless it is of before, as is its gate."""
        if self.process.alive and self.newest.get(owner) is said:
            self.tell(owner, said)

    def due(self, gate: sync_gate.SyncGate, event: sync_gate.Event) -> None:
        """Something has been waited for long enough, or has happened meanwhile."""
        if gate is self.gate and self.process.alive:
            self.take(event)

    def leave(self, step: Step) -> None:
        """What a step reads leaves; now and then nobody hears of that."""
        chance = self.world.sim.chance
        if self.world.readers and chance.random() > _UNHEARD:
            sent = partial(self.due, self.gate, sync_gate.ReadSent(step))
            self.world.sim.later(chance.random() * _LEAVES_S, sent)

    def apply(self, life: int, chosen: list[Contributed]) -> None:
        """Applies the mean of these; each was computed from just these variables."""
        if life != self.life or not self.process.alive:
            return
        version = len(self.history)
        for step, batch, versions in chosen:
            read = set(versions)
            assert read == {version}, f"{batch} of {step} was read at {read}"
        self.check_chosen(chosen)
        replicas = [step[0] for step, _, _ in chosen]
        assert len(set(replicas)) == len(replicas), f"twice of one: {replicas}"
        made = tuple(batch for _, batch, _ in chosen)
        if self.world.durability == "checkpoint":
            self.history.append(made)
            self.applied(life, version, None)
        else:
            self.recorder.begins(DUE)
            self.run_nodes(life, version, made, sorted(DUE))

    def check_chosen(self, chosen: list[Contributed]) -> None:
        """Checks what an update is made of."""

    def applied(self, life: int, version: int, lost: JGError | None) -> None:
        """An update is applied, and kept a second time."""
        if life != self.life or not self.process.alive:
            return
        if lost is not None:
            backup = self.world.backup_of(self.task)
            self.tell(self.world.deciding, ("unkept", "", life, backup))
        else:
            self.settle()
            self.take(sync_gate.UpdateApplied())
            self.tell(self.world.deciding, ("applied", "", self.life, version))

    # ------------------------------------------------------------ what is kept

    def run_nodes(
        self, life: int, version: int, made: tuple[int, ...], nodes: list[int]
    ) -> None:
        """Runs the nodes of an update, one some time after the other."""
        if life != self.life or not self.process.alive:
            return
        step, node = ("apply", version), nodes[0]

        def work() -> list[Any]:
            if node == max(DUE):
                self.history.append(made)
                if self.recorder.undo is not None:
                    self.recorder.undo(self.unmake)
            arrays = [np.array(made)]
            self.recorder.put(NodeRan(0, node), arrays, step, update=True)
            return []

        try:
            self.recorder.holding(work)()
        except CopyLostError:
            return  # the run goes on elsewhere
        if left := nodes[1:]:
            again = partial(self.run_nodes, life, version, made, left)
            self.world.sim.later(self.world.sim.chance.random() * _APPLY_S, again)
        else:
            self.recorder.when_kept(step, partial(self.applied, life, version))

    def end(self, version: int) -> History:
        """Returns the updates that it has when it ends at a version."""
        self.recorder.end(version)
        return self.history

    def unmake(self) -> None:
        """Undoes the newest update."""
        self.history.pop()

    def wake(self) -> None:
        seconds = self.world.sim.chance.random() * _APPLY_S
        self.world.sim.later(seconds, partial(self.keep, self.life))

    def keep(self, life: int) -> None:
        """Keeps what was recorded by now."""
        if life != self.life or not self.process.alive:
            return
        if not (records := self.recorder.take()):
            return
        if self.world.durability == "replica":
            for record in records:
                backup = self.world.backup_of(self.task)
                self.send(backup, ("record", "", life, record))
            return
        log = self.world.disks[self.task]
        for record in records:
            if record.number == self.cut:
                log.clear()
            log.append(record)
        on_disk = partial(self.recorder.commit, records[-1].number)
        self.world.sim.later(self.world.sim.chance.random() * _APPLY_S, on_disk)
        if self.world.sim.chance.random() < _CUTS and not self.recorder.is_torn:
            self.cut = self.recorder.put("history", as_arrays(self.history))

    def said(self, kind: str, *what: Any) -> Message:
        """Returns what this gate says to another."""
        return (kind, "", self.life, self.opening, *what)

    def settle(self) -> None:
        settled, self.settled = self.settled, []
        for src, message in settled:
            self.send(src, message)

    def tell(self, shard: TaskName, message: Message) -> None:
        """Tells a ps, which may be this one."""
        if shard == self.task:
            self.receive(shard, message)
        else:
            self.send(shard, message)

    def send(self, task: TaskName, message: Message) -> None:
        self.world.net.send(self.process, task, message)

    def close_again(self, task: TaskName, opening: int) -> None:
        """Tells a gate again that nothing more is decided: it may not have heard."""
        there = self.process.alive and task in self.world.shards
        if there and opening == self.opening:
            self.send(task, self.said("closed"))

    def lost(self, task: TaskName) -> None:
        for leader in self.leaders.values():
            leader.lost(task)
        last, name = self.leader, self.world.leading(self.opening)
        if last is not None and (last.name, last.is_over) == (name, True):
            again = partial(self.close_again, task, self.opening)
            self.world.sim.later(AGAIN_S, again)
        if self.life >= 0:
            self.sum(host_sums.LinkLost(task))
        if self.life == self.world.life and task == self.world.backup_of(self.task):
            self.recorder.fail(CopyLostError(f"{task} was lost", task=task))
        if task == self.world.deciding and self.life == self.world.life:
            self.settle()
            self.take(sync_gate.Closed(TaskLostError(f"{task} was lost", task=task)))
            if task != self.task:
                self.send(task, self.said("closed"))
