"""Bytes between two processes: a small request there, a payload back.

Run: ``python -m benchmarks.transport``. Prints one JSON line per way and size: the time
of one round trip (median, least, greatest, in ms); the throughput with four requests
under way; the CPU seconds per GB of both processes together. Ways: ``post`` (frames
between tasks of two hosts), ``stream`` (the same over gRPC, as where the data port is
out of reach), ``shm`` (through shared memory), ``call`` (one call each), and as limits
to compare with ``tcp``, a bare socket that reads into memory which it keeps, and
``memcpy`` into warm memory. Both processes have the event loop of one that serves a
task, and keep freed memory as it does. ``--tls`` has the same encrypted: ``records``,
``tls`` over the data socket, ``stream_tls`` and ``call_tls``. They take turns.
``--fan-in`` measures many processes that pull from and push to one.
"""

import asyncio
import multiprocessing
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np

from benchmarks import measure, transport_fan_in
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.transport import Frame

PS = TaskName("/job:ps/task:0")
WORKER = TaskName("/job:worker/task:0")
SIZES = {4: 200, 64: 200, 10**6: 60, 16 * 10**6: 20, 100 * 10**6: 8}
REQUEST = struct.Struct("<q")
SECRET = ("records", "tls", "stream_tls")
WARM_UP = 3
BURST = 4
WAYS = ("post", "stream", "shm", "call", "tcp", "memcpy")
TLS_WAYS = ("post", "records", "tls", "stream_tls", "call", "call_tls", "tcp", "memcpy")
How = Literal["off", "stream", "auto", "records", "tls", "stream_tls"]
HOW: tuple[How, ...] = ("off", "stream", "auto")
TLS_HOW: tuple[How, ...] = ("off", "records", "tls", "stream_tls")
PLAIN = {"records": "post", "tls": "post", "stream_tls": "post", "call_tls": "call"}
"""What an encrypted way is to be compared with."""
Way = Callable[[int, int], Awaitable[int]]


def make_transports(task: TaskName, certificates: str) -> dict[How, GrpcTransport]:
    """One transport per way to send; an empty directory name is without TLS."""
    return {
        how: GrpcTransport(
            task,
            same_machine="auto" if how == "auto" else "off",
            data_port=None if how.startswith("stream") else 0,
            data_encryption="tls" if how == "tls" else "records",
            tls=TLS.of(certificates, task) if how in SECRET else None,
        )
        for how in (TLS_HOW if certificates else HOW)
    }


def request(nbytes: int) -> Frame:
    return frame(start_step=pb.StartStep(step_id=nbytes))


