"""Requests that cannot be answered get one clear sentence, and the server goes on."""

import http.client
import json
import shutil
import socket
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

import jgraph as jg
from jgraph.cli import app
from jgraph.coordination.serving.versions import Listed
from jgraph.errors import (
    CertificateError,
    ConfigError,
    DeadlineError,
    InsecureError,
    ModelInputError,
    PortInUseError,
    TokenError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc import http_port
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.token import Token
from jgraph.serving import oip_http
from jgraph.serving._pb import inference_pb2 as pb
from jgraph.serving.model_options import ModelOptions
from tests.support.exported import half_plus_three
from tests.support.http_calls import call, connected, heard, infer

pytestmark = pytest.mark.bad_input_row(24)
INFER = "/v2/models/half_plus_three/infer"
GOOD = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}


def told(server: jg.ModelServer, **change: Any) -> tuple[int, str]:
    inputs = change.pop("inputs", [{**GOOD, **change}])
    status, answer, _ = call(server, "POST", INFER, {"inputs": inputs})
    return status, answer.get("error", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "y"}, "'y' is no input of the model"),
        ({"inputs": []}, "the input 'x' is missing"),
        ({"inputs": [GOOD, GOOD]}, "there twice"),
        ({"datatype": "FP64"}, "the model takes FP32"),
        ({"datatype": "BYTES", "data": ["a"]}, "the model takes FP32"),
        ({"shape": [1, 1]}, "has the shape [1,1]"),
        ({"shape": [-1]}, "has the shape [-1]"),
        ({"shape": [2**63]}, "has 1 values"),
        ({"shape": [1] * 65}, "list of sizes"),
        ({"shape": [10**9]}, "has 1 values"),
        ({"shape": ["1"]}, "list of sizes"),
        ({"data": ["1"]}, "no float32"),
        ({"data": [[1], [1, 2]]}, "no array"),
        ({"shape": [3], "data": [1, 2, True]}, "true or false among its numbers"),
        ({"shape": [3000], "data": [0] * 2999 + [False]}, "true or false among"),
        ({"data": [1e39]}, "does not hold"),
        ({"data": 1.0}, "list of values"),
        ({"data": None}, "list of values"),
        ({"parameters": {"binary_data_size": 4}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": -1}}, "binary_data_size"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared memory, and this"),
    ],
)
def test_an_input_that_is_not_the_models_is_named(
    change: dict[str, Any], says: str, server: jg.ModelServer
) -> None:
    status, error = told(server, **change)
    assert status == 400
    assert error.startswith("JG-603")
    assert says in error


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"{" * 100_000,
        b'{"inputs": [{"name": "x", "data": [NaN]}]}',
        b'{"a": 1, "a": 2}',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe",
        b" " * 3_000_000,
        b"[]",
        b"",
        b'{"inputs": 7}',
        b'{"id": 7, "inputs": []}',
        b'{"id": "\\ud800", "inputs": []}',
        b'{"inputs": [{"name": "\\udfff", "datatype": "FP32", "shape": [1]}]}',
        b'{"signature_name": "\\ud800", "instances": [1.0]}',
        json.dumps({"inputs": [{**GOOD, "data": [1e400]}]}).encode(),
        b'{"inputs": [{"name":"x","datatype":"FP32","shape":[1],"data":[1e400]}]}',
        b'{"parameters": [], "inputs": []}',
        b'{"parameters": {"timeout": "soon"}, "inputs": []}',
        b'{"parameters": {"timeout": 1%s}, "inputs": []}' % (b"0" * 400),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    body: bytes, server: jg.ModelServer
) -> None:
    status, answer, _ = call(server, "POST", INFER, body)
    assert (status, answer["code"]) == (400, "JG-603")
    status, answer, _ = call(server, "POST", "/v1/models/ctr:predict", body)
    assert (status, answer["code"]) == (400, "JG-603")


def test_a_timeout_is_not_negative_and_0_is_none(server: jg.ModelServer) -> None:
    asked = {"inputs": [GOOD], "parameters": {"timeout": -5}}
    status, answer, _ = call(server, "POST", INFER, asked)
    assert (status, answer["code"]) == (400, "JG-603")
    assert "'timeout' is a number of microseconds" in answer["error"]
    assert "it is -5" in answer["error"]
    asked["parameters"] = {"timeout": 0}
    assert call(server, "POST", INFER, asked)[0] == 200


