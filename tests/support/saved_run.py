"""A run of one ps that its master saves, without processes."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jgraph.clock import SystemClock
from jgraph.errors import TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.files.blocks import Sums
from jgraph.runtime.files.manifest import FILE, PROOF, Leaf, Manifest, read_manifest
from jgraph.runtime.files.shard_files import Slice, check_slice, make_proof, proven
from jgraph.runtime.files.writer_lease import newest
from jgraph.runtime.store.store import VariableStore
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.server.runs.saving.checkpointer import STEP, RunCheckpointer, Saved
from jgraph.server.runs.saving.state_source import MasterSaves, SavedState
from jgraph.server.state_service import save_shards

MASTER, PS = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")
SCALAR = ValueType((), "int32")
LIVE, COPY = (StoredVariable(STEP, SCALAR, of) for of in ("live", "copy"))


class Ps:
    """A ps with one variable, and a run that goes on after each call of the master."""

    def __init__(self, last: int = 1000) -> None:
        self.last = last  # updates that there are
        self.store = VariableStore(PS)
        self.generations: list[int] = []
        self.directory = Path()
        self.stands_still = True
        self.lost_at = ""  # it dies before it is asked this
        self.done = 0
        self.train()

    def train(self) -> None:
        self.done = min(self.done + 1, self.last)
        self.store.write([LIVE], [np.int32(self.done)])

    async def call(
        self, task: TaskName, method: str, request: Frame, timeout_s: float = 0.0
    ) -> Frame:
        reply = frame(empty=pb.Empty())
        if method == self.lost_at:
            raise TaskLostError("gone", task=PS)
        if method == "RunStep":
            self.train()  # on the way here
            self.store.write([COPY], self.store.read([LIVE]))
            self.generations.append(newest(self.directory).generation)
        elif method == "SaveShards":
            reply = save_shards(task, self.store, request, lambda: None)
        self.train()
        return reply

    async def go_on(self) -> bool:
        return self.stands_still


def order(directory: Path, keep: int = 2) -> pb.RunSaves:
    """Returns what is saved; the client has saved the first step."""
    first = directory / "0"
    first.mkdir(parents=True)
    manifest = Manifest(0, {STEP: Leaf.of(np.zeros((), np.int32))})
    (first / FILE).write_text(manifest.to_json())
    shard = pb.ShardFile(name=STEP, container="copy", array=STEP, rows=1, step=1)
    shard.type.dtype = SCALAR.dtype
    return pb.RunSaves(
        directory=str(directory),
        proof=make_proof(directory),
        every=1,
        keep=keep,
        driver=PS,
        tasks=[pb.TaskShards(task=PS, shards=[shard])],
    )


def report() -> Frame:
    columns: list[Any] = [np.arange(1), np.zeros(1)]
    return frame(loop_report=pb.LoopReport(state="running"), tensors=columns)


def saved(directory: Path, ps: Ps, keep: int = 2, *, goes_on: bool = True) -> None:
    """Lets a master save a run twice, and, if it ``goes_on`` then, at its end."""

    async def run() -> None:
        ps.directory = directory
        info = json.dumps({"steps": 100, "first_step": 0})
        record = Journal(MASTER, pb.OpenRun(run="r", info=info), SystemClock())
        where = lambda: {"done": ps.done}
        saver = RunCheckpointer(MASTER, order(directory, keep), record, ps.call, where)
        saver.start()
        loop = pb.RunLoop(loop="a", task=PS)
        record.begins(loop)
        async with asyncio.timeout(20):
            for _ in range(2):
                record.keep(loop, report(), 0.0)
                await saver.save_halted(0, ps.go_on)
            resting = asyncio.ensure_future(saver.rest())
            await asyncio.sleep(0)
            assert not resting.done(), "the run goes on"
            if goes_on:
                record.keep(loop, report(), 0.0)
            record.end("stopped", None)
            await resting
        assert newest(directory).released

    asyncio.run(run())


def saved_at_rest(directory: Path, ps: Ps) -> Saved | None:
    """Lets a master save a run whose loops have ended, as its ps is told to end."""

    async def run() -> Saved | None:
        ps.directory = directory
        record = Journal(MASTER, pb.OpenRun(run="r", info="{}"), SystemClock())
        where = lambda: {"done": ps.done}
        saver = RunCheckpointer(MASTER, order(directory), record, ps.call, where)
        saver.start()
        setup = cast("PsSetup", None)  # nothing is loaded
        found = await MasterSaves(saver, setup).save_at_rest([PS], "{}")
        record.end("failed", None)
        await saver.rest()
        return found

    return asyncio.run(run())


def restored(directory: Path) -> SavedState:
    """Lets a master give its ps what is saved; the ps reads it, and keeps nothing."""

    async def load(_: TaskName, path: Path) -> list[tuple[str, Sums]]:
        leaf = read_manifest(path).leaves[STEP]
        rows = Slice.whole(STEP, leaf.type, leaf.block_rows)
        with proven(str(path), (path / PROOF).read_bytes()) as fd:
            return [(STEP, check_slice(fd, rows))]

    saver = SimpleNamespace(order=pb.RunSaves(directory=str(directory)))
    setup = SimpleNamespace(tasks=[PS], load=load)
    source = MasterSaves(cast("RunCheckpointer", saver), cast("PsSetup", setup))
    lost = TaskLostError("gone", task=PS)
    return asyncio.run(asyncio.wait_for(source.load(lost, 0), 20))
