"""Open Inference Protocol over gRPC, with Triton's repository calls and stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias, final

import grpc
import numpy as np

from jgraph import __version__
from jgraph.errors import ModelInputError
from jgraph.rpc.security.token import METADATA_KEY, Token
from jgraph.serving._pb import inference_pb2 as pb
from jgraph.serving.inference import (
    EXTENSIONS,
    Answer,
    Models,
    asked_timeout,
    checked_size,
    control,
    from_raw,
    put,
    signature_of,
)
from jgraph.serving.refusals import Refusal, check_token
from jgraph.serving.served_model import model_row
from jgraph.serving.signature import Array, Signature, TensorSpec

SERVICE: Final = "inference.GRPCInferenceService"
MAX_STREAMED: Final = 256
"""Requests of one stream under way."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


@final
class InferenceService:
    """The methods of the protocol.

    Args:
      models: what answers.
      token: what callers show.
      allow_control: whether they may load and unload models.
    """

    def __init__(self, models: Models, token: Token, *, allow_control: bool) -> None:
        self._models = models
        self._token = token
        self._allow_control = allow_control

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Returns what a gRPC server takes."""
        unary: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = {
            "ServerLive": (self._live, pb.ServerLiveRequest),
            "ServerReady": (self._ready, pb.ServerReadyRequest),
            "ModelReady": (self._model_ready, pb.ModelReadyRequest),
            "ServerMetadata": (self._metadata, pb.ServerMetadataRequest),
            "ModelMetadata": (self._model_metadata, pb.ModelMetadataRequest),
            "ModelInfer": (self._infer, pb.ModelInferRequest),
            "ModelStatistics": (self._statistics, pb.ModelStatisticsRequest),
            "RepositoryIndex": (self._index, pb.RepositoryIndexRequest),
            "RepositoryModelLoad": (self._load, pb.RepositoryModelLoadRequest),
            "RepositoryModelUnload": (self._unload, pb.RepositoryModelUnloadRequest),
        }
        serialize = lambda message: (
            message if isinstance(message, bytes) else message.SerializeToString()
        )
        open_to_all = {"ServerLive", "ServerReady", "ModelReady"}
        methods: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._refusing(method, needs_token=name not in open_to_all),
                request_deserializer=request.FromString,
                response_serializer=serialize,
            )
            for name, (method, request) in unary.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.ModelInferRequest.FromString,
            response_serializer=serialize,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _refusing(
        self, method: Callable[..., Awaitable[Any]], *, needs_token: bool
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """Returns a method that shows its token first, and whose errors have codes."""

        async def call(request: Any, context: Context) -> Any:
            try:
                if needs_token:
                    self._check_token(context)
                return await method(request, context)
            except Exception as error:  # noqa: BLE001  # all have an answer
                refusal = Refusal(error)
            trailing: tuple[tuple[str, str], ...] = ()
            if refusal.retry_after_s is not None:
                trailing = (("retry-after", str(refusal.retry_after_s)),)
            return await context.abort(refusal.grpc_code, refusal.text, trailing)

        return call

    def _check_token(self, context: Context) -> None:
        header = ""
        for key, value in context.invocation_metadata() or ():
            if key == METADATA_KEY:
                header = str(value)
        check_token(header, self._token)

    async def _live(self, _: Any, __: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, _: Any, __: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._models.is_ready)

    async def _model_ready(self, request: Any, _: Context) -> pb.ModelReadyResponse:
        ready = self._models.is_model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def _metadata(self, _: Any, __: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name="jgraph", version=__version__, extensions=EXTENSIONS
        )

    async def _model_metadata(
        self, request: Any, _: Context
    ) -> pb.ModelMetadataResponse:
        found = self._models.metadata(request.name, request.version)
        return pb.ModelMetadataResponse(**found)

    async def _infer(self, request: pb.ModelInferRequest, context: Context) -> bytes:
        return await self._answered(request, context.time_remaining())

    async def _answered(
        self, request: pb.ModelInferRequest, left_s: float | None
    ) -> bytes:
        """Returns a response as it is sent."""
        models = self._models
        model = models.model(request.model_name)
        with model.routed(request.model_version, request.id) as version:
            options = parameters_of(request.parameters) if request.parameters else {}
            name = str(options.get("signature_name", ""))
            values = inputs_of(request, signature_of(version, name))
            outputs = [one.name for one in request.outputs]
            timeout_s = asked_timeout(options.get("timeout"), left_s)
            asked = models.asked(version, name, values, outputs, timeout_s)
            answer = models.at_once(asked) or await models.answer(asked)
        return _response(request, answer)

    async def _stream(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answers in the order that answers come; who asks tells them by ``id``."""
        try:
            self._check_token(context)
        except Exception as error:  # noqa: BLE001  # all have an answer
            refusal = Refusal(error)
            await context.abort(refusal.grpc_code, refusal.text)
        answers: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_STREAMED)

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                found = await self._answered(request, context.time_remaining())
                response = pb.ModelStreamInferResponse()
                response.infer_response.MergeFromString(found)
            except Exception as error:  # noqa: BLE001  # all have an answer
                response = pb.ModelStreamInferResponse(
                    error_message=Refusal(error).text
                )
                response.infer_response.id = request.id
            answers.put_nowait(response)
            room.release()

        async def take() -> None:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await room.acquire()
                    group.create_task(answer(request))
            answers.put_nowait(None)

        taking = asyncio.create_task(take())
        try:
            while (response := await answers.get()) is not None:
                yield response
        finally:
            taking.cancel()

    async def _statistics(self, request: Any, _: Context) -> pb.ModelStatisticsResponse:
        found = pb.ModelStatisticsResponse()
        for name, version in self._models.served(request.name, request.version):
            one = version.statistics
            durations = {
                part: pb.StatisticDuration(count=duration.count, ns=duration.ns)
                for part, duration in one.durations.items()
            }
            found.model_stats.add(
                name=name,
                version=str(version.number),
                last_inference=one.last_ms,
                inference_count=one.rows,
                execution_count=one.executions,
                inference_stats=pb.InferStatistics(**durations),
            )
        return found

    async def _index(self, request: Any, _: Context) -> pb.RepositoryIndexResponse:
        rows = [row for one in self._models.by_name.values() for row in model_row(one)]
        if request.ready:
            rows = [row for row in rows if row["state"] == "READY"]
        return pb.RepositoryIndexResponse(
            models=[pb.RepositoryIndexResponse.ModelIndex(**row) for row in rows]
        )

    async def _load(self, request: Any, _: Context) -> pb.RepositoryModelLoadResponse:
        await control(self._models, request.model_name, "load", self._allow_control)
        return pb.RepositoryModelLoadResponse()

    async def _unload(
        self, request: Any, _: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await control(self._models, request.model_name, "unload", self._allow_control)
        return pb.RepositoryModelUnloadResponse()


def parameters_of(values: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Returns the parameters that have a value."""
    return {
        name: getattr(one, kind)
        for name, one in values.items()
        if (kind := one.WhichOneof("parameter_choice")) is not None
    }


def inputs_of(request: pb.ModelInferRequest, signature: Signature) -> dict[str, Array]:
    """Returns the inputs of a request.

    Raises:
      ModelInputError: they are not what the model takes.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise ModelInputError(
            f"the request has {len(request.inputs)} inputs and {len(raw)} "
            "raw_input_contents; send one of each for every input"
        )
    values: dict[str, Array] = {}
    for place, one in enumerate(request.inputs):
        spec = signature.input(one.name)
        if not raw:
            value = _from_contents(spec, one)
        elif one.HasField("contents"):
            raise ModelInputError(
                f"input '{one.name}' has contents, and the request has "
                "raw_input_contents; send one of them"
            )
        else:
            value = from_raw(spec, one.datatype, tuple(one.shape), raw[place])
        put(values, spec, value)
    return values


def _from_contents(spec: TensorSpec, one: Any) -> Array:
    spec.check(one.datatype, one.shape)
    field = _CONTENTS.get(spec.datatype)
    if field is None:
        raise ModelInputError(
            f"input '{spec.name}' is {spec.datatype}, which has no place in contents; "
            "send raw_input_contents"
        )
    found = getattr(one.contents, field)
    checked_size(spec, one.shape, len(found))
    wide = np.array(found, np.int64 if field == "int_contents" else None)
    value = wide.astype(spec.np_dtype)
    if spec.np_dtype.kind in "iu" and (value != wide).any():
        raise ModelInputError(f"input '{spec.name}' has values beyond {spec.dtype}")
    return value.reshape(one.shape)


def _response(request: pb.ModelInferRequest, answer: Answer) -> bytes:
    """Returns a response as it is sent.

    What many responses have in common is serialized once: the bytes of messages one
    after the other are those of one message with the fields of both.
    """
    fields = [_CONTENTS.get(spec.datatype) for spec, _ in answer.outputs]
    if not request.raw_input_contents and None not in fields:  # never both
        return _with_contents(request, answer)
    outputs = tuple((spec, value.shape) for spec, value in answer.outputs)
    head = _head(request.model_name, answer.version, outputs)
    raw = pb.ModelInferResponse(
        raw_output_contents=[value.tobytes() for _, value in answer.outputs]
    )
    if request.id or answer.facts:
        raw.MergeFrom(_named(request, answer))
    return head + raw.SerializeToString()


@lru_cache(256)
def _head(
    model: str,
    version: int,
    outputs: tuple[tuple[TensorSpec, tuple[int, ...]], ...],
) -> bytes:
    """Returns what says which model answers, and with outputs of which shapes."""
    response = pb.ModelInferResponse(model_name=model, model_version=str(version))
    for spec, shape in outputs:
        response.outputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
    return response.SerializeToString()


def _named(request: pb.ModelInferRequest, answer: Answer) -> pb.ModelInferResponse:
    """Returns the parts of a response that are those of one request."""
    response = pb.ModelInferResponse(id=request.id)
    for name, fact in answer.facts.items():
        kind = "string_param" if isinstance(fact, str) else "int64_param"
        setattr(response.parameters[name], kind, fact)
    return response


def _with_contents(request: pb.ModelInferRequest, answer: Answer) -> bytes:
    response = _named(request, answer)
    response.model_name, response.model_version = (
        request.model_name,
        str(answer.version),
    )
    for spec, value in answer.outputs:
        out = response.outputs.add(
            name=spec.name, datatype=spec.datatype, shape=value.shape
        )
        field = _CONTENTS[spec.datatype]
        getattr(out.contents, field).extend(value.ravel().tolist())
    return response.SerializeToString()
