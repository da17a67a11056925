"""Whatever bytes come, a decoder returns, or raises an error of ours: with coverage.

``python -m tests.support.fuzz.decoders NAME SECONDS`` lets atheris look for bytes that
do something else in one decoder of what comes from the network or from a file. What it
finds is in the file that it names. Other bytes are tried by the tests of each decoder
at every run of the tests; this looks for those that reach new code.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
    from jgraph.graph.variable import Variable
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
    from jgraph.serving import artifact, oip_grpc, oip_http, tf_http
    from jgraph.serving._pb import inference_pb2
    from jgraph.serving.artifact import ModelManifest
    from jgraph.serving.inference import asked_timeout
    from jgraph.serving.labels import read_labels
    from jgraph.serving.live.batch_code import LookedUp
    from jgraph.serving.live.live_file import BatchPrograms, LiveDescription
    from jgraph.serving.live.live_options import LiveOptions
    from jgraph.serving.live.table_rows import LiveTable
    from jgraph.serving.model_options import read_options
    from jgraph.serving.signature import Signature, TensorSpec

import numpy as np
from google.protobuf.message import DecodeError

from jgraph.graph.rows.hash_spec import Column, HashSpec
from jgraph.plan.program.replay import NodeRan, Record
from jgraph.rpc.transport import Frame
from tests.support.bad_inputs import (
    JSON,
    LABELS,
    LENGTHS,
    TENSORFLOW,
    manifests,
    messages,
)
from tests.support.wire_programs import small

_THERE: Final = Path(tempfile.mkdtemp())
_PLAN: Final = SlotPlan([Part("data", 8)], 2, seed=0)
_RECORD: Final = Record(1, NodeRan(0, 1), [np.zeros(2)])
_PROGRAM, _CODE = encode_program(small())
_ORDER: Final = pb.RegisterProgram(handle="h", program=_PROGRAM)
_LEAF: Final = Leaf((2,), "float32", 2, (7,))
_PS: Final = ("/job:ps/task:0", "/job:ps/task:1")
_TABLE: Final = HashSpec("ads", (Column("rows", 16),), 1 << 20)
_SIGNATURE: Final = Signature(
    "0" * 64,
    (
        TensorSpec("x", "float32", (None, 2)),
        TensorSpec("n", "int8", (None,)),
        TensorSpec("b", "bool", (None,)),
    ),
    (),
    is_batched=True,
)
_MODEL: Final = ModelManifest({"f": _SIGNATURE}, {"w": _LEAF}, ("cpu",))
_COUNT: Final = Variable("global_step", ((), np.dtype("int32"), None))
_USERS: Final = Variable(
    "users", ((2, 16), np.dtype("float32"), None), shard_devices=_PS, table=_TABLE
)
_LIVE: Final = LiveDescription(
    LiveOptions(),
    _COUNT,
    [_COUNT],
    {"users": LiveTable(_USERS, (4,))},
    (
        BatchPrograms(
            1,
            (LookedUp("users", "batch['u']", 2, 4, True, (16,), "float32"),),
            "0" * 64,
            "1" * 64,
        ),
    ),
)
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


def oip_json(data: bytes) -> None:
    """A request over REST; its first bytes say how much of it is JSON."""
    told, body = text_of(data[:4]).strip(), data[4:]
    asked, binary = oip_http.decoded(body, told or None)
    options = oip_http.object_in(asked, "parameters")
    asked_timeout(options.get("timeout"), None)
    oip_http.wanted_outputs(asked, options)
    _SIGNATURE.ordered(oip_http.inputs_of(asked, binary, _SIGNATURE))


def oip_message(data: bytes) -> None:
    request = inference_pb2.ModelInferRequest.FromString(data)
    asked_timeout(oip_grpc.parameters_of(request.parameters).get("timeout"), None)
    _SIGNATURE.ordered(oip_grpc.inputs_of(request, _SIGNATURE))


def model_manifest(data: bytes) -> None:
    """Its checksum is made right, as that of a checkpoint's."""
    with suppress(ValueError, RecursionError):
        body = json.loads(data)
        if isinstance(body, dict):
            body.pop("crc32", None)
            data = json.dumps({**body, "crc32": checksum(body)}).encode()
    artifact.read_manifest(written(data, artifact.FILE).parent)


