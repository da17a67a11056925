"""A master and the standby of its runs: when it is invited."""

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jgraph.errors import FencedError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Address, Frame
from jgraph.runtime.files.shard_files import make_proof
from jgraph.server.runs import calls as runs_module, journal
from jgraph.server.runs.calls import Runs
from jgraph.server.runs.standby import StandbyPeers
from jgraph.server.runs.supervisor import RunSupervisor
from tests.support.loop_orders import PS, WORKER, SetClock
from tests.support.run_async import run_async

OTHER = TaskName("/job:worker/task:1")


class Inviting:
    """A door to tasks that note to which run they are invited."""

    task, incarnation = WORKER, 7

    def __init__(self) -> None:
        self.members = [PS, WORKER]
        self.invited: asyncio.Queue[pb.OpenRun] = asyncio.Queue()
        self.clock = SetClock()
        self.taken: FencedError | None = None
        """Set: the standby has taken the run."""

    def tasks(self) -> list[TaskName]:
        """Returns those of the cluster."""
        return self.members

    def address(self, task: TaskName) -> Address:
        """Returns where a task listens."""
        if task not in self.members:
            raise UnknownDeviceError(f"this cluster has no {task}")
        return Address(f"{task.rpartition(':')[2]}.host:1")

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Answers as a task does."""
        if method == "Variables":
            return frame(variable_table=pb.VariableTable())
        if method == "TaskStatus":
            status = pb.TaskStatus(task=task, state="ready", incarnation=7)
            return frame(task_status=status)
        if self.taken is not None:
            raise self.taken
        invited = pb.OpenRun()
        invited.CopyFrom(body_of(request))
        self.invited.put_nowait(invited)
        return frame(empty=pb.Empty())


QUERY = pb.RunQuery(run="r")
REPORT = frame(loop_report=pb.LoopReport(), tensors=[np.arange(9), np.ones(9)])


async def opened(door: Inviting) -> tuple[Runs, RunSupervisor]:
    """Returns a master's runs, one of which is open, once its standby is invited."""
    runs = Runs(cast("StandbyPeers", door), door.clock)
    order = pb.OpenRun(run="r", info='{"container": ""}')
    async for _ in runs.methods["Master.OpenRun"](frame(open_run=order)):
        invited = await door.invited.get()
        assert (invited.master, invited.incarnation) == (WORKER, 7)
    supervisor = runs.find("r")
    assert supervisor is not None
    return runs, supervisor


def test_of_a_run_that_its_client_gave_up_before_it_was_open_nothing_goes_on(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        door = Inviting()
        asked, answer = asyncio.Event(), door.call

        async def call(task: str, method: str, request: Frame, **_: Any) -> Frame:
            if method == "Variables":
                asked.set()
                await asyncio.Event().wait()
            return await answer(task, method, request)

        door.call = call  # type: ignore[method-assign]
        runs = Runs(cast("StandbyPeers", door), door.clock)
        saves = pb.RunSaves(directory=str(tmp_path), proof=make_proof(tmp_path))
        order = pb.OpenRun(run="r", info='{"container": ""}', saves=saves)
        replies = runs.methods["Master.OpenRun"](frame(open_run=order))
        opening = asyncio.ensure_future(anext(replies))
        await asked.wait()
        opening.cancel()
        await asyncio.wait([opening])
        assert runs.find("r") is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_async(main(), timeout_s=20)


def test_heir_is_not_invited_to_a_run_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs_module, "_INVITE_S", 0.01)

    async def main() -> None:
        door = Inviting()
        runs, supervisor = await opened(door)
        door.clock.at_s = 3.0
        supervisor.record.again(REPORT)
        invited = await door.invited.get()  # time and again, while the run goes on
        assert (invited.age_s, invited.frames) == (3.0, 1)
        while not door.invited.empty():
            door.invited.get_nowait()
        supervisor.record.end("done", None)
        await asyncio.gather(*runs._working)
        assert door.invited.empty()

    run_async(main(), timeout_s=20)


