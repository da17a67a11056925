"""Whatever bytes come, a decoder returns, or raises an error of ours: with coverage.

``python -m tests.support.fuzz.decoders NAME SECONDS`` lets atheris look for bytes that
do something else in one decoder of what comes from the network or from a file. What it
finds is in the file that it names. Other bytes are tried by the tests of each decoder
at every run of the tests; this looks for those that reach new code.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["jgraph"]):
    from jgraph.cluster.methods import reading
    from jgraph.cluster.spec import ClusterSpec
    from jgraph.coordination.data.batch_book import BatchBook
    from jgraph.coordination.data.slots import Part, SlotPlan
    from jgraph.errors import JGError
    from jgraph.launch.hosts import read_hosts
    from jgraph.rpc._pb import jgraph_pb2 as pb
    from jgraph.rpc.frames import body_of, frame, kind_of
    from jgraph.rpc.security.token import Token
    from jgraph.rpc.wire.codec import encode
    from jgraph.rpc.wire.decoder import Decoder
    from jgraph.rpc.wire.program_codec import decode_program, encode_program
    from jgraph.rpc.wire.record_codec import record_from, record_to
    from jgraph.rpc.wire.table_codec import table_from, table_to
    from jgraph.runtime.files.manifest import (
        FILE,
        Leaf,
        Manifest,
        checksum,
        read_manifest,
    )
    from jgraph.server.replication.wal import LogWriter, read_log

import numpy as np
from google.protobuf.message import DecodeError

from jgraph.graph.rows.hash_spec import Column, HashSpec
from jgraph.plan.program.replay import NodeRan, Record
from jgraph.rpc.transport import Frame
from tests.support.wire_programs import small

_THERE: Final = Path(tempfile.mkdtemp())
_PLAN: Final = SlotPlan([Part("data", 8)], 2, seed=0)
_RECORD: Final = Record(1, NodeRan(0, 1), [np.zeros(2)])
_PROGRAM, _CODE = encode_program(small())
_ORDER: Final = pb.RegisterProgram(handle="h", program=_PROGRAM)
_LEAF: Final = Leaf((2,), "float32", 2, (7,))
_TABLE: Final = HashSpec("ads", (Column("rows", 16),), 1 << 20)
_BEGIN: Final = BatchBook(_PLAN).position()


def frames(data: bytes) -> None:
    """Whole frames, and what is in them."""
    decoder = Decoder()
    for at in range(0, len(data), 512):
        for frame in decoder.feed(data[at : at + 512]):
            match kind_of(frame):
                case "record":
                    record_from(frame)
                case "register_program":
                    decode_program(body_of(frame).program, frame.tensors)
    decoder.finish()


def table(data: bytes) -> None:
    table_from(pb.HashSpec.FromString(data))


def log(data: bytes) -> None:
    written(data, "s.1.log")
    list(read_log(_THERE, "s"))


def manifest(data: bytes) -> None:
    """Its checksum is made right: else nothing of it is looked at."""
    with suppress(ValueError, RecursionError):
        body = json.loads(data)
        if isinstance(body, dict):
            body.pop("crc32", None)
            data = json.dumps({**body, "crc32": checksum(body)}).encode()
    read_manifest(written(data, FILE).parent)


def cluster_toml(data: bytes) -> None:
    ClusterSpec.from_toml(written(data, "cluster.toml"))


def cluster_json(data: bytes) -> None:
    ClusterSpec.from_json(text_of(data))


def tf_config(data: bytes) -> None:
    ClusterSpec.from_tf_config(text_of(data))


def hosts(data: bytes) -> None:
    read_hosts(text_of(data), "hosts.txt")


def token(data: bytes) -> None:
    path = written(data, "token")
    path.chmod(0o600)
    Token.read(path)


def plan(data: bytes) -> None:
    with reading("a plan"):
        SlotPlan.from_dict(json.loads(text_of(data)))


def position(data: bytes) -> None:
    with reading("a position"):
        BatchBook(_PLAN, json.loads(text_of(data)))


def bytes_of(frame: Frame) -> bytes:
    return b"".join(encode(frame).pieces)


def log_of(made: Record) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        writer = LogWriter(Path(directory), "s")
        writer.begin()
        writer.write(record_to("s", made))
        writer.sync()
        writer.close()
        return (Path(directory) / "s.1.log").read_bytes()


def written(data: bytes, name: str) -> Path:
    path = _THERE / name
    path.write_bytes(data)
    return path


def text_of(data: bytes) -> str:
    return data.decode(errors="replace")


_SPEC: Final = b'{"cluster": {"ps": ["a:1"], "worker": ["b:1", "b:2"]}}'
DECODERS: Final[Mapping[str, tuple[Callable[[bytes], None], bytes]]] = {
    "frames": (frames, bytes_of(frame(empty=pb.Empty()))),
    "records": (frames, bytes_of(record_to("s", _RECORD))),
    "programs": (frames, bytes_of(frame(register_program=_ORDER, tensors=_CODE))),
    "tables": (table, table_to(_TABLE).SerializeToString()),
    "log": (log, log_of(_RECORD)),
    "manifest": (manifest, Manifest(3, {"w": _LEAF}).to_json().encode()),
    "cluster_toml": (cluster_toml, b'[cluster]\nps = ["a:1"]\nworker = ["b:1"]\n'),
    "cluster_json": (cluster_json, b'{"ps": ["a:1"], "worker": ["b:1"]}'),
    "tf_config": (tf_config, _SPEC),
    "hosts": (hosts, b"ada@node  # fast\nlab2 10.0.0.2"),
    "token": (token, b"0" * 64),
    "plan": (plan, json.dumps(_PLAN.to_dict()).encode()),
    "position": (position, json.dumps(_BEGIN).encode()),
}
"""Each decoder, and bytes to begin with."""


def main(name: str, seconds: str) -> None:
    """Looks for so long."""
    decode, first = DECODERS[name]

    def one(data: bytes) -> None:
        try:
            decode(data)
        except (JGError, DecodeError):  # the latter becomes JG-401 at one place
            return

    with tempfile.TemporaryDirectory() as corpus:
        (Path(corpus) / "first").write_bytes(first)
        options = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([sys.argv[0], corpus, "-max_len=4096", *options], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
