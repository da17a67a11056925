"""Members of a simulated cluster: processes that join it, leave it, freeze and hang.

The machine that numbers them, ``Members``, is real, as is what each task does about its
arrangement. Simulated are the calls: of who joins to the registrar, and of that to all.
"""

import asyncio
import math
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from jgraph.coordination.data.slots import DEATHS
from jgraph.coordination.liveness.members import (
    Adopted,
    Answered,
    Event,
    Give,
    Gone,
    Knocked,
    LeaveAsked,
    Left,
    Member,
    Members,
    Publish,
    Refuse,
    Served,
    TimePassed,
)
from jgraph.errors import DataSlotError, JGError, TaskLostError
from jgraph.graph.device import is_worker
from jgraph.graph.ir import TaskName
from jgraph.rpc.resumable.dialing import RESUME_S
from jgraph.server.members.messages import arrangement_in, members_message
from tests.support.simulation.run_tasks import RunProcess
from tests.support.simulation.run_world import RunWorld, address_of

LEASE_S: Final = 6.0
"""So long an index is kept for a process that is not heard of."""
LOOK_S: Final = 1.0
"""Between two looks of the registrar at a member."""
REFUSED_S: Final = 5.0
"""So long after a process was given up its steps are refused."""
_LEAVE_S: Final = 0.5
_GRACE_S: Final = 8.0
WAYS: Final = ("given", "served", "late", "prepared", "hangs", "begins")
"""How one that joins fails: it dies when it has an index, or serves; it serves too
late; it dies, or hangs, as it is prepared; it dies as its loop begins."""
_DIES_AT: Final = {"prepared": "RegisterProgram", "begins": "RunLoop"}