def test_another_standby_is_chosen_as_soon_as_tasks_join_or_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs_module, "_INVITE_S", 1000.0)

    async def main() -> None:
        door = Inviting()
        runs, supervisor = await opened(door)
        await asyncio.sleep(0)  # it waits now
        door.members = [PS, OTHER, WORKER]
        runs.rearranged()
        asked = [await door.invited.get() for _ in range(2)]
        assert [list(one.standbys) for one in asked] == [[PS, OTHER]] * 2
        supervisor.record.end("done", None)
        runs.rearranged()
        await asyncio.gather(*runs._working)

    run_async(main(), timeout_s=20)


def test_heir_is_not_invited_to_a_run_whose_journal_is_not_kept_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and not tried every two seconds to the end of the run."""
    monkeypatch.setattr(runs_module, "_INVITE_S", 0.01)
    monkeypatch.setattr(journal, "_MOST_BYTES", 100)

    async def main() -> None:
        runs, supervisor = await opened(Inviting())
        for _ in range(2):
            supervisor.record.again(REPORT)
        await asyncio.gather(*runs._working)
        assert not supervisor.record.is_over

    run_async(main(), timeout_s=20)
    (said,) = [line for line in caplog.messages if "too long" in line]
    assert "run 'r'" in said


TAKEN = FencedError("another task is the master of run 'r'", run="r")


def test_a_master_that_was_replaced_says_how_far_it_came() -> None:
    """It may have noted what none of its standbys has read."""

    async def main() -> None:
        runs, supervisor = await opened(Inviting())
        supervisor.record.again(REPORT)
        supervisor.record.end("failed", TAKEN)
        query = frame(run_query=pb.RunQuery(run="r"))
        (reply,) = [one async for one in runs.methods["JournalEnd"](query)]
        (row,) = body_of(reply).runs
        assert (row.state, row.frames) == ("replaced", supervisor.record.frames)
        until = frame(run_query=pb.RunQuery(run="r", until=row.frames))
        told = [one async for one in runs.methods["RunJournal"](until)]
        assert len(told) == row.frames == 1
        runs.close()

    run_async(main(), timeout_s=20)


def test_a_master_that_is_told_to_end_waits_until_its_standby_has_its_runs() -> None:
    async def main() -> None:
        door = Inviting()
        runs, supervisor = await opened(door)
        runs.hand_over()
        waits = asyncio.ensure_future(runs.wait_handed_over(grace_s=20.0))
        await door.invited.get()
        assert not waits.done()
        assert not supervisor.record.is_over
        door.taken = TAKEN
        await waits
        assert supervisor.is_replaced
        runs.close()

    run_async(main(), timeout_s=20)


def test_a_master_is_not_held_longer_than_its_grace() -> None:
    async def main() -> None:
        door = Inviting()
        runs, supervisor = await opened(door)
        runs.hand_over()
        await runs.wait_handed_over(grace_s=0.0)
        assert not supervisor.record.is_over
        runs.close()

    run_async(main(), timeout_s=20)


def test_no_standby_is_made_of_a_master_that_is_no_member() -> None:
    async def main() -> None:
        door = Inviting()
        runs = Runs(cast("StandbyPeers", door), door.clock)
        order = pb.OpenRun(run="r", info='{"container": ""}', master=OTHER)
        with pytest.raises(UnknownDeviceError, match="r' belongs to no member") as told:
            async for _ in runs.methods["InheritRun"](frame(open_run=order)):
                pass
        assert OTHER in told.value.message
        async for end in runs.methods["JournalEnd"](frame(run_query=QUERY)):
            assert not body_of(end).runs  # it follows nobody
        runs.close()

    run_async(main(), timeout_s=20)


def test_a_standby_that_has_left_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs_module, "_INVITE_S", 0.01)

    async def main() -> None:
        door = Inviting()
        runs, _ = await opened(door)
        door.members = [WORKER, OTHER]
        runs.rearranged()
        while list((await door.invited.get()).standbys) != [OTHER]:
            pass
        runs.close()

    run_async(main(), timeout_s=20)
