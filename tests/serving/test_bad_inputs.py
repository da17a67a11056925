"""Each bad input that is known is refused in a sentence, and the server goes on."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import jgraph as jg
from jgraph.coordination.serving import joining
from jgraph.errors import ArtifactError, ConfigError, ModelInputError
from jgraph.runtime.files.manifest import checksum
from jgraph.serving import oip_http, tf_http
from jgraph.serving._pb import inference_pb2 as pb
from jgraph.serving.artifact import FILE, read_manifest
from jgraph.serving.inference import asked_timeout
from jgraph.serving.labels import read_labels
from jgraph.serving.signature import Signature, TensorSpec
from tests.support import bad_inputs
from tests.support.http_calls import call, infer

pytestmark = pytest.mark.bad_input_row(24)
SIGNATURE = Signature(
    "0" * 64,
    (
        TensorSpec("x", "float32", (None, 2)),
        TensorSpec("n", "int8", (None,)),
        TensorSpec("b", "bool", (None,)),
    ),
    (TensorSpec("y", "float32", (None,)),),
    is_batched=True,
)
LONGEST_S = 1.0
MESSAGES = bad_inputs.messages(pb)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jg.ModelServer]:
    models = tmp_path_factory.mktemp("models")
    example = {
        "x": np.zeros((1, 2), np.float32),
        "n": np.zeros(1, np.int8),
        "b": np.zeros(1, np.bool_),
    }
    fn: Any = lambda x: x["x"].sum(-1) + x["n"] * x["b"]
    jg.export(fn, example, models / "typed")
    with jg.serve(models, watch_s=3600) as server:
        yield server


def decode_json(body: bytes, length: str | None = None) -> None:
    asked, binary = oip_http.decoded(body, length)
    if not isinstance(asked.get("id", ""), str):
        raise ModelInputError("'id' is a string")
    options = oip_http.object_in(asked, "parameters")
    values = oip_http.inputs_of(asked, binary, SIGNATURE)
    SIGNATURE.chosen(oip_http.wanted_outputs(asked, options))
    asked_timeout(options.get("timeout"), None)
    SIGNATURE.ordered(values)


def test_the_requests_that_are_made_bad_are_good(server: jg.ModelServer) -> None:
    body = bad_inputs.infer(bad_inputs.X, bad_inputs.N, bad_inputs.B)
    decode_json(body)
    status, answer, _ = call(server, "POST", "/v2/models/typed/infer", body)
    assert (status, answer["outputs"][0]["data"]) == (200, [6.0])


@pytest.mark.parametrize("name", bad_inputs.JSON)
def test_a_bad_body_is_refused_in_a_moment(name: str) -> None:
    began = time.process_time()
    with pytest.raises(ModelInputError, match="JG-603"):
        decode_json(bad_inputs.JSON[name])
    assert time.process_time() - began < LONGEST_S


@pytest.mark.parametrize("quick_s", [0.0, 10.0], ids=["by a task", "directly"])
def test_bad_bodies_get_an_answer_each_and_harm_nobody(
    quick_s: float, server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "SHORT_S", quick_s)
    monkeypatch.setattr(joining, "WORTH_S", quick_s)
    path = "/v2/models/typed/infer"
    for name, body in bad_inputs.JSON.items():
        status, answer, _ = call(server, "POST", path, body)
        assert (name, status, answer["code"]) == (name, 400, "JG-603")
        assert len(answer["error"]) < 500
    good = bad_inputs.infer(bad_inputs.X, bad_inputs.N, bad_inputs.B)
    assert call(server, "POST", path, good)[0] == 200


@pytest.mark.parametrize("length", bad_inputs.LENGTHS)
def test_a_length_of_json_that_is_none_is_refused(length: str) -> None:
    good = bad_inputs.infer(bad_inputs.X, bad_inputs.N, bad_inputs.B)
    with pytest.raises(ModelInputError, match="Inference-Header-Content-Length"):
        decode_json(good, length)


@pytest.mark.parametrize("name", bad_inputs.TENSORFLOW)
def test_a_bad_body_of_tensorflows_calls_is_refused(
    name: str, server: jg.ModelServer
) -> None:
    body = bad_inputs.TENSORFLOW[name]
    with pytest.raises((ModelInputError, jg.errors.ModelNotFoundError)):
        SIGNATURE.ordered(tf_http.inputs_of(tf_http.decoded(body), SIGNATURE))
    status, answer, _ = call(server, "POST", "/v1/models/typed:predict", body)
    assert (status, answer["code"]) == (400, "JG-603")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_bad_message_is_an_invalid_argument(
    name: str, server: jg.ModelServer
) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        infer(server, pb.ModelInferRequest.FromString(MESSAGES[name]))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.value.details() or "").startswith("JG-603")


@pytest.mark.parametrize("name", bad_inputs.LABELS)
def test_bad_labels_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_bytes(bad_inputs.LABELS[name])
    with pytest.raises(ArtifactError, match=r"labels\.json"):
        read_labels(tmp_path)


def test_bad_manifests_are_refused_by_name(tmp_path: Path) -> None:
    x, w = np.zeros((1, 2), np.float32), np.zeros(2, np.float32)
    version = jg.export(lambda w, x: x @ w, x, tmp_path / "m", params=w).path
    file = version / FILE
    good = json.loads(file.read_text())
    del good["crc32"]
    for body in bad_inputs.manifests(good).values():
        file.write_text(json.dumps({**body, "crc32": checksum(body)}))
        with pytest.raises(ArtifactError, match=FILE):
            read_manifest(version)
    file.write_text(json.dumps({**good, "crc32": checksum(good)}))
    read_manifest(version)


@pytest.mark.parametrize("key", ["arrays", "signatures", "platforms"])
def test_a_manifest_without_a_key_says_so(key: str, tmp_path: Path) -> None:
    version = jg.export(lambda x: x + 1, np.zeros(2), tmp_path / "m").path
    body = json.loads((version / FILE).read_text())
    del body["crc32"], body[key]
    (version / FILE).write_text(json.dumps({**body, "crc32": checksum(body)}))
    with pytest.raises(ArtifactError, match=f"{FILE}: it has no '{key}'; export the"):
        read_manifest(version)


@pytest.mark.parametrize("tls", ["certs", ("server.crt",), ("server.crt", None)])
def test_certificates_that_are_no_two_files_are_told(tls: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls is .*; give .* tls=\('server\.crt', "):
        jg.serve(tmp_path, tls=tls)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("port", "write grpc_port=8001, http_port=8000"),
        ("host", "write bind="),
        ("http_prot", "write http_port=…"),
    ],
)
def test_an_argument_that_a_server_has_not_is_told_with_what_it_has(
    name: str, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"ModelServer has no argument '{name}'") as e:
        jg.serve(tmp_path, **{name: 8000})
    assert instead in e.value.message
