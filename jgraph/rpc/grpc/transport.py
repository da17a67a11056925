"""gRPC transport of real clusters: asyncio, one Exchange stream per pair of tasks."""

import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, TypeAlias, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.caller import MAX_ASK_BYTES, CallConnection
from jgraph.rpc.calls.connections import ConnectionPool
from jgraph.rpc.dial_only.address import dial_only_address, is_dial_only
from jgraph.rpc.exchange.link import ExchangeLink
from jgraph.rpc.exchange.links import Links
from jgraph.rpc.exchange.receiver import Presence
from jgraph.rpc.frames import PROTOCOL, body_of, frame, hello
from jgraph.rpc.grpc.channels import Channels
from jgraph.rpc.grpc.routes import Routes
from jgraph.rpc.grpc.server_port import ServerPort
from jgraph.rpc.grpc.service import Service
from jgraph.rpc.resumable.admission_control import RequestBudget
from jgraph.rpc.resumable.backlog import default_queue_limit
from jgraph.rpc.resumable.dialing import OpenStream
from jgraph.rpc.security.auth import Roles
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import Token
from jgraph.rpc.serving import HELLO_METHOD
from jgraph.rpc.shared_memory.joining import Joins
from jgraph.rpc.shared_memory.memory_files import is_supported
from jgraph.rpc.shared_memory.shared_memory import SendMemories
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.sockets.offer import Doors
from jgraph.rpc.statistics import Counters, TransportStatistics
from jgraph.rpc.transport import Address, Frame, Handler
from jgraph.rpc.wire.buffer_pool import BufferPool
from jgraph.rpc.wire.codec import MAX_FRAME_BYTES, Prepared, prepare
from jgraph.rpc.wire.decoder import Decoder

DataEncryption: TypeAlias = Literal["records", "tls"]