@dataclass
class ElasticWorld(RunWorld):
    """A run on tasks of which some join, leave, and are replaced.

    Attributes:
      joined: how many have joined.
      left: how many have left in order.
      replaced: processes that were there when another one got their index.
      broken: what did not hold.
      kills: of workers.
      short_s: so long steps went on with fewer workers than the least.
    """

    joined: int = 0
    left: int = 0
    replaced: list[RunProcess] = field(default_factory=list)
    broken: list[AssertionError] = field(default_factory=list)
    short_s: float = 0.0
    kills: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.registrar = self.tasks[0]
        self.machines: dict[int, Members] = {}
        self.heard: dict[int, float] = {}  # when each process was heard of
        self.removed: dict[int, float] = {}  # when each was given up, or left
        self.invited: dict[int, int] = {}  # which registrar gave each its index
        self.looks = set[TaskName]()
        self.short_since: float | None = None
        self.works = set[asyncio.Task[None]]()
        self.do(self.look_after())

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins work that nobody waits for."""

        async def done() -> None:
            try:
                with suppress(JGError):  # who would be told is gone
                    await work
            except AssertionError as error:
                self.broken.append(error)

        task = asyncio.ensure_future(done())
        self.works.add(task)
        task.add_done_callback(self.works.discard)

    # ------------------------------------------------------------ the registrar

    def handle(self, event: Event) -> TaskName | None:
        """Tells the registrar; returns the task that it gives.

        Raises:
          JGError: it is not there, or refuses.
        """
        there = self.at(self.registrar)
        machine = self.machines.get(there.incarnation)
        if machine is None:
            described = {t: m.address for t, m in self.described.members.items()}
            machine = self.machines[there.incarnation] = Members(described, LEASE_S)
            self.learn(machine)
        given: TaskName | None = None
        for instruction in machine.handle(event, self.clock.now()):
            match instruction:
                case Give(task):
                    given = task
                case Refuse(error):
                    raise error
                case Publish():
                    self.publish(there, instruction)
        return given

    def publish(self, there: RunProcess, told: Publish) -> None:
        """Takes the newest arrangement; one that is there is given up late enough."""
        if (task := told.task) is not None:
            self.note(f"{task} {told.kind} ({told.arrangement.number})")
            process = self.processes[task]
            if told.kind in {"lost", "left"}:
                silent_s = self.clock.now() - self.heard.get(process.incarnation, 0.0)
                ends = not process.alive or process.leaves
                assert ends or silent_s >= LEASE_S, f"{task} is there"
                self.removed[process.incarnation] = self.clock.now()
        there.arrange(told.arrangement)

    def learn(self, machine: Members) -> None:
        """A registrar that was started again asks the others, and is told at once."""
        known = [one.arrangement for one in self.processes.values() if one.alive]
        newest = max(known, key=lambda one: one.number)
        for member in newest.members.values():  # nobody heard that it was given up
            self.removed.pop(member.incarnation, None)
        machine.handle(Adopted(newest), self.clock.now())
        self.at(self.registrar).arrange(newest)

    async def look_after(self) -> None:
        """Tells all tasks the newest arrangement, and sees who is there.

        Somebody starts a worker where there is none for long.
        """
        alone = 0
        while True:
            await asyncio.sleep(LOOK_S)
            works = [one for one in self.staying() if not self.processes[one].hangs_at]
            alone = 0 if works else alone + 1
            if alone == 10:
                self.do(self.join())
            with suppress(JGError):
                self.handle(TimePassed())
                members = self.at(self.registrar).arrangement.members
                for task, member in members.items():
                    if task not in self.looks:
                        self.looks.add(task)
                        self.do(self.look(task, member))

    async def look(self, task: TaskName, member: Member) -> None:
        """Tells one the arrangement."""
        try:
            there, process = self.at(self.registrar), self.processes[task]
            is_it = member.incarnation in {0, process.incarnation}
            if not (process.alive and is_it):
                self.handle(Gone(task, member.incarnation))
                return
            await self.travel(there, task)
            if self.at(task) is process:
                told = members_message(there.arrangement)
                process.arrange(arrangement_in(told))
                there.arrange(process.arrangement)
                self.handle(Answered(task, process.incarnation))
                self.heard[process.incarnation] = self.clock.now()
        except JGError:
            pass  # it is not reached, or nobody looks
        finally:
            self.looks.discard(task)

    def arranged(self, process: RunProcess) -> None:
        """A process may find that it is no member any more, or is to leave."""
        arrangement, task = process.arrangement, process.task
        if not arrangement.is_of(task, process.incarnation):
            self.end(process)
        elif arrangement.members[task].leaves and not process.leaves:
            self.do(self.drain(process))

    def is_given_up(self, process: RunProcess) -> bool:
        return process.incarnation in self.removed

    def end(self, process: RunProcess) -> None:
        """A process ends; nobody starts it again."""
        if process.alive:
            self.note(f"{process.task} ends")
            process.kill()

    async def drain(self, process: RunProcess) -> None:
        """A process that was told to leave does so."""
        process.leaves = True
        await asyncio.sleep(_LEAVE_S)
        await process.leave(_GRACE_S)
        await process.awake()
        if process.alive:
            with suppress(JGError):
                await self.travel(process, self.registrar)
                self.handle(Left(process.task, process.incarnation))
            self.left += 1
            self.end(process)

    def applied(self, process: RunProcess) -> None:
        """Learns for how long too few workers train, and what came too late."""
        removed_s = self.removed.get(process.incarnation, math.inf)
        # A master that is lost itself refuses nobody.
        is_led = len(self.masters) == 1 and self.masters[0].alive
        if removed_s < self.clock.now() - REFUSED_S and is_led:
            late = f"{process.task} was given up, and what it does counts"
            self.broken.append(AssertionError(late))
        loops = [loop for one in self.processes.values() for loop in one.loops.values()]
        training = [one for one in loops if not one.order.HasField("sync")]
        if len(training) >= (self.least or 0):
            self.short_since = None
            return
        now = self.clock.now()
        self.short_since = now if self.short_since is None else self.short_since
        self.short_s = max(self.short_s, now - self.short_since)

    # ------------------------------------------------------------ who joins

    async def join(self, fails: str = "", job: str = "worker") -> None:
        """A process joins.

        Args:
          fails: how, see ``WAYS``; empty: it does not.
          job: of the process.
        """
        self.starts += 1
        incarnation = self.starts
        task = await self.knock(incarnation, job)
        if task is None:
            return
        process = self.take(task, incarnation)
        if fails == "given":
            self.end(process)
            return
        if fails == "late":
            await asyncio.sleep(LEASE_S + self.chance.uniform(0.0, 3.0))
        if fails in _DIES_AT:
            process.dies_at = _DIES_AT[fails]
        elif fails == "hangs":
            process.hangs_at = "RegisterProgram"
        try:
            await self.travel(process, self.registrar)
            self.handle(Served(task, incarnation, address_of(task, incarnation)))
            self.heard[incarnation] = self.clock.now()
            self.invited.pop(incarnation, None)  # each registrar learns of it
        except JGError as error:
            self.note(f"{task} does not join: {error.code}")
            self.end(process)
            return
        self.joined += not fails
        process.arrange(self.at(self.registrar).arrangement)
        if fails == "served":
            self.end(process)

    async def knock(self, incarnation: int, job: str) -> TaskName | None:
        """Asks for an index while the registrar is away; None: for too long."""
        for _ in range(40):
            try:
                await self.travel(None, self.registrar)
                for task, one in list(self.machine_joined().items()):
                    process = self.processes[task]
                    if not (process.alive and process.incarnation == one.incarnation):
                        self.handle(Gone(task, one.incarnation))
                return self.handle(Knocked(job, incarnation))
            except TaskLostError:
                await asyncio.sleep(0.5)
        return None

    def machine_joined(self) -> dict[TaskName, Member]:
        """Returns the members that have joined, as the registrar has them."""
        self.handle(TimePassed())
        return self.machines[self.at(self.registrar).incarnation].joined

    def take(self, task: TaskName, incarnation: int) -> RunProcess:
        """A process is a task from now on; no other holds that (M4)."""
        now, before = self.clock.now(), self.processes.get(task)
        giver = self.at(self.registrar).incarnation
        if before is not None and before.alive:
            waited_s = now - self.heard[before.incarnation]
            is_free = before.incarnation in self.removed or waited_s >= LEASE_S
            # A registrar that was started again knows those that serve.
            known = self.invited.get(before.incarnation, giver) == giver
            assert is_free or not known, f"{task} is there, and another one gets it"
            self.replaced.append(before)
        self.note(f"{incarnation} is given {task}")
        process = self.process(task, incarnation)
        process.joined, self.heard[incarnation] = True, now
        self.invited[incarnation] = giver
        self.processes[task] = process
        if task not in self.tasks:
            self.tasks.append(task)
        return process

    # ------------------------------------------------------------ what becomes of them

    def tear(self) -> None:
        """As in any run; more workers than it began with may have a step under way."""
        super().tear()
        if self.durability != "checkpoint":
            workers = [t for t in self.tasks if is_worker(t) and self.is_up(t)]
            self.torn += max(0, len(workers) - self.workers)

    def kill(self, task: TaskName, away_s: float) -> None:
        """SIGKILL; a process that had joined joins anew."""
        process = self.processes.get(task)
        if process is None or not process.alive:
            return
        self.kills += is_worker(task)
        if not process.joined:
            super().kill(task, away_s)
            return
        self.note(f"kill {task}, which had joined")
        process.kill()
        job = "worker" if is_worker(task) else "ps"
        again = lambda: self.do(self.join(job=job))
        asyncio.get_running_loop().call_later(away_s, again)

    def start_again(self, task: TaskName) -> None:
        """A task that has left meanwhile is not started."""
        members = max(
            (one.arrangement for one in self.processes.values() if one.alive),
            key=lambda one: one.number,
            default=self.described,
        ).members
        # Nor one whose index another has.
        if task in members and members[task] == self.described.members[task]:
            super().start_again(task)

    async def freeze(self, task: TaskName, seconds: float) -> None:
        """A process does nothing for a while, and wakes with what it was doing."""
        process = self.at(task)
        self.note(f"freeze {task} for {seconds:.1f} s")
        process.freeze()
        loop = asyncio.get_running_loop()
        loop.call_later(RESUME_S, self.break_links, process)
        await asyncio.sleep(seconds)
        self.note(f"{task} wakes")
        process.thaw()
        await asyncio.sleep(self.chance.uniform(0.1, 3.0))  # until it is told
        members = self.at(self.registrar).arrangement.members
        member = members.get(task)
        if member is None or member.incarnation not in {0, process.incarnation}:
            self.end(process)

    def break_links(self, process: RunProcess) -> None:
        """Connections of one that is silent are given up."""
        if process.is_frozen:
            for end in list(process.ends):
                end(None)

    def asks_to_leave(self, task: TaskName) -> None:
        """Somebody tells a task to leave the cluster."""
        with suppress(JGError):
            self.handle(LeaveAsked(task))

    def is_suspicious(self, state: str) -> bool:
        """Whether the run ended as one batch, or one step, seems to end its tasks."""
        return state == "failed" and (
            (self.kills >= DEATHS and DataSlotError.code in self.why())
            or "times already" in self.why()
        )

    def led_by(self) -> list[TaskName]:
        """Returns who looks after the run."""
        return [one.task for one in self.masters[-1:]]

    def staying(self) -> list[TaskName]:
        """Returns the workers that are members, there, and not told to leave."""
        with suppress(TaskLostError):
            members = self.at(self.registrar).arrangement.members
            return [
                task
                for task, one in members.items()
                if is_worker(task) and self.answers(task) and not one.leaves
            ]
        return []
