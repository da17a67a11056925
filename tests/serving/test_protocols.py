"""Clients that nobody here wrote get their answers, and so do plain requests."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jgraph as jg
from tests.support.exported import ROOT
from tests.support.http_calls import call


@pytest.mark.slow
@pytest.mark.procs
def test_tritonclient_asks_by_all_four_of_its_clients(server: jg.ModelServer) -> None:
    python = ROOT / ".venv-peers-tritonclient" / "bin" / "python"
    if not python.exists():
        pytest.skip("tritonclient is not installed: make peers-tritonclient")
    judge = ROOT / "tests" / "support" / "triton_judge.py"
    done = subprocess.run(
        [python, judge, server.url, server.grpc_target, server.token.path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "as asked\n"


@pytest.mark.procs
@pytest.mark.parametrize("model", ["half_plus_three", "ctr"])
def test_the_line_that_a_server_shows_asks_it(
    model: str, server: jg.ModelServer
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(
        server.curl(model), shell=True, capture_output=True, timeout=30, check=True
    )
    answer = json.loads(done.stdout)
    assert answer["model_name"] == model
    wanted = 3.0 if model == "half_plus_three" else 0.0
    assert answer["outputs"][0]["data"] == [wanted]


def test_the_requests_of_tensorflow_servings_pages(server: jg.ModelServer) -> None:
    path = "/v1/models/half_plus_three"
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d sends
    body = b'{"instances": [1.0, 2.0, 5.0]}'
    assert call(server, "POST", f"{path}:predict", body, form)[1] == {
        "predictions": [3.5, 4.0, 5.5]
    }
    told = {"signature_name": "serving_default", "inputs": [1.0, 2.0, 5.0]}
    for where in ("", "/versions/1", "/labels/stable"):
        status, answer, _ = call(server, "POST", f"{path}{where}:predict", told)
        assert (status, answer) == (200, {"outputs": [3.5, 4.0, 5.5]})
    status, answer, _ = call(server, "GET", path)
    ok = {"error_code": "OK", "error_message": ""}
    row = {"version": "1", "state": "AVAILABLE", "status": ok}
    assert (status, answer) == (200, {"model_version_status": [row]})
    answer = call(server, "POST", f"{path}:predict", b'{"instances": [NaN]}')[1]
    assert np.isnan(answer["predictions"][0])
    answer = call(server, "GET", f"{path}/versions/1/metadata")[1]
    assert answer["model_spec"]["version"] == "1"
    signatures = answer["metadata"]["signature_def"]["signature_def"]
    x = signatures["serving_default"]["inputs"]["x"]
    assert x["dtype"] == "DT_FLOAT"
    assert x["tensor_shape"]["dim"] == [{"size": "-1", "name": ""}]
    for method, verb, code in (("POST", "classify", 404), ("GET", "predict", 405)):
        status, answer, _ = call(server, method, f"{path}:{verb}")
        assert (status, answer["code"]) == (code, "JG-621")
        assert ":predict'" in answer["error"]


def test_outputs_that_have_no_rows_are_not_asked_for_by_rows(tmp_path: Path) -> None:
    x = np.ones((2, 1), np.float32)
    of = lambda x: {"sum": x.sum(), "twice": x * 2}
    jg.export(of, x, tmp_path / "m", batch=None)
    with jg.serve(tmp_path, grpc_port=None) as server:
        path = "/v1/models/m:predict"
        answer = call(server, "POST", path, {"inputs": x.tolist()})[1]
        assert answer["outputs"]["sum"] == 2.0
        status, answer, _ = call(server, "POST", path, {"instances": x.tolist()})
    assert (status, answer["code"]) == (400, "JG-603")
    assert "'sum: float32[]' has no row for each of the 2" in answer["error"]


def test_rows_by_name_and_several_outputs(server: jg.ModelServer) -> None:
    rows = [{"user": 1, "dense": [0, 1, 2]}, {"user": 2, "dense": [1, 1, 1]}]
    answer = call(server, "POST", "/v1/models/ctr:predict", {"instances": rows})[1]
    assert answer["predictions"] == [
        {"score": 6.0, "twice": 2},
        {"score": 5.0, "twice": 4},
    ]
    columns = {"user": [1, 2], "dense": [[0, 1, 2], [1, 1, 1]]}
    answer = call(server, "POST", "/v1/models/ctr:predict", {"inputs": columns})[1]
    assert answer["outputs"]["score"] == [6.0, 5.0]


def test_what_a_server_and_a_model_say_of_themselves(server: jg.ModelServer) -> None:
    assert call(server, "GET", "/v2")[1]["name"] == "jgraph"
    told = call(server, "GET", "/v2/models/ctr")[1]
    assert [one["shape"] for one in told["inputs"]] == [[-1, 3], [-1]] or [
        one["shape"] for one in told["inputs"]
    ] == [[-1], [-1, 3]]
    assert call(server, "GET", "/v2/models/ctr/ready", headers={})[0] == 200
    assert call(server, "GET", "/v2/health/ready")[0] == 200
    status, text, _ = call(server, "GET", "/metrics")
    assert status == 200
    assert b'jgraph_serve_requests_total{model="half_plus_three",version="1"}' in text


def test_a_request_that_names_outputs_and_bytes_gets_those(
    server: jg.ModelServer,
) -> None:
    dense = np.array([[0, 1, 2]], np.float32).tobytes()
    head = {
        "inputs": [
            {"name": "user", "datatype": "INT32", "shape": [1], "data": [1]},
            {
                "name": "dense",
                "datatype": "FP32",
                "shape": [1, 3],
                "parameters": {"binary_data_size": len(dense)},
            },
        ],
        "outputs": [{"name": "score", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(text)),
        "Content-Type": "application/octet-stream",
    }
    status, body, told = call(
        server, "POST", "/v2/models/ctr/infer", text + dense, headers
    )
    assert status == 200, body
    length = int(told["inference-header-content-length"])
    (output,) = json.loads(body[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": 4}
    assert np.frombuffer(body[length:], np.float32).tolist() == [6.0]


def test_a_large_request_is_cut_and_none_is_padded_into_an_answer(
    server: jg.ModelServer,
) -> None:
    for rows in (0, 1, 3, 64, 65, 300):
        x = np.arange(rows, dtype=np.float32)
        found = server.predict("half_plus_three", x)["y"]
        np.testing.assert_array_equal(found, x / 2 + 3)


def test_rows_that_depend_on_each_other_are_never_computed_together(
    server: jg.ModelServer,
) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_allclose(server.predict("mean", x)["y"], x - x.mean(0))
