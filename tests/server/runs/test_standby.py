"""A run whose client and master are both gone goes on with the master's standby."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.errors import (
    CopyLostError,
    FencedError,
    InternalError,
    InvalidProgramError,
    JGError,
    TaskLostError,
    UninitializedError,
    UnknownDeviceError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.server.loops.dealer import Dealers
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.standby import Standby, StandbyPeers
from jgraph.server.runs.supervisor import RunSupervisor
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from tests.support.counting import BATCH, IDS, Ledger, after, trainer
from tests.support.ledger import examples_counted, examples_due
from tests.support.loop_orders import SetClock
from tests.support.run_async import run_async
from tests.support.servers import Servers
from tests.support.stopping import once

pytestmark = pytest.mark.usefixtures("nothing_is_left")

MASTER, PS, OTHER = "/job:worker/task:1", "/job:ps/task:0", "/job:ps/task:1"


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=2)
    yield servers
    servers.stop()


@pytest.fixture
def client(own_servers: Servers) -> Iterator[Cluster]:
    with connect(own_servers.server(MASTER).target, timeout_s=20) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "strategy",
    [AsyncPS(), pytest.param(SyncPS(), marks=pytest.mark.nightly)],
    ids=["async", "sync"],
)
def test_client_of_a_detached_run_follows_it_to_the_heir_of_its_master(
    own_servers: Servers, client: Cluster, strategy: Strategy
) -> None:
    there = trainer(client, strategy)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[
            after(100, lambda: own_servers.lose(MASTER)),
            once(lambda run: client.master == PS),
        ],
        progress=False,
        detached=True,
    )
    assert (run.state, client.master) == ("stopped", PS)
    (info,) = client.runs()
    assert (info.master, info.state) == (PS, "stopped")
    assert info.term > 1
    # What the lost worker had told of, but not as done, comes again; what it had done
    # and not told of is counted by the ps alone.
    assert run.steps >= info.step
    if isinstance(strategy, SyncPS):
        assert run.steps == info.step
        position = there.current_position()
        np.testing.assert_array_equal(examples_counted(run), examples_due(position))
    else:
        ledger = Ledger()
        ledger.add(run)
        ledger.check(there, lost=1)


@pytest.mark.nightly
def test_client_that_attached_follows_the_run_to_the_heir(
    own_servers: Servers, client: Cluster
) -> None:
    """It is connected to the master that is lost, as the client that began the run."""
    there = trainer(client, AsyncPS())
    begun, found, lost = threading.Event(), threading.Event(), list[int]()

    def lose_and_stop(run: Run, report: Report) -> None:
        begun.set()
        if found.is_set() and not lost:
            lost.append(report.step)
            own_servers.lose(MASTER)
        if lost and report.step > lost[0] + 200:
            run.stop()

    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[lose_and_stop],
        progress=False,
        detached=True,
        block=False,
    )
    assert begun.wait(20)
    with connect(own_servers.server(MASTER).target, timeout_s=20) as other:
        watching = trainer(other, AsyncPS())
        watched = watching.attach()
        found.set()
        watched.wait(40)
        run.wait(40)
        assert other.master == PS
        (info,) = client.runs()
        for one in (run, watched):
            assert one.state == "stopped"
            assert one.steps >= info.step  # the ps counts what nobody was told of
        assert watched.steps == run.steps
        seen = [one.metrics("seen")["value"].sum(0) for one in (run, watched)]
        np.testing.assert_array_equal(*seen)
        assert watching.current_position() == there.current_position()


@pytest.mark.parametrize(
    "by", [pytest.param("who began it", marks=pytest.mark.nightly), "who attached"]
)
def test_stop_that_a_lost_master_did_not_hear_is_told_to_its_heir(
    own_servers: Servers, client: Cluster, by: str
) -> None:
    begun = threading.Event()
    run = trainer(client, AsyncPS()).fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        callbacks=[lambda run, report: begun.set()],
        progress=False,
        detached=True,
        block=False,
    )
    assert begun.wait(20)
    with connect(own_servers.server(PS).target, timeout_s=20) as other:
        stopping = run if by == "who began it" else trainer(other, AsyncPS()).attach()
        own_servers.lose(MASTER)
        stopping.stop()
        assert stopping.wait(40).state == "stopped"
        assert run.wait(40).state == "stopped"


class Behind:
    """A door to a master that is busy with its journal, and is lost then.

    Args:
      journal: what it tells.
      lost: how the loss shows; it tells the rest to who follows again.
      then: which process answers in its place.
    """

    task = PS

    def __init__(self, journal: Sequence[Frame], lost: JGError, then: int = 2) -> None:
        self.journal = journal
        self.lost, self.is_lost = lost, False
        self.then = then
        self.is_held, self.held_at = False, list[bool]()
        self.told_to_end, self.may_tell = asyncio.Event(), asyncio.Event()
        self.may_tell.set()
        self.began: asyncio.Queue[pb.RunLoop] = asyncio.Queue()
        self.heirs: list[RunSupervisor] = []
        """Of standbys that took its place."""
        self.dealers = Dealers(SetClock())
        self.loops_end = "stopped"
        self.accounts_s = dict[str, float]()
        """For how long each task was asked to end its loop."""
        self.others: list[Frame] = []
        """What another standby has read."""
        self.newest_loop = ""
        self.terms, self.taken = list[int](), set[int]()
        self.rest: list[Frame] = []
        """Of the journal: told when the master is followed again."""
        self.refuses: JGError | None = None
        """The master has left the cluster: what who asks it is told."""
        self.refusals: list[JGError] = []
        """Ends of loops that do not go on, in their order."""

    def tasks(self) -> list[str]:
        """Returns those of the cluster."""
        return [PS, OTHER, *([MASTER] if self.refuses is None else [])]

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Answers of a task."""
        if method == "TaskStatus":
            if not self.is_lost:
                raise TaskLostError("it does not answer in time", task=TaskName(task))
            status = pb.TaskStatus(task=task, state="ready", incarnation=self.then)
            return frame(task_status=status)
        if method == "JournalEnd" and task == MASTER and self.refuses is not None:
            raise self.refuses
        if method == "JournalEnd":
            end = pb.RunRow(run="r", task=MASTER, state="running", term=1)
            end.incarnation, end.frames = 1, len(self.others)
            knows = self.others if task == OTHER else self.then == 1
            return frame(run_table=pb.RunTable(runs=[end] if knows else []))
        if method == "StopLoop" and body_of(request).takes_over:
            self.terms.append(body_of(request).term)
            if self.terms[-1] in self.taken:
                raise FencedError("another one has it", term=self.terms[-1])
            return frame(loop_report=pb.LoopReport(loop=self.newest_loop))
        if method == "StopLoop" and body_of(request).loop:
            await asyncio.sleep(0)  # what was let go would end here
            self.held_at.append(self.is_held)
            self.accounts_s[task] = body_of(request).timeout_s
            ended = pb.LoopReport(state=self.loops_end)
            return frame(loop_report=ended, tensors=[np.arange(1), np.full(1, 5.0)])
        if method == "Variables":
            return frame(variable_table=pb.VariableTable())
        return frame(empty=pb.Empty())

    async def register(self, request: Frame) -> Frame:
        """Passes every task its part of a program."""
        return frame(empty=pb.Empty())

    async def stream(
        self, task: str, method: str, request: Frame
    ) -> AsyncIterator[Frame]:
        """Tells the journal, or that the master may end."""
        if method == "DrainHold":
            self.is_held = True
            try:
                yield request
                await self.told_to_end.wait()
                yield request
                await asyncio.Event().wait()
            finally:
                self.is_held = False
        await self.may_tell.wait()
        if task == OTHER:
            assert self.terms, "the master may still write more"
            for made in self.others[body_of(request).after : body_of(request).until]:
                yield made
            return
        rest = self.rest if self.is_lost else []
        for made in [*self.journal, *rest][body_of(request).after :]:
            yield made
        if not self.is_lost:
            self.is_lost = True
            raise self.lost

    def note(self, kind: str, text: str) -> None:
        """Notes nothing."""

    async def loop(self, order: pb.RunLoop) -> AsyncIterator[Frame]:
        """Begins a loop that goes on, or is refused."""
        self.began.put_nowait(order)
        if self.refusals:
            raise self.refusals.pop(0)
        await asyncio.Event().wait()
        yield frame(empty=pb.Empty())


