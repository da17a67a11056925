"""Frames between hosts over a data socket: each arrives once, whatever breaks."""

import asyncio
import logging
import random
import socket
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jgraph.errors import PortInUseError, TaskLostError
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.sockets import connecting, listener
from jgraph.rpc.sockets.frame_socket import FrameSocket
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import (
    PS,
    WORKER,
    Recorder,
    numbers,
    started,
    step,
)
from tests.support.run_async import run_async
from tests.support.worker_pair import Remote, paired

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory, [PS, WORKER])
    return directory


def way(transport: GrpcTransport) -> str:
    return transport.statistics().peers[PS].way


def test_frames_go_over_the_data_socket_and_through_the_proxy() -> None:
    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0, np.ones(1 << 20, np.uint8)))
            await pair.has(1)
            assert way(pair.worker) == "data socket (plain)"
            assert pair.proxy.data_bytes > 1 << 20
            await pair.worker.close()
            assert not way(pair.worker)

    run_async(main())


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels count otherwise")
def test_an_idle_connection_outlives_lost_probes() -> None:
    """Linux ends it when it was silent for the whole time and a probe is unanswered."""

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        make = partial(FrameSocket, lambda _: None)
        server = await loop.create_server(make, "127.0.0.1", 0)
        async with server:
            transport, _ = await loop.create_connection(
                make, *server.sockets[0].getsockname()
            )
            connected = transport.get_extra_info("socket")
            found = [
                connected.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_USER_TIMEOUT,
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                )
            ]
            transport.abort()
            return found

    most_ms, idle_s, every_s = run_async(main())
    assert most_ms == 15_000
    assert (most_ms / 1000 - idle_s) / every_s >= 5


def test_proxy_leads_to_a_data_port_by_one_port_whoever_asks_at_once() -> None:
    async def main() -> None:
        async with TcpProxy("127.0.0.1:1") as proxy:
            ports = await asyncio.gather(*(proxy.lead_data(9) for _ in range(5)))
            assert len(set(ports)) == 1

    run_async(main())


