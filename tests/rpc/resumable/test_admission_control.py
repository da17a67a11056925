"""A task takes in no more of what clients ask at once than it has room for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
import pytest

from jgraph.errors import (
    ClusterBusyError,
    ConfigError,
    JGError,
    MalformedMessageError,
    MessageTooLargeError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import CHANNEL_OPTIONS
from jgraph.rpc.frames import body_of, frame, hello, kind_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.resumable import admission_control as intakes
from jgraph.rpc.resumable.admission_control import RequestBudget
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.serving import ROOM_METHOD
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Address, Frame, Tensor
from jgraph.rpc.wire.codec import LENGTH, prepare
from jgraph.testing.transport_harness import PS, WORKER, Recorder, numbers, step
from tests.support.asks import (
    HELLO,
    LARGE,
    LIMIT,
    Memory,
    ask,
    intake,
    send,
    send_over,
    told,
)
from tests.support.run_async import run_async

pytestmark = pytest.mark.usefixtures("nothing_is_left")

NEAR = pytest.mark.parametrize("near", ["auto", "off"])


@pytest.mark.row(28)
@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_no_memory_is_taken_for_what_is_refused_and_what_follows_is_read(
    chunk: int,
) -> None:
    room, memory = RequestBudget(100), Memory()
    room.take(60)
    stream = intake(room, memory)
    data = ask(1, step(1, np.ones(5000, np.uint8))) + ask(2, step(2, np.ones(40)))
    data += ask(3, step(3, np.ones(40, np.uint8)))
    got: list[Frame] = []
    for at in range(0, len(data), chunk):
        got += stream.decoder.feed(data[at : at + chunk])
    assert [f.header.sequence for f in got] == [1, 2, 3]
    assert [len(f.tensors) for f in got] == [0, 0, 1]
    assert (memory.taken, room.taken) == (40, 100)
    for number in (1, 2):
        with pytest.raises(ClusterBusyError, match="has no room for the"):
            stream.begin(number, "Echo", PS)
    assert stream.begin(3, "Echo", PS) == 40


def with_header(number: int, nbytes: int, *tensors: Tensor) -> bytes:
    """A call whose header has so many bytes, and some more."""
    text = pb.LogLines(lines=["x" * nbytes])
    return ask(number, frame(log_lines=text, tensors=tensors))


def test_large_header_has_room_before_it_comes_until_its_call_is_answered() -> None:
    room = RequestBudget(1 << 20)
    stream, data = intake(room), with_header(1, 600_000, np.ones(1000, np.uint8))
    (header,) = LENGTH.unpack_from(data)
    stream.decoder.feed(data[: LENGTH.size])
    assert room.taken == header > 600_000
    (call,) = stream.decoder.feed(data[LENGTH.size :])
    assert (len(call.tensors), room.taken) == (1, header + 1000)
    assert stream.begin(1, "Echo", PS) == header + 1000
    half = intake(room)
    with pytest.raises(ClusterBusyError, match="no room for the header of a call"):
        half.decoder.feed(data[: LENGTH.size])
    with pytest.raises(ClusterBusyError):  # nothing follows: whose call was it?
        half.decoder.feed(ask(2, step(2)))
    half.close()
    room.give(header + 1000)
    assert room.taken == 0


def test_large_header_that_does_not_go_on_loses_its_room() -> None:
    room = RequestBudget(1 << 20)
    stream, data = intake(room), with_header(1, 600_000)
    for at in range(0, 400_000, 100_000):
        stream.decoder.feed(data[at : at + 100_000])
        assert not stream.is_stuck()
    stream.decoder.feed(data[400_000:400_100])
    assert not stream.is_stuck()
    assert stream.is_stuck()
    stream.close()
    assert room.taken == 0


def test_large_header_of_a_call_that_is_refused_counts_until_that_is_told() -> None:
    room = RequestBudget(1 << 20)
    stream, data = intake(room), with_header(1, 600_000, LARGE)
    (header,) = LENGTH.unpack_from(data)
    assert stream.decoder.feed(data[: header + 100]) == []
    assert room.taken == header
    (call,) = stream.decoder.feed(data[header + 100 :])
    assert len(call.tensors) == 0
    with pytest.raises(ClusterBusyError, match="has no room"):
        stream.begin(1, "Echo", PS)
    assert room.taken == 0


def test_large_header_of_no_call_gives_its_room_back() -> None:
    room = RequestBudget(1 << 20)
    intake(room).decoder.feed(told(frame(hello=pb.Hello(task="x" * 600_000))))
    assert room.taken == 0


@NEAR
def test_call_with_a_large_header_waits_for_its_turn(
    near: Literal["auto", "off"],
) -> None:
    async def main() -> None:
        server = GrpcTransport(PS, max_request_bytes=1 << 20, same_machine=near)
        client = GrpcTransport(None, same_machine=near)
        address = await server.start(Recorder())
        asked_for, turn = asyncio.Event(), server._room.turn

        async def noted(nbytes: int) -> None:
            asked_for.set()
            await turn(nbytes)

        server._room.turn = noted  # type: ignore[method-assign]  # as is seen below
        request = frame(log_lines=pb.LogLines(lines=["x" * 600_000]))
        server._room.take(900_000)  # as others' calls do
        asking = asyncio.create_task(client.ask(address, "Echo", request, timeout_s=20))
        calling = asyncio.create_task(kinds_of(client, address, request))
        await asked_for.wait()
        server._room.give(900_000)
        assert kind_of(await asking) == "log_lines"
        assert await calling == ["log_lines"]
        assert server._room.taken == 0
        await client.close()
        await server.close()

    run_async(main())


async def kinds_of(
    client: GrpcTransport, address: Address, request: Frame
) -> list[str]:
    """Returns the kinds of all replies."""
    replies = client.call(address, "Echo", request, timeout_s=20)
    return [kind_of(reply) async for reply in replies]


def test_what_a_stream_leaves_behind_is_given_back_at_its_end() -> None:
    room = RequestBudget(1000)
    stream = intake(room)
    half = ask(2, step(2, np.ones(300, np.uint8)))[:-1]
    stream.decoder.feed(ask(1, step(1, np.ones(200, np.uint8))) + half)
    assert room.taken == 500
    assert stream.begin(1, "Echo", PS) == 200
    stream.close()
    assert room.taken == 200


def test_a_task_is_let_in_beyond_the_limit_and_counted() -> None:
    """It asks for something that was let in elsewhere, which waits for the answer."""
    room = RequestBudget(100)
    room.take(60)
    stream = intake(room)
    stream.of_task = True
    stream.decoder.feed(ask(1, step(1, LARGE)))
    assert room.taken == 60 + LARGE.nbytes


def test_who_waits_for_room_gets_it_in_order_and_who_gave_up_keeps_none() -> None:
    """Nobody overtakes a large call for ever."""

    async def main() -> None:
        room, got = RequestBudget(100), list[int]()

        async def turn(nbytes: int) -> None:
            await room.turn(nbytes)
            got.append(nbytes)

        room.take(60)
        waiting = [asyncio.create_task(turn(n)) for n in (90, 70, 30, 41, 20)]
        await settled()
        assert (got, room.take(1)) == ([], False)
        room.give(60)
        await settled()
        assert got == [90]
        waiting[1].cancel()
        await settled()
        room.give(90)
        await settled()
        assert (got, room.taken) == ([90, 30, 41, 20], 91)
        for nbytes in (30, 41, 20):
            room.give(nbytes)
        assert (room.taken, room.take(100)) == (0, True)
        await asyncio.wait(waiting)

    run_async(main())


@pytest.mark.parametrize("how", ["late", "cancelled", "cancelled just then"])
def test_who_gives_up_waiting_leaves_the_room_to_others(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(intakes, "TURN_S", 0.0 if how == "late" else 30.0)
        room = RequestBudget(100)
        room.take(60)
        stream = intake(room)
        first = asyncio.create_task(stream.reserve(60, "RunStep", PS))
        await settled()
        if how == "cancelled just then":
            room.give(60)
        if how != "late":
            first.cancel()
        await asyncio.wait([first])
        if how == "late":
            with pytest.raises(ClusterBusyError, match="60 bytes of 'RunStep' now"):
                first.result()
        room.give(room.taken)
        assert room.take(100)

    run_async(main())


@pytest.mark.parametrize("ends", ["before", "after"])
def test_room_that_is_kept_for_a_call_is_given_back_with_its_stream(ends: str) -> None:
    async def main() -> None:
        room = RequestBudget(100)
        stream = intake(room)
        if ends == "before":
            stream.close()
        await stream.reserve(60, "Echo", PS)
        if ends == "after":
            assert room.taken == 60
            stream.close()
        assert room.taken == 0

    run_async(main())


def test_call_that_has_room_takes_none_of_others() -> None:
    async def main() -> None:
        room = RequestBudget(100)
        stream, other = intake(room), intake(room)
        await stream.reserve(60, "Echo", PS)
        other.decoder.feed(ask(1, step(1, np.ones(60, np.uint8))))
        stream.decoder.feed(ask(1, step(1, np.ones(60, np.uint8))))
        with pytest.raises(ClusterBusyError):
            other.begin(1, "Echo", PS)
        assert (stream.begin(1, "Echo", PS), room.taken) == (60, 60)

    run_async(main())


@pytest.mark.parametrize(
    "again",
    [
        b"".join(prepare(frame(ack=pb.Ack(), tensors=[LARGE])).encoded().pieces),
        ask(1, step(1, LARGE)),
    ],
    ids=["of no call", "of a call made twice"],
)
def test_tensors_for_which_nobody_would_give_back_the_room_are_thrown_away(
    again: bytes,
) -> None:
    room, memory = RequestBudget(1 << 30), Memory()
    got = intake(room, memory).decoder.feed(ask(1, step(1, LARGE)) + again)
    assert [len(f.tensors) for f in got] == [1, 0]
    assert room.taken == memory.taken == LARGE.nbytes


@pytest.mark.parametrize("limit", [0, -1])
def test_room_for_nothing_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match=f"max_request_bytes={limit} lets nobody"):
        GrpcTransport(PS, max_request_bytes=limit)


async def settled() -> None:
    """Lets what is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def ps(
    near: Literal["auto", "off"], *tasks: Any
) -> AsyncIterator[tuple[GrpcTransport, Recorder, Address, list[GrpcTransport]]]:
    """A ps with room for ``LIMIT`` bytes, which has to be empty at the end."""
    server, at_ps = GrpcTransport(PS, max_request_bytes=LIMIT), Recorder()
    address = await server.start(at_ps)
    clients = [GrpcTransport(task, same_machine=near) for task in tasks]
    for client in clients:
        await client.start(Recorder())
    try:
        yield server, at_ps, address, clients
        await at_ps.wait(lambda: not at_ps.hanging, "end of a call")
        assert server._room.taken == 0
    finally:
        for client in clients:
            await client.close()
        await server.close()