def test_names_in_any_script_are_taken_and_told(tmp_path: Path) -> None:
    x = {"größe": np.zeros(2, np.float32)}
    jg.export(lambda x: {"合計": x["größe"] * 2}, x, tmp_path / "m")
    asked = {**GOOD, "name": "größe"}
    with jg.serve(tmp_path, grpc_port=None) as server:
        for text in (json.dumps, lambda one: json.dumps(one, ensure_ascii=False)):
            body = text({"id": "😀", "inputs": [asked]}).encode()
            status, answer, _ = call(server, "POST", "/v2/models/m/infer", body)
            assert (status, answer["id"]) == (200, "😀")
            assert answer["outputs"][0]["name"] == "合計"
        wrong = {"inputs": [{**asked, "name": "größer"}]}
        status, answer, _ = call(server, "POST", "/v2/models/m/infer", wrong)
        assert status == 400
        assert "did you mean 'größe'?" in answer["error"]


@pytest.mark.parametrize(
    "length", ["-1", "999999", "x", "1e2", "²", "9" * 400, "0" * 5000]
)
def test_a_header_length_that_is_no_length_is_refused(
    length: str, server: jg.ModelServer
) -> None:
    name = {"Inference-Header-Content-Length": length.encode("utf-8").decode("latin-1")}
    assert call(server, "POST", INFER, {"inputs": [GOOD]}, name)[0] == 400


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v2/models/nobody/infer", "this server has ctr, half_plus_three"),
        ("/v2/models/half_plus_three/versions/9/infer", "it has 1"),
        ("/v2/models/half_plus_three/labels/canary/infer", "it has stable"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(
    path: str, says: str, server: jg.ModelServer
) -> None:
    status, answer, _ = call(server, "POST", path, {"inputs": [GOOD]})
    assert (status, answer["code"]) == (404, "JG-601")
    assert says in answer["error"]
    with pytest.raises(jg.errors.ModelNotFoundError, match="serving_default"):
        server.predict("ctr", {}, signature="other")


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Host": "evil.example"}, 421, "JG-621"),
        ({"Content-Type": "text/plain"}, 415, "JG-621"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "JG-621"),
        ({"Content-Encoding": "gzip"}, 415, "JG-621"),
        ({"Authorization": "Bearer x"}, 401, "JG-114"),
        ({"Authorization": ""}, 401, "JG-114"),
    ],
)
def test_who_may_not_ask_is_told_so_before_the_body_is_read(
    headers: dict[str, str], status: int, code: str, server: jg.ModelServer
) -> None:
    told, answer, _ = call(server, "POST", INFER, {"inputs": [GOOD]}, headers)
    assert (told, answer["code"]) == (status, code)
    assert answer["error"].startswith(f"{code} ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v3", 404), ("GET", INFER, 405), ("DELETE", "/v2", 405)],
)
def test_a_path_or_method_that_is_not_taken_is_told_with_a_code(
    method: str, path: str, status: int, server: jg.ModelServer
) -> None:
    told, answer, headers = call(server, method, path)
    assert (told, answer["code"]) == (status, "JG-621")
    assert ("allow" in headers) is (status == 405)


@pytest.mark.parametrize("nbytes", [9, 100_000], ids=["small", "large"])
def test_a_body_that_does_not_come_in_time_is_told_with_a_code(
    nbytes: int, server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = (http_port, "HEAD_S") if nbytes < oip_http.LARGE else (oip_http, "BODY_S")
    monkeypatch.setattr(*limit, 0.05)
    with connected(server) as pipe:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {server.token.value}\r\n"
        head += f"Content-Length: {nbytes}\r\n"
        pipe.sendall(f"{head}\r\n[".encode())
        told = heard(pipe)
    assert told.startswith(b"HTTP/1.1 408 ")
    assert json.loads(told.partition(b"\r\n\r\n")[2])["code"] == "JG-621"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: -2\r\n\r\n{}",
        b"Content-Length: 2\n\n{}",
    ],
)
def test_a_request_of_two_lengths_is_refused_and_the_connection_ended(
    head: bytes, server: jg.ModelServer
) -> None:
    assert server.http_port is not None
    begin = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection(("127.0.0.1", server.http_port), 10) as pipe:
        pipe.sendall(begin + f"Authorization: Bearer {server.token.value}\r\n".encode())
        pipe.sendall(head)
        answer = b""
        while chunk := pipe.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 400")


