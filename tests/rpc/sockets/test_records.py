"""Sealed records: what was changed, moved, repeated or cut off is given to nobody."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, strategies as st

from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.sockets import records
from jgraph.rpc.sockets.connecting import DataDialer
from jgraph.rpc.sockets.records import RECORD_BYTES, Opener, RecordError, Sealer
from jgraph.testing.tcp_proxy import TcpProxy
from jgraph.testing.transport_harness import PS, WORKER, Recorder, numbers, step
from tests.support.encrypted_offers import data_through
from tests.support.run_async import run_async

KEY = bytes(range(32))
VECTORS = [
    (b"", False, "000000006fc6d57b17a3b232bcdc6be04af6edaefe6a2a43"),
    (b"jgraph", False, "06000000116342588ff007510ea9f5cc1dfaf08035a4283bff59c7375ca9"),
    (
        bytes(range(16)),
        False,
        "10000000ee2ce8359363c70f74c6cd924710323454fed48c19e51d927afc493ee652451f067c1e75",
    ),
    (b"", True, "00000080c3c10f930ab2387ccd8fa0ab888fb2a112daf51b"),
]
"""Plain bytes, whether they are the last, and their record; under KEY, one by one."""


def no_room(least: int) -> None:
    """Plain bytes are taken as they come."""


def opened(
    opener: Opener, sealed: bytes | bytearray, most: int = 1 << 30
) -> list[bytes]:
    """Returns the plain bytes of what arrives in pieces of so many bytes."""
    found, at = [], 0
    while at < len(sealed):
        room = opener.room()
        part = sealed[at : at + min(len(room), most)]
        room[: len(part)] = part
        found += [bytes(plain) for plain in opener.opened(len(part), no_room)]
        at += len(part)
    return found


def until_refused(sealed: bytes) -> tuple[list[bytes], bool]:
    """Returns the plain bytes up to where something is wrong, and whether it is."""
    opener, found = Opener(KEY), list[bytes]()
    try:
        for at in range(len(sealed)):
            found += opened(opener, sealed[at : at + 1])
    except RecordError:
        return found, True
    return found, False


def test_all_that_seals_is_one_file_to_be_read_at_once() -> None:
    assert len(Path(records.__file__).read_text().splitlines()) < 200


def test_records_are_those_of_the_specification() -> None:
    sealer = Sealer(KEY)
    for number, (plain, is_end, record) in enumerate(VECTORS):
        assert sealer.seal(plain, is_end=is_end).hex() == record
        # And by the cipher alone, as the specification says it.
        size = struct.pack("<I", len(plain) | is_end << 31)
        nonce = bytes(4) + struct.pack("<Q", number)
        added = size + struct.pack("<Q", number)
        head = size + struct.pack("<I", zlib.crc32(added))
        assert record == (head + AESGCM(KEY).encrypt(nonce, plain, added)).hex()
    sealed = bytes.fromhex("".join(record for *_, record in VECTORS))
    assert opened(Opener(KEY), sealed) == [p for p, *_ in VECTORS if p]


@given(
    st.lists(st.one_of(st.binary(max_size=200), st.integers(0, 300_000)), max_size=8),
    st.integers(1, 400_000),
)
def test_what_is_sealed_is_opened_however_it_arrives(
    parts: list[bytes | int], most: int
) -> None:
    sealer, plain, sealed = Sealer(KEY), b"", b""
    for part in parts:
        data = bytes(part) if isinstance(part, int) else part
        plain += data
        sealed += sealer.seal(data)
    assert b"".join(opened(Opener(KEY), sealed, most)) == plain


PLAINS = [b"first", b"", b"the second", bytes(70)]


def sealed_records() -> list[bytes]:
    sealer = Sealer(KEY)
    return [bytes(sealer.seal(plain)) for plain in PLAINS]


def test_a_bit_flipped_anywhere_is_refused_when_its_record_is_there() -> None:
    """Nothing more may ever come: who waits for it waits for ever."""
    made = sealed_records()
    for at, record in enumerate(made):
        for bit in range(8 * len(record)):
            wrong = bytearray(record)
            wrong[bit // 8] ^= 1 << bit % 8
            found, is_refused = until_refused(b"".join(made[:at]) + wrong)
            assert is_refused, f"bit {bit} of record {at}"
            assert found == [plain for plain in PLAINS[:at] if plain]


ORDERS = [[1, 0, 2], [0, 0, 1], [0, 2], [0, 2, 1], [3], [2]]


@pytest.mark.parametrize("order", ORDERS)
def test_records_moved_repeated_or_left_out_end_what_is_opened(
    order: list[int],
) -> None:
    made = sealed_records()
    with pytest.raises(RecordError, match="changed on the way"):
        opened(Opener(KEY), b"".join(made[at] for at in order))


def test_record_of_another_direction_is_refused() -> None:
    with pytest.raises(RecordError):
        opened(Opener(bytes(32)), sealed_records()[0])


def test_nothing_follows_the_end() -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    assert opened(opener, sealer.seal(b"last", is_end=True)) == [b"last"]
    with pytest.raises(RecordError, match="after the last"):
        opened(opener, sealer.seal(b"more"))


def head(size: int) -> bytes:
    checksum = zlib.crc32(struct.pack("<IQ", size, 0))
    return struct.pack("<II", size, checksum)


def test_size_is_bounded_before_memory_is_taken() -> None:
    opener = Opener(KEY)
    with pytest.raises(RecordError, match="a record of"):
        opened(opener, head(RECORD_BYTES + 1))
    assert len(opener._sealed) < RECORD_BYTES
    with pytest.raises(RecordError, match="a record of"):
        Sealer(KEY).seal(bytes(RECORD_BYTES + 1))


@given(st.binary(max_size=600))
def test_garbage_gives_nothing(data: bytes) -> None:
    assert until_refused(data) == ([], len(data) >= 8)


def test_changed_record_is_not_given_out_where_it_belongs() -> None:
    """Its memory is written, and nobody is told of it."""
    record = bytearray(Sealer(KEY).seal(bytes(5000)))
    record[-1] ^= 1
    opener, target = Opener(KEY), memoryview(bytearray(5000))
    opener.room()[: len(record)] = record
    with pytest.raises(RecordError):
        list(opener.opened(len(record), lambda least: target))


def test_key_serves_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 10)
    sealer = Sealer(KEY)
    sealer.seal(b"some")
    with pytest.raises(RecordError, match="has served"):
        sealer.seal(b"and more")


# ------------------------------------------------------------ over a network


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory, [PS, WORKER])
    return directory


class Proxied:
    """A worker that reaches a ps through a proxy, with certificates."""

    def __init__(self, certificates: Path) -> None:
        self.ps, self.worker = (
            GrpcTransport(task, same_machine="off", tls=TLS.of(certificates, task))
            for task in (PS, WORKER)
        )
        self.at_ps, self.at_worker = Recorder(), Recorder()

    async def close(self) -> None:
        await self.worker.close()
        await self.ps.close()


def test_no_plain_byte_travels_and_each_flipped_bit_is_mended(
    certificates: Path,
) -> None:
    passed = bytearray()

    async def main() -> None:
        there = Proxied(certificates)
        async with TcpProxy(await there.ps.start(there.at_ps)) as proxy:
            there.ps.set_peers({WORKER: await there.worker.start(there.at_worker)})
            there.worker.set_peers({PS: proxy.address})
            proxy.watch = passed.extend
            with data_through([proxy]):
                for i in range(30):
                    data = np.full(40_000, 0x5A, np.uint8)
                    there.worker.post(PS, step(i, data))
                    (*_, frame) = await there.at_ps.wait_frames(i + 1)
                    np.testing.assert_array_equal(frame.tensors[0], data)
                    proxy.flips = i % 2
                way = there.worker.statistics().peers[PS].way
                assert way == "data socket (records)"
                frames = [f for _, f in there.at_ps.frames]
                assert numbers(frames) == list(range(30))
                assert [*there.at_ps.lost, *there.at_worker.lost] == []
            await there.close()

    run_async(main())
    assert len(passed) > 30 * 40_000
    assert b"\x5a" * 8 not in passed
    assert b"uint8" not in passed


def test_key_that_has_served_is_followed_by_another(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 300_000)

    async def main() -> None:
        there = Proxied(certificates)
        address = await there.ps.start(there.at_ps)
        there.ps.set_peers({WORKER: await there.worker.start(there.at_worker)})
        there.worker.set_peers({PS: address})
        for i in range(40):
            there.worker.post(PS, step(i, np.full(40_000, i, np.uint8)))
        frames = await there.at_ps.wait_frames(40)
        assert numbers(frames) == list(range(40))
        assert [*there.at_ps.lost, *there.at_worker.lost] == []
        await there.close()

    run_async(main())


@pytest.mark.parametrize("why", ["no TLS here", "TLS is wanted", "half a key"])
def test_keys_are_not_taken_where_they_may_not_be(
    why: str, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    offer = pb.DataSocket(port=1, ticket=bytes(32), welcome=bytes(32))
    offer.key_to_accepting = bytes(32)
    offer.key_to_dialing = bytes(31 if why == "half a key" else 32)
    mine = TLS.of(certificates, WORKER).load(TaskName(WORKER))
    tls = None if why == "no TLS here" else mine.data_context(accepts=False)
    dialer = DataDialer(tls, takes_records=why != "TLS is wanted")

    async def main() -> None:
        assert await dialer.connect("127.0.0.1:2", offer, PS, lambda _: None) is None

    run_async(main())
    assert "this side takes none" in caplog.text
