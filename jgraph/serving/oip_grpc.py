"""Open Inference Protocol over gRPC, with Triton's repository calls and stream."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar, final

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from jgraph import __version__
from jgraph.errors import ModelInputError
from jgraph.rpc.security.token import METADATA_KEY, Token
from jgraph.serving._pb import inference_pb2 as pb
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
from jgraph.serving.served_model import ServedVersion, model_row
from jgraph.serving.signature import Array, Signature, TensorSpec

SERVICE: Final = "inference.GRPCInferenceService"
MAX_STREAMED: Final = 256
"""Requests of one stream under way."""
MANY: Final = 4096
"""Numbers in typed contents that are read or written in one call; more are in a thread,
so many at a time: 4,096 take a millisecond."""
FORM_BYTES: Final = 64 << 10
"""Of a request whose form is remembered; to read a larger one is a small part of it."""
FORMS: Final = 64
"""Numbers of bytes of which forms are remembered."""
FORMS_OF_A_SIZE: Final = 4
FINAL: Final = pb.ModelInferResponse(
    parameters={"triton_final_response": pb.InferParameter(bool_param=True)}
).SerializeToString()
"""What Triton puts to the last response of each request of a stream."""
T = TypeVar("T")
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
_NARROW: Final = {"int_contents": np.int64, "uint_contents": np.int64}
"""Fields of inputs of fewer bits, which are compared with what was sent."""
_OUTPUTS: Final = pb.ModelInferResponse.OUTPUTS_FIELD_NUMBER
_CONTENTS_OF: Final = pb.ModelInferResponse.InferOutputTensor.CONTENTS_FIELD_NUMBER
_STREAMED: Final = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER


@final
class InferenceService:
    """The methods of the protocol.

    Args:
      models: what answers.
      token: what callers show.
      aside: where many numbers in typed contents are read and written; one thread.
      allow_control: whether they may load and unload models.
    """

    def __init__(
        self, models: Models, token: Token, *, aside: Executor, allow_control: bool
    ) -> None:
        self._models = models
        self._token = token
        self._aside = aside
        self._allow_control = allow_control
        self._forms = _Forms()

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Returns what a gRPC server takes."""
        unary: dict[str, tuple[Callable[..., Awaitable[Any]], Any]] = {
            "ServerLive": (self._live, pb.ServerLiveRequest),
            "ServerReady": (self._ready, pb.ServerReadyRequest),
            "ModelReady": (self._model_ready, pb.ModelReadyRequest),
            "ServerMetadata": (self._metadata, pb.ServerMetadataRequest),
            "ModelMetadata": (self._model_metadata, pb.ModelMetadataRequest),
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
                self._refusing(method, request, needs_token=name not in open_to_all),
                response_serializer=serialize,
            )
            for name, (method, request) in unary.items()
        }
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _refusing(
        self, method: Callable[..., Awaitable[Any]], kind: Any, *, needs_token: bool
    ) -> Callable[[bytes, Context], Awaitable[Any]]:
        """Returns a method that shows its token first, and whose errors have codes."""

        async def call(data: bytes, context: Context) -> Any:
            try:
                if needs_token:
                    self._check_token(context)
                return await method(_parsed(kind, data), context)
            except Exception as error:  # noqa: BLE001  # all have an answer
                refusal = Refusal(error)
            return await _refuse(context, refusal)

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

    async def _infer(self, data: bytes, context: Context) -> bytes:
        """Answers; what is done for each request is done here, without more calls."""
        try:
            self._check_token(context)
            models, form = self._models, self._forms.of(data)
            if form is None:
                request = _parsed(pb.ModelInferRequest, data)
                answer = await self._answered(request, context.time_remaining())
                self._forms.learn(data, request)
                return answer
            with models.model(form.model).routed(form.version) as version:
                reading = form.reading(version)
                left_s = context.time_remaining()
                asked = reading.asked(version, data, models.deadline(version, left_s))
                found = models.at_once(asked) or await models.answer(asked)
                return reading.response(found)
        except Exception as error:  # noqa: BLE001  # all have an answer
            refusal = Refusal(error)
        await _refuse(context, refusal)
        return b""

    async def _answered(
        self, request: pb.ModelInferRequest, left_s: float | None
    ) -> bytes:
        """Returns a response as it is sent."""
        models = self._models
        model = models.model(request.model_name)
        with model.routed(request.model_version, request.id) as version:
            options = parameters_of(request.parameters) if request.parameters else {}
            name = str(options.get("signature_name", ""))
            signature, count = signature_of(version, name), _typed_in(request)
            values = await self._where_due(count, inputs_of, request, signature)
            outputs = [one.name for one in request.outputs]
            timeout_s = asked_timeout(options.get("timeout"), left_s)
            asked = models.asked(version, name, values, outputs, timeout_s)
            answer = models.at_once(asked) or await models.answer(asked)
        is_typed = not request.raw_input_contents
        count = sum(value.size for _, value in answer.outputs) if is_typed else 0
        return await self._where_due(count, _response, request, answer)

    async def _where_due(self, count: int, function: Callable[..., T], *args: Any) -> T:
        """Returns what a function gives that reads or writes so many typed numbers.

        Each is an object of Python for a moment. While many are read, in a thread,
        small requests are answered; raw tensors are looked at, however large they are.
        """
        if count <= MANY:
            return function(*args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, function, *args)

    async def _stream(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Answers in the order that answers come; who asks tells them by ``id``.

        Each request has one response, which says that it is the last, as Triton's do
        of a model that is not decoupled: an empty one never follows, wished for or not.
        """
        try:
            self._check_token(context)
        except Exception as error:  # noqa: BLE001  # all have an answer
            refusal = Refusal(error)
            await context.abort(refusal.grpc_code, refusal.text)
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_STREAMED)

        async def answer(data: bytes) -> None:
            number = ""
            try:
                request = _parsed(pb.ModelInferRequest, data)
                number = request.id
                found = await self._answered(request, context.time_remaining())
                response = _within(_STREAMED, found + FINAL)
            except Exception as error:  # noqa: BLE001  # all have an answer
                refused = pb.ModelStreamInferResponse(error_message=Refusal(error).text)
                refused.infer_response.MergeFromString(FINAL)
                refused.infer_response.id = number
                response = refused.SerializeToString()
            answers.put_nowait(response)
            room.release()

        async def take() -> None:
            async with asyncio.TaskGroup() as group:
                async for data in requests:
                    await room.acquire()
                    group.create_task(answer(data))
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
        await self._control(request, "load")
        return pb.RepositoryModelLoadResponse()

    async def _unload(
        self, request: Any, _: Context
    ) -> pb.RepositoryModelUnloadResponse:
        await self._control(request, "unload")
        return pb.RepositoryModelUnloadResponse()

    async def _control(self, request: Any, what: str) -> None:
        allowed, name = self._allow_control, request.model_name
        await control(self._models, name, what, request.parameters, allowed=allowed)


async def _refuse(context: Context, refusal: Refusal) -> None:
    trailing: tuple[tuple[str, str], ...] = ()
    if refusal.retry_after_s is not None:
        trailing = (("retry-after", str(refusal.retry_after_s)),)
    await context.abort(refusal.grpc_code, refusal.text, trailing)


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ModelInputError(
            f"the {len(data):,} bytes are no {kind.DESCRIPTOR.name} of the Open "
            "Inference Protocol; send one"
        ) from error


@final
@dataclass(slots=True)
class _Reading:
    """How a version reads requests of a form, and what its responses have in common.

    Attributes:
      version: whose it is; it may go meanwhile.
      request: the first one of the form.
      inputs: of each input, in the order of the function: its name, where its bytes
        are, their dtype, and its shape.
      function: its name.
      outputs: positions of those that are wanted.
      rows: of the request.
      heads: what stands before the bytes of each output, once there was an answer.
    """

    version: "weakref.ref[ServedVersion]"
    request: pb.ModelInferRequest
    inputs: list[tuple[str, slice, np.dtype[Any], tuple[int, ...]]]
    function: str
    outputs: list[int]
    rows: int
    heads: list[bytes] = field(default_factory=list)

    def asked(self, version: ServedVersion, data: bytes, deadline: float) -> Asked:
        """Returns a request of the form, whose types were checked with the first."""
        values: dict[str, Array] = {}
        for name, place, dtype, shape in self.inputs:
            values[name] = np.frombuffer(data[place], dtype).reshape(shape)
        inputs, queue = list(values.values()), version.queues[self.function]
        rows, outputs = self.rows, self.outputs
        return Asked(version, "", values, outputs, queue, inputs, rows, deadline)

    def response(self, answer: Answer) -> bytes:
        """Returns a response as it is sent, as ``_response`` would."""
        if answer.facts:
            return _response(self.request, answer)
        if not self.heads:
            self.heads = _heads(self.request, answer)
        raw = [value.tobytes() for _, value in answer.outputs]
        if len(raw) == 1:
            return self.heads[0] + raw[0]
        parts = zip(self.heads, raw, strict=True)
        return b"".join([part for pair in parts for part in pair])


@final
@dataclass(slots=True)
class _Form:
    """Requests that are the same but for the bytes of their tensors.

    Attributes:
      request: the first one.
      model: what it asks.
      version: which version of it.
      fixed: its bytes before each tensor, from the end of the one before.
      places: where each tensor begins and ends.
      readings: of versions, by number.
    """

    request: pb.ModelInferRequest
    model: str
    version: str
    fixed: list[bytes]
    places: list[tuple[int, int]]
    readings: dict[int, _Reading] = field(default_factory=dict)

    def fits(self, data: bytes) -> bool:
        """Whether a request of as many bytes is of this form."""
        at = 0
        for fixed, (begin, end) in zip(self.fixed, self.places, strict=True):
            if not data.startswith(fixed, at, begin):
                return False
            at = end
        return True

    def reading(self, version: ServedVersion) -> _Reading:
        """Returns how a version reads such requests.

        Raises:
          ModelInputError: it takes none; says why.
        """
        found = self.readings.get(version.number)
        if found is None or found.version() is not version:
            if len(self.readings) >= FORMS:
                self.readings.clear()
            found = self.readings[version.number] = self._read(version)
        return found

    def _read(self, version: ServedVersion) -> _Reading:
        signature = signature_of(version, "")
        values = inputs_of(self.request, signature)
        inputs, rows = signature.ordered(values)
        names = list(values)
        return _Reading(
            weakref.ref(version),
            self.request,
            [
                (
                    spec.name,
                    slice(*self.places[names.index(spec.name)]),
                    spec.np_dtype,
                    one.shape,
                )
                for spec, one in zip(signature.inputs, inputs, strict=True)
            ],
            version.loaded.default,
            signature.chosen([one.name for one in self.request.outputs]),
            rows,
        )


@final
class _Forms:
    """Forms of requests that came, by their number of bytes.

    Most callers send the same again and again, with other numbers in it. Where these
    are is found out once, and the rest of such a request is compared, not read.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, list[_Form]] = {}
        self._once: dict[int, None] = {}
        """Numbers of bytes that came once, those of the last ``FORMS`` requests."""

    def of(self, data: bytes) -> _Form | None:
        """Returns the form of a request; None: it is none that is known."""
        for form in self._by_size.get(len(data), ()):
            if form.fits(data):
                return form
        return None

    def learn(self, data: bytes, request: pb.ModelInferRequest) -> None:
        """Remembers the form of a request that was answered, if it can come again.

        From the second one of a size: where each has another size, nothing is looked
        for in them, and no form that comes again makes room for them.

        Args:
          data: its bytes.
          request: what they say.
        """
        if len(data) > FORM_BYTES or request.id or request.parameters:
            return
        if not request.raw_input_contents or "BOOL" in {
            one.datatype for one in request.inputs
        }:
            return
        if self._is_first(len(data)):
            return
        if self.of(data) is not None:  # several came at once, before the first answer
            return
        if (form := _form(data, request)) is None:
            return
        alike = self._by_size.setdefault(len(data), [])
        alike.append(form)
        if len(alike) > FORMS_OF_A_SIZE:
            del alike[0]
        if len(self._by_size) > FORMS:
            del self._by_size[next(iter(self._by_size))]

    def _is_first(self, nbytes: int) -> bool:
        """Whether no request of that size came lately; notes that one did."""
        if nbytes in self._by_size:
            return False
        if nbytes in self._once:
            del self._once[nbytes]
            return False
        self._once[nbytes] = None
        if len(self._once) > FORMS:
            del self._once[next(iter(self._once))]
        return True