def infer_request(**change: Any) -> pb.ModelInferRequest:
    one: Any = {"name": "x", "datatype": "FP32", "shape": [1], **change}
    request = pb.ModelInferRequest(model_name="half_plus_three", inputs=[one])
    request.raw_input_contents.append(np.float32(1).tobytes())
    return request


@pytest.mark.parametrize(
    ("change", "raw"),
    [
        ({"contents": pb.InferTensorContents(fp32_contents=[1.0])}, 1),
        ({}, 2),
        ({"shape": [2]}, 1),
        ({"shape": [2**62]}, 1),
        ({"datatype": "INT32"}, 1),
        ({"contents": pb.InferTensorContents(int_contents=[1])}, 0),
        ({"contents": pb.InferTensorContents(fp32_contents=[1.0, 2.0])}, 0),
    ],
)
def test_a_message_whose_parts_do_not_fit_is_an_invalid_argument(
    change: dict[str, Any], raw: int, server: jg.ModelServer
) -> None:
    request = infer_request(**change)
    del request.raw_input_contents[:]
    request.raw_input_contents.extend([np.float32(1).tobytes()] * raw)
    with pytest.raises(grpc.RpcError) as failed:
        infer(server, request)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (failed.value.details() or "").startswith("JG-603")


@pytest.mark.parametrize("parameter", ["shared_memory_region", "classification"])
def test_a_tensor_is_neither_read_nor_left_where_this_server_does_not_look(
    parameter: str, server: jg.ModelServer
) -> None:
    output = {"name": "y", "parameters": {parameter: "1"}}
    status, answer, _ = call(
        server, "POST", INFER, {"inputs": [GOOD], "outputs": [output]}
    )
    assert (status, answer["code"]) == (400, "JG-603")
    asked = infer_request()
    asked.outputs.add(name="y").parameters[parameter].string_param = "1"
    given = infer_request(shape=[0])
    del given.raw_input_contents[:]
    given.inputs[0].parameters[parameter].string_param = "1"
    for request in (asked, given):
        with pytest.raises(grpc.RpcError, match="and this server") as failed:
            infer(server, request)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_requests_without_rows_and_bad_ones_are_counted(server: jg.ModelServer) -> None:
    def counts() -> tuple[int, int]:
        told = call(server, "GET", "/v2/models/half_plus_three/stats")[1]
        found = told["model_stats"][0]["inference_stats"]
        return found["success"]["count"], found["fail"]["count"]

    answered, refused = counts()
    empty = {"inputs": [{**GOOD, "shape": [0], "data": []}]}
    assert call(server, "POST", INFER, empty)[0] == 200
    assert told(server, name="other")[0] == 400
    with pytest.raises(grpc.RpcError):
        infer(server, infer_request(name="other"))
    assert counts() == (answered + 1, refused + 2)


def test_contents_are_answered_as_contents(server: jg.ModelServer) -> None:
    request = infer_request(contents=pb.InferTensorContents(fp32_contents=[1.0]))
    del request.raw_input_contents[:]
    answer = infer(server, request)
    assert list(answer.outputs[0].contents.fp32_contents) == [3.5]


def test_a_deadline_of_nothing_is_told(server: jg.ModelServer) -> None:
    with pytest.raises(DeadlineError):
        server.predict("half_plus_three", [1.0], timeout_s=1e-9)
    body = {"inputs": [GOOD], "parameters": {"timeout": 1e-6}}
    status, answer, _ = call(server, "POST", INFER, body)
    assert (status, answer["code"]) == (504, "JG-133")


def test_more_rows_than_may_wait_are_too_many_for_one_request(tmp_path: Any) -> None:
    half_plus_three(tmp_path)
    options = "[batching]\nmax_rows = 2\nmax_queued_rows = 4\n"
    (tmp_path / "half_plus_three" / "model.toml").write_text(options)
    with jg.serve(tmp_path) as server:
        assert server.predict("half_plus_three", [1, 2])["y"].tolist() == [3.5, 4.0]
        with pytest.raises(jg.errors.MessageTooLargeError, match="5 rows, and 4"):
            server.predict("half_plus_three", [1] * 5)
        body = {"inputs": [{**GOOD, "shape": [5], "data": [1] * 5}]}
        status, answer, _ = call(server, "POST", INFER, body)
        assert (status, answer["code"]) == (413, "JG-402")


