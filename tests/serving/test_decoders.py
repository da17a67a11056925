"""Whatever JSON comes in place of a good request's, a decoder answers with JG-603."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.errors import ModelInputError
from jgraph.serving import oip_http, tf_http
from jgraph.serving.inference import asked_timeout
from jgraph.serving.signature import Signature, TensorSpec

pytestmark = pytest.mark.bad_input_row(24)
SIGNATURE = Signature(
    "0" * 64,
    (
        TensorSpec("x", "float32", (None, 2)),
        TensorSpec("n", "int64", (None,)),
        TensorSpec("h", "bfloat16", (None,)),
        TensorSpec("b", "bool", (None,)),
    ),
    (),
    is_batched=True,
)
INFER = {
    "id": "7",
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
        {"name": "n", "datatype": "INT64", "shape": [1], "data": [3]},
        {
            "name": "h",
            "datatype": "BF16",
            "shape": [1],
            "parameters": {"binary_data_size": 2},
        },
        {"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]},
    ],
    "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    "parameters": {"timeout": 1000, "binary_data_output": True},
}
ROW = {"x": [1, 2], "n": 3, "h": 0.5, "b": True}
BY_ROWS = {"signature_name": "f", "instances": [ROW, ROW]}
BY_NAME = {"inputs": {"x": [[1, 2]], "n": [3], "h": [0.5], "b": [True]}}
KEYS = st.sampled_from(["x", "n", "b", "name", "shape", "data", "inputs", "b64", ""])
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1e39, 1e308, -0.0, 0.5]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | KEYS | st.sampled_from(["FP32", "BF16"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)


def changed(draw: st.DrawFn, value: Any) -> Any:
    """A request of which one part is another, or is missing, or is there once more."""
    parts = value if isinstance(value, dict | list) else ()
    if not parts or draw(st.integers(0, 3)) == 0:
        return draw(VALUES)
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: changed(draw, value[key])}
    place = draw(st.integers(0, len(value) - 1))
    if draw(st.integers(0, 5)) == 0:
        return value * draw(st.integers(0, 2))
    return [*value[:place], changed(draw, value[place]), *value[place + 1 :]]


@st.composite
def requests(draw: st.DrawFn, good: Any) -> bytes:
    return json.dumps(changed(draw, good)).encode()


def infer(body: bytes) -> None:
    tail = struct.pack("<H", 0x3F80)
    asked, binary = oip_http.decoded(body + tail, str(len(body)))
    options = oip_http.object_in(asked, "parameters")
    asked_timeout(options.get("timeout"), None)
    oip_http.wanted_outputs(asked, options)
    SIGNATURE.ordered(oip_http.inputs_of(asked, binary, SIGNATURE))


def predict(body: bytes) -> None:
    SIGNATURE.ordered(tf_http.inputs_of(tf_http.decoded(body), SIGNATURE))


CASES = [(infer, INFER), (predict, BY_ROWS), (predict, BY_NAME)]


@pytest.mark.parametrize(("decode", "good"), CASES)
def test_the_request_that_is_changed_is_a_good_one(decode: Any, good: Any) -> None:
    decode(json.dumps(good).encode())


@pytest.mark.parametrize(("decode", "good"), CASES)
@given(data=st.data())
def test_a_changed_request_is_decoded_or_refused(
    decode: Any, good: Any, data: st.DataObject
) -> None:
    body, refused = data.draw(requests(good)), ""
    try:
        decode(body)
    except ModelInputError as error:
        refused = str(error)
    assert len(refused) < 1000  # what is wrong, not all that came
