"""Bad requests and files of the model server: of its tests, and seeds of its fuzzing.

What they decode to is no request for a model of ``x: float32[b,2]``, ``n: int8[b]`` and
``b: bool[b]``, whoever reads them.
"""

import json
from collections.abc import Mapping
from math import nan
from typing import Any, Final

X: Final[Mapping[str, Any]] = {
    "name": "x",
    "datatype": "FP32",
    "shape": [1, 2],
    "data": [1, 2],
}
N: Final[Mapping[str, Any]] = {
    "name": "n",
    "datatype": "INT8",
    "shape": [1],
    "data": [3],
}
B: Final[Mapping[str, Any]] = {
    "name": "b",
    "datatype": "BOOL",
    "shape": [1],
    "data": [True],
}
WIDE: Final = 1_000_000_000


def infer(*inputs: Mapping[str, Any], **more: Any) -> bytes:
    """A request of the Open Inference Protocol as JSON."""
    return json.dumps({"inputs": inputs, **more}).encode()


def binary(size: int) -> dict[str, Any]:
    """An input whose values are said to follow the JSON."""
    named = {name: X[name] for name in ("name", "datatype", "shape")}
    return {**named, "parameters": {"binary_data_size": size}}


JSON: Final[Mapping[str, bytes]] = {
    "a name twice": infer(X, X, N, B),
    "a name missing": infer(X, N),
    "a name unknown": infer({**X, "name": "usr"}, N, B),
    "an output unknown": infer(X, N, B, outputs=[{"name": "z"}] * 2),
    "float64 for float32": infer({**X, "datatype": "FP64"}, N, B),
    "int64 for int8": infer(X, {**N, "datatype": "INT64"}, B),
    "a type that is none": infer({**X, "datatype": "FP33"}, N, B),
    "more values than the shape says": infer({**X, "shape": [2, 2]}, N, B),
    "a negative size": infer({**X, "shape": [-1, 2]}, N, B),
    "a size of 2^63": infer({**X, "shape": [2**63, 2]}, N, B),
    "65 dimensions": infer({**X, "shape": [1] * 65}, N, B),
    "another rank": infer({**X, "shape": [2]}, N, B),
    "another last size": infer({**X, "shape": [2, 1]}, N, B),
    "rows that differ": infer(X, {**N, "shape": [2], "data": [3, 4]}, B),
    "10^9 rows in few bytes": infer({**X, "shape": [WIDE, 2]}, N, B),
    "rows that are no lists": infer({**X, "shape": "1,2"}, N, B),
    "strings for numbers": infer({**X, "data": ["1", "2"]}, N, B),
    "ragged lists": infer({**X, "data": [[1], [2, 3]]}, N, B),
    "values beyond the type": infer(X, {**N, "data": [300]}, B),
    "a float for an integer": infer(X, {**N, "data": [1.5]}, B),
    "a number for a truth": infer(X, N, {**B, "data": [1]}),
    "a truth among numbers": infer({**X, "data": [1, True]}, N, B),
    "a truth among rows": infer({**X, "data": [[1, True]]}, N, B),
    "a truth among integers": infer(
        {**X, "shape": [2, 2], "data": [1, 2, 3, 4]},
        {**N, "shape": [2], "data": [True, 3]},
        {**B, "shape": [2], "data": [True, False]},
    ),
    "NaN": infer({**X, "data": [float("nan"), 1]}, N, B),
    "1e400": infer(X, N, B).replace(b"[1, 2]}", b"[1e400, 2]}", 1),
    "a key twice": b'{"inputs": [], "inputs": []}',
    "a depth of 100,000": b"[" * 100_000,
    "an object of the depth 100,000": b'{"a":' * 100_000,
    "3 MB of spaces": b" " * 3_000_000,
    "a byte order mark": b"\xef\xbb\xbf" + infer(X, N, B),
    "no UTF-8": b'{"inputs": "\xff"}',
    "nothing": b"",
    "a list": b"[]",
    "an id that is no string": infer(X, N, B, id=7, inputs=7),
    "parameters that are no object": infer(X, N, B, parameters=[1]),
    "a time that is no number": infer(X, N, B, parameters={"timeout": "soon"}),
    "a time below none": infer(X, N, B, parameters={"timeout": -1}),
    "a time that is true": infer(X, N, B, parameters={"timeout": True}),
    "more bytes than there are": infer(binary(1 << 40), N, B),
    "fewer bytes than none": infer(binary(-1), N, B),
    "bytes that are not there": infer(binary(8), N, B),
}
"""Bodies of ``/v2/models/M/infer``, by what is wrong with them."""

LENGTHS: Final = ("-1", "9999", "x", "1e2", "²", "", "0x10", "9" * 400)
"""Values of ``Inference-Header-Content-Length`` that are none."""