def labels(data: bytes) -> None:
    read_labels(written(data, "labels.json").parent)


def model_options(data: bytes) -> None:
    read_options(written(data, "model.toml").parent)


def live_version(data: bytes) -> None:
    LiveDescription.from_bytes(data)


def tf_json(data: bytes) -> None:
    _SIGNATURE.ordered(tf_http.inputs_of(tf_http.decoded(data), _SIGNATURE))


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


def oip_request(*, raw: bool) -> bytes:
    """Two rows, of which there are bytes, or numbers."""
    request = inference_pb2.ModelInferRequest(model_name="m")
    request.parameters["timeout"].int64_param = 1000
    for spec, field, value in (
        (_SIGNATURE.inputs[0], "fp32_contents", np.ones((2, 2), np.float32)),
        (_SIGNATURE.inputs[1], "int_contents", np.ones(2, np.int8)),
        (_SIGNATURE.inputs[2], "bool_contents", np.ones(2, np.bool_)),
    ):
        one = request.inputs.add(
            name=spec.name, datatype=spec.datatype, shape=value.shape
        )
        if raw:
            request.raw_input_contents.append(value.tobytes())
        else:
            getattr(one.contents, field).extend(value.ravel().tolist())
    return request.SerializeToString()


_OIP_JSON: Final = (
    b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}, '
    b'{"name": "n", "datatype": "INT8", "shape": [1], "data": [3]}, '
    b'{"name": "b", "datatype": "BOOL", "shape": [1], "data": [true]}], '
    b'"parameters": {"timeout": 1000}, "outputs": [{"name": "y"}]}'
)
_OIP_BINARY: Final = _OIP_JSON.replace(
    b'"data": [1, 2]', b'"parameters": {"binary_data_size": 8}'
)
_TF_JSON: Final = b'{"instances": [{"x": [1, 2], "n": 3, "b": true}]}'
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
    "oip_json": (oip_json, b"    " + _OIP_JSON),
    "oip_binary": (oip_json, b"%-4d" % len(_OIP_BINARY) + _OIP_BINARY + bytes(8)),
    "oip_contents": (oip_message, oip_request(raw=False)),
    "oip_raw": (oip_message, oip_request(raw=True)),
    "tf_json": (tf_json, _TF_JSON),
    "model_manifest": (model_manifest, _MODEL.to_json().encode()),
    "labels": (labels, b'{"a": 1, "b": 2, "split": {"a": 5, "b": 95}, "mirror": "b"}'),
    "model_options": (model_options, b"[batching]\nbuckets = [1, 8]\nslots = 2\n"),
    "live_version": (live_version, _LIVE.to_bytes()),
}
"""Each decoder, and bytes to begin with."""
_LENGTHS: Final = [text.encode()[:4].ljust(4) + _OIP_JSON for text in LENGTHS]
_BODIES: Final = [b"    " + body for body in JSON.values()] + _LENGTHS
_MESSAGES: Final = list(messages(inference_pb2).values())
SEEDS: Final[Mapping[str, Sequence[bytes]]] = {
    "oip_json": _BODIES,
    "oip_binary": _BODIES,
    "oip_contents": _MESSAGES,
    "oip_raw": _MESSAGES,
    "tf_json": list(TENSORFLOW.values()),
    "labels": list(LABELS.values()),
    "model_manifest": [
        json.dumps(body).encode()
        for body in manifests(json.loads(_MODEL.to_json())).values()
    ],
}
"""Bad inputs that are known, to begin with as well."""


def main(name: str, seconds: str) -> None:
    """Looks for so long."""
    decode, first = DECODERS[name]

    def one(data: bytes) -> None:
        try:
            decode(data)
        except (JGError, DecodeError):  # the latter becomes JG-401 at one place
            return

    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate([first, *SEEDS.get(name, ())]):
            (Path(corpus) / f"{number}").write_bytes(data)
        options = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([sys.argv[0], corpus, "-max_len=4096", *options], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
