"""Open Inference Protocol over HTTP, with its binary extension; the app of a server."""

import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jgraph import __version__
from jgraph.errors import HttpRequestError, MessageTooLargeError, ModelInputError
from jgraph.rpc.http_port import DirectAnswer, DirectBody, PlainProtocol
from jgraph.rpc.json_pieces import PieceDecoder, written, written_in_pieces
from jgraph.rpc.security.token import METADATA_KEY, Token
from jgraph.serving.inference import (
    EXTENSIONS,
    Answer,
    Asked,
    Models,
    asked_timeout,
    checked_size,
    control,
    from_raw,
    put,
    refuse_elsewhere,
    signature_of,
)
from jgraph.serving.refusals import Refusal, check_token
from jgraph.serving.served_model import LABEL, ServedVersion, model_row
from jgraph.serving.signature import (
    MAX_RANK,
    Array,
    Signature,
    TensorSpec,
    array_of_numbers,
    is_finite,
)
from jgraph.serving.statistics import Metrics

LARGE: Final = 64 << 10
"""Bytes of JSON beyond which it is read and written in a thread, in pieces."""
NUMBER: Final = 16
"""Bytes of JSON that a number of an answer has, about."""
BODY_S: Final = 10.0
"""A body is here by then."""
HEADER_LENGTH: Final = "inference-header-content-length"
KEY: Final = "x-jgraph-key"
_OPEN: Final = re.compile(
    "/v2/(?:health/(?:live|ready)|models/[^/]+(?:/(?:versions|labels)/[^/]+)?/ready)"
)
"""Paths for balancers, which show no token; a model may be called ``ready`` too."""
_DIRECT: Final = re.compile(
    "/v2/models/([^/]+)(?:/versions/([^/]+)|/labels/([^/]+))?/infer"
)
"""Paths of inferences, as ``InferenceRoutes.routes`` has them."""
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_TYPES: Final = ("application/json", "application/octet-stream")
_FORM: Final = "application/x-www-form-urlencoded"
_WIDE: Final = {"float16": np.float32, "bfloat16": np.float32}
T = TypeVar("T")
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@final
class HttpDoor:
    """What lets requests in: the right host, the token, and a body that can be.

    Args:
      models: what answers.
      token: what callers show.
      allow_control: whether they may load and unload models.
      max_message: bytes of a body.
      is_loopback: only names of this machine are taken for it.
      aside: where large JSON is read and written; one thread, as two at once would
        only wait for each other.
    """

    def __init__(
        self,
        models: Models,
        token: Token,
        *,
        aside: Executor,
        allow_control: bool,
        max_message: int,
        is_loopback: bool,
    ) -> None:
        self.models = models
        self.allow_control = allow_control
        self._token = token
        self._aside = aside
        self._max_message = max_message
        self._is_loopback = is_loopback

    def guarding(self, app: ASGIApp) -> ASGIApp:
        """Returns the app behind this door: headers are checked first, then a body."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            try:
                # Not the path of request.url, into which old Starlettes put Host.
                headers = Request(scope).headers
                refused = self.refused(scope["method"], scope["path"], headers)
            except Exception as error:  # noqa: BLE001  # all have an answer
                refused = refusal(error)
            await (refused or app)(scope, receive, send)

        return guarded

    def refused(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> Response | None:
        """Returns why a request is not let in; None: it is.

        Raises:
          TokenError: it does not show the token.
        """
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._is_loopback and name not in _LOOPBACK:
            return said(421, f"'{host[:80]}' is no name of this machine")
        if not _OPEN.fullmatch(path):
            check_token(headers.get(METADATA_KEY, ""), self._token)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        allowed = (*_TYPES, "", *((_FORM,) if path.startswith("/v1/") else ()))
        if method == "POST" and kind not in allowed:
            return said(415, f"Content-Type is {kind[:80]}; send {_TYPES[0]}")
        if headers.get("content-encoding", "identity") != "identity":
            return said(415, "bodies are taken as they are, without Content-Encoding")
        return None

    async def body(self, request: Request) -> bytes:
        """Returns the body of a request.

        Raises:
          MessageTooLargeError: it is over the limit.
          HTTPException: it took too long.
        """
        chunks, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > self._max_message:
                        raise MessageTooLargeError(
                            f"a body has {self._max_message:,} bytes at most; send "
                            "fewer rows at a time"
                        )
        except TimeoutError:
            raise HTTPException(408, f"the body was not here in {BODY_S:g} s") from None
        return b"".join(chunks)

    async def where_due(self, nbytes: int, function: Callable[..., T], *args: Any) -> T:
        """Returns what a function gives that reads or writes JSON of such a size.

        Small JSON is read where it comes, for less than a thread costs. While a large
        one is, in a thread, small requests are answered.
        """
        if nbytes <= LARGE:
            return function(*args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, function, *args)


async def while_there(request: Request, answer: Awaitable[T]) -> T:
    """Returns an answer, which is given up when the caller hangs up.

    Raises:
      ClientDisconnect: it did.
    """
    waiting = asyncio.timeout(None)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        waiting.reschedule(0.0)

    try:
        async with waiting:
            watching = asyncio.create_task(watch())
            try:
                return await answer
            finally:
                watching.cancel()
    except TimeoutError:
        if not waiting.expired():
            raise
        raise ClientDisconnect from None


def refusing(handler: Handler) -> Handler:
    """Returns a handler whose errors are answers with codes."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except HTTPException as error:
            return said(error.status_code, error.detail)
        except ClientDisconnect:
            return said(400, "the caller went away")
        except Exception as error:  # noqa: BLE001  # all have an answer
            return refusal(error)

    return handle