@pytest.mark.parametrize("task", [WORKER, None])
def test_with_tls_only_the_certificate_of_a_task_lets_in_beyond_the_limit(
    task: TaskName | None, tmp_path: Path
) -> None:
    """Both say that they are a worker."""
    make_certificates(tmp_path, [PS, WORKER])
    caller = TLS.of(tmp_path, task).load(task).channel_credentials()
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "ps-0.jgraph")]
    says = told(frame(hello=hello(WORKER, incarnation=5)))

    async def main() -> None:
        server = GrpcTransport(PS, max_request_bytes=LIMIT, tls=TLS.of(tmp_path, PS))
        address = await server.start(Recorder())
        server._room.take(LIMIT)
        secure = grpc.aio.secure_channel(address, caller, options=options)
        async with secure as channel:
            got = await send_over(channel, [says, ask(1, step(1, LARGE))])
        (reply,) = [reply for reply in got if reply.header.sequence == 1]
        assert kind_of(reply) == ("start_step" if task else "status")
        if task is None:
            with pytest.raises(ClusterBusyError, match="has no room"):
                raise from_status(body_of(reply))
        await server.close()

    run_async(main())


async def hang(client: GrpcTransport, address: Address, array: Any) -> None:
    await client.ask(address, "Hang", step(1, array), timeout_s=30)


