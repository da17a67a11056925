"""The newest frames of a run, read by several at once."""

import asyncio

import numpy as np

from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import encode
from jgraph.server.frame_log import FrameLog


def numbered(number: int, nbytes: int = 10) -> Frame:
    body = pb.LoopReport(number=number)
    return frame(loop_report=body, tensors=[np.zeros(nbytes, np.uint8)])


def nbytes_of(entry: Frame) -> int:
    return encode(entry).nbytes


async def read(log: FrameLog, at: int) -> list[tuple[int, int]]:
    return [(at, body_of(entry).number) async for at, entry in log.follow(at)]


def test_who_follows_has_what_was_there_and_what_comes_until_it_ends() -> None:
    async def run() -> None:
        log = FrameLog(1000)
        log.append(numbered(0))
        following = [asyncio.create_task(read(log, at)) for at in (0, 1, 2)]
        await asyncio.sleep(0)
        log.append(numbered(1))
        await asyncio.sleep(0)
        log.append(numbered(2))
        log.end()
        every = [(n, n) for n in range(3)]
        assert await asyncio.gather(*following) == [every, every[1:], every[2:]]
        assert await read(log, 0) == every

    asyncio.run(run())


def test_the_oldest_go_and_the_newest_is_kept_however_large() -> None:
    async def run() -> None:
        log = FrameLog(5 * nbytes_of(numbered(1)) // 2)
        for number in range(3):
            log.append(numbered(number))
        assert (log.count, log.is_whole) == (3, False)
        slow = log.follow(0)
        assert (await anext(slow))[0] == 1  # as much as there is room for
        log.append(numbered(3, nbytes=1000))
        log.end()
        assert [at async for at, _ in slow] == [3]
        assert await read(log, 0) == [(3, 3)]

    asyncio.run(run())


def test_a_frame_takes_room_whatever_its_tensors_are() -> None:
    async def run() -> None:
        log = FrameLog(1000)
        for number in range(1000):
            log.append(numbered(number, nbytes=0))
        assert not log.is_whole
        log.end()
        at = [at for at, _ in await read(log, 0)]
        assert at == [*range(at[0], 1000)]
        assert len(at) < 100

    asyncio.run(run())