_ROW: Final = {"x": [1, 2], "n": 3, "b": True}
TENSORFLOW: Final[Mapping[str, bytes]] = {
    "both keys": json.dumps({"instances": [_ROW], "inputs": _ROW}).encode(),
    "neither key": b"{}",
    "a key that is none": json.dumps({"instances": [_ROW], "x": 1}).encode(),
    "no rows": b'{"instances": []}',
    "rows of other names": json.dumps({"instances": [_ROW, {"x": [1, 2]}]}).encode(),
    "several inputs without names": b'{"instances": [[1, 2]]}',
    "base64 for a number": json.dumps(
        {"instances": [{**_ROW, "x": {"b64": "AA=="}}]}
    ).encode(),
    "a name that is no string": json.dumps(
        {"instances": [_ROW], "signature_name": 7}
    ).encode(),
    "a truth among numbers": json.dumps(
        {"instances": [{**_ROW, "x": [1, True]}]}
    ).encode(),
    "1e400": b'{"instances": [{"x": [1e400, 2], "n": 1e400, "b": true}]}',
    "a depth of 100,000": b'{"instances":' + b"[" * 100_000,
    "a list": b"[]",
}
"""Bodies of ``/v1/models/M:predict``."""

LABELS: Final[Mapping[str, bytes]] = {
    "no JSON": b"{stable: 1}",
    "a label that is a number": b'{"7": 1}',
    "a version that is no number": b'{"stable": "1"}',
    "a version of nothing": b'{"stable": 0}',
    "shares of 101": b'{"a": 1, "b": 2, "split": {"a": 51, "b": 50}}',
    "a share of no label": b'{"a": 1, "split": {"c": 100}}',
    "a negative share": b'{"a": 1, "b": 2, "split": {"a": -1, "b": 101}}',
    "a mirror of no label": b'{"a": 1, "mirror": "b"}',
    "a list": b"[1]",
    "a depth of 100,000": b"[" * 100_000,
}
"""Contents of ``labels.json``."""


def manifests(good: Mapping[str, Any]) -> dict[str, Any]:
    """Bodies of ``jgraph_model.json`` that are none, made of a good one."""
    array = next(iter(good["arrays"].values()))
    signature = next(iter(good["signatures"].values()))

    def renamed(name: str) -> dict[str, Any]:
        return {**good, "arrays": {name: array}}

    def changed(**more: Any) -> dict[str, Any]:
        return {**good, "arrays": {"w": {**array, **more}}}

    return {
        "another format": {**good, "format": 2},
        "another kind": {**good, "kind": "pickle"},
        "no signatures": {**good, "signatures": {}},
        "half a character": {**good, "signatures": {"\ud800": signature}},
        "a source that is none": {**good, "source": None},
        "a parent": renamed("../x"),
        "an absolute name": renamed("/etc/passwd"),
        "a negative size": changed(shape=[-1]),
        "a size of 2^63": changed(shape=[2**63]),
        "a type that is none": changed(dtype="object"),
        "no checksums": changed(crc32="x"),
        "arrays that are a list": {**good, "arrays": [array]},
    }


def messages(pb: Any) -> dict[str, bytes]:
    """Requests by gRPC, by what is wrong with them.

    Args:
      pb: the module of the messages.
    """
    values = {"x": bytes(8), "n": b"\3", "b": b"\1"}

    def message(raw: int = 3, timeout: Any = None, **change: Any) -> bytes:
        request = pb.ModelInferRequest(model_name="typed")
        if timeout is not None:
            request.parameters["timeout"].CopyFrom(timeout)
        for one in (X, N, B):
            named = {name: one[name] for name in ("name", "datatype", "shape")}
            request.inputs.add(**(named | (change if one is X else {})))
        request.raw_input_contents.extend([*values.values()][:raw])
        data: bytes = request.SerializeToString()
        return data

    floats = pb.InferTensorContents(fp32_contents=[1.0, 2.0])
    return {
        "raw bytes and contents": message(contents=floats),
        "fewer raw bytes than inputs": message(2),
        "neither raw bytes nor contents": message(0),
        "a name twice": message(name="n"),
        "a name unknown": message(name="usr"),
        "float64 for float32": message(datatype="FP64"),
        "a type that is none": message(datatype="BYTES"),
        "other bytes than the shape says": message(shape=[2, 2]),
        "a negative size": message(shape=[-1, 2]),
        "a size of 2^62": message(shape=[2**62, 2]),
        "10^9 rows in few bytes": message(shape=[WIDE, 2]),
        "a time below none": message(timeout=pb.InferParameter(int64_param=-1)),
        "a time that is no number": message(
            timeout=pb.InferParameter(double_param=nan)
        ),
        "65 dimensions": message(shape=[1] * 65),
        "another rank": message(shape=[2]),
    }
