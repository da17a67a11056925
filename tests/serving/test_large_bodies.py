"""Large JSON is read and written aside, and meanwhile small requests are answered."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jgraph as jg
from jgraph.serving import oip_http, tf_http
from tests.support.held_call import HeldCall
from tests.support.http_calls import call

V2 = "/v2/models/half_plus_three/infer"
TF = "/v1/models/half_plus_three:predict"
ROWS = 1000
PAD = b" " * oip_http.LARGE


def body_of(path: str, values: Any) -> bytes:
    if path == TF:
        return json.dumps({"instances": values}).encode()
    x = {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values}
    return json.dumps({"inputs": [x]}).encode()


def found_in(answer: Any) -> Any:
    if "predictions" in answer:
        return answer["predictions"]
    return answer["outputs"][0]["data"]


@pytest.mark.parametrize("path", [V2, TF])
@pytest.mark.parametrize("what", ["decoded", "inputs_of", "written_in_pieces"])
def test_a_small_request_does_not_wait_for_a_large_one(
    path: str, what: str, server: jg.ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tf_http if path == TF else oip_http
    held = HeldCall(monkeypatch, module, what)
    monkeypatch.setattr(module, "NUMBER", 100)  # the answer is a large one too
    values = (np.arange(ROWS) / 7).tolist()
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(call, server, "POST", path, body_of(path, values) + PAD)
        with held:
            for other in (V2, TF):
                status, answer, _ = call(server, "POST", other, body_of(other, [1.0]))
                assert (status, found_in(answer)) == (200, [3.5])
        status, answer, _ = large.result()
    assert status == 200
    np.testing.assert_allclose(found_in(answer), np.arange(ROWS) / 14 + 3, 1e-6)


@pytest.mark.parametrize("path", [V2, TF])
@pytest.mark.parametrize("wrong", [["1"], [1e300], [None], [[1.0], 2.0], {}])
def test_a_large_body_that_is_wrong_is_refused_as_a_small_one(
    path: str, wrong: Any, server: jg.ModelServer
) -> None:
    body = body_of(path, wrong)
    few = call(server, "POST", path, body)[:2]
    many = call(server, "POST", path, body + PAD)[:2]
    assert many == few
    assert few[0] == 400