def refusal(error: BaseException) -> Response:
    """Returns the answer for an error."""
    refused = Refusal(error)
    headers = {}
    if refused.retry_after_s is not None:
        headers["Retry-After"] = str(refused.retry_after_s)
    if refused.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"error": refused.text, "code": refused.error.code}
    return JSONResponse(body, refused.http_status, headers)


def said(status: int, what: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an answer that says what HTTP itself finds wrong."""
    error = HttpRequestError(what)
    return JSONResponse({"error": str(error), "code": error.code}, status, headers)


def _no_such_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is called for no other
    reasons = {404: "this server has no such path", 405: "the path takes other methods"}
    what = reasons.get(error.status_code, error.detail)
    return said(error.status_code, what, error.headers)


def parsed(body: bytes, *, allows_nan: bool) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
      ModelInputError: it is none, or a name is there twice.

    Example:
      >>> parsed(b'{"a": [1]}', allows_nan=False)
      {'a': [1]}
    """
    try:
        decoder: Any = _LOOSE if allows_nan else _STRICT
        if len(body) > LARGE:
            decoder = PieceDecoder(decoder)
        found = decoder.decode(body.decode())
        if b"\\u" in body:  # half of a character has a number, and no bytes
            for part in _AS_IT_IS.iterencode(found):
                part.encode()
    except (ValueError, RecursionError) as error:
        raise ModelInputError(f"the body is no JSON object: {error!s:.200}") from error
    if not isinstance(found, dict):
        raise ModelInputError(f"the body is no JSON object but a {_kind(found)}")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON; send it as binary data")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice in an object")
    return found


_AS_IT_IS: Final = json.JSONEncoder(ensure_ascii=False)
_LOOSE: Final = json.JSONDecoder(object_pairs_hook=_unique)
_STRICT: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def _kind(value: object) -> str:
    return {list: "list", str: "string", type(None): "null"}.get(type(value), "number")


def version_of(request: Request) -> str:
    """Returns the version that a path names."""
    if label := request.path_params.get("label"):
        return f"{LABEL}{label}"
    return str(request.path_params.get("version", ""))