def _form(data: bytes, request: pb.ModelInferRequest) -> _Form | None:
    """Returns the form of a request; None: its bytes are in another order than ours."""
    bare = pb.ModelInferRequest()
    bare.CopyFrom(request)
    bare.ClearField("raw_input_contents")
    before, at = bare.SerializeToString(), 0
    fixed: list[bytes] = []
    places: list[tuple[int, int]] = []
    for raw in request.raw_input_contents:
        one = pb.ModelInferRequest(raw_input_contents=[raw]).SerializeToString()
        fixed.append(before + one[: len(one) - len(raw)])
        if not data.startswith(fixed[-1] + raw, at):
            return None
        begin = at + len(fixed[-1])
        at = begin + len(raw)
        places.append((begin, at))
        before = b""
    if at != len(data):
        return None
    return _Form(request, request.model_name, request.model_version, fixed, places)


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
    tensors: tuple[Any, ...] = (*request.inputs, *request.outputs)
    for tensor in tensors:
        if tensor.parameters:
            refuse_elsewhere(tensor.name, tensor.parameters)
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
    wide = _numbers(found, np.dtype(_NARROW.get(field, spec.np_dtype)))
    value = wide.astype(spec.np_dtype, copy=False)
    if spec.np_dtype.kind in "iu" and (value != wide).any():
        raise ModelInputError(f"input '{spec.name}' has values beyond {spec.dtype}")
    return value.reshape(one.shape)