@NEAR
def test_many_large_calls_at_once_wait_for_their_turn_and_are_all_answered(
    near: Literal["auto", "off"],
) -> None:
    async def main() -> None:
        async with ps(near, None) as (_, _, address, (client,)):
            calls = [
                client.ask(address, "Echo", step(n, LARGE), timeout_s=30)
                for n in range(20)
            ]
            assert numbers(await asyncio.gather(*calls)) == [*range(20)]

    run_async(main())


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (step(1), MalformedMessageError, "takes a 'call', and 'start_step' was sent"),
        (
            frame(call=pb.Call(method="Echo", nbytes=1 << 63)),
            MessageTooLargeError,
            "a call of 9,223,372,036,854,775,808 bytes",
        ),
    ],
    ids=["another kind", "more than may be sent"],
)
def test_bad_question_for_room_is_refused(
    asked: Frame, error: type[JGError], said: str
) -> None:
    async def main() -> None:
        async with ps("off", None) as (_, _, address, (client,)):
            with pytest.raises(error, match=said):
                await client.ask(address, ROOM_METHOD, asked, timeout_s=10)

    run_async(main())


@NEAR
def test_client_is_refused_while_others_have_the_room_and_let_in_afterwards(
    near: Literal["auto", "off"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intakes, "TURN_S", 0.01)

    async def main() -> None:
        async with ps(near, None, None, WORKER) as (_, at_ps, address, asking):
            one, other, worker = asking
            first = asyncio.create_task(hang(one, address, LARGE))
            await at_ps.wait(lambda: at_ps.hanging == 1, "call")
            with pytest.raises(ClusterBusyError) as raised:
                await other.ask(address, "Echo", step(2, LARGE), timeout_s=10)
            assert raised.value.details == {"refused": "Echo", "task": PS}
            small = await other.ask(address, "Echo", step(3), timeout_s=10)
            task = await worker.ask(address, "Echo", step(4, LARGE), timeout_s=10)
            assert numbers([small, task]) == [3, 4]
            first.cancel()
            await asyncio.wait([first])
            await at_ps.wait(lambda: not at_ps.hanging, "end of a call")
            last = await other.ask(address, "Echo", step(5, LARGE), timeout_s=10)
            assert numbers([last]) == [5]

    run_async(main())


@NEAR
def test_call_that_is_larger_than_the_room_passes_alone(
    near: Literal["auto", "off"],
) -> None:
    huge = np.ones(2 * LIMIT, np.uint8)

    async def main() -> None:
        async with ps(near, None) as (_, _, address, (client,)):
            for number in (1, 2):
                request = step(number, huge)
                got = await client.ask(address, "Echo", request, timeout_s=20)
                assert got.tensors[0].nbytes == huge.nbytes

    run_async(main())


def test_connection_that_ends_in_the_middle_of_a_call_leaves_no_bytes() -> None:
    async def main() -> None:
        async with ps("off") as (server, _, address, _):
            began = HELLO + ask(1, step(1, LARGE))[: 1 << 20]
            got = await send(address, [began])
            assert got
            line = pb.Hello(line=7)
            line.MergeFrom(hello(None, incarnation=6))
            await send(
                address, [told(frame(hello=line)), ask(1, step(1, LARGE), "Fail")]
            )
            assert server._room.taken == 0

    run_async(main())