@final
class InferenceRoutes:
    """Routes of the protocol.

    Args:
      door: lets requests in.
    """

    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._models = door.models

    def routes(self) -> list[Route]:
        """Returns them."""
        paths = (
            "/v2/models/{model}",
            "/v2/models/{model}/versions/{version}",
            "/v2/models/{model}/labels/{label}",
        )
        # They are tried in order, and these are asked for most.
        routes = [_route("POST", f"{path}/infer", self._infer) for path in paths]
        routes += [
            _route("GET", "/v2", self._server),
            _route("GET", "/v2/health/live", self._live),
            _route("GET", "/v2/health/ready", self._ready),
            _route("GET", "/v2/models/stats", self._stats),
            _route("POST", "/v2/repository/index", self._index),
            _route("POST", "/v2/repository/models/{model}/load", self._load),
            _route("POST", "/v2/repository/models/{model}/unload", self._unload),
        ]
        for path in paths:
            routes += [
                _route("GET", path, self._metadata),
                _route("GET", f"{path}/ready", self._model_ready),
                _route("GET", f"{path}/stats", self._stats),
            ]
        return routes

    async def _server(self, _: Request) -> Response:
        facts = {"name": "jgraph", "version": __version__, "extensions": EXTENSIONS}
        return JSONResponse(facts)

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        ready = self._models.is_ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metadata(self, request: Request) -> Response:
        name = request.path_params["model"]
        return JSONResponse(self._models.metadata(name, version_of(request)))

    async def _model_ready(self, request: Request) -> Response:
        name = request.path_params["model"]
        ready = self._models.is_model_ready(name, version_of(request))
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def _stats(self, request: Request) -> Response:
        name = request.path_params.get("model", "")
        rows = [
            {
                "name": model,
                "version": str(version.number),
                "last_inference": version.statistics.last_ms,
                "inference_count": version.statistics.rows,
                "execution_count": version.statistics.executions,
                "inference_stats": {
                    part: {"count": duration.count, "ns": duration.ns}
                    for part, duration in version.statistics.durations.items()
                },
            }
            for model, version in self._models.served(name, version_of(request))
        ]
        return JSONResponse({"model_stats": rows})

    async def _index(self, request: Request) -> Response:
        body = await self._door.body(request)
        asked = parsed(body, allows_nan=False) if body.strip() else {}
        rows = [row for one in self._models.by_name.values() for row in model_row(one)]
        if asked.get("ready") is True:
            rows = [row for row in rows if row["state"] == "READY"]
        return JSONResponse(rows)

    async def _load(self, request: Request) -> Response:
        return await self._control(request, "load")

    async def _unload(self, request: Request) -> Response:
        return await self._control(request, "unload")

    async def _control(self, request: Request, what: str) -> Response:
        name, allowed = request.path_params["model"], self._door.allow_control
        body = await self._door.body(request)
        asked = parsed(body, allows_nan=False) if body.strip() else {}
        parameters = object_in(asked, "parameters")
        await control(self._models, name, what, parameters, allowed=allowed)
        return JSONResponse({})

    async def _infer(self, request: Request) -> Response:
        name, door = request.path_params["model"], self._door
        body = await door.body(request)
        size = json_nbytes(request.headers, body)
        inference = await door.where_due(size, _Inference, body, request.headers)
        model = self._models.model(name)
        with model.routed(version_of(request), inference.key) as version:
            await door.where_due(size, inference.read, version)
            asked = inference.asked(self._models, version)
            answer = self._models.at_once(asked)
            if answer is None:
                answer = await while_there(request, self._models.answer(asked))
        size = inference.nbytes_of(answer)
        headers, content = await door.where_due(size, inference.content, name, answer)
        return Response(content, headers=headers)

    def direct(self, path: str, headers: Mapping[str, str]) -> DirectBody | None:
        """Returns what answers a POST whose body is here, if it need not wait.

        Whatever else comes takes the way of all requests, by ``routes``.
        """
        found = _DIRECT.fullmatch(path)
        if not found:
            return None
        try:
            refused = self._door.refused("POST", path, headers)
        except Exception as error:  # noqa: BLE001  # all have an answer
            refused = refusal(error)
        version = f"{LABEL}{found[3]}" if found[3] else found[2] or ""
        answer = None if refused is None else _direct(refused)
        return functools.partial(self._directly, found[1], version, headers, answer)

    def _directly(
        self,
        name: str,
        version_name: str,
        headers: Mapping[str, str],
        refused: DirectAnswer | None,
        body: bytes,
    ) -> DirectAnswer | None:
        model = self._models.by_name.get(name)
        if model is None or self._models.is_ending:
            return None
        if refused is not None or not model.is_quick:
            return refused
        try:
            inference = _Inference(body, headers)
            with model.routed(version_name, inference.key) as version:
                inference.read(version)
                asked = inference.asked(self._models, version)
                if inference.nbytes_of_rows(asked) > LARGE:
                    return None  # it is written aside
                answer = self._models.at_once(asked)
            if answer is not None:
                return 200, *inference.content(name, answer)
        except Exception as error:  # noqa: BLE001  # all have an answer
            return _direct(refusal(error))
        return None


def _direct(response: Response) -> DirectAnswer:
    return response.status_code, response.headers, bytes(response.body)