def _numbers(contents: Any, dtype: np.dtype[Any]) -> Array:
    """Returns numbers of a message; between parts other threads have a turn."""
    numbers: Array = np.empty(len(contents), dtype)
    each = iter(contents)
    for first in range(0, len(numbers), MANY):
        part = numbers[first : first + MANY]
        part[:] = np.fromiter(islice(each, len(part)), dtype, len(part))
    return numbers


def _typed_in(request: pb.ModelInferRequest) -> int:
    """Returns how many numbers a request has in typed contents."""
    if request.raw_input_contents:
        return 0
    fields = ((one, _CONTENTS.get(one.datatype)) for one in request.inputs)
    return sum(len(getattr(one.contents, name)) for one, name in fields if name)


def _response(request: pb.ModelInferRequest, answer: Answer) -> bytes:
    """Returns a response as it is sent.

    What many responses have in common is serialized once: the bytes of messages one
    after the other are those of one message with the fields of both.
    """
    fields = [_CONTENTS.get(spec.datatype) for spec, _ in answer.outputs]
    if not request.raw_input_contents and None not in fields:  # never both
        return _with_contents(request, answer)
    head = _head_of(request, answer)
    raw = pb.ModelInferResponse(
        raw_output_contents=[value.tobytes() for _, value in answer.outputs]
    )
    if request.id or answer.facts:
        raw.MergeFrom(_named(request, answer))
    return head + raw.SerializeToString()


