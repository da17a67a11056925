"""Many worker processes pull from and push to one ps process, all at once.

Run: ``python -m benchmarks.transport --fan-in``. In each round every worker pulls 25 MB
and then pushes 25 MB: as between two hosts (``post``), through shared memory (``shm``),
or through a bare socket each (``tcp``), whose ends keep their memory. They take turns.
Prints one JSON line each with the bytes of all workers per second.
"""

import asyncio
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from benchmarks import measure
from jgraph.cluster.event_loop import new_loop
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.transport import Frame
from jgraph.server.process_setup import keep_memory

PS = TaskName("/job:ps/task:0")
WORKERS = 8
NBYTES = 25 * 10**6
ROUNDS = 12
WARM_UP = 2
How = Literal["off", "auto"]
HOW: dict[str, How] = {"post": "off", "shm": "auto"}
PULL, PUSH = 1, 2
TCP = "tcp"


def message(kind: int, *tensors: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Frame:
    return frame(start_step=pb.StartStep(step_id=kind), tensors=tensors)


class Ps:
    """Sends its parameters when asked, and acknowledges gradients."""

    def __init__(self, transport: GrpcTransport) -> None:
        self.transport = transport
        self.parameters = np.ones(NBYTES, np.uint8)

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        if body_of(frame).step_id == PULL:
            self.transport.post(src, message(PULL, self.parameters))
        else:
            self.transport.post(src, message(PUSH))

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        pass

    async def handle_call(self, method: str, request: Frame) -> AsyncIterator[Frame]:
        yield request


class Worker(Ps):
    """Pulls, then pushes what it got."""

    answer: asyncio.Future[Frame]

    def frame_received(self, src: TaskName, frame: Frame) -> None:
        self.answer.set_result(frame)

    async def ask(self, frame: Frame) -> Frame:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.post(PS, frame)
        async with asyncio.timeout(60):
            return await self.answer

    async def round(self) -> None:
        pulled = await self.ask(message(PULL))
        await self.ask(message(PUSH, pulled.tensors[0]))


def serve_bare(listener: socket.socket) -> None:
    """Lets each worker pull from a socket and push to it, in a thread of its own."""
    parameters = np.ones(NBYTES, np.uint8)

    def serve(connection: socket.socket) -> None:
        gradients = memoryview(bytearray(NBYTES))
        with connection:
            while connection.recv(1, socket.MSG_WAITALL):
                connection.sendall(parameters.data)
                receive(connection, gradients)
                connection.sendall(b"1")

    for _ in range(WORKERS):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fills memory with what comes."""
    while memory:
        memory = memory[connection.recv_into(memory) :]


class BareWorker:
    """Pulls, then pushes what it got, through a bare socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.connection = socket.create_connection(address)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.memory = memoryview(bytearray(NBYTES))

    def round(self) -> None:
        self.connection.sendall(b"1")
        receive(self.connection, self.memory)
        self.connection.sendall(self.memory)
        self.connection.recv(1, socket.MSG_WAITALL)


def run_as_task(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine as a process does that serves a task."""
    keep_memory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work)


def work(pipe: Connection, index: int) -> None:
    async def main() -> None:
        workers = {}
        for way, how in HOW.items():
            name = TaskName(f"/job:worker/task:{index}")
            transport = GrpcTransport(name, same_machine=how)
            workers[way] = Worker(transport)
        pipe.send({way: await w.transport.start(w) for way, w in workers.items()})
        addresses = await asyncio.to_thread(pipe.recv)
        for way, worker in workers.items():
            worker.transport.set_peers({PS: addresses[way]})
        bare = BareWorker(addresses[TCP])
        while way := await asyncio.to_thread(pipe.recv):
            if way == TCP:
                await asyncio.to_thread(bare.round)
            else:
                await workers[way].round()
            pipe.send("done")
        for worker in workers.values():
            await worker.transport.close()

    run_as_task(main())


async def take_turns(pipes: list[Connection]) -> None:
    transports = {way: GrpcTransport(PS, same_machine=how) for way, how in HOW.items()}
    addresses: dict[str, Any] = {w: await t.start(Ps(t)) for w, t in transports.items()}
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_bare, args=(listener,), daemon=True).start()
    addresses[TCP] = listener.getsockname()
    theirs = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
    for way, transport in transports.items():
        transport.set_peers(
            {TaskName(f"/job:worker/task:{i}"): t[way] for i, t in enumerate(theirs)}
        )
    for pipe in pipes:
        pipe.send(addresses)
    times: dict[str, list[float]] = {way: [] for way in (*HOW, TCP)}
    for i in range(ROUNDS + WARM_UP):
        for way, seconds in times.items():
            start = time.perf_counter()
            for pipe in pipes:
                pipe.send(way)
            for pipe in pipes:
                await asyncio.to_thread(pipe.recv)
            if i >= WARM_UP:
                seconds.append(time.perf_counter() - start)
    for pipe in pipes:
        pipe.send("")
    report(times)
    for transport in transports.values():
        await transport.close()


def report(times: dict[str, list[float]]) -> None:
    for way, found in times.items():
        median = statistics.median(found)
        measure.emit(
            "transport_fan_in",
            way=way,
            workers=WORKERS,
            bytes_each_way=NBYTES,
            **measure.spread("ms", [1e3 * seconds for seconds in found]),
            gb_per_s=round(2 * WORKERS * NBYTES / median / 1e9, 3),
            **measure.ratio("speed_to_post", times["post"], found, 2),
            **measure.ratio("speed_to_tcp", times[TCP], found, 2),
            rounds=len(found),
        )


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for index in range(WORKERS):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(theirs, index))
            process.start()
            pipes.append(ours)
            processes.append(process)
        run_as_task(take_turns(pipes))
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
            process.join()