@final
class _Inference:
    """A request for an inference: its JSON, and the tensors after it.

    Args:
      body: of the request.
      headers: likewise.

    Raises:
      ModelInputError: it is none.
    """

    __slots__ = (
        "_binary",
        "_function",
        "_json",
        "_options",
        "_values",
        "_wanted",
        "key",
        "number",
    )

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self._json, self._binary = decoded(body, headers.get(HEADER_LENGTH))
        self._options = object_in(self._json, "parameters")
        self._function = str(self._options.get("signature_name", ""))
        self._values: dict[str, Array] = {}
        self._wanted: dict[str, bool] = {}
        self.number = self._json.get("id", "")
        if not isinstance(self.number, str):
            raise ModelInputError("'id' is a string")
        self.key = headers.get(KEY, self.number)

    def read(self, version: ServedVersion) -> None:
        """Makes its inputs arrays, as a version takes them.

        Raises:
          ModelInputError: they are not what it takes.
        """
        signature = signature_of(version, self._function)
        self._values = inputs_of(self._json, self._binary, signature)

    def asked(self, models: Models, version: ServedVersion) -> Asked:
        """Returns it for a version, checked, once its inputs are read.

        Raises:
          ModelInputError: it is not what the version takes.
        """
        self._wanted = wanted_outputs(self._json, self._options)
        timeout_s = asked_timeout(self._options.get("timeout"), None)
        return models.asked(
            version, self._function, self._values, self._wanted, timeout_s
        )

    def nbytes_of_rows(self, asked: Asked) -> int:
        """Returns how large the JSON of a response will be, about, by the signature."""
        are_binary = self._options.get("binary_data_output") is True
        specs = signature_of(asked.version, self._function).outputs
        numbers = 0
        for place in asked.places:
            if not self._wanted.get(specs[place].name, are_binary):
                numbers += specs[place].size_of(asked.rows)
        return NUMBER * numbers

    def nbytes_of(self, answer: Answer) -> int:
        """Returns how large the JSON of a response is, about."""
        are_binary = self._options.get("binary_data_output") is True
        return NUMBER * sum(
            value.size
            for spec, value in answer.outputs
            if not self._wanted.get(spec.name, are_binary)
        )

    def content(self, name: str, answer: Answer) -> tuple[dict[str, str], bytes]:
        """Returns the headers and the body of a response."""
        are_binary = self._options.get("binary_data_output") is True
        write = written if self.nbytes_of(answer) <= LARGE else written_in_pieces
        body, raw = _body(
            name, self.number, answer, self._wanted, are_binary=are_binary
        )
        head = write(body)
        if not raw:
            return {"content-type": _TYPES[0]}, head
        headers = {"content-type": _TYPES[1], HEADER_LENGTH: str(len(head))}
        return headers, b"".join([head, *raw])


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, refusing(handler), methods=[method])


def json_nbytes(headers: Mapping[str, str], body: bytes) -> int:
    """Returns how long the JSON of a body is, if it is as its headers say."""
    length = headers.get(HEADER_LENGTH, "")
    is_number = length.isascii() and length.isdigit() and len(length) < 20
    return min(int(length), len(body)) if is_number else len(body)


def decoded(body: bytes, json_nbytes: str | None) -> tuple[dict[str, Any], memoryview]:
    """Returns the JSON of a body, and the tensors after it.

    Args:
      body: of a request.
      json_nbytes: how long the JSON is, if there may be something after it.

    Raises:
      ModelInputError: it is none, or not so long.
    """
    length = len(body)
    if json_nbytes is not None:
        is_number = (
            json_nbytes.isascii() and json_nbytes.isdigit() and len(json_nbytes) < 20
        )
        if not is_number or int(json_nbytes) > length:
            raise ModelInputError(
                f"Inference-Header-Content-Length is '{json_nbytes:.40}', and the "
                f"body has {length} bytes"
            )
        length = int(json_nbytes)
    return parsed(body[:length], allows_nan=False), memoryview(body)[length:]


