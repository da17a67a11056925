"""In-process transport in one event loop: no sockets, no encoding, same semantics."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.errors import (
    ClusterUnreachableError,
    JGError,
    PortInUseError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import (
    CONNECT_TIMEOUT_S,
    deadline_error,
    ended_link,
    ended_stream,
    lost_call,
)
from jgraph.rpc.exchange.links import Links
from jgraph.rpc.frames import hello
from jgraph.rpc.resumable.backlog import Backlog, default_queue_limit
from jgraph.rpc.serving import answer, only_reply, results
from jgraph.rpc.statistics import Counters, TransportStatistics
from jgraph.rpc.status import from_status, to_status
from jgraph.rpc.transport import Address, Frame, Handler
from jgraph.rpc.wire.codec import MAX_FRAME_BYTES, aligned_copy, encode, values_of

_Posted: TypeAlias = tuple[Frame, int]
_Replies: TypeAlias = "asyncio.Queue[Frame | JGError | None]"
_logger = logging.getLogger(__name__)


@final
class InProcessNetwork:
    """Connects the transports that it made, within one event loop.

    Example:
      >>> network = InProcessNetwork()
      >>> network.transport(TaskName("/job:ps/task:0")).task
      '/job:ps/task:0'
    """

    def __init__(self) -> None:
        self._ports = itertools.count(1)
        self._listening: dict[Address, InProcessTransport] = {}
        self._changed = asyncio.Condition()

    def transport(
        self,
        task: TaskName | None,
        *,
        bind: Address = "inprocess:0",
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_queued_bytes: int | None = None,
    ) -> "InProcessTransport":
        """Returns a transport for ``task`` (None: a client), not started yet."""
        limit = max_queued_bytes or default_queue_limit()
        return InProcessTransport(self, task, bind, max_frame_bytes, limit)

    async def listen(self, transport: "InProcessTransport", bind: Address) -> Address:
        """Makes a transport reachable; returns its address.

        Raises:
          PortInUseError: another transport has that address.
        """
        host, _, port = bind.rpartition(":")
        if port == "0":
            bind = f"{host}:{next(self._ports)}"
        if bind in self._listening:
            raise PortInUseError(
                f"port {port} of {host} is taken by another transport; choose another "
                f"port (0 takes a free one)",
                address=bind,
            )
        async with self._changed:
            self._listening[bind] = transport
            self._changed.notify_all()
        return bind

    def leave(self, address: Address) -> None:
        """Makes an address free again."""
        self._listening.pop(address, None)

    def at(self, address: Address, task: str = "") -> "InProcessTransport":
        """Returns the transport that listens at ``address``.

        Raises:
          ClusterUnreachableError: none does.
        """
        if address not in self._listening:
            raise ClusterUnreachableError(
                f"no jgraph server {f'for {task} ' if task else ''}at {address} "
                f"(nothing listens there); start it first",
                address=address,
                task=task,
            )
        return self._listening[address]

    async def wait_listening(
        self, address: Address, task: TaskName
    ) -> "InProcessTransport":
        """Returns the transport at ``address``, as soon as it listens, within 2 s.

        Raises:
          ClusterUnreachableError: none does, or it is another task's.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: address in self._listening)
        except TimeoutError:
            self.at(address, task)
        found = self.at(address, task)
        if found.task != task:
            raise ClusterUnreachableError(
                f"{address} should be {task}, but is {found.task}; correct the cluster "
                f"description",
                task=task,
                address=address,
            )
        return found