def test_control_needs_leave(models: Any) -> None:
    with jg.serve(models) as server:
        for what in ("load", "unload"):
            path = f"/v2/repository/models/mean/{what}"
            status, answer, _ = call(server, "POST", path)
            assert (status, answer["code"]) == (403, "JG-115")


def test_a_model_is_loaded_from_its_directory_and_not_from_a_request(
    server: jg.ModelServer,
) -> None:
    path = "/v2/repository/models/mean/load"
    for name in ("config", "file:1/model.onnx"):
        status, answer, _ = call(server, "POST", path, {"parameters": {name: "{}"}})
        assert (status, answer["code"]) == (400, "JG-603")
        assert "its model.toml" in answer["error"]
    assert call(server, "POST", path, {"parameters": {}})[0] == 200


def test_a_server_does_not_let_strangers_in_by_mistake(
    models: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InsecureError, match="--tls-cert"):
        jg.serve(models, bind="0.0.0.0")
    with pytest.raises(CertificateError, match="No such file"):
        jg.serve(models, grpc_port=None, tls=(tmp_path / "a.crt", tmp_path / "a.key"))
    token = Token.make(tmp_path / "token")
    monkeypatch.setenv("JGRAPH_TOKEN_FILE", str(token.path))
    with pytest.raises(ConfigError, match="token of a cluster"):
        jg.serve(models, token_file=token.path)
    with pytest.raises(ConfigError, match="holds no exported models"):
        jg.serve(tmp_path)


def test_a_token_file_leaves_the_token_of_a_cluster_alone(
    models: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("JGRAPH_HOME", str(home))
    monkeypatch.delenv("JGRAPH_TOKEN_FILE", raising=False)
    token = Token.make(tmp_path / "serve_token")
    with jg.serve(models, http_port=None, token_file=token.path):
        assert not home.exists()


def test_a_model_that_is_called_like_an_open_path_wants_the_token(
    tmp_path: Path,
) -> None:
    exported = half_plus_three(tmp_path, label="ready").path.parent
    exported.rename(tmp_path / "ready")
    nobody = {"Authorization": ""}
    with jg.serve(tmp_path, grpc_port=None) as server:
        for path in (
            *("/v2/models/ready", "/v2/models/ready/labels/ready"),
            *("/v1/models/ready", "/v2/health/../models/ready"),
        ):
            assert call(server, "GET", path, headers=nobody)[0] == 401, path
        for path in (
            *("/v2/health/live", "/v2/health/ready", "/v2/models/ready/ready"),
            "/v2/models/ready/versions/1/ready",
            "/v2/models/ready/labels/ready/ready",
        ):
            assert call(server, "GET", path, headers=nobody)[0] == 200, path


def test_the_token_of_a_cluster_is_refused_in_any_file(
    models: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    monkeypatch.delenv("JGRAPH_TOKEN_FILE", raising=False)
    token = Token.make(tmp_path / "token")
    shutil.copy(token.path, tmp_path / "serve_token")
    with pytest.raises(ConfigError, match="token of a cluster"):
        jg.serve(models, http_port=None)
    monkeypatch.setattr(Token, "make", None)  # as a home that is mounted read-only
    with pytest.raises(ConfigError, match="token of a cluster"):
        jg.serve(models, http_port=None, token_file=token.path)


@pytest.mark.parametrize(
    "text",
    [
        "[batching]\nmax_rows = 0",
        "[batching]\nbuckets = [4, 2]",
        "[batching]\nmax_rows = 8\nbuckets = [1, 4]",
        "[batching]\nslots = true",
        "[batching]\nmax_row = 8",
        "[batching]\ntimeout_ms = 0",
        "[batching]\ntimeout_ms = nan",
        "[batching]\nmax_delay_ms = inf",
        "[batching]\nbuckets = [1.5]",
        "[batching]\nbuckets = [1, [2]]",
        "[batching]\nmax_rows = 100000000000000000000",
        "[batching]\nslots = 100000000",
        "batching = 3",
        "[versions]\nnewest = -1",
        "[other]\na = 1",
        "max_rows",
    ],
)
def test_options_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises((ValueError, ConfigError)):
        ModelOptions.of(text)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"http_port": 65536}, ConfigError, "65536 is no port"),
        ({"grpc_port": -1}, ConfigError, "-1 is no port"),
        ({"http_port": "8000"}, ConfigError, "'8000' is no port"),
        ({"watch_s": "2"}, ConfigError, "watch_s='2' is how often"),
        ({"watch_s": float("nan")}, ConfigError, "watch_s=nan is how often"),
        ({"max_connections": 0}, ConfigError, "max_connections=0: give a number"),
        ({"max_message": -1}, ConfigError, "max_message=-1: give a number"),
        ({"token_file": "nowhere"}, TokenError, "jgraph token new nowhere"),
    ],
)
def test_options_of_a_server_that_mean_nothing_are_refused(
    options: Any, error: type[Exception], match: str, models: Path
) -> None:
    with pytest.raises(error, match=match):
        jg.serve(models, **options)


