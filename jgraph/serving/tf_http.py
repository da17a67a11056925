"""TensorFlow Serving's REST calls: ``:predict`` and the status of a model."""

import functools
from typing import Any, Final, final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jgraph.coordination.serving import versions
from jgraph.errors import ModelInputError, ModelNotFoundError
from jgraph.rpc.json_pieces import written, written_in_pieces
from jgraph.serving.inference import Answer, put, signature_of
from jgraph.serving.oip_http import (
    KEY,
    LARGE,
    NUMBER,
    HttpDoor,
    numbers_of,
    parsed,
    refusing,
    said,
    version_of,
    while_there,
)
from jgraph.serving.signature import (
    DATATYPES,
    Array,
    Signature,
    array_of_numbers,
    listed,
)

_STATES: Final = {
    versions.FOUND: "START",
    versions.LOADING: "LOADING",
    versions.READY: "AVAILABLE",
    versions.DRAINING: "UNLOADING",
    versions.FAILED: "END",
    versions.GONE: "END",
}
_TYPES: Final = {
    **{name: f"DT_{name.upper()}" for name in DATATYPES},
    "float16": "DT_HALF",
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
}
_KEYS: Final = frozenset({"signature_name", "instances", "inputs"})


@final
class TensorFlowRoutes:
    """Routes under ``/v1``.

    Args:
      door: lets requests in.
    """

    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._models = door.models

    def routes(self) -> list[Route]:
        """Returns them."""
        routes = []
        for path in (
            "/v1/models/{model}",
            "/v1/models/{model}/versions/{version}",
            "/v1/models/{model}/labels/{label}",
        ):
            predict, status = refusing(self._predict), refusing(self._status)
            metadata, verb = refusing(self._metadata), refusing(self._no_verb)
            routes += [
                Route(f"{path}:predict", predict, methods=["POST"]),
                Route(f"{path}:{{verb}}", verb, methods=["GET", "POST"]),
                Route(f"{path}/metadata", metadata, methods=["GET"]),
                Route(path, status, methods=["GET"]),
            ]
        return routes

    async def _no_verb(self, request: Request) -> Response:
        verb = request.path_params["verb"]
        if verb == "predict":
            return said(405, "':predict' is asked by POST", {"Allow": "POST"})
        return said(404, f"there is no ':{verb:.40}' here; send tensors to ':predict'")

    async def _metadata(self, request: Request) -> Response:
        model = self._models.model(request.path_params["model"])
        with model.routed(version_of(request)) as version:
            signatures = {
                name: _described(function.signature)
                for name, function in version.loaded.functions.items()
            }
            number = str(version.number)
        spec = {"name": model.name, "signature_name": "", "version": number}
        described = {"signature_def": {"signature_def": signatures}}
        return JSONResponse({"model_spec": spec, "metadata": described})

    async def _status(self, request: Request) -> Response:
        model = self._models.model(request.path_params["model"])
        version = version_of(request)
        if version:
            with model.routed(version) as one:
                version = str(one.number)
        rows = [
            {
                "version": str(number),
                "state": _STATES[state],
                "status": {
                    "error_code": "UNKNOWN" if reason else "OK",
                    "error_message": reason,
                },
            }
            for number, state, reason in reversed(model.states)
            if version in ("", str(number))
        ]
        if not rows:
            raise ModelNotFoundError(f"{model.name} has no versions")
        return JSONResponse({"model_version_status": rows})

    async def _predict(self, request: Request) -> Response:
        door = self._door
        raw = await door.body(request)
        body = await door.where_due(len(raw), decoded, raw)
        model = self._models.model(request.path_params["model"])
        key = request.headers.get(KEY, "")
        with model.routed(version_of(request), key) as version:
            name = body.get("signature_name", "")
            signature = signature_of(version, name)
            values = await door.where_due(len(raw), inputs_of, body, signature)
            asked = self._models.asked(version, name, values)
            by_rows = "instances" in body
            if by_rows:
                check_rows(signature, len(body["instances"]))
            answer = self._models.at_once(asked)
            if answer is None:
                answer = await while_there(request, self._models.answer(asked))
        size = NUMBER * sum(value.size for _, value in answer.outputs)
        write = functools.partial(_content, answer, by_rows=by_rows)
        content = await door.where_due(size, write)
        return Response(content, media_type="application/json")


