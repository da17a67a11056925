"""Simulated masters: one orders the loops of a run, until another takes its place."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from jgraph.coordination.data.dispatch import (
    Asked,
    Deal,
    Dispatch,
    Event,
    Expel,
    Fail,
    LinkLost,
    Over,
    Progressed,
    TimePassed,
    WaitEnded,
    WorkerEnded,
    WorkerLost,
)
from jgraph.coordination.data.slots import Lease
from jgraph.graph.ir import TaskName
from tests.support.simulation.network import Message

if TYPE_CHECKING:
    from tests.support.simulation.faulty_run import FaultyRun

ANSWER_S: Final = 10.0
LEASE_S: Final = 20.0


class Master:
    """Orders loops, tells the client what it hears, and may deal out the data.

    Attributes:
      dispatch: what is dealt; None until the client has said it, or if others deal.
      term: which master of the run this is.
      loops: where each loop that it has set going runs.
      is_heard: the client still listens; orders are refused of one that was replaced.
    """

    def __init__(self, world: "FaultyRun[Any]", term: int) -> None:
        self.world = world
        self.term = term
        self.task = TaskName(f"/job:master/task:{term}")
        self.dispatch: Dispatch | None = None
        self.loops: dict[str, TaskName] = {}
        self.asked: dict[str, int] = {}
        self.unlisted: set[str] = set()
        self.is_heard = True
        self.process = world.net.start(self.task, self.receive, self.lost)
        world.sim.later(LEASE_S / 4, self.keep_looking)

    def deal(self, dispatch: Dispatch) -> None:
        """Begins to deal; earlier loops are nothing to it any more."""
        self.dispatch = dispatch
        self.loops.clear()
        self.asked.clear()

    def start_loop(self, name: str, task: TaskName, *, listed: bool = True) -> None:
        """Sets a loop going; one that is not listed is not allowed for."""
        if not listed:
            self.unlisted.add(name)
        self.loops[name] = task
        self.send(task, ("run", name, self.world.life, self.term))

    def stop_loop(self, name: str) -> None:
        if name in self.loops:
            self.send(self.loops[name], ("stop", name, self.term))

    def send(self, task: TaskName, message: Message) -> None:
        self.world.net.send(self.process, task, message)

    def forget(self, name: str) -> None:
        """A loop was lost."""
        self.loops.pop(name, None)
        self.asked.pop(name, None)
        self.handle(WorkerLost(name))

    def receive(self, src: TaskName, message: Message) -> None:
        kind, loop, *rest = message
        if kind in ("account", "opened"):
            if self.is_heard and kind == "account":
                self.world.accounted(loop, *rest)
            elif self.is_heard:
                self.world.opened(loop, src)
            return
        if self.loops.get(loop) != src:
            return
        if kind == "there?":
            self.send(src, ("there", loop))
            return
        if kind == "ask":
            done, batches, idle, number = rest
            self.asked[loop] = number
            self.handle(Asked(loop, done, batches, idle))
            if idle:
                wait = partial(self.wait_ended, loop, number)
                self.world.sim.later(ANSWER_S, wait)
            return
        self.hear(loop, src, *rest)

    def hear(
        self, loop: str, task: TaskName, done: int, told: Any, state: str, lost: str
    ) -> None:
        """Takes a report of a loop."""
        self.handle(Progressed(loop, done))
        if state == "failed" and lost not in ("", task):
            self.handle(LinkLost(loop))
        elif state not in ("running", "failed"):
            self.handle(WorkerEnded(loop))
        if self.is_heard:
            self.world.reported(loop, told, state, lost)

    def wait_ended(self, loop: str, number: int) -> None:
        if self.asked.get(loop) == number:
            del self.asked[loop]
            self.handle(WaitEnded(loop))
            self.answer(loop, number, ())

    def handle(self, event: Event) -> None:
        if self.dispatch is None:
            return
        for instruction in self.dispatch.handle(event, self.world.sim.now):
            match instruction:
                case Deal(loop, leases):
                    if loop not in self.unlisted:
                        self.world.dealt(leases)
                    self.answer(loop, self.asked.pop(loop), leases)
                case Over(loop):
                    self.answer(loop, self.asked.pop(loop), None)
                case Expel(loop, _):
                    self.stop_loop(loop)
                    if self.is_heard:
                        self.world.loop_lost(loop)
                case Fail(error):
                    if self.is_heard:
                        self.world.state = f"failed: {error}"

    def answer(self, loop: str, number: int, leases: Sequence[Lease] | None) -> None:
        if loop in self.loops:
            self.send(self.loops[loop], ("deal", loop, number, leases))

    def lost(self, task: TaskName) -> None:
        """A task is not reached any more."""
        if self.is_heard and self.process.alive:
            self.world.lost(task)

    def keep_looking(self) -> None:
        if self.process.alive:
            self.handle(TimePassed())
            if self.is_heard:
                self.world.look()
            self.world.sim.later(LEASE_S / 4, self.keep_looking)