def standby(
    door: Behind,
    before: Standby | None = None,
    saves: Callable[[pb.OpenRun, RunSupervisor], None] = lambda _order, _supervisor: (
        None
    ),
    **invited: Any,
) -> Standby:
    order = pb.OpenRun(
        **{"run": "r", "info": '{"container": ""}', **invited},
        master=MASTER,
        incarnation=1,
    )

    async def begins(_: pb.OpenRun, supervisor: RunSupervisor) -> None:
        door.heirs.append(supervisor)

    peers = cast("StandbyPeers", door)
    return Standby(order, peers, SetClock(), begins, saves, before)


NEXT = 3
"""The first term of the first of three tasks, after the first of all."""
LOOP = frame(run_loop=pb.RunLoop(loop="w", task=PS, run="r", term=1))
BEGUN = frame(run_query=pb.RunQuery(run="r"))
OVER = frame(run_table=pb.RunTable(runs=[pb.RunRow(run="r", state="done")]))


def test_heir_has_the_place_of_a_master_that_says_another_process_has_its_own() -> None:
    """One that was frozen, and whose task was started again elsewhere."""

    async def main() -> None:
        fenced = FencedError("it was started again", task=TaskName(MASTER))
        door = Behind([LOOP, BEGUN], fenced)
        await standby(door).work()
        assert (await door.began.get()).term == NEXT
        (supervisor,) = door.heirs
        assert (supervisor.record.term, supervisor.record.is_over) == (NEXT, False)
        supervisor.close()

    run_async(main(), timeout_s=20)


