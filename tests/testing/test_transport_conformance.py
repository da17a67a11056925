"""The conformance suite finds transports that are wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc.transport import Address, Frame, Handler, Transport
from jgraph.testing.in_process_transport import InProcessNetwork
from jgraph.testing.transport_conformance import CHECKS
from jgraph.testing.transport_harness import MakeTransport


class Faulty:
    """A transport that behaves like ``good``, apart from what a subclass spoils."""

    def __init__(self, good: Transport) -> None:
        self.good = good

    async def start(self, handler: Handler) -> Address:
        return await self.good.start(handler)

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        self.good.set_peers(peers)

    def post(self, dst: TaskName, frame: Frame) -> None:
        self.good.post(dst, frame)

    def when_sent(self, dst: TaskName, callback: Callable[[], None]) -> None:
        self.good.when_sent(dst, callback)

    def withdraw(self, handle: str, step_id: int) -> int:
        return self.good.withdraw(handle, step_id)

    def call(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> AsyncIterator[Frame]:
        return self.good.call(dst, method, request, timeout_s=timeout_s)

    async def ask(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> Frame:
        return await self.good.ask(dst, method, request, timeout_s=timeout_s)

    async def close(self) -> None:
        await self.good.close()


class Reorders(Faulty):
    """Holds back every seventh frame until the next one."""

    held: tuple[TaskName, Frame] | None = None
    posts = 0

    def post(self, dst: TaskName, frame: Frame) -> None:
        self.posts += 1
        if self.posts % 7 == 0:
            self.held = dst, frame
            return
        self.good.post(dst, frame)
        if self.held is not None:
            self.good.post(*self.held)
            self.held = None


class Hasty(Faulty):
    """Says at once that all has left."""

    def when_sent(self, dst: TaskName, callback: Callable[[], None]) -> None:
        callback()


class Spoils:
    """A handler in front of the real one."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        self.handler.frame_received(src, frame)

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        self.handler.peer_lost(peer, error)

    def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        return self.handler.handle_call(method, request)


class Keeps(Faulty):
    """Sends also what was withdrawn."""

    def withdraw(self, handle: str, step_id: int) -> int:
        return 0


class Silent(Spoils):
    """Never learns of a loss."""

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        pass


class ReadOnly(Spoils):
    """Gets arrays that it may not change."""

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        for tensor in frame.tensors:
            tensor.flags.writeable = False
        super().frame_received(src, frame)


class Flat(Spoils):
    """Gets every array without its shape."""

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        flat = tuple(tensor.reshape(-1) for tensor in frame.tensors)
        super().frame_received(src, Frame(frame.header, flat))


class Shows(Spoils):
    """Tells the caller the text of any exception."""

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        try:
            async for reply in self.handler.handle_call(method, request):
                yield reply
        except ValueError as error:
            raise JGError(str(error)) from error


def network(wrap: type[Faulty], spoil: type[Spoils] | None = None) -> MakeTransport:
    good = InProcessNetwork()

    class Wrapped(wrap):  # type: ignore[misc, valid-type]  # a class made here
        async def start(self, handler: Handler) -> Address:
            front: Any = handler if spoil is None else spoil(handler)
            address: Address = await self.good.start(front)
            return address

    def make(
        task: TaskName | None,
        *,
        bind: Address = "inprocess:0",
        max_queued_bytes: int | None = None,
    ) -> Transport:
        transport = good.transport(task, bind=bind, max_queued_bytes=max_queued_bytes)
        made: Transport = Wrapped(transport)
        return made

    return make


def passes(name: str, make: MakeTransport) -> bool:
    try:
        asyncio.run(asyncio.wait_for(_run(name, make), 50))
    except (AssertionError, ValueError, JGError):
        return False
    return True


async def _run(name: str, make: MakeTransport) -> None:
    await CHECKS[name](make)


@pytest.mark.parametrize(
    ("check", "wrap", "spoil"),
    [
        ("frames_arrive_in_order", Reorders, None),
        ("every_dtype_and_layout_survives", Faulty, Flat),
        ("withdrawn_values_do_not_leave", Keeps, None),
        ("sender_is_told_when_nothing_waits_to_leave", Hasty, None),
        ("received_tensors_are_aligned_and_owned", Faulty, ReadOnly),
        ("crash_of_a_handler_tells_nothing_secret", Faulty, Shows),
    ],
)
def test_suite_finds_the_fault(
    check: str, wrap: type[Faulty], spoil: type[Spoils] | None
) -> None:
    assert passes(check, network(Faulty))
    assert not passes(check, network(wrap, spoil))


def test_suite_finds_a_loss_that_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jgraph.testing.transport_harness.WAIT_S", 0.2)
    for check in (
        "sender_learns_that_the_receiver_closed",
        "receiver_learns_that_the_sender_closed",
    ):
        assert passes(check, network(Faulty))
        assert not passes(check, network(Faulty, Silent))