def _heads(request: pb.ModelInferRequest, answer: Answer) -> list[bytes]:
    """Returns what stands before the bytes of each output."""
    found, before = [], _head_of(request, answer)
    for _, value in answer.outputs:
        raw = value.tobytes()
        one = pb.ModelInferResponse(raw_output_contents=[raw]).SerializeToString()
        found.append(before + one[: len(one) - len(raw)])
        before = b""
    return found


def _head_of(request: pb.ModelInferRequest, answer: Answer) -> bytes:
    outputs = tuple((spec, value.shape) for spec, value in answer.outputs)
    return _head(request.model_name, answer.version, outputs)


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
    parts = [response.SerializeToString()]
    for spec, value in answer.outputs:
        tensor = pb.ModelInferResponse.InferOutputTensor(
            name=spec.name, datatype=spec.datatype, shape=value.shape
        )
        written = b"".join(_contents(spec, value.ravel()))
        tensor_bytes = tensor.SerializeToString()
        if written:
            tensor_bytes += _within(_CONTENTS_OF, written)
        parts.append(_within(_OUTPUTS, tensor_bytes))
    return b"".join(parts)


def _contents(spec: TensorSpec, flat: Array) -> Iterator[bytes]:
    """Yields contents in parts, between which other threads have a turn.

    The numbers of messages one after the other are those of one message.
    """
    field = _CONTENTS[spec.datatype]
    for first in range(0, len(flat), MANY):
        numbers = flat[first : first + MANY].tolist()
        yield pb.InferTensorContents(**{field: numbers}).SerializeToString()


def _within(field: int, message: bytes) -> bytes:
    """Returns the bytes of a message that has another one as a field."""
    size, length = len(message), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + message