def test_heir_of_a_master_that_began_nothing_has_the_number_after() -> None:
    """The loops in the journal are of the master before."""

    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("gone"))
        await standby(door, term=5).work()
        assert (await door.began.get()).term == 6
        door.heirs[0].close()

    run_async(main(), timeout_s=20)


def test_a_master_that_is_one_again_after_another_has_another_journal() -> None:
    async def main() -> None:
        heir = standby(Behind([LOOP, BEGUN], TaskLostError("gone")), term=1)
        same = pb.OpenRun(run="r", master=MASTER, incarnation=1, term=1)
        assert not heir.is_of_another(same)
        same.term = 3
        assert heir.is_of_another(same)

    run_async(main(), timeout_s=20)


def dealt() -> Frame:
    """The data of a run."""
    plan = json.dumps(SlotPlan([Part("a", 10)], 1, 0).to_dict())
    return frame(
        open_data_run=pb.OpenDataRun(
            run="r", plan=plan, budget=10, workers=1, lease_s=60.0
        )
    )


async def answer_all(supervisor: RunSupervisor) -> None:
    """Is the client of a run, which has a checkpoint of its beginning."""
    client = supervisor.client
    assert client is not None
    async for report in supervisor.record.reports(client.waits):
        question = body_of(report).question
        if question.kind in {"newest", "state"}:
            await client.answer(pb.RunAnswer(number=question.number, step=0))


@pytest.mark.parametrize(
    ("why", "process"),
    [
        (InvalidProgramError("no program 'h'", task=TaskName(MASTER)), "2"),
        (UninitializedError("a variable has no value"), "1"),
    ],
    ids=["the_programs_were_dropped", "a_ps_was_started_again"],
)
def test_heir_takes_a_run_back_that_its_master_was_lost_before_it_could(
    why: JGError, process: str
) -> None:
    """A master drops the programs as it begins to; a ps may have lost all it held."""

    async def main() -> None:
        journal = [
            frame(register_program=pb.RegisterProgram(handle="h", run="r")),
            dealt(),
            frame(run_loop=pb.RunLoop(loop="w", task=MASTER, handle="h", run="r")),
            BEGUN,
        ]
        door = Behind(journal, TaskLostError("gone"))
        door.refusals.append(why)
        client = pb.RunClient(directory="there", lease_s=60.0)
        info = '{"container": "", "first_step": 0, "steps": 10}'
        holders = {PS: process}
        invited: dict[str, Any] = {"info": info, "client": client, "holders": holders}
        await standby(door, **invited).work()
        (supervisor,) = door.heirs
        assert (await door.began.get()).handle == "h"
        answering = asyncio.ensure_future(answer_all(supervisor))
        again = asyncio.ensure_future(door.began.get())
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({answering, again}, return_when=first)
        assert again.done(), supervisor.record.error
        assert again.result().handle.startswith("h~back.")
        assert supervisor.restores == 1
        answering.cancel()
        supervisor.close()

    run_async(main(), timeout_s=20)