class Task:
    """Answers requests for the payloads that it has, or takes answers."""

    def __init__(self, transport: GrpcTransport, payloads: dict[int, Frame]) -> None:
        self.transport = transport
        self.payloads = payloads
        self.answers: asyncio.Queue[Frame] = asyncio.Queue()

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        if self.payloads:
            self.transport.post(src, self.payloads[body_of(frame).step_id])
        else:
            self.answers.put_nowait(frame)

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Also at the end, when the other side closes."""

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        yield self.payloads[body_of(request).step_id]


def make_payloads(sizes: list[int]) -> dict[int, Frame]:
    return {n: frame(empty=pb.Empty(), tensors=[np.ones(n, np.uint8)]) for n in sizes}


def serve_tcp(listener: socket.socket, payloads: dict[int, Frame]) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while wanted := connection.recv(REQUEST.size, socket.MSG_WAITALL):
            (nbytes,) = REQUEST.unpack(wanted)
            connection.sendall(payloads[nbytes].tensors[0].data)


def serve(pipe: Connection, sizes: list[int], certificates: str) -> None:
    """The other process: a ps, and a bare socket."""
    payloads = make_payloads(sizes)
    listener = socket.create_server(("127.0.0.1", 0))
    tcp = threading.Thread(target=serve_tcp, args=(listener, payloads), daemon=True)

    async def main() -> None:
        tcp.start()
        transports = make_transports(PS, certificates)
        addresses = {
            how: await t.start(Task(t, payloads)) for how, t in transports.items()
        }
        pipe.send((addresses, listener.getsockname()))
        theirs = await asyncio.to_thread(pipe.recv)
        for how, transport in transports.items():
            transport.set_peers({WORKER: theirs[how]})
        await asyncio.to_thread(pipe.recv)  # until the other side has enough
        for transport in transports.values():
            await transport.close()

    transport_fan_in.run_as_task(main())


class Asking:
    """This process: each way is a method that moves ``n`` payloads of ``nbytes``."""

    def __init__(self, pipe: Connection, largest: int, certificates: str) -> None:
        self.transports = make_transports(WORKER, certificates)
        self.tasks = {how: Task(t, {}) for how, t in self.transports.items()}
        self.pipe = pipe
        self.kept = memoryview(bytearray(largest))
        self.source = np.ones(largest, np.uint8)
        self.targets = np.ones((BURST, largest), np.uint8)

    async def start(self) -> None:
        self.addresses, tcp_address = await asyncio.to_thread(self.pipe.recv)
        ours = {
            how: await t.start(self.tasks[how]) for how, t in self.transports.items()
        }
        self.pipe.send(ours)
        for how, transport in self.transports.items():
            transport.set_peers({PS: self.addresses[how]})
        self.connection = socket.create_connection(tcp_address)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def close(self) -> None:
        self.connection.close()
        for transport in self.transports.values():
            await transport.close()

    async def post(self, nbytes: int, n: int, how: How = "off") -> int:
        for _ in range(n):
            self.transports[how].post(PS, request(nbytes))
        got = 0
        async with asyncio.timeout(60):
            for _ in range(n):
                got += (await self.tasks[how].answers.get()).tensors[0].nbytes
        return got

    async def stream(self, nbytes: int, n: int) -> int:
        return await self.post(nbytes, n, "stream")

    async def stream_tls(self, nbytes: int, n: int) -> int:
        return await self.post(nbytes, n, "stream_tls")

    async def shm(self, nbytes: int, n: int) -> int:
        return await self.post(nbytes, n, "auto")

    async def records(self, nbytes: int, n: int) -> int:
        return await self.post(nbytes, n, "records")

    async def tls(self, nbytes: int, n: int) -> int:
        return await self.post(nbytes, n, "tls")

    async def call_tls(self, nbytes: int, n: int) -> int:
        return await self.call(nbytes, n, "records")

    async def call(self, nbytes: int, n: int, how: How = "off") -> int:
        async def one() -> int:
            replies = self.transports[how].call(
                self.addresses[how], "Get", request(nbytes), timeout_s=60
            )
            return sum([reply.tensors[0].nbytes async for reply in replies])

        return sum(await asyncio.gather(*(one() for _ in range(n))))

    async def tcp(self, nbytes: int, n: int) -> int:
        self.connection.sendall(REQUEST.pack(nbytes) * n)
        total = 0
        for _ in range(n):
            got = 0
            while got < nbytes:
                got += self.connection.recv_into(self.kept[got:nbytes])
            total += got
        return total

    async def memcpy(self, nbytes: int, n: int) -> int:
        for target in self.targets[:n]:
            target[:nbytes] = self.source[:nbytes]
        return nbytes * n


class Found:
    """What was measured of one way and size."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.gb_per_s: list[float] = []
        self.cpu_s_per_gb: list[float] = []

    async def add(self, way: Way, nbytes: int, server: int) -> None:
        await way(nbytes, 1)  # what the other ways left in the caches is theirs
        cpu, start = cpu_seconds(server), time.perf_counter()
        await way(nbytes, 1)
        middle = time.perf_counter()
        total = await way(nbytes, BURST)
        end, cpu_end = time.perf_counter(), cpu_seconds(server)
        if total != BURST * nbytes:
            raise RuntimeError(f"{way} gave {total} bytes, not {BURST} times {nbytes}")
        self.ms.append(1e3 * (middle - start))
        self.gb_per_s.append(total / (end - middle) / 1e9)
        self.cpu_s_per_gb.append((cpu_end - cpu) / (total + nbytes) * 1e9)


async def take_turns(
    pipe: Connection, sizes: dict[int, int], server: int, certificates: str
) -> None:
    asking = Asking(pipe, max(sizes), certificates)
    await asking.start()
    names = TLS_WAYS if certificates else WAYS
    ways: dict[str, Way] = {name: getattr(asking, name) for name in names}
    for nbytes, repeats in sizes.items():
        found = {name: Found() for name in ways}
        for i in range(repeats + WARM_UP):
            if i == WARM_UP:
                found = {name: Found() for name in ways}
            for name, way in ways.items():
                await found[name].add(way, nbytes, server)
        report(nbytes, found)
    await asking.close()


def cpu_seconds(server: int) -> float:
    """CPU time of this process and the server so far."""
    return time.process_time() + measure.cpu_seconds(server)


def report(nbytes: int, found: dict[str, Found]) -> None:
    speeds = {name: statistics.median(f.gb_per_s) for name, f in found.items()}
    for name, one in found.items():
        measure.emit(
            "transport_tls" if "tls" in found else "transport",
            way=name,
            bytes=nbytes,
            **measure.spread("ms", one.ms, 3),
            **measure.spread("gb_per_s", one.gb_per_s, 3),
            to_tcp=round(speeds[name] / speeds["tcp"], 3),
            to_memcpy=round(speeds[name] / speeds["memcpy"], 3),
            to_plain=round(speeds[name] / speeds[PLAIN.get(name, name)], 3),
            **measure.spread("cpu_s_per_gb", one.cpu_s_per_gb, 3),
            repeats=len(one.ms),
        )


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--largest", type=int, default=max(SIZES), help="bytes")
    parser.add_argument("--fan-in", action="store_true", help="many to one instead")
    parser.add_argument("--tls", action="store_true", help="encrypted, beside plain")
    a = parser.parse_args(args)
    if a.fan_in:
        transport_fan_in.main()
        return
    sizes = {n: repeats for n, repeats in SIZES.items() if n <= a.largest}
    with tempfile.TemporaryDirectory() as directory:
        certificates = directory if a.tls else ""
        if certificates:
            make_certificates(certificates, [PS, WORKER])
        run(sizes, certificates)


def run(sizes: dict[int, int], certificates: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, list(sizes), certificates))
    process.start()
    assert process.pid is not None  # it was started
    try:
        turns = take_turns(ours, sizes, process.pid, certificates)
        transport_fan_in.run_as_task(turns)
        ours.send("enough")
        process.join(10)
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
