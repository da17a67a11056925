"""Master methods about runs: open, begin, list, attach, answer, stop, succeed, save."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, final

from jgraph.clock import Clock
from jgraph.cluster.deadlines import COMPILE_S
from jgraph.cluster.methods import Answer
from jgraph.cluster.polling import Polling
from jgraph.coordination.run.succession import standbys_of
from jgraph.errors import ConfigError, FencedError, JGError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import is_refused
from jgraph.rpc.dial_only.address import is_dial_only
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Frame
from jgraph.server.runs.peers import ready_tasks
from jgraph.server.runs.ps_setup import version_if_known
from jgraph.server.runs.standby import Standby, StandbyPeers
from jgraph.server.runs.supervisor import RunSupervisor

_LOG = logging.getLogger("jgraph.recover")
_INVITE_S: Final = 2.0
"""Between two invitations: a standby that was started again has forgotten the last."""
_HAND_OVER_S: Final = 0.1
"""Between two looks: that a standby has a run shows as it refuses an invitation."""
_KEPT: Final = 16
"""Runs that are over and can still be looked at."""


@final
class Runs:
    """Adds the calls about runs to a master.

    Args:
      peers: to the tasks.
      clock: dates what happens.

    Attributes:
      methods: the calls, by name.
    """

    def __init__(
        self,
        peers: StandbyPeers,
        clock: Clock,
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._supervisors: dict[str, RunSupervisor] = {}
        self._standbys: dict[str, Standby] = {}
        self._appointed: dict[str, dict[TaskName, str]] = {}
        """Standbys of the runs of this master: task and process."""
        self._changed = asyncio.Event()
        """Set, and replaced, as tasks join or leave: runs may need other standbys."""
        self._working: set[asyncio.Task[None]] = set()
        self._leaves = False
        self.methods: Mapping[str, Answer] = {
            "Runs": self._own,
            "InheritRun": self._inherit,
            "SucceedRun": self._succeed_now,
            "RunJournal": self._journal,
            "JournalEnd": self._journal_end,
            "Master.Runs": self._all,
            "Master.OpenRun": self._open,
            "Master.KeepProgram": self._keep,
            "Master.BeginRun": self._begin,
            "Master.Attach": self._attach,
            "Master.AnswerRun": self._answer,
            "Master.SucceedRun": self._succeed_lost,
            "Master.StopRun": self._stop,
            "Master.RunSaved": self._saved,
        }

    def find(self, run: str) -> RunSupervisor | None:
        """Returns who looks after a run; None: these are loops of no run."""
        return self._supervisors.get(run)

    def rearranged(self) -> None:
        """Tells all runs that tasks have joined the cluster, or left it."""
        for supervisor in self._supervisors.values():
            supervisor.rearranged()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def hand_over(self) -> None:
        """Lets standbys take the runs of this task, which is told to end."""
        self._leaves = True
        for supervisor in self._supervisors.values():
            self._hand_over(supervisor)

    def _hand_over(self, supervisor: RunSupervisor) -> None:
        if self._has_standby(supervisor):
            supervisor.hand_over()
            self._do(self._wait_taken(supervisor))

    async def wait_handed_over(self, grace_s: float) -> None:
        """Waits until no run needs this task any more, for at most ``grace_s``.

        The master of a run may be lost while this task, its standby, is told to end: it
        becomes the master then, as it may know what nobody else does.
        """
        polling = Polling(_HAND_OVER_S, grace_s, self._clock)
        while self._is_needed() and await polling.again():
            pass
        for standby in self._standbys.values():  # it would be lost at once
            standby.retire()

    def _is_needed(self) -> bool:
        elects = any(standby.elects for standby in self._standbys.values())
        return elects or any(map(self._has_standby, self._supervisors.values()))

    def _has_standby(self, supervisor: RunSupervisor) -> bool:
        """Whether a run of this master goes on, and another task can take it."""
        return bool(
            self._appointed.get(supervisor.name) and not supervisor.record.is_over
        )

    async def _wait_taken(self, supervisor: RunSupervisor) -> None:
        """Asks standbys until one of them has the run, which ends here then."""
        while not supervisor.record.is_over:
            await self._invite(supervisor)
            await asyncio.sleep(_HAND_OVER_S)

    def leave(self) -> None:
        """Tells those who watch a run that this task ends."""
        for supervisor in self._supervisors.values():
            supervisor.record.leave()

    def close(self) -> None:
        """Follows no run any more."""
        for work in self._working:
            work.cancel()
        for supervisor in self._supervisors.values():
            supervisor.close()

    async def _open(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        if order.run not in self._supervisors:
            # First: nobody would end what has begun if the caller gives up meanwhile.
            order.version = await version_if_known(self._peers, order)
            supervisor = RunSupervisor(order, self._peers, self._clock)
            supervisor.confirm = partial(self._invite, supervisor)
            self._save(order, supervisor)
            self._supervisors[order.run] = supervisor
            if supervisor.client is not None:
                supervisor.client.begin(COMPILE_S)  # it has more to say
            await self._appoint(order, supervisor)
        self._forget_oldest()
        yield frame(empty=pb.Empty())

    def _forget_oldest(self) -> None:
        """Forgets runs that are over, if there are many."""
        over = [
            name
            for name, supervisor in self._supervisors.items()
            if supervisor.record.is_over
        ]
        for name in over[: max(0, len(self._supervisors) - _KEPT)]:
            del self._supervisors[name]

    async def _begin(self, request: Frame) -> AsyncIterator[Frame]:
        supervisor = self.get(body_of(request).run)
        supervisor.record.note(request)
        await self._invite(supervisor)  # so that it goes on, whatever becomes of this
        supervisor.begin_all()
        yield frame(empty=pb.Empty())

    # ------------------------------------------------------------ standbys

    async def _appoint(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        """Chooses standbys for a run of this master, and sees that it has some."""
        order.master = self._peers.task
        order.incarnation = self._peers.incarnation
        order.term = order.term or 1
        await self._choose(supervisor)
        self._do(self._keep_standby(supervisor))

    async def _choose(self, supervisor: RunSupervisor) -> None:
        # Addresses first: a task may leave the cluster while others are asked.
        peers = self._peers
        dialled = {t for t in peers.tasks() if not is_dial_only(peers.address(t))}
        ready = {
            task: process
            for task, process in (await ready_tasks(peers, within_s=_INVITE_S)).items()
            if task in dialled  # else no client could ask it
        }
        before = self._appointed.get(supervisor.name, {})
        incumbents = {
            task: process
            for task, process in before.items()
            if await self._may_be_there(task, process, ready)
        }
        chosen = standbys_of(ready, self._peers.task, incumbents)
        self._appointed[supervisor.name] = {
            task: incumbents.get(task) or ready[task] for task in chosen
        }
        await self._invite(supervisor)

    async def _may_be_there(
        self, task: TaskName, process: str, ready: Mapping[TaskName, str]
    ) -> bool:
        """Whether a standby may still be one; a process that is gone is none."""
        if task in ready:
            return ready[task] == process
        if task not in self._peers.tasks():  # it has left the cluster
            return False
        return not await is_refused(self._peers.address(task))

    async def _keep_standby(self, supervisor: RunSupervisor) -> None:
        """Sees to it that a run has some to its end, also if they are started again."""
        changed = self._changed
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_INVITE_S):
                    await changed.wait()
            changed = self._changed
            if supervisor.record.is_over:  # which its standby has read
                self._appointed.pop(supervisor.name, None)
                return
            if not supervisor.record.is_whole:
                _LOG.warning(
                    "run '%s' is too long for another standby to read: if its own is "
                    "started again, it ends with its master, %s",
                    *(supervisor.name, self._peers.task),
                )
                return
            await self._choose(supervisor)

    async def _invite(self, supervisor: RunSupervisor) -> None:
        standbys = self._appointed.get(supervisor.name, {})
        order = supervisor.as_known(standbys)
        asks = (self._invite_one(task, order, supervisor) for task in standbys)
        await asyncio.gather(*asks)

    async def _invite_one(
        self, task: TaskName, order: pb.OpenRun, supervisor: RunSupervisor
    ) -> None:
        try:
            await self._peers.call(task, "InheritRun", frame(open_run=order))
        except FencedError as error:
            supervisor.fail(error)
        except JGError as error:
            _LOG.info("%s is no standby of '%s': %s", task, order.run, error.message)

    async def _inherit(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        mine = self._supervisors.get(order.run)
        if mine is not None:
            if mine.is_of_standby and order.term == mine.term:  # it is over
                yield frame(empty=pb.Empty())
                return
            if order.term <= mine.term:
                raise FencedError(
                    f"{self._peers.task} has taken over run '{order.run}' from "
                    f"{order.master}, which was thought to be lost",
                    run=order.run,
                )
            what = f"{order.master} is the master of run '{order.run}' now"
            mine.fail(FencedError(what, run=order.run))
            del self._supervisors[order.run]
            self._appointed.pop(order.run, None)
        standby = self._standbys.get(order.run)
        if standby is not None and order.term < standby.end.term:
            what = f"{standby.master} is the master of run '{order.run}' now"
            raise FencedError(what, run=order.run, term=standby.end.term)
        if standby is None or standby.is_of_another(order):
            self._check_member(order)
            if standby is not None:
                standby.close()
            world = order, self._peers, self._clock
            standby = Standby(*world, self._succeed, self._save_on, standby)
            self._standbys[order.run] = standby
            self._do(self._follow(order.run, standby))
        standby.standbys = list(map(TaskName, order.standbys))
        await standby.wait_read(order.frames)
        yield frame(empty=pb.Empty())

    def _check_member(self, order: pb.OpenRun) -> None:
        """Refuses to follow a master that cannot be asked for anything.

        It asks again, also if this task is the one that does not know it yet.
        """
        if TaskName(order.master) not in self._peers.tasks():
            raise UnknownDeviceError(
                f"run '{order.run}' belongs to no member of the cluster that "
                f"{self._peers.task} knows, but to {order.master}"
            )

    async def _succeed_lost(self, request: Frame) -> AsyncIterator[Frame]:
        calls = (
            self._peers.call(task, "SucceedRun", request)
            for task in self._peers.tasks()
            if task != body_of(request).master
        )
        await asyncio.gather(*calls, return_exceptions=True)
        yield frame(empty=pb.Empty())

    async def _succeed_now(self, request: Frame) -> AsyncIterator[Frame]:
        query = body_of(request)
        standby = self._standbys.get(query.run)
        if standby is not None and standby.master == query.master:
            standby.succeed()
        yield frame(empty=pb.Empty())

    async def _follow(self, run: str, standby: Standby) -> None:
        try:
            await standby.work()
        finally:
            is_newest = self._standbys.get(run) is standby
            if is_newest:
                del self._standbys[run]
        if self._leaves and run in self._supervisors:  # it has become the master
            self._hand_over(self._supervisors[run])
        if is_newest:
            before = standby.reader
            if before is not None and before is not standby:
                before.open()
                self._standbys[run] = before
                self._do(self._follow(run, before))
        if standby.end_record is not None and run not in self._supervisors:
            # Its master may be lost before its client has heard how it ended.
            standby.end_record.close()
            self._supervisors[run] = standby.end_record
            self._forget_oldest()

    async def _succeed(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        self._supervisors[order.run] = supervisor
        supervisor.confirm = partial(self._invite, supervisor)
        # Before any loop begins: who comes after this one is to know them all.
        await self._appoint(order, supervisor)

    def _save_on(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        try:
            self._save(order, supervisor)
        except JGError as error:
            _LOG.warning("run '%s' is not saved any more: %s", order.run, error.message)

    async def _journal(self, request: Frame) -> AsyncIterator[Frame]:
        query = body_of(request)
        known = self._known(query.run) or self.get(query.run)
        async for entry in known.record.journal(query.after, query.until):
            yield entry

    def _known(self, run: str) -> RunSupervisor | None:
        """Returns who knows a run here, as its master or as a standby that has read."""
        standby, supervisor = self._standbys.get(run), self._supervisors.get(run)
        if supervisor is not None and not supervisor.is_replaced:
            return supervisor
        reader = None if standby is None else standby.reader
        return None if reader is None else reader.supervisor

    async def _journal_end(self, request: Frame) -> AsyncIterator[Frame]:
        """Says how far this task knows a run, as its master or as a standby."""
        run, table = body_of(request).run, pb.RunTable()
        # What a master did before it was replaced may be known to nobody else.
        known = self._known(run) or self._supervisors.get(run)
        if known is not None:
            table.runs.append(known.journal_end())
        yield frame(run_table=table)

    def note(self, request: Frame) -> None:
        """Keeps what made a run, if there is one."""
        if (supervisor := self.find(body_of(request).run)) is None:
            return
        supervisor.record.note(request)
        if kind_of(request) == "open_data_run":
            supervisor.loops.data = body_of(request)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    # ------------------------------------------------------------ calls

    async def _keep(self, request: Frame) -> AsyncIterator[Frame]:
        self.get(body_of(request).run).ready.keep(request)
        self.note(request)
        yield frame(empty=pb.Empty())

    def _save(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        if order.HasField("saves") and not order.client.directory:
            supervisor.saving.begin()

    def own(self) -> pb.RunTable:
        """Returns the runs whose master this task is, or was and was not told so."""
        known = self._supervisors.values()
        rows = [one.row() for one in known if not one.is_replaced]
        return pb.RunTable(runs=rows)

    async def _own(self, request: Frame) -> AsyncIterator[Frame]:
        yield frame(run_table=self.own())

    async def _all(self, request: Frame) -> AsyncIterator[Frame]:
        calls = (self._peers.call(t, "Runs", request) for t in self._peers.tasks())
        replies = await asyncio.gather(*calls, return_exceptions=True)
        tables = []
        for reply in replies:
            if isinstance(reply, JGError):
                continue  # who does not answer is the master of nothing
            if isinstance(reply, BaseException):
                raise reply
            tables.append(body_of(reply))
        yield frame(run_table=merged(tables))

    async def _attach(self, request: Frame) -> AsyncIterator[Frame]:
        query = body_of(request)
        supervisor = self.get(query.run)
        client = supervisor.client if query.owner else None
        if client is None:
            async for report in supervisor.record.reports():
                yield report
            return
        with client.watching():
            async for report in supervisor.record.reports(client.waits):
                yield report

    async def _answer(self, request: Frame) -> AsyncIterator[Frame]:
        body = body_of(request)
        client = self.get(body.run).client
        answer = pb.RunAnswer() if client is None else await client.answer(body)
        yield frame(run_answer=answer)

    async def _stop(self, request: Frame) -> AsyncIterator[Frame]:
        self.get(body_of(request).run).stop()
        yield frame(empty=pb.Empty())

    async def _saved(self, request: Frame) -> AsyncIterator[Frame]:
        await self.get(body_of(request).run).saving.rest()
        yield frame(empty=pb.Empty())

    def get(self, run: str) -> RunSupervisor:
        """Returns who looks after a run.

        Raises:
          ConfigError: nobody does here.
        """
        if run not in self._supervisors:
            raise ConfigError(
                f"{self._peers.task} is not the master of a run '{run[:80]}'; `jgraph "
                "runs` shows which runs there are",
                run=run,
            )
        return self._supervisors[run]


def merged(tables: Iterable[pb.RunTable]) -> pb.RunTable:
    """Returns the runs that several tasks tell of, each as its newest master does.

    One that does not know yet that it was replaced has it, too, and so has a standby
    that has read its end.
    """
    rows = [row for table in tables for row in table.runs]
    rows.sort(key=lambda row: (row.term, not row.of_standby))
    return pb.RunTable(runs={row.run: row for row in rows}.values())