@pytest.mark.row(30)
@pytest.mark.parametrize("invited", [{"client": pb.RunClient(lease_s=0.01)}, {}])
@pytest.mark.parametrize(("process", "state"), [("2", "done"), ("1", "failed")])
def test_run_without_its_client_is_not_done_if_a_ps_holds_nothing(
    process: str, state: str, invited: dict[str, Any]
) -> None:
    """Nobody reads the ps at the end, who would find out."""

    async def main() -> None:
        door = Behind([dealt(), LOOP, BEGUN], TaskLostError("gone"))
        door.loops_end = "done"
        await standby(door, holders={PS: process}, **invited).work()
        record = door.heirs[0].record
        with suppress(TaskLostError):
            async for _ in record.reports():
                pass
        assert record.row().state == state
        if record.error is not None:
            assert f"{PS} was lost at the end of the run" in record.error.message

    run_async(main(), timeout_s=20)


def test_heir_of_a_run_that_is_over_goes_on_with_nothing() -> None:
    async def main() -> None:
        record = Journal(TaskName(MASTER), pb.OpenRun(run="r"), SetClock())
        record.begins(body_of(LOOP))
        record.end("failed", TaskLostError("gone"))
        door = Behind([made async for made in record.journal(0)], TaskLostError("gone"))
        await standby(door).work()
        assert not door.heirs

    run_async(main(), timeout_s=20)


def test_master_that_was_busy_when_it_invited_is_followed_again_when_it_answers() -> (
    None
):
    """A link that is lost for a moment costs no master."""

    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("lost"), then=1)
        door.rest = [OVER]
        follows = standby(door)
        await follows.work()
        assert not door.heirs
        assert follows.end_record is not None
        row = follows.end_record.row()
        assert (row.state, row.of_standby) == ("done", True)

    run_async(main(), timeout_s=20)


def test_heir_of_a_master_that_has_left_the_cluster_has_its_place() -> None:
    async def main() -> None:
        door = Behind([LOOP, BEGUN], UnknownDeviceError(f"there is no {MASTER}"))
        door.refuses = UnknownDeviceError(f"there is no {MASTER}")
        follows = standby(door)
        await follows.work()
        (supervisor,) = door.heirs
        assert (await door.began.get()).task == PS
        supervisor.close()

    run_async(main(), timeout_s=20)


def test_heir_that_was_invited_late_tells_when_steps_were_since_the_run_began() -> None:
    async def main() -> None:
        loop = frame(run_loop=pb.RunLoop(loop="w", task=PS, began_s=90.0))
        door = Behind([loop, BEGUN], TaskLostError("lost"))
        await standby(door, age_s=100.0).work()
        await door.began.get()
        (supervisor,) = door.heirs
        assert supervisor.record.seconds == 100.0
        told = supervisor.record.journal(0)
        *_, account, again = [await anext(told) for _ in range(4)]
        assert account.tensors[1] == [95.0]
        assert body_of(again).began_s == 100.0
        supervisor.close()

    run_async(main(), timeout_s=20)


def test_run_that_its_heir_cannot_go_on_with_has_failed() -> None:
    """Else it would be shown as running, with nobody to look after it."""

    def refuse(_order: pb.OpenRun, _supervisor: RunSupervisor) -> None:
        raise RuntimeError("it cannot be saved")

    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("lost"))
        await standby(door, saves=refuse).work()
        row = door.heirs[0].record.row()
        assert (row.state, row.term) == ("failed", NEXT)  # where who watches looks
        with pytest.raises(InternalError, match="it cannot be saved"):
            async for _ in door.heirs[0].record.reports():
                pass

    run_async(main(), timeout_s=20)