@pytest.mark.parametrize("cuts", [20, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", ["head", "tensor", "before the acknowledgement"])
def test_cuts_lose_and_repeat_nothing(where: str, cuts: int) -> None:
    async def main() -> None:
        chance = random.Random(where)
        large = np.arange(300_000, dtype=np.int32)
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            for i in range(1, cuts + 1):
                proxy = pair.proxy
                after = {
                    "head": chance.randrange(1, 12),
                    "tensor": chance.randrange(1000, large.nbytes),
                    "before the acknowledgement": 0,
                }[where]
                if after:
                    proxy.cut_after_bytes = proxy.passed_bytes + after
                pair.worker.post(PS, step(i, large))
                assert len(await pair.has(i + 1)) == i + 1
                if not after:
                    proxy.cut()
                frame = pair.at_ps.frames[-1][1]
                np.testing.assert_array_equal(frame.tensors[0], large)
            assert numbers([f for _, f in pair.at_ps.frames]) == list(range(cuts + 1))
            assert [*pair.at_ps.lost, *pair.at_worker.lost] == []
            assert way(pair.worker) == "data socket (plain)"

    run_async(main(), timeout_s=120)


def test_end_of_the_data_socket_alone_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something between drops one connection of the two."""
    ends: list[FrameSocket] = []
    whole = FrameSocket.connection_made

    def keep(self: FrameSocket, transport: asyncio.BaseTransport) -> None:
        ends.append(self)
        whole(self, transport)

    monkeypatch.setattr(FrameSocket, "connection_made", keep)
    monkeypatch.setattr(connecting, "LAST_WORDS_S", 1e6)

    async def main() -> None:
        async with paired() as pair:
            for i in range(20):
                pair.worker.post(PS, step(i, np.full(50_000, i, np.int32)))
                assert len(await pair.has(i + 1)) == i + 1
                ends[-1 - i % 2]._transport.abort()  # type: ignore[union-attr]
            assert numbers([f for _, f in pair.at_ps.frames]) == list(range(20))
            assert [*pair.at_ps.lost, *pair.at_worker.lost] == []

    run_async(main())


@pytest.mark.parametrize("tls", [False, True])
def test_tensors_of_every_size_arrive_whole(tls: bool, certificates: Path) -> None:
    def make(task: object, bind: str = "127.0.0.1:0", **_: object) -> GrpcTransport:
        files = TLS.of(certificates, task) if tls else None  # type: ignore[arg-type]
        return Remote(task, bind=bind, tls=files)  # type: ignore[arg-type]

    async def main() -> None:
        sizes = [0, 1, 1023, 1024, 16_383, 16_384, 32_767, 32_768, 65_536, 65_537]
        sizes += [1 << 20, (1 << 20) + 1, 4 << 20, (4 << 20) + 5, 24_000_001]
        kinds = [np.uint8, np.float32, ml_dtypes.bfloat16]
        sent = [
            np.arange(size // np.dtype(kind).itemsize).astype(kind)
            for size in sizes
            for kind in kinds
        ]
        random.Random(7).shuffle(sent)
        async with started(make) as (_, at_ps, worker, _, _):
            for i in range(0, len(sent), 3):
                worker.post(PS, step(i, *sent[i : i + 3]))
            frames = await at_ps.wait_frames(len(sent) // 3)
            got = [tensor for frame in frames for tensor in frame.tensors]
            for ours, theirs in zip(sent, got, strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours.view(), theirs)
            assert way(worker).startswith("data socket")  # type: ignore[arg-type]

    run_async(main())


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_either_side_can_leave_frames_in_the_stream(who: str) -> None:
    async def main() -> None:
        ps = Remote(PS, data_port=None if who == "receiver" else 0)
        worker = Remote(WORKER, data_port=None if who == "sender" else 0)
        at_ps = Recorder()
        worker.set_peers({PS: await ps.start(at_ps)})
        await worker.start(Recorder())
        worker.post(PS, step(1))
        assert numbers(await at_ps.wait_frames(1)) == [1]
        assert way(worker) == "gRPC stream"
        assert (ps.data_port == 0) == (who == "receiver")
        await worker.close()
        await ps.close()

    run_async(main())


@pytest.mark.parametrize("how", ["refused", "filtered", "another's"])
def test_data_port_out_of_reach_leaves_frames_to_the_stream_with_one_line(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a port that did not answer costs its two seconds once."""
    opened = connecting.DataDialer._open
    waits = Counter[str]()

    async def leads_elsewhere(
        self: connecting.DataDialer, make: object, host: str, port: int, tls: object
    ) -> None:
        if how == "filtered":
            waits[str(self)] += 1
            await asyncio.Event().wait()
        other = 1 if how == "refused" else port
        await opened(self, make, host, other, tls)  # type: ignore[arg-type]

    monkeypatch.setattr(connecting.DataDialer, "_open", leads_elsewhere)
    if how == "filtered":
        monkeypatch.setattr(connecting, "HANDSHAKE_TIMEOUT_S", 0.05)
    if how == "another's":
        monkeypatch.setattr(
            listener.SocketListener, "_welcome", lambda self, guest, _: guest.close()
        )
    caplog.set_level(logging.INFO, "jgraph.rpc.sockets.connecting")

    async def main() -> None:
        async with paired() as pair:
            for i in range(4):
                pair.worker.post(PS, step(i))
                assert len(await pair.has(i + 1)) == i + 1
                pair.proxy.cut()
            assert way(pair.worker) == "gRPC stream"
            assert [*pair.at_ps.lost, *pair.at_worker.lost] == []

    run_async(main())
    said = [r.getMessage() for r in caplog.records]
    assert len([line for line in said if f"Frames for {PS} at " in line]) == 1
    assert max(waits.values(), default=0) == (how == "filtered")


def test_ring_of_small_frames_is_bounded_by_what_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small frames that leave at once are kept as well."""
    monkeypatch.setattr("jgraph.rpc.resumable.numbers.WINDOW_FRAMES", 8)
    monkeypatch.setattr("jgraph.rpc.resumable.numbers.ACK_FRAMES", 4)

    async def main() -> None:
        async with paired() as pair:
            for i in range(200):
                pair.worker.post(PS, step(i))
                if i % 10 == 0:
                    await pair.has(i)
            assert await pair.has(200) == list(range(200))

    run_async(main())


def test_port_that_is_taken_is_told() -> None:
    async def main() -> None:
        first = Remote(PS)
        await first.start(Recorder())
        second = Remote(WORKER, data_port=first.data_port)
        with pytest.raises(PortInUseError, match=str(first.data_port)):
            await second.start(Recorder())
        await first.close()
        again = Remote(WORKER, data_port=first.data_port)  # it is free at once
        await again.start(Recorder())
        assert again.data_port == first.data_port
        await again.close()

    run_async(main())


def test_bytes_that_are_no_frames_are_refused_with_the_reason() -> None:
    """The stream beside the socket says why."""

    async def main() -> None:
        async with paired() as pair:
            pair.worker.post(PS, step(0))
            await pair.has(1)
            link = pair.worker._links._links[PS][0]
            socket = link._outbox._idle_socket  # type: ignore[attr-defined]
            assert socket is not None
            socket.write_now(b"\xff" * 100)
            error = await pair.at_worker.wait_lost(PS)
            assert not isinstance(error, TaskLostError)
            assert "not a jgraph message" in error.message

    run_async(main())