def test_a_server_that_nobody_could_ask_is_not_started(models: Path) -> None:
    ports = ["--http-port", "-1", "--grpc-port", "-1"]
    done = CliRunner().invoke(app, ["serve", str(models), *ports])
    assert "give --http-port or --grpc-port" in str(done.exception)


def test_a_server_whose_port_is_taken_says_no_more_than_that(
    server: jg.ModelServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        half_plus_three(tmp_path, label=f"v{number}")
    with pytest.raises(PortInUseError):
        jg.serve(tmp_path, http_port=server.http_port)
    assert "cannot be loaded" not in caplog.text


class Watched:
    """A model of which it is known what was asked."""

    name = "watched"
    newest = 1

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> Listed:
        self.looks += 1
        return Listed(())

    def load(self, version: int) -> Any:
        raise AssertionError("there is no version")

    def set_label(self, label: str, version: int | None) -> None:
        raise AssertionError("there is no version")


def test_a_server_whose_port_is_taken_has_not_begun_to_load_its_models(
    server: jg.ModelServer,
) -> None:
    model = Watched()
    with pytest.raises(PortInUseError):
        jg.ModelServer(None, models=[model], http_port=server.http_port)
    assert not model.looks


def test_one_bad_request_of_many_hurts_nobody(server: jg.ModelServer) -> None:
    wrong: list[object] = []

    def ask_many(bad: int) -> None:
        try:
            for number in range(30):
                x = np.array([number], np.float32)
                found = server.predict("half_plus_three", x)["y"].tolist()
                if found != [number / 2 + 3]:
                    wrong.append((number, found))
                if bad:
                    with pytest.raises(ModelInputError):
                        server.predict("half_plus_three", np.zeros((1, 1), np.float32))
        except Exception as error:  # noqa: BLE001  # is shown below
            wrong.append(error)

    threads = [threading.Thread(target=ask_many, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_key_of_another_certificate_is_told_as_such(
    models: Any, tmp_path: Any
) -> None:
    make_certificates(tmp_path, [TaskName(f"/job:serve/task:{n}") for n in (0, 1)])
    files = tmp_path / "serve-0.crt", tmp_path / "serve-1.key"
    with pytest.raises(CertificateError, match="are no certificate and its key"):
        jg.serve(models, http_port=None, tls=files)


def test_with_a_certificate_both_protocols_speak_tls_only(
    models: Any, tmp_path: Any
) -> None:
    make_certificates(tmp_path / "certs", [TaskName("/job:serve/task:0")])
    files = [tmp_path / "certs" / f"serve-0.{end}" for end in ("crt", "key")]
    authority = tmp_path / "certs" / "ca.crt"
    with jg.serve(models, tls=(files[0], files[1])) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=authority)
        context.check_hostname = False  # the certificate is of serve-0.jgraph
        ready = f"{server.url}/v2/health/ready"
        with urllib.request.urlopen(ready, timeout=20, context=context) as answer:
            assert json.load(answer) == {"ready": True}
        credentials = grpc.ssl_channel_credentials(authority.read_bytes())
        name = [("grpc.ssl_target_name_override", "serve-0.jgraph")]
        with grpc.secure_channel(server.grpc_target, credentials, name) as channel:
            method = channel.unary_unary(
                "/inference.GRPCInferenceService/ServerReady",
                request_serializer=pb.ServerReadyRequest.SerializeToString,
                response_deserializer=pb.ServerReadyResponse.FromString,
            )
            assert method(pb.ServerReadyRequest(), timeout=20).ready
        assert server.http_port is not None
        plain = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=20)
        plain.request("GET", "/v2/health/ready")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            plain.getresponse()
        plain.close()