@final
class GrpcTransport:
    """Moves frames over gRPC; see ``jgraph.rpc.transport.Transport``.

    All methods belong to the event loop that ``start`` runs on.

    Args:
      task: the task that it speaks for; None for a client, which listens nowhere
        and only calls.
      bind: ``host:port`` to listen at; port 0 takes a free one. None: nowhere; the
        task dials all that listen, and is reached over streams that it offers them.
      max_frame_bytes: larger frames are refused, on both ends.
      same_machine: ``"auto"`` passes frames to and from processes of the same machine
        and user over a Unix socket, and their large tensors through shared memory;
        ``"off"`` never does.
      data_port: where frames from other machines arrive, over a TCP connection beside
        the gRPC stream; 0 takes a free port. None: they stay in the stream, in both
        directions.
      max_shared_bytes: the most shared memory to keep for sending; what does not fit
        goes through the stream. 8 GiB unless given, or half of the memory that is
        available if that is less.
      max_queued_bytes: a task for which more waits is given up as lost; half of the
        memory that is available unless given, and 1 GiB at least.
      max_request_bytes: what clients may ask at once, in bytes of arrays; more is
        refused until something was answered. A single call may be larger. A quarter of
        the memory that is available unless given, and 256 MiB at least.
      token: what callers must show here, and what this one shows; None: nothing, for
        what is no cluster.
      roles: which role may call which method; None: every one all.
      tls: certificates; both sides of every connection then show theirs. None speaks
        plain text.
      data_encryption: with ``tls``, what protects the data port: ``"records"`` of 1 MiB
        that are sealed with keys from the stream's TLS, or ``"tls"``, which costs more.
        A side that says ``"tls"`` sends no records.
      incarnation: identity of this start of the task; random unless given.
      protocol: version of the wire contract, for tests.

    Raises:
      ConfigError: ``same_machine`` is something else, or a limit below 1.
      CertificateError: the certificates of ``tls`` cannot be used.
      RoleError: they are of another task.

    Example:
      >>> import asyncio
      >>> from jgraph.rpc.frames import frame
      >>> class Greeter:
      ...     async def handle_call(self, method, request):
      ...         yield request
      >>> async def main():
      ...     server = GrpcTransport(TaskName("/job:ps/task:0"))
      ...     client = GrpcTransport(None)
      ...     address = await server.start(Greeter())
      ...     await client.start(Greeter())
      ...     request = frame(call=pb.Call(method="for you"))
      ...     replies = client.call(address, "Echo", request, timeout_s=10)
      ...     print([reply.header.call.method async for reply in replies])
      ...     await client.close()
      ...     await server.close()
      >>> asyncio.run(main())
      ['for you']
    """

    def __init__(
        self,
        task: TaskName | None,
        *,
        bind: Address | None = "127.0.0.1:0",
        max_frame_bytes: int = MAX_FRAME_BYTES,
        same_machine: Literal["auto", "off"] = "auto",
        data_port: int | None = 0,
        max_shared_bytes: int | None = None,
        max_queued_bytes: int | None = None,
        max_request_bytes: int | None = None,
        token: Token | None = None,
        roles: Roles | None = None,
        tls: TLS | None = None,
        data_encryption: DataEncryption = "records",
        incarnation: int | None = None,
        protocol: int = PROTOCOL,
    ) -> None:
        if same_machine not in {"auto", "off"}:
            raise ConfigError(
                f"same_machine='{same_machine}' is not an option; write "
                f"same_machine='auto' or same_machine='off'",
                same_machine=same_machine,
            )
        self.task = task
        self.data_port = 0
        self.incarnation = incarnation or secrets.randbits(64) or 1
        self._max_frame_bytes = max_frame_bytes
        self._hello = hello(task, self.incarnation, protocol)
        is_near = same_machine == "auto" and is_supported()
        self._memories = SendMemories(max_shared_bytes, near=is_near)
        self._joins = Joins(self._memories.slabs)
        self._max_queued_bytes = max_queued_bytes or default_queue_limit()
        self._room = RequestBudget(max_request_bytes)
        identity = tls.load(task) if tls is not None else None
        self._roles = roles
        self._buffers = BufferPool()
        self._counters = Counters()
        seals = data_encryption == "records"
        self._data: DataDialer | None = None
        if data_port is not None:
            tls_context = identity and identity.data_context(accepts=False)
            self._data = DataDialer(tls_context, takes_records=seals)
        self._port: ServerPort | None = None
        if bind is not None:
            self._port = ServerPort(bind, data_port, identity, token, seals=seals)
        listens = task is not None and bind is not None
        channels = Channels(identity, token)
        self._routes = Routes(channels, self._hello, listens=listens)
        self._has_tls = identity is not None
        self._service: Service | None = None
        self._numbers: dict[TaskName, Iterator[int]] = {}
        self._links: Links[Prepared] = Links(self._make_link)
        self._lines = ConnectionPool(self._routes.reach, self._line)
        self._line_numbers = itertools.count(1)
        self._closed = False

    async def start(self, handler: Handler) -> Address:
        """Begins to accept frames and calls; returns the bound ``host:port``.

        A client gets ``""``: it listens nowhere. A task that only dials gets what
        stands for its address.

        Raises:
          AddressError: ``bind`` is not an address of this machine.
          PortInUseError: another process listens there.
        """
        if self.task is None:
            return ""
        self._links.start(handler)
        port = self._port
        near = self._memories.is_near
        doors = Doors() if port is None else port.open_doors(near=near)
        service = Service(
            handler,
            self._hello,
            self._counters,
            self._max_frame_bytes,
            self._max_queued_bytes,
            self._buffers,
            self._room,
            shares_memory=near and port is not None,
            presence=Presence(self, self._links.address_of),
            doors=doors,
            offered=self._routes.offered,
            checks_certificates=self._has_tls,
            roles=self._roles,
        )
        if port is None:
            address = dial_only_address(self.task, self.incarnation)
            self._routes.offer(service.serve_dialled)
        else:
            address = await port.listen(service.generic_handler(), doors)
        self.data_port = 0 if doors.data is None else doors.data.port
        self._service = service
        return address

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        """Tells where other tasks are; connections are made on first use.

        A connection to an address that is no longer the peer's is given up, and
        reported as lost.
        """
        self._links.set_peers(peers)
        if not self._closed:
            self._routes.set_peers(peers)

    def post(self, dst: TaskName, frame: Frame) -> None:
        """Queues a frame for ``dst``; never blocks. A failure is ``peer_lost``.

        The arrays must not change afterwards. A peer that is not up yet is waited for
        during 2 s.

        Raises:
          MalformedMessageError: a tensor that cannot be sent.
          MessageTooLargeError: the frame is over ``max_frame_bytes``.
        """
        if not self._links.is_ready(dst):
            return
        prepared = prepare(frame, max_frame_bytes=self._max_frame_bytes)
        self._links.push(dst, prepared)

    def when_sent(self, dst: TaskName, callback: Callable[[], None]) -> None:
        """See ``Transport.when_sent``."""
        self._links.when_sent(dst, callback)

    def withdraw(self, handle: str, step_id: int) -> int:
        """Drops the posted values of a step that have not begun to leave.

        Returns:
          How many frames.
        """
        return self._links.withdraw((handle, step_id))

    def _make_link(self, peer: TaskName, address: Address) -> ExchangeLink:
        return ExchangeLink(
            peer,
            address,
            self._hello_of_line(),
            self._counters,
            self._memories.new,
            self._numbers.setdefault(peer, itertools.count(1)),
            self._max_queued_bytes,
            partial(self._routes.frames, peer, address),
            near=self._memories.is_near,
            data=self._data,
        )

    def _hello_of_line(self) -> pb.Hello:
        hello = pb.Hello(line=next(self._line_numbers))
        hello.MergeFrom(self._hello)
        return hello

    async def call(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> AsyncGenerator[Frame, None]:
        """Calls ``method`` at an address; yields the reply frames.

        Raises:
          AddressError: ``dst`` is no address, or its host does not resolve.
          CertificateError, PlainTextError, RoleError: the two sides do not trust each
            other, or only one of them speaks TLS.
          ClusterUnreachableError: nothing of ours listens there.
          DeadlineError: no end of the reply within ``timeout_s``.
          TaskLostError: the server went away during the call.
          TokenError: the server is of a cluster with another token.
          JGError: whatever the other side raised.
        """
        prepared = prepare(request, max_frame_bytes=self._max_frame_bytes)
        self._counters.calls_made += 1
        async with (
            self._lines.own(dst, timeout_s) as (line, left_s),
            aclosing(line.call(method, prepared, left_s)) as replies,
        ):
            async for reply in replies:
                yield reply

    async def ask(
        self, dst: Address, method: str, request: Frame, *, timeout_s: float
    ) -> Frame:
        """Calls ``method`` at an address; returns its only reply.

        Raises:
          InternalError: there was no reply.
          JGError: as ``call``.
        """
        prepared = prepare(request, max_frame_bytes=self._max_frame_bytes)
        self._counters.calls_made += 1
        if prepared.nbytes > MAX_ASK_BYTES or prepared.has_large_header:
            async with self._lines.own(dst, timeout_s) as (line, left_s):
                at_once = not self._lines.is_crowded(dst)
                return await line.ask_in_turn(method, prepared, left_s, at_once=at_once)
        line = await self._lines.shared(dst, timeout_s)
        return await line.ask(method, prepared, timeout_s)

    async def who_is_at(self, dst: Address, timeout_s: float) -> pb.Hello:
        """Returns who answers at an address now; raises as ``ask``."""
        async with self._routes.calls_now(dst, timeout_s) as over:
            line = self._line(dst, over, data=False)
            try:
                request = prepare(frame(call=pb.Call(method=HELLO_METHOD)))
                reply = await line.ask(HELLO_METHOD, request, timeout_s)
            finally:
                await line.close()
        theirs: pb.Hello = body_of(reply)
        return theirs

    def _line(
        self, dst: Address, over: OpenStream | None = None, *, data: bool = True
    ) -> CallConnection:
        over = over or partial(self._routes.calls, dst)
        return CallConnection(
            *(dst, self._hello_of_line(), over, self._decoder),
            near=self._memories.is_near,
            data=self._data if data else None,
        )

    def _decoder(self) -> Decoder:
        return Decoder(max_frame_bytes=self._max_frame_bytes, take=self._buffers.take)

    async def join(
        self, parts: Sequence[np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any] | None:
        """See ``Transport.join``."""
        return await self._joins.join(parts) if self._memories.is_near else None

    async def give_back_memory(self) -> None:
        """See ``Transport.give_back_memory``."""
        await self._memories.give_back()

    def statistics(self) -> TransportStatistics:
        """Returns what was sent and received so far."""
        repeats = self._service.repeats if self._service is not None else 0
        return self._counters.snapshot(repeats, self._memories.taken)

    async def close(self) -> None:
        """Sends what is posted (1 s at most), ends streams, and releases the port.

        Calls that are still being served are cancelled. Closing twice is fine.
        """
        if self._closed:
            return
        self._closed = True
        await self._links.close()
        await self._lines.close(is_dial_only)  # which end with the streams offered here
        if self._service is not None:
            self._service.stop()
            if self._port is not None:
                await self._port.close()
        await self._lines.close()
        self._memories.close()
        await self._routes.close()
