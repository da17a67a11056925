"""What a master keeps of a run and tells of it, whoever watches."""

import asyncio
import json

import numpy as np
import pytest

from jgraph.coordination.run.privacy_account import PrivacyAccount, Spent
from jgraph.errors import ConfigError, TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Frame
from jgraph.server.runs import journal
from jgraph.server.runs.journal import Journal
from tests.support.loop_orders import WORKER, SetClock, contributing, deciding


def report(steps: int, position: str = "", late: int = 0) -> Frame:
    body = pb.LoopReport(
        state="running",
        data_position=position,
        dropped={WORKER: late} if late else {},
    )
    return frame(loop_report=body, tensors=[np.arange(steps), np.ones(steps)])


def test_steps_of_a_synchronous_run_are_those_that_were_decided_in_all_its_rows() -> (
    None
):
    async def run() -> None:
        clock = SetClock()
        record = Journal(WORKER, pb.OpenRun(run="r", info="{}"), clock)
        for loop, steps, late in [("a-0", 3, 2), ("a-1", 4, 5)]:
            record.begins(deciding(loop))
            record.begins(contributing("w" + loop))
            record.keep(contributing("w" + loop), report(9), record.seconds)
            decided = report(steps, f"[{steps}]", late)
            record.keep(deciding(loop), decided, record.seconds)
            assert record.position == f"[{steps}]"
            clock.at_s += 2.0
        assert (record.row().state, record.row().steps) == ("running", 7)
        record.end("done", None)
        clock.at_s += 5.0
        row = record.row()
        assert (row.state, row.seconds, row.age_s) == ("done", 4.0, 9.0)
        told = [one async for one in record.reports() if len(one.tensors[0])]
        loops = [body_of(one).loop for one in told]
        assert loops == ["wa-0", "a-0", "wa-1", "a-1"]
        told_all = told[1::2]
        # Times are those since the run began, and counts those of all rows.
        assert [one.tensors[1][0] for one in told_all] == [1.0, 3.0]
        assert [body_of(one).dropped[WORKER] for one in told_all] == [2, 7]

    asyncio.run(run())


def test_who_watches_a_run_hears_of_all_its_loops_and_how_it_ended() -> None:
    async def run() -> None:
        record = Journal(WORKER, pb.OpenRun(run="r", info="{}"), SetClock())
        lost = TaskLostError("gone", task=WORKER)
        order = pb.RunLoop(loop="w", task=WORKER, handle="h")
        record.begins(order)
        record.keep(order, report(2), 0.0)
        record.lost(order, lost)
        again = pb.RunLoop(loop="w~1", task=WORKER, handle="h~1.1")
        record.begins(again)
        record.end("failed", lost)
        states, ended = [], None
        try:
            async for one in record.reports():
                body = body_of(one)
                states.append((body.loop, body.handle, body.state, len(one.tensors[0])))
        except TaskLostError as error:
            ended = error
        assert ended is lost
        assert states == [
            ("w", "h", "running", 0),
            ("w", "", "running", 2),
            ("w", "", "lost", 0),
            ("w~1", "h~1.1", "running", 0),
        ]

    asyncio.run(run())


def test_record_made_from_the_journal_of_another_tells_the_same() -> None:
    async def run() -> None:
        order = pb.OpenRun(run="r", info="{}")
        record, other = (Journal(WORKER, order, SetClock()) for _ in range(2))
        record.note(frame(register_program=pb.RegisterProgram(run="r")))
        for loop, late in [("a-0", 2), ("a-1", 5)]:
            record.begins(deciding(loop))
            record.begins(contributing("w" + loop))
            record.keep(contributing("w" + loop), report(9), 0.0)
            record.keep(deciding(loop), report(3, "[3]", late), 0.0)
        record.lost(contributing("wa-1"), TaskLostError("gone", task=WORKER))
        record.end("done", None)
        kinds = []
        async for made in record.journal(0):
            kinds.append(kind_of(made))
            match kinds[-1]:
                case "run_loop":
                    other.begins(body_of(made))
                case "loop_report":
                    other.again(made)
        assert kinds[:3] == ["register_program", "run_loop", "run_loop"]
        assert kinds[-1] == "run_table"
        other.end("done", None)
        assert other.row() == record.row()
        for mine, theirs in zip(
            [one async for one in record.reports()],
            [one async for one in other.reports()],
            strict=True,
        ):
            assert mine.header == theirs.header
            np.testing.assert_array_equal(mine.tensors[0], theirs.tensors[0])
        # Who takes over counts on with what came too late in earlier rows.
        other.begins(deciding("a-2"))
        other.keep(deciding("a-2"), report(1, "[4]", 1), 0.0)
        last = [one async for one in other.reports()][-1]
        assert body_of(last).dropped[WORKER] == 8

    asyncio.run(run())


def test_journal_that_is_too_long_to_be_kept_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        monkeypatch.setattr(journal, "_MOST_BYTES", 100)
        record = Journal(WORKER, pb.OpenRun(run="r", info="{}"), SetClock())
        for _ in range(3):
            record.keep(deciding("a"), report(5), 0.0)
        assert not record.is_whole
        with pytest.raises(ConfigError, match="too long to have another master"):
            await anext(record.journal(0))
        # So is one who was too slow; who has the rest goes on.
        behind, newest = record.journal(2), record.journal(2)
        assert body_of(await anext(behind)).loop == body_of(await anext(newest)).loop
        record.keep(deciding("b"), report(5), 0.0)
        assert body_of(await anext(newest)).loop == "b"
        record.keep(deciding("c"), report(5), 0.0)
        with pytest.raises(ConfigError, match="too long to have another master"):
            await anext(behind)

    asyncio.run(run())


def test_the_account_of_privacy_is_of_all_updates_that_were_made() -> None:
    """One that an heir goes back from without knowing all is no account."""

    async def run() -> None:
        kind = Spent("example", 1.0, 0.1)
        opening = PrivacyAccount((), kind, first=10, limit=12).opening()
        order = pb.OpenRun(run="r", info=json.dumps({"privacy": opening}))
        record, loop = Journal(WORKER, order, SetClock()), deciding("a")
        record.begins(loop)
        record.keep(loop, report(7), 0.0)
        assert record.privacy(17) == {"privacy": [["example", 1.0, 0.1, 7]]}
        record.go_back(pb.RunRestored(back_to=14), 4, "")
        assert record.privacy(14) == {"privacy": [["example", 1.0, 0.1, 7]]}
        assert record.may_do(100) == 5
        record.keep(loop, report(2), 0.0)
        assert record.privacy(16) == {"privacy": [["example", 1.0, 0.1, 9]]}
        record.go_back(pb.RunRestored(back_to=14, untold=True), 4, "")
        assert record.privacy(14) == {}
        plain = Journal(WORKER, pb.OpenRun(run="r", info="{}"), SetClock())
        assert (plain.privacy(3), plain.may_do(100)) == ({}, 100)

    asyncio.run(run())