@pytest.mark.row(20)
@pytest.mark.parametrize(("newest", "waits_s"), [("w", 30.0), ("", 1.0)])
def test_a_step_under_way_of_a_master_that_only_its_client_misses_is_waited_for(
    newest: str, waits_s: float
) -> None:
    """Else its batch is dealt again untold. One that is gone says nothing."""

    async def main() -> None:
        own = pb.RunLoop(loop="w", task=MASTER, run="r", term=1, step_timeout_s=30.0)
        door = Behind([frame(run_loop=own), BEGUN], TaskLostError("lost"))
        door.newest_loop = newest
        follows = standby(door)
        follows.succeed()
        await follows.work()
        assert (await door.began.get()).task == MASTER
        assert door.accounts_s == {MASTER: waits_s}
        door.heirs[0].close()

    run_async(main(), timeout_s=20)


AGAIN = frame(run_loop=pb.RunLoop(loop="w~1.1", task=PS, run="r", term=1))


@pytest.mark.row(35)
def test_standby_that_is_behind_reads_the_rest_from_another_one() -> None:
    """It was cut off from the master, which then died."""

    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("lost"))
        door.others, door.newest_loop = [LOOP, BEGUN, AGAIN], "w~1.1"
        await standby(door).work()
        again = await door.began.get()
        assert (again.loop, again.term) == (f"w~{again.term}.1", door.terms[-1])
        names = [body_of(made).loop async for made in journal_of(door.heirs[0], 3)]
        assert names == ["w", "w~1.1"]
        door.heirs[0].close()

    run_async(main(), timeout_s=20)


async def journal_of(supervisor: RunSupervisor, until: int) -> AsyncIterator[Frame]:
    """Yields the loops in the journal of a run."""
    async for made in supervisor.record.journal(0, until):
        if made.header.HasField("run_loop"):
            yield made


@pytest.mark.row(35)
def test_run_fails_if_nobody_who_answers_has_read_of_its_newest_loop() -> None:
    """It may have gone back since; who has read of that does not answer."""

    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("lost"))
        door.newest_loop = "w~1.1"
        await standby(door).work()
        error = door.heirs[0].record.error
        assert isinstance(error, CopyLostError)
        assert "(nothing of a loop on " in error.message

    run_async(main(), timeout_s=20)


def test_standby_whose_term_was_another_masters_takes_a_later_one() -> None:
    """That master is lost as well, or this one would hear of it."""

    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("lost"))
        door.taken = {NEXT}
        await standby(door).work()
        first, second = sorted(set(door.terms))
        assert first < second == (await door.began.get()).term
        door.heirs[0].close()

    run_async(main(), timeout_s=20)


@pytest.mark.row(34)
def test_standby_whose_next_master_is_lost_unread_has_the_journal_before() -> None:
    async def main() -> None:
        door = Behind([], TaskLostError("lost"))
        before = standby(door)
        after = standby(door, before, frames=3)
        assert after.reader is before
        await after.work()
        assert not door.heirs
        assert after.reader is before
        before.open()  # as Runs does
        door.journal, door.is_lost = [LOOP, BEGUN], False
        await before.work()
        assert door.heirs[0].record.frames >= 2
        door.heirs[0].close()

    run_async(main(), timeout_s=20)


@pytest.mark.parametrize("read", [[], [LOOP]], ids=["nothing", "a_loop"])
def test_run_whose_heir_had_not_read_what_was_done_has_failed_and_says_so(
    read: list[Frame],
) -> None:
    """It was invited late; what it knows is where the run was long ago."""

    async def main() -> None:
        door = Behind(read, TaskLostError("lost"))
        await standby(door, frames=2).work()
        row, error = door.heirs[0].record.row(), door.heirs[0].record.error
        assert (row.state, row.term) == ("failed", NEXT)
        assert isinstance(error, CopyLostError)
        assert f"({len(read)} of 2 entries)" in error.message

    run_async(main(), timeout_s=20)


def test_master_that_is_told_to_end_goes_when_its_heir_has_asked_for_all_it_did() -> (
    None
):
    async def main() -> None:
        door = Behind([LOOP, BEGUN], TaskLostError("lost"))
        door.may_tell.clear()
        door.told_to_end.set()
        work = asyncio.ensure_future(standby(door, frames=2).work())
        assert not (await asyncio.wait({work}, timeout=0.1))[0]
        door.may_tell.set()
        await work
        assert (await door.began.get()).term == NEXT
        assert door.held_at == [True]
        door.heirs[0].close()

    run_async(main(), timeout_s=20)
