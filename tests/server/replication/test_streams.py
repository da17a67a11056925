import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.clock import SystemClock
from jgraph.errors import CopyLostError
from jgraph.failpoints import armed
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.record_codec import record_from
from jgraph.server.replication.streams import ChangeStreams
from jgraph.server.replication.wal import read_log
from jgraph.server.replication.wal_thread import WalThread
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext
from jgraph.server.task_service import TaskService
from jgraph.testing.in_process_transport import InProcessNetwork
from tests.support.run_async import run_async

PS, STREAM = TaskName("/job:ps/task:0"), "run.ps0"
W = StoredVariable("w", ValueType((), "float32"))
KEEP = frame(keep_records=pb.KeepRecords(stream=STREAM))


async def asked(streams: ChangeStreams, method: str, request: Frame) -> None:
    async for _ in streams.methods[method](request):
        pass


@pytest.mark.parametrize(
    ("method", "order"),
    [
        (
            "CopyAhead",
            frame(copy_ahead=pb.CopyAhead(stream=STREAM, begins=True, backup=PS)),
        ),
        ("TakeRecords", frame(take_records=pb.TakeRecords(stream=STREAM, src=PS))),
    ],
)
def test_a_reset_while_a_stream_begins_leaves_nothing_of_it(
    method: str, order: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        transport = InProcessNetwork().transport(PS)
        context = TaskContext(PS, transport, SystemClock(), records_dir=tmp_path)
        service = TaskService(context, lambda grace_s: None)
        streams = service.records
        service.runtime.store.write([W], [np.float32(1)])
        await asked(streams, "KeepRecords", KEEP)
        run = TaskHost.run

        async def run_and_reset(shell: TaskHost, work: Callable[[], Any]) -> Any:
            result = await run(shell, work)
            streams.drop([])  # as a Reset does
            return result

        monkeypatch.setattr(TaskHost, "run", run_and_reset)
        with pytest.raises(CopyLostError):
            await asked(streams, method, order)
        assert not streams._sources
        assert not streams._copies
        service.shell.close()

    run_async(scenario())


def test_a_log_that_begins_again_is_not_removed_by_the_one_of_its_name_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first still writes when it is dropped, and ends after the second began."""
    is_writing, may_end = threading.Event(), threading.Event()
    passes = itertools.count()
    join = WalThread.join

    def joined(thread: WalThread) -> None:
        may_end.set()
        join(thread)

    monkeypatch.setattr(WalThread, "join", joined)

    def pass_log_written() -> None:
        if next(passes) == 1:  # after all that was there
            is_writing.set()
            assert may_end.wait(10)

    async def scenario() -> None:
        transport = InProcessNetwork().transport(PS)
        context = TaskContext(PS, transport, SystemClock(), records_dir=tmp_path)
        service = TaskService(context, lambda grace_s: None)
        streams, store = service.records, service.runtime.store
        store.write([W], [np.float32(1)])
        with armed("log.written", pass_log_written):
            await asked(streams, "KeepRecords", KEEP)
            first = streams._sources[STREAM]
            first.recorder.put("w", [np.full((), 2, np.float32)], ("step", 1))
            await asyncio.to_thread(is_writing.wait, 10)
            streams.drop([STREAM])
            store.write([W], [np.float32(3)])
            await asked(streams, "KeepRecords", KEEP)
            may_end.set()
            assert first.log is not None
            await asyncio.to_thread(join, first.log)
        records = map(record_from, read_log(tmp_path / "jgraph-records", STREAM))
        assert [float(record.arrays[0]) for record in records] == [3.0]
        streams.close()
        service.shell.close()

    run_async(scenario())
