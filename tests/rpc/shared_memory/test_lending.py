"""Large tensors are copied into shared memory whole, and piece by piece."""

import asyncio

import numpy as np
import pytest

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.shared_memory import lending
from jgraph.rpc.shared_memory.memory_blocks import Budget
from jgraph.rpc.shared_memory.shared_memory import ReceiveMemory, SendMemory
from jgraph.rpc.wire.codec import prepare


@pytest.mark.parametrize("nbytes", [40_000, 50_001, 99_999, 100_000, 250_001])
def test_a_tensor_arrives_whole_and_others_run_between_its_pieces(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "COPY_BYTES", 50_000)
    array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    memory = SendMemory(Budget(1 << 20))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def copied() -> pb.SharedBlock:
        beside = asyncio.create_task(others())
        message = prepare(frame(empty=pb.Empty(), tensors=[array]))
        (handle,) = (await lending.lend(message, memory)).values()
        beside.cancel()
        return handle

    handle = asyncio.run(copied())
    arrived = ReceiveMemory(memory.announcement()).array(handle, nbytes)
    assert np.array_equal(arrived, array)
    assert turns == max(nbytes // 50_000, 1) - 1
    memory.close()
