"""Master methods about detached runs: open, list, attach, stop, take over, save."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, final

from jgraph.clock import Clock
from jgraph.cluster.methods import Answer
from jgraph.coordination.run.succession import standby_of
from jgraph.errors import ConfigError, FencedError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Frame
from jgraph.server.runs.checkpointer import RunCheckpointer
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.ps_setup import version_if_known
from jgraph.server.runs.standby import Standby, StandbyPeers
from jgraph.server.runs.supervisor import RunSupervisor

_LOG = logging.getLogger("jgraph.recover")
_INVITE_S: Final = 2.0
"""Between two invitations: a standby that was started again has forgotten the last."""
_KEPT: Final = 16
"""Runs that are over and can still be looked at."""


@final
class Runs:
    """Adds the calls about runs to a master.

    Args:
      peers: to the tasks.
      clock: dates what happens.
      position: says where in its data a run is.

    Attributes:
      methods: the calls, by name.
    """

    def __init__(
        self,
        peers: StandbyPeers,
        clock: Clock,
        position: Callable[[Journal], Mapping[str, Any]],
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._position = position
        self._supervisors: dict[str, RunSupervisor] = {}
        self._savers: dict[str, RunCheckpointer] = {}
        self._standbys: dict[str, Standby] = {}
        self._working: set[asyncio.Task[None]] = set()
        self.methods: Mapping[str, Answer] = {
            "Runs": self._own,
            "InheritRun": self._inherit,
            "RunJournal": self._journal,
            "Master.Runs": self._all,
            "Master.OpenRun": self._open,
            "Master.KeepProgram": self._keep,
            "Master.Attach": self._attach,
            "Master.StopRun": self._stop,
            "Master.RunSaved": self._saved,
        }

    def find(self, run: str) -> RunSupervisor | None:
        """Returns who looks after a run; None: it ends with its client."""
        return self._supervisors.get(run)

    def leave(self) -> None:
        """Tells those who watch a run that this task ends."""
        for supervisor in self._supervisors.values():
            supervisor.record.leave()

    def close(self) -> None:
        """Follows no run any more."""
        for work in self._working:
            work.cancel()
        for saver in self._savers.values():
            saver.close()
        for supervisor in self._supervisors.values():
            supervisor.close()

    async def _open(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        if order.run not in self._supervisors:
            supervisor = RunSupervisor(order, self._peers, self._clock)
            self._save(order, supervisor)
            self._supervisors[order.run] = supervisor
            standby = standby_of(self._peers.tasks(), self._peers.task)
            if standby is not None:
                order.master = self._peers.task
                order.incarnation = self._peers.incarnation
                order.version = await version_if_known(self._peers, order)
                await self._invite(standby, order, supervisor)
                self._do(self._keep_standby(standby, order, supervisor))
        over = [
            name
            for name, supervisor in self._supervisors.items()
            if supervisor.record.is_over
        ]
        for name in over[: max(0, len(self._supervisors) - _KEPT)]:
            del self._supervisors[name]
            self._savers.pop(name, None)
        yield frame(empty=pb.Empty())

    # ------------------------------------------------------------ standbys

    async def _keep_standby(
        self, standby: TaskName, order: pb.OpenRun, supervisor: RunSupervisor
    ) -> None:
        """Sees to it that a run has one to its end, also if that is started again."""
        while True:
            await asyncio.sleep(_INVITE_S)
            if supervisor.record.is_over:  # which its standby has read
                return
            if not supervisor.record.is_whole:
                _LOG.warning(
                    "run '%s' is too long for another standby to read: if %s is "
                    "started again, it ends with its master, %s",
                    *(order.run, standby, order.master),
                )
                return
            await self._invite(standby, order, supervisor)

    async def _invite(
        self, standby: TaskName, order: pb.OpenRun, supervisor: RunSupervisor
    ) -> None:
        order.age_s, order.frames = supervisor.record.seconds, supervisor.record.frames
        try:
            await self._peers.call(standby, "InheritRun", frame(open_run=order))
        except FencedError as error:
            supervisor.fail(error)
        except JGError as error:
            _LOG.info("run '%s' has no standby now: %s", order.run, error.message)

    async def _inherit(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        if order.run in self._supervisors:
            raise FencedError(
                f"{self._peers.task} has taken over run '{order.run}' from "
                f"{order.master}, which was thought to be lost",
                run=order.run,
            )
        if order.run not in self._standbys:
            standby = Standby(
                *(order, self._peers, self._clock), self._succeed, self._save_on
            )
            self._standbys[order.run] = standby
            self._do(self._follow(order.run, standby))
        yield frame(empty=pb.Empty())

    async def _follow(self, run: str, standby: Standby) -> None:
        try:
            await standby.work()
        finally:
            del self._standbys[run]

    def _succeed(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        self._supervisors[order.run] = supervisor

    def _save_on(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        try:
            self._save(order, supervisor)
        except JGError as error:
            _LOG.warning("run '%s' is not saved any more: %s", order.run, error.message)

    async def _journal(self, request: Frame) -> AsyncIterator[Frame]:
        query = body_of(request)
        async for made in self._get(query.run).record.journal(query.after):
            yield made

    def note(self, request: Frame) -> None:
        """Keeps what made a run, if it is one that outlives its client."""
        if (supervisor := self.find(body_of(request).run)) is None:
            return
        supervisor.record.note(request)
        if kind_of(request) == "open_data_run":
            supervisor.data = body_of(request)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    # ------------------------------------------------------------ calls

    async def _keep(self, request: Frame) -> AsyncIterator[Frame]:
        self._get(body_of(request).run).ready.keep(request)
        self.note(request)
        yield frame(empty=pb.Empty())

    def _save(self, order: pb.OpenRun, supervisor: RunSupervisor) -> None:
        if not order.HasField("saves"):
            return
        record = supervisor.record
        where = lambda: self._position(record)
        peers = self._peers
        saver = RunCheckpointer(peers.task, order.saves, record, peers.call, where)
        saver.start()
        self._savers[order.run] = saver
        supervisor.be_saved(saver)

    async def _own(self, request: Frame) -> AsyncIterator[Frame]:
        rows = [supervisor.record.row() for supervisor in self._supervisors.values()]
        yield frame(run_table=pb.RunTable(runs=rows))

    async def _all(self, request: Frame) -> AsyncIterator[Frame]:
        calls = (self._peers.call(t, "Runs", request) for t in self._peers.tasks())
        replies = await asyncio.gather(*calls, return_exceptions=True)
        table = pb.RunTable()
        for reply in replies:
            if isinstance(reply, JGError):
                continue  # who does not answer is the master of nothing
            if isinstance(reply, BaseException):
                raise reply
            table.runs.extend(body_of(reply).runs)
        # A master that was replaced has it still: of a term before, or as failed.
        order = lambda row: (row.term, row.state != "failed")
        newest = {row.run: row for row in sorted(table.runs, key=order)}
        yield frame(run_table=pb.RunTable(runs=newest.values()))

    async def _attach(self, request: Frame) -> AsyncIterator[Frame]:
        query = body_of(request)
        async for report in self._get(query.run).record.reports():
            yield report

    async def _stop(self, request: Frame) -> AsyncIterator[Frame]:
        self._get(body_of(request).run).stop()
        yield frame(empty=pb.Empty())

    async def _saved(self, request: Frame) -> AsyncIterator[Frame]:
        run = body_of(request).run
        self._get(run)
        if run in self._savers:
            await self._savers[run].rest()
        yield frame(empty=pb.Empty())

    def _get(self, run: str) -> RunSupervisor:
        if run not in self._supervisors:
            raise ConfigError(
                f"{self._peers.task} is not the master of a run '{run[:80]}'; `jgraph "
                "runs` shows which runs there are"
            )
        return self._supervisors[run]