@final
class InProcessTransport:
    """Moves frames within one process; see ``jgraph.rpc.transport.Transport``.

    Made by ``InProcessNetwork.transport``.
    """

    def __init__(
        self,
        network: InProcessNetwork,
        task: TaskName | None,
        bind: Address,
        max_frame_bytes: int,
        max_queued_bytes: int,
    ) -> None:
        self.task = task
        self.incarnation = secrets.randbits(64) or 1
        self.address: Address = ""
        self._hello = hello(task, self.incarnation)
        self._handler: Handler | None = None
        self._counters = Counters()
        self._network = network
        self._bind = bind
        self._max_frame_bytes = max_frame_bytes
        self.max_queued_bytes = max_queued_bytes
        self._links: Links[_Posted] = Links(self._make_link)
        self._inbound: dict[TaskName, _InProcessLink] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._calling: set[_Replies] = set()
        self._closed = False

    async def start(self, handler: Handler) -> Address:
        """Begins to accept frames and calls; a client gets the address ``""``."""
        if self.task is not None:
            self._handler = handler
            self._links.start(handler)
            self.address = await self._network.listen(self, self._bind)
        return self.address

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        """Tells where other tasks are; connections are made on first use."""
        self._links.set_peers(peers)

    def post(self, dst: TaskName, frame: Frame) -> None:
        """Queues a frame for ``dst``; never blocks. A failure is ``peer_lost``.

        Raises:
          MalformedMessageError: a tensor that cannot be sent.
          MessageTooLargeError: the frame is over ``max_frame_bytes``.
        """
        if self._links.is_ready(dst):
            nbytes = encode(frame, max_frame_bytes=self._max_frame_bytes).nbytes
            self._links.push(dst, (frame, nbytes))

    def when_sent(self, dst: TaskName, callback: Callable[[], None]) -> None:
        """See ``Transport.when_sent``."""
        self._links.when_sent(dst, callback)

    def withdraw(self, handle: str, step_id: int) -> int:
        """Drops the posted values of a step that were not delivered yet.

        Returns:
          How many frames.
        """
        return self._links.withdraw((handle, step_id))

    def _make_link(self, peer: TaskName, address: Address) -> "_InProcessLink":
        return _InProcessLink(self, peer, address, self._network)

    def connect(self, src: TaskName, link: "_InProcessLink") -> None:
        """Takes note of a stream from ``src``."""
        if src in self._inbound:
            self._report_lost(src, "connected anew")
        self._inbound[src] = link

    def deliver(self, src: TaskName, frame: Frame, nbytes: int) -> None:
        """Gives a posted frame to the handler."""
        if self._handler is not None:
            self._counters.received(src, frames=1, nbytes=nbytes)
            self._handler.frame_received(src, _copy(frame))

    def disconnect(self, src: TaskName, link: "_InProcessLink") -> None:
        """Learns that a stream from ``src`` ended."""
        if self._inbound.get(src) is link:
            del self._inbound[src]
            self._report_lost(src, "ended its connection")

    def _report_lost(self, task: TaskName, why: str) -> None:
        if not self._closed and self._handler is not None:
            self._handler.peer_lost(task, ended_stream(task, why))

    async def call(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> AsyncGenerator[Frame, None]:
        """Calls ``method`` at an address; yields the reply frames.

        Raises:
          ClusterUnreachableError: nothing listens there.
          DeadlineError: no end of the reply within ``timeout_s``.
          TaskLostError: the server went away during the call.
          JGError: whatever the other side raised.
        """
        self._counters.calls_made += 1
        end = asyncio.get_running_loop().time() + timeout_s
        encode(request, max_frame_bytes=self._max_frame_bytes)
        replies: _Replies = asyncio.Queue()
        self._calling.add(replies)
        serving = self._network.at(dst).serve(dst, method, _copy(request), replies)
        try:
            while True:
                async with asyncio.timeout_at(end):
                    reply = await replies.get()
                if reply is None:
                    return
                if isinstance(reply, JGError):
                    raise reply
                yield reply
        except TimeoutError as error:
            if isinstance(error, JGError):
                raise
            raise deadline_error(method, dst, timeout_s) from None
        finally:
            self._calling.discard(replies)
            serving.cancel()

    async def ask(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> Frame:
        """Calls ``method`` at an address; returns its only reply.

        Raises:
          InternalError: there was no reply.
          JGError: as ``call``.
        """
        replies = self.call(dst, method, request, timeout_s=timeout_s)
        return await only_reply(replies, method, dst)

    def serve(
        self, address: Address, method: str, request: Frame, replies: "_Replies"
    ) -> "asyncio.Task[None]":
        """Answers a call into a queue; None is the end."""
        self._counters.calls_served += 1
        serving = asyncio.create_task(self._serve(address, method, request, replies))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        return serving

    async def _serve(
        self, address: Address, method: str, request: Frame, replies: "_Replies"
    ) -> None:
        assert self._handler is not None  # only a started transport is found
        answers = answer(self._handler, self._hello, method, request)
        try:
            async with aclosing(results(answers)) as frames:
                async for reply in frames:
                    encode(reply, max_frame_bytes=self._max_frame_bytes)
                    replies.put_nowait(_copy(reply))
        except JGError as error:
            replies.put_nowait(error)
        except asyncio.CancelledError:
            replies.put_nowait(lost_call(method, address))
            raise
        replies.put_nowait(None)

    def count_sent(self, peer: TaskName, nbytes: int) -> None:
        """Counts a frame that was delivered to ``peer``."""
        self._counters.sent(peer, frames=1, nbytes=nbytes)

    async def join(
        self, parts: Sequence[np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any] | None:
        """See ``Transport.join``; there is no shared memory."""
        return None

    async def give_back_memory(self) -> None:
        """See ``Transport.give_back_memory``; there is none."""

    def statistics(self) -> TransportStatistics:
        """Returns what was sent and received so far."""
        return self._counters.snapshot()

    async def close(self) -> None:
        """Delivers what is posted, ends streams, and frees the address."""
        if self._closed:
            return
        self._closed = True
        await self._links.close()
        self._network.leave(self.address)
        for link in list(self._inbound.values()):
            link.lose()
        for replies in self._calling:
            replies.put_nowait(lost_call("a call", "another task", closed_here=True))
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


class _InProcessLink:
    """Delivers frames to one task, as soon as it listens."""

    def __init__(
        self,
        src: InProcessTransport,
        peer: TaskName,
        address: Address,
        network: InProcessNetwork,
    ) -> None:
        self.peer = peer
        self.address = address
        self._src = src
        self._network = network
        self._backlog: Backlog[_Posted] = Backlog(
            src.task or "", peer, address, src.max_queued_bytes
        )
        self._now = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._when_sent: list[Callable[[], None]] = []
        self._finishing = False
        self._lost = False

    def push(self, item: "_Posted") -> None:
        posted, nbytes = item
        self._backlog.add(item, nbytes, step=values_of(posted), now=self._now())
        self._wake.set()

    def withdraw(self, step: Hashable) -> int:
        return self._backlog.withdraw(step)

    def when_sent(self, callback: Callable[[], None]) -> None:
        if self._backlog.nbytes:
            self._when_sent.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback)

    def clear(self) -> None:
        self._backlog.clear()
        self._note_sent()

    def finish(self) -> None:
        self._finishing = True
        self._wake.set()

    def lose(self) -> None:
        """Learns that the other side closed."""
        self._lost = True
        self._wake.set()

    async def run(self) -> None:
        there = await self._network.wait_listening(self.address, self.peer)
        src = self._src.task
        assert src is not None  # a client cannot post
        there.connect(src, self)
        try:
            while self._backlog or not self._finishing:
                await self._wake.wait()
                self._wake.clear()
                while self._backlog and not self._lost:
                    posted, nbytes = self._backlog.take(now=self._now())
                    self._src.count_sent(self.peer, nbytes)
                    self._deliver(there, src, posted, nbytes)
                self._backlog.finish_frame()
                if self._lost:
                    raise ended_link(self.peer, self.address)
                self._note_sent()
        finally:
            there.disconnect(src, self)

    def _note_sent(self) -> None:
        callbacks, self._when_sent = self._when_sent, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback)

    def _deliver(
        self, there: InProcessTransport, src: TaskName, frame: Frame, nbytes: int
    ) -> None:
        try:
            there.deliver(src, frame, nbytes)
        except JGError as error:
            raise from_status(to_status(error)) from None
        except Exception as error:
            _logger.exception("An incoming stream failed.")
            raise from_status(to_status(error)) from None


def _copy(frame: Frame) -> Frame:
    """Returns a frame that the receiver owns."""
    header = pb.Frame()
    header.CopyFrom(frame.header)
    return Frame(header, tuple(aligned_copy(tensor) for tensor in frame.tensors))