def decoded(body: bytes) -> dict[str, Any]:
    """Returns the JSON of a request.

    Raises:
      ModelInputError: it is no request.
    """
    asked = parsed(body, allows_nan=True)
    if unknown := asked.keys() - _KEYS:
        raise ModelInputError(
            f"'{min(unknown):.40}' is none of {', '.join(sorted(_KEYS))}"
        )
    if ("instances" in asked) == ("inputs" in asked):
        raise ModelInputError("send 'instances' or 'inputs', one of them")
    if not isinstance(asked.get("signature_name", ""), str):
        raise ModelInputError("'signature_name' is a string")
    return asked


def inputs_of(asked: dict[str, Any], signature: Signature) -> dict[str, Array]:
    """Returns the inputs of a request, which come by rows or by name.

    Raises:
      ModelInputError: they are not what the model takes.
    """
    if "instances" in asked:
        return _by_rows(asked, signature)
    return _by_name(asked, signature)


def _by_name(body: dict[str, Any], signature: Signature) -> dict[str, Array]:
    inputs = body["inputs"]
    if not isinstance(inputs, dict):
        inputs = {_only(signature): inputs}
    values: dict[str, Array] = {}
    for name, value in inputs.items():
        spec = signature.input(name)
        put(values, spec, array_of_numbers(spec, value))
    return values


def _by_rows(body: dict[str, Any], signature: Signature) -> dict[str, Array]:
    rows = body["instances"]
    if not isinstance(rows, list) or not rows:
        raise ModelInputError("'instances' is a list of one or more")
    if not isinstance(rows[0], dict):
        return _by_name({"inputs": {_only(signature): rows}}, signature)
    if not all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        raise ModelInputError("all of 'instances' have the same names")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return _by_name({"inputs": columns}, signature)


def check_rows(signature: Signature, rows: int) -> None:
    """Refuses to answer by rows what has none.

    Raises:
      ModelInputError: an output has not one for each instance.
    """
    for spec in signature.outputs:
        if not spec.shape or spec.shape[0] not in (None, rows):
            raise ModelInputError(
                f"the output '{spec}' has no row for each of the {rows} instances; "
                "send 'inputs' in place of 'instances'"
            )


def _only(signature: Signature) -> str:
    if len(signature.inputs) != 1:
        raise ModelInputError(
            f"the model has several inputs ({listed(signature.inputs)}); name them"
        )
    return signature.inputs[0].name


def _described(signature: Signature) -> dict[str, Any]:
    """Returns a signature as TensorFlow describes one, whose sizes are strings."""
    found: dict[str, Any] = {"method_name": "tensorflow/serving/predict"}
    for kind, specs in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        found[kind] = {
            spec.name: {
                "dtype": _TYPES[spec.dtype],
                "name": spec.name,
                "tensor_shape": {
                    "dim": [{"size": f"{n}", "name": ""} for n in spec.wire_shape],
                    "unknown_rank": False,
                },
            }
            for spec in specs
        }
    return found


def _content(answer: Answer, *, by_rows: bool) -> bytes:
    """Returns an answer as TensorFlow writes it: NaN and Infinity are words."""
    found = {spec.name: numbers_of(spec, value) for spec, value in answer.outputs}
    only = next(iter(found.values())) if len(found) == 1 else None
    body: dict[str, Any] = {}
    if by_rows:
        body["predictions"] = _rows(found) if only is None else only
    else:
        body["outputs"] = found if only is None else only
    nbytes = NUMBER * sum(value.size for value in found.values())
    return written(body) if nbytes <= LARGE else written_in_pieces(body)


def _rows(by_name: dict[str, Array]) -> list[Any]:
    columns = [value.tolist() for value in by_name.values()]
    return [dict(zip(by_name, row, strict=True)) for row in zip(*columns, strict=True)]