def object_in(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns an object of an object; an empty one if there is none.

    Raises:
      ModelInputError: it is something else.
    """
    value = message.get(name, {})
    if not isinstance(value, dict):
        raise ModelInputError(f"'{name}' is an object")
    return value


def _list(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = message.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ModelInputError(f"'{name}' is a list of objects")
    return value


def inputs_of(
    asked: dict[str, Any], binary: memoryview, signature: Signature
) -> dict[str, Array]:
    """Returns the inputs of a request, from its JSON and the tensors after it.

    Raises:
      ModelInputError: they are not what the model takes.
    """
    values: dict[str, Array] = {}
    for one in _list(asked, "inputs"):
        spec = signature.input(str(one.get("name")))
        shape = one.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_RANK
            or not all(type(size) is int for size in shape)
        ):
            raise ModelInputError(f"the shape of '{spec.name}' is a list of sizes")
        datatype = str(one.get("datatype"))
        parameters = object_in(one, "parameters")
        refuse_elsewhere(spec.name, parameters)
        size = parameters.get("binary_data_size")
        if size is None:
            value = _from_json(spec, datatype, shape, one.get("data"))
        else:
            if type(size) is not int or not 0 <= size <= len(binary):
                raise ModelInputError(
                    f"the binary_data_size of '{spec.name}' is {size!r:.40}, and the "
                    f"body has {len(binary)} bytes more; Inference-Header-Content-"
                    "Length says where they begin"
                )
            value = from_raw(spec, datatype, shape, binary[:size])
            binary = binary[size:]
        put(values, spec, value)
    if len(binary):
        raise ModelInputError(f"the body has {len(binary)} bytes that are no input's")
    return values


def _from_json(spec: TensorSpec, datatype: str, shape: list[int], data: Any) -> Array:
    spec.check(datatype, shape)
    if not isinstance(data, list):
        raise ModelInputError(f"the data of '{spec.name}' is a list of values")
    value = array_of_numbers(spec, data)
    if spec.is_float and not is_finite(value):
        raise ModelInputError(
            f"input '{spec.name}' has a value that is no number of JSON; send it as "
            "binary data"
        )
    checked_size(spec, shape, value.size)
    return value.reshape(shape)


def wanted_outputs(asked: dict[str, Any], options: dict[str, Any]) -> dict[str, bool]:
    """Returns the outputs that are asked for, and whether as binary data.

    Raises:
      ModelInputError: one is named twice.
    """
    default = options.get("binary_data_output") is True
    wanted: dict[str, bool] = {}
    for one in _list(asked, "outputs"):
        name = str(one.get("name"))
        if name in wanted:
            raise ModelInputError(f"the output '{name:.80}' is named twice")
        parameters = object_in(one, "parameters")
        refuse_elsewhere(name, parameters)
        wanted[name] = parameters.get("binary_data", default) is True
    return wanted


def numbers_of(spec: TensorSpec, value: Array) -> Array:
    """Returns a value whose numbers JSON has."""
    wide = _WIDE.get(spec.dtype)
    return value if wide is None else value.astype(wide)


def _body(
    name: str, number: str, answer: Answer, wanted: dict[str, bool], *, are_binary: bool
) -> tuple[dict[str, Any], list[bytes]]:
    """Returns what becomes the JSON of a response, and the tensors after it."""
    outputs: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for spec, value in answer.outputs:
        shape = list(value.shape)
        tensor: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype}
        tensor["shape"] = shape
        if wanted.get(spec.name, are_binary):
            raw.append(value.tobytes())
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            tensor["data"] = numbers_of(spec, value.ravel())
        outputs.append(tensor)
    body: dict[str, Any] = {"model_name": name, "model_version": str(answer.version)}
    if number:
        body["id"] = number
    if answer.facts:
        body["parameters"] = dict(answer.facts)
    body["outputs"] = outputs
    return body, raw


def protocol_of(routes: InferenceRoutes) -> type[asyncio.Protocol]:
    """Returns how connections are read: by httptools, or h11 where there is none."""
    try:
        from jgraph.rpc.http_direct import direct_protocol
    except ImportError:
        return PlainProtocol
    return direct_protocol(routes.direct)


def http_app(door: HttpDoor, own: InferenceRoutes, more: list[Route]) -> ASGIApp:
    """Returns the app of a server: this protocol's routes, others', and metrics."""
    models = door.models
    metrics = Metrics(
        lambda: (
            (name, version.number, version.queued_rows, version.statistics)
            for name, version in models.served("", "")
        )
    )

    async def scraped(_: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(metrics.text(), headers={"Content-Type": kind})

    routes = [
        *own.routes(),
        *more,
        _route("GET", "/metrics", scraped),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
    return door.guarding(app)
