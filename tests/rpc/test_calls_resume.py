"""Calls over connections of gRPC that break: each is made once and answered once."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from jgraph.errors import TaskLostError
from jgraph.rpc.resumable import accepting, dialing
from jgraph.testing.transport_harness import PS, WAIT_S, call, numbers, step
from tests.support.paired import Counting, Pair, Remote, paired
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def request_lost(pair: Pair) -> "asyncio.Task[int]":
    pair.proxy.silence()
    asking = pair.asking(1)
    async with asyncio.timeout(WAIT_S):
        await pair.proxy.held.wait()
    return asking


async def in_progress(pair: Pair) -> "asyncio.Task[int]":
    pair.at_ps.may_answer.clear()
    asking = pair.asking(1)
    await pair.at_ps.wait(lambda: pair.at_ps.asked == [0, 1])
    return asking


async def response_lost(pair: Pair) -> "asyncio.Task[int]":
    asking = await in_progress(pair)
    pair.proxy.silence()
    pair.at_ps.may_answer.set()
    async with asyncio.timeout(WAIT_S):
        await pair.proxy.held.wait()
    return asking


@pytest.mark.row(4, 5, 6, 7)
@pytest.mark.parametrize("moment", [request_lost, in_progress, response_lost])
def test_a_call_is_made_once_whatever_of_it_was_lost(
    moment: Callable[[Pair], Awaitable["asyncio.Task[int]"]],
) -> None:
    async def main() -> None:
        async with paired() as pair:
            asking = await moment(pair)
            pair.proxy.cut()
            pair.proxy.heal()
            await pair.ask(2) if pair.at_ps.may_answer.is_set() else None
            pair.at_ps.may_answer.set()
            assert await asking == 1
            assert sorted(pair.at_ps.asked) in ([0, 1], [0, 1, 2])
            assert not pair.at_ps.stopped

    run_async(main())


@pytest.mark.parametrize("data_port", [None, 0], ids=["stream", "data socket"])
def test_first_reply_of_a_line_arrives_though_the_connection_was_cut_before_it(
    data_port: int | None,
) -> None:
    """Neither side has anything to send again, and the server has to know where to."""

    async def main() -> None:
        async with paired(data_port, greets=False) as pair:
            pair.at_ps.may_answer.clear()
            asking = pair.asking(1)
            await pair.at_ps.wait(lambda: pair.at_ps.asked == [1])
            pair.proxy.cut()
            pair.at_ps.may_answer.set()
            assert await asking == 1
            assert pair.at_ps.asked == [1]

    run_async(main())


@pytest.mark.row(4, 5, 6, 7)
def test_calls_are_made_once_however_often_the_connection_is_cut() -> None:
    chance = random.Random(0)

    async def main() -> None:
        async with paired() as pair:
            for first in range(1, 200, 20):
                batch = range(first, first + 20)
                sizes = [chance.choice([0, 3000, 300_000, 3 << 20]) for _ in batch]
                room = chance.randrange(1, 4 << 20)
                pair.proxy.cut_after_bytes = pair.proxy.passed_bytes + room
                calls = [pair.ask(i, n) for i, n in zip(batch, sizes, strict=True)]
                assert await asyncio.gather(*calls) == list(batch)
                pair.proxy.cut()
            assert sorted(pair.at_ps.asked) == list(range(201))

    run_async(main())


def test_replies_follow_in_order_however_often_the_connection_is_cut() -> None:
    async def main() -> None:
        async with paired() as pair:
            replies = pair.client.call(
                pair.proxy.address, "Count", step(300), timeout_s=WAIT_S
            )
            got = []
            async for reply in replies:
                (number,) = numbers([reply])
                assert (reply.tensors[0] == number).all()
                got.append(number)
                if number % 50 == 20:
                    pair.proxy.cut()
            assert got == list(range(300))
            assert pair.at_ps.asked == [0, 300]

    run_async(main())


def test_server_that_was_started_again_is_not_asked_what_the_old_one_was() -> None:
    async def main() -> None:
        async with paired() as pair:
            again, at_again = Remote(PS), Counting()
            asking = await in_progress(pair)
            pair.proxy.lead_to(await again.start(at_again))
            pair.proxy.cut()
            with pytest.raises(TaskLostError, match="started again since"):
                await asking
            assert not at_again.asked
            assert await pair.ask(2) == 2
            await again.close()

    run_async(main())


def test_calls_stop_when_their_caller_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "RETURN_S", 0.1)

    async def main() -> None:
        async with paired() as pair:
            asking = await in_progress(pair)
            pair.proxy.lead_to("127.0.0.1:1")
            monkeypatch.setattr(dialing, "RESUME_S", 0.3)
            pair.proxy.cut()
            with pytest.raises(TaskLostError, match="connection lost"):
                await asking
            await pair.at_ps.wait(lambda: pair.at_ps.stopped == 1)

    run_async(main())


def test_caller_that_comes_back_too_late_learns_that_its_call_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "RETURN_S", 0.0)
    monkeypatch.setattr(dialing, "RESUME_POLL_S", 0.3)

    async def main() -> None:
        async with paired() as pair:
            waiting = await in_progress(pair)
            pair.proxy.cut()
            with pytest.raises(TaskLostError, match="cannot be resumed"):
                await waiting
            pair.at_ps.may_answer.set()
            assert await pair.ask(2) == 2

    run_async(main())


def test_call_with_many_replies_ends_on_the_server_when_its_caller_stops() -> None:
    async def main() -> None:
        async with paired() as pair:
            pair.at_ps.may_answer.clear()
            address = pair.proxy.address
            calling = asyncio.create_task(
                call(pair.client, address, "Count", step(3), timeout_s=WAIT_S)
            )
            await pair.at_ps.wait(lambda: pair.at_ps.asked == [0, 3])
            calling.cancel()
            async with asyncio.timeout(accepting.RETURN_S / 2):
                await pair.at_ps.wait(lambda: pair.at_ps.stopped == 1)

    run_async(main())
