"""What leaves over streams that fail, and what waits until it is acknowledged."""

import asyncio
import random
from functools import partial

import numpy as np
import pytest

from jgraph.errors import NotTakingError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.grpc import transport
from jgraph.rpc.resumable import numbers as resumable_numbers, outbox
from jgraph.rpc.resumable.backlog import Backlog
from jgraph.rpc.resumable.outbox import FEW_BYTES, Outbox, as_it_is
from jgraph.rpc.sockets.pipe import StreamPipe
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import Encoded, encode
from jgraph.rpc.wire.decoder import Decoder
from jgraph.testing.transport_harness import PS, asked, numbers, step
from tests.support.paired import LARGE, Pair, paired
from tests.support.run_async import run_async


class BrokenError(Exception):
    """A stream that fails."""


@pytest.mark.parametrize("seed", range(8))
def test_frames_of_an_outbox_arrive_once_over_streams_that_fail(seed: int) -> None:
    chance = random.Random(seed)
    got: list[int] = []

    async def over_one_stream(box: Outbox[Encoded]) -> None:
        decoder, left = Decoder(), chance.randrange(1, 12)

        async def write(chunk: bytes) -> None:
            nonlocal left
            part = chunk if left else chunk[: chance.randrange(len(chunk))]
            got.extend(numbers(decoder.feed(part)))
            await asyncio.sleep(0)
            left -= 1
            if left < 0:
                raise BrokenError

        # Sometimes it tells what it has, always at the next stream.
        if chance.random() < 0.5:
            box.acknowledge(len(got))
        await box.run(StreamPipe(write), len(got))

    async def main() -> None:
        box, sent = Outbox[Encoded](Backlog(), as_it_is), 0
        while len(got) < 60:
            for _ in range(chance.randrange(8)):
                sent += 1
                box.put(encode(step(sent, np.zeros(chance.randrange(1_400_000), "u1"))))
            try:
                async with asyncio.timeout(0.02):
                    await over_one_stream(box)
            except (BrokenError, TimeoutError):
                continue
        assert got == list(range(1, len(got) + 1))

    asyncio.run(main())


@pytest.fixture
def one_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one large reply wait until another is acknowledged."""
    monkeypatch.setattr(outbox, "FULL_BYTES", 1 << 20)
    monkeypatch.setattr(resumable_numbers, "WINDOW_BYTES", LARGE)


async def large_replies_at_once(
    pair: Pair, count: int
) -> "list[list[Frame] | BaseException]":
    """Asks for replies that are given when all were asked for."""
    pair.at_ps.may_answer.clear()
    asking = asyncio.gather(
        *(
            asked(pair.client, pair.proxy.address, "Large", step(number))
            for number in range(count)
        ),
        return_exceptions=True,
    )
    await pair.at_ps.wait(lambda: len(pair.at_ps.asked) == 1 + count)
    pair.at_ps.may_answer.set()
    return await asking


@pytest.mark.usefixtures("one_is_much")
def test_any_number_of_large_replies_at_once_all_arrive() -> None:
    async def main() -> None:
        async with paired() as pair:
            replies = await large_replies_at_once(pair, 12)
            for number, reply in enumerate(replies):
                assert isinstance(reply, list)
                assert numbers(reply) == [number]
                assert reply[0].tensors[0].nbytes == LARGE

    run_async(main())


@pytest.mark.usefixtures("one_is_much")
def test_a_caller_that_acknowledges_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "UNACKNOWLEDGED_S", 0.1)
    monkeypatch.setattr(resumable_numbers, "ACK_FRAMES", 1 << 30)
    monkeypatch.setattr(resumable_numbers, "ACK_BYTES", 1 << 60)

    async def main() -> None:
        async with paired() as pair:
            *_, last = await large_replies_at_once(pair, 12)
            assert isinstance(last, NotTakingError)
            assert "was acknowledged for 0.1 s" in str(last)

    run_async(main())
    assert "closes a connection: nothing of the last" in caplog.text


def test_a_caller_for_whom_too_many_bytes_of_replies_wait_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "default_queue_limit", lambda: 3 * LARGE)

    async def main() -> None:
        async with paired() as pair:
            errors = await large_replies_at_once(pair, 12)
            assert {type(error) for error in errors} == {NotTakingError}
            again = await asked(pair.client, pair.proxy.address, "Large", step(1))
            assert numbers(again) == [1]

    run_async(main())
    assert f"{PS} closes a connection: a caller does not take what {PS} sends" in (
        caplog.text
    )


def test_one_who_acknowledges_nothing_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable_numbers, "WINDOW_BYTES", 1 << 20)
    left = 0

    async def count(chunk: bytes) -> None:
        nonlocal left
        left += len(chunk)

    async def main() -> None:
        box = Outbox[Encoded](Backlog(), as_it_is, give_up_s=0.05)
        for _ in range(20):
            box.put(encode(frame(empty=pb.Empty(), tensors=[np.zeros(100_000)])))
        with pytest.raises(NotTakingError, match=r"was acknowledged for 0\.05 s"):
            await box.run(StreamPipe(count))
        assert left < 3 << 20

    asyncio.run(main())


def test_who_waits_until_all_is_there_is_told_when_it_is_acknowledged() -> None:
    """Not when it has left, and not if the stream fails: then it is sent again."""

    async def main() -> None:
        box, told, writes = Outbox[Encoded](Backlog(), as_it_is), list[str](), 0

        async def write(chunk: bytes) -> None:
            nonlocal writes
            writes += 1
            await asyncio.sleep(0)
            if writes == 2:
                raise BrokenError

        for number in range(3):
            box.put(encode(step(number, np.zeros(FEW_BYTES, "u1"))))
        box.when_sent(partial(told.append, "all"))
        with pytest.raises(BrokenError):
            await box.run(StreamPipe(write))
        sending = asyncio.create_task(box.run(StreamPipe(write)))
        await box.flushed()
        for received in (1, 2):
            box.acknowledge(received)
            await asyncio.sleep(0)
            assert not told
        box.acknowledge(3)
        assert not told  # later
        await asyncio.sleep(0)
        assert told == ["all"]
        box.put(encode(step(3)))  # so few bytes are acknowledged with others
        box.when_sent(partial(told.append, "little"))
        await box.flushed()
        await asyncio.sleep(0)
        assert told == ["all", "little"]
        sending.cancel()
        await asyncio.wait([sending])
        box.put(encode(step(4, np.zeros(FEW_BYTES, "u1"))))
        box.when_sent(partial(told.append, "none"))
        box.clear()  # nothing of it leaves any more
        await asyncio.sleep(0)
        assert told == ["all", "little", "none"]

    asyncio.run(main())
