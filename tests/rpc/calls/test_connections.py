"""A line that a large call had to itself serves the next one, unless it broke."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from jgraph.errors import DeadlineError, TaskLostError
from jgraph.rpc.calls.caller import MAX_ASK_BYTES, CallConnection
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Address, Frame
from jgraph.testing.transport_harness import PS, Recorder, step
from tests.support.run_async import run_async

Ask = Callable[[str], "asyncio.Task[Frame]"]
LARGE = np.arange(MAX_ASK_BYTES, dtype=np.uint8)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses to which a line was opened."""
    found: list[Address] = []
    make = GrpcTransport._line

    def counted(self: GrpcTransport, dst: Address) -> CallConnection:
        found.append(dst)
        return make(self, dst)

    monkeypatch.setattr(GrpcTransport, "_line", counted)
    return found


@asynccontextmanager
async def asking() -> AsyncIterator[Ask]:
    ps, client = GrpcTransport(PS), GrpcTransport(None)
    address = await ps.start(Recorder())
    await client.start(Recorder())

    def ask(method: str) -> "asyncio.Task[Frame]":
        limit = 0.2 if method == "Hang" else 20.0
        request = step(1, LARGE)
        return asyncio.create_task(
            client.ask(address, method, request, timeout_s=limit)
        )

    yield ask
    await client.close()
    await ps.close()


def test_large_calls_one_after_the_other_open_one_line(dialled: list[Address]) -> None:
    async def main() -> None:
        async with asking() as ask:
            for _ in range(3):
                assert np.array_equal((await ask("Echo")).tensors[0], LARGE)
            assert len(dialled) == 1

    run_async(main())


def test_large_calls_at_once_have_a_line_each_of_which_one_is_kept(
    dialled: list[Address],
) -> None:
    async def main() -> None:
        async with asking() as ask:
            for replies in (2, 2):
                for reply in await asyncio.gather(
                    *(ask("Echo") for _ in range(replies))
                ):
                    assert np.array_equal(reply.tensors[0], LARGE)
            assert len(dialled) == 3

    run_async(main())


def test_line_of_a_call_that_failed_is_not_used_again(dialled: list[Address]) -> None:
    async def main() -> None:
        async with asking() as ask:
            with pytest.raises(DeadlineError):
                await ask("Hang")
            assert np.array_equal((await ask("Echo")).tensors[0], LARGE)
            assert len(dialled) == 2

    run_async(main())


def test_line_whose_server_went_away_is_opened_anew(dialled: list[Address]) -> None:
    async def main() -> None:
        client = GrpcTransport(None)
        await client.start(Recorder())
        bind = "127.0.0.1:0"
        for _ in range(2):
            ps = GrpcTransport(PS, bind=bind)
            bind = await ps.start(Recorder())
            request = step(1, LARGE)
            reply = await client.ask(bind, "Echo", request, timeout_s=20)
            assert np.array_equal(reply.tensors[0], LARGE)
            await ps.close()
        assert dialled == [bind, bind]
        await client.close()

    run_async(main())


@pytest.mark.parametrize("request_", [step(1), step(1, LARGE)])
def test_who_asks_after_the_end_opens_no_line_that_nobody_closes(
    request_: Frame, dialled: list[Address]
) -> None:
    async def main() -> None:
        ps, client = GrpcTransport(PS), GrpcTransport(None)
        address = await ps.start(Recorder())
        await client.ask(address, "Echo", request_, timeout_s=20)
        await client.close()
        with pytest.raises(TaskLostError, match="because this side closed"):
            await client.ask(address, "Echo", request_, timeout_s=20)
        assert dialled == [address]
        await ps.close()

    run_async(main())
