"""Inference requests: routing, checks and answers, whatever protocol they came by."""

import asyncio
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from jgraph.clock import Clock
from jgraph.errors import (
    JGError,
    ModelInputError,
    ModelNotFoundError,
    ModelNotReadyError,
    NotAllowedError,
)
from jgraph.serving.answering import Answered, Fact
from jgraph.serving.function_queue import FunctionQueue
from jgraph.serving.served_model import Mirror, ServedModel, ServedVersion
from jgraph.serving.signature import Array, Signature, TensorSpec, short

PLATFORM: Final = "jax_stablehlo"
MOST_MIRRORED: Final = 64
"""Copies of requests that are under way at once, of all models."""
_LONGEST_S: Final = 86_400
_LOG = logging.getLogger("jgraph.serving")
EXTENSIONS: Final = ("binary_tensor_data", "model_repository", "statistics")


@final
@dataclass(slots=True)
class Answer:
    """What a request gets.

    Attributes:
      version: that answered.
      outputs: what the signature says of each output, and its value.
      facts: what is told beside them, as parameters.
    """

    version: int
    outputs: list[tuple[TensorSpec, Array]]
    facts: Mapping[str, Fact]


@final
@dataclass(slots=True)
class Asked:
    """A request that was checked.

    Attributes:
      version: answers it; it is held by ``ServedModel.routed``.
      signature: name of the function; the default one if empty.
      values: its inputs, by name.
      places: which outputs are wanted.
      queue: of the function.
      inputs: in its order.
      rows: how many.
      deadline: the answer is of use until then.
    """

    version: ServedVersion
    signature: str
    values: Mapping[str, Array]
    places: Sequence[int]
    queue: FunctionQueue
    inputs: list[Array]
    rows: int
    deadline: float


@final
@dataclass(slots=True)
class Models:
    """The models of a server, and whether it takes requests.

    Attributes:
      clock: for deadlines.
      by_name: the models.
      is_ending: no new request is taken.
      says_ready: False once the server was told to end.
      first: names of the models that the server started with.
    """

    clock: Clock
    by_name: dict[str, ServedModel] = field(default_factory=dict)
    is_ending: bool = False
    says_ready: bool = True
    first: frozenset[str] = frozenset()
    _mirroring: set["asyncio.Task[None]"] = field(default_factory=set)

    def model(self, name: str) -> ServedModel:
        """Returns a model.

        Raises:
          ModelNotFoundError: there is none of that name.
          ModelNotReadyError: the server is about to end.
        """
        if self.is_ending:
            raise ModelNotReadyError("this server is about to end; ask another one")
        found = self.by_name.get(name)
        if found is None:
            there = ", ".join(sorted(self.by_name)[:20]) or "none"
            raise ModelNotFoundError(
                f"there is no model '{name:.80}'; this server has {there}"
            )
        return found

    @property
    def is_ready(self) -> bool:
        """Whether a model answers, and all that a caller may count on do.

        These are the models of the start, and those that answered since. A model that
        came later and never answered takes no server from its callers, nor does one
        that was deleted, or that a caller unloaded.
        """
        models = self.by_name.values()
        missed = any(
            model.is_wanted and (model.has_answered or model.name in self.first)
            for model in models
            if not model.is_ready
        )
        return self.says_ready and not missed and any(m.is_ready for m in models)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a model, or a version of it, answers.

        Raises:
          ModelNotFoundError: there is none of that name.
        """
        model = self.model(name)
        try:
            with model.routed(version):
                return self.says_ready
        except ModelNotReadyError:
            return False

    def asked(
        self,
        version: ServedVersion,
        signature: str,
        values: Mapping[str, Array],
        outputs: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> Asked:
        """Returns a request that was checked, to be answered.

        Args:
          version: one that is held by ``ServedModel.routed``.
          signature: name of the function; the default one if empty.
          values: its inputs.
          outputs: which of its outputs; all if none.
          timeout_s: how long the answer is of use; as the model says if unset.

        Raises:
          ModelInputError: what is wrong with the request.
        """
        one = version.loaded.function(signature).signature
        inputs, rows = one.ordered(values)
        deadline = self.deadline(version, timeout_s)
        queue = version.queues[signature or version.loaded.default]
        return Asked(
            version,
            signature,
            values,
            one.chosen(outputs),
            queue,
            inputs,
            rows,
            deadline,
        )

    def deadline(self, version: ServedVersion, timeout_s: float | None) -> float:
        """Returns until when an answer is of use, by its caller or its model."""
        return self.clock.now() + min(timeout_s or version.timeout_s, _LONGEST_S)

    def at_once(self, asked: Asked) -> Answer | None:
        """Returns the answer to a request that need not wait; None to one that must.

        Raises:
          JGError: it cannot be answered.
        """
        found = asked.queue.at_once(asked.inputs, asked.rows, asked.deadline)
        return None if found is None else self._answer(asked, found)

    async def answer(self, asked: Asked) -> Answer:
        """Returns the answer to a request.

        Raises:
          JGError: it cannot be answered now.
        """
        queue = asked.queue
        found = await queue.answer(asked.inputs, asked.rows, asked.deadline)
        return self._answer(asked, found)

    def _answer(self, asked: Asked, answered: Answered) -> Answer:
        version = asked.version
        if version.mirror is not None:
            self._mirror(version, asked.signature, asked.values, answered.outputs)
        specs, values = asked.queue.outputs, answered.outputs
        outputs = [(specs[n], values[n]) for n in asked.places]
        return Answer(version.number, outputs, answered.facts)

    def _mirror(
        self,
        version: ServedVersion,
        signature: str,
        values: Mapping[str, Array],
        outputs: Sequence[Array],
    ) -> None:
        """Begins to ask a mirror the same, if there is one and it is not busy."""
        assert version.mirror is not None  # as the caller has seen
        with version.mirror() as mirror:
            if mirror is None or len(self._mirroring) >= MOST_MIRRORED:
                return
        asking = asyncio.get_running_loop().create_task(
            self._compare(version.mirror, version, signature, values, outputs)
        )
        self._mirroring.add(asking)
        asking.add_done_callback(self._mirroring.discard)

    async def _compare(
        self,
        held: Mirror,
        version: ServedVersion,
        signature: str,
        values: Mapping[str, Array],
        outputs: Sequence[Array],
    ) -> None:
        await asyncio.sleep(0)  # the answer goes out first
        with held() as mirror:
            if mirror is None:
                return
            outcome = "failed"
            try:
                function = mirror.loaded.function(signature)
                inputs, rows = function.signature.ordered(values)
                queue = mirror.queues[signature or mirror.loaded.default]
                deadline = self.clock.now() + mirror.timeout_s
                found = await queue.answer(inputs, rows, deadline)
                own = version.loaded.function(signature).signature
                same = own.are_close(outputs, function.signature, found.outputs)
                outcome = "same" if same else "different"
            except JGError as error:
                _LOG.debug("A mirrored request failed: %s", error)
            except Exception:  # noqa: BLE001  # a copy must not harm the original
                _LOG.exception("A mirrored request failed in an unexpected way.")
            counts = mirror.statistics.mirrored
            counts[outcome] = counts.get(outcome, 0) + 1

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """Returns what a model takes and gives, as the protocol has it.

        Raises:
          ModelNotFoundError, ModelNotReadyError: it cannot be told.
        """
        model = self.model(name)
        with model.routed(version) as routed:
            one = routed.loaded.function("").signature
            versions = [routed.number] if version else sorted(model.versions)
        return {
            "name": name,
            "versions": [str(number) for number in versions],
            "platform": PLATFORM,
            "inputs": [_described(spec) for spec in one.inputs],
            "outputs": [_described(spec) for spec in one.outputs],
        }

    def served(self, name: str, version: str) -> list[tuple[str, ServedVersion]]:
        """Returns versions that answer: those of a model, or of all if it is empty."""
        models = [self.model(name)] if name else list(self.by_name.values())
        found = []
        for model in models:
            if version:
                with model.routed(version) as one:
                    found.append((model.name, one))
            else:
                found += [(model.name, one) for one in model.versions.values()]
        return found


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape = spec.wire_shape
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}


def put(values: dict[str, Array], spec: TensorSpec, value: Array) -> None:
    """Adds an input to those of a request.

    Raises:
      ModelInputError: it is there already.
    """
    if spec.name in values:
        raise ModelInputError(f"the input '{spec.name}' is there twice")
    values[spec.name] = value


def refuse_elsewhere(name: object, parameters: Container[str]) -> None:
    """Refuses a tensor that is to be elsewhere, or something else, than in a message.

    Raises:
      ModelInputError: its parameters say so; ignored, they would make an answer wrong.
    """
    if "shared_memory_region" in parameters:
        raise ModelInputError(
            f"'{name!s:.80}' is to be in shared memory, and this server has none; send "
            "tensors in requests, and take them from answers"
        )
    if "classification" in parameters:
        raise ModelInputError(
            f"'{name!s:.80}' is asked for as classes, and this server gives tensors; "
            "leave 'classification' (class_count) away, and sort what comes"
        )


def from_raw(
    spec: TensorSpec, datatype: str, shape: Sequence[int], raw: bytes | memoryview
) -> Array:
    """Returns a value of which there are bytes; they are looked at, not copied.

    Raises:
      ModelInputError: they are not what the input takes.
    """
    spec.check(datatype, shape)
    if len(raw) != spec.nbytes_of(shape):
        raise ModelInputError(
            f"input '{spec.name}' has {len(raw)} bytes, and {datatype} of the shape "
            f"{short(shape)} has {spec.nbytes_of(shape)}",
            input=spec.name,
        )
    if spec.dtype == "bool":  # any byte but 0 is True, and NumPy would keep it
        bits: Array = np.frombuffer(raw, np.uint8) != 0
        return bits.reshape(shape)
    value: Array = np.frombuffer(raw, spec.np_dtype).reshape(shape)
    return value


def checked_size(spec: TensorSpec, shape: Sequence[int], count: int) -> None:
    """Refuses values that are not as many as their shape says.

    Raises:
      ModelInputError: they are not.
    """
    wanted = spec.nbytes_of(shape) // spec.np_dtype.itemsize
    if count != wanted:
        raise ModelInputError(
            f"input '{spec.name}' has {count} values, and the shape {short(shape)} has "
            f"{wanted}",
            input=spec.name,
        )


def signature_of(version: ServedVersion, name: str) -> Signature:
    """Returns a signature of a version; the default one if the name is empty."""
    return version.loaded.function(name).signature


async def control(
    models: Models, name: str, what: str, parameters: Iterable[str], *, allowed: bool
) -> None:
    """Loads or unloads a model, if callers may.

    Raises:
      NotAllowedError: they may not.
      ModelInputError: they bring what is to be loaded.
      ModelNotReadyError: it cannot be loaded.
    """
    if not allowed:
        raise NotAllowedError(
            f"this server lets nobody {what} models; start it with --allow-control"
        )
    model = models.model(name)
    brought = [one for one in parameters if one == "config" or one.startswith("file:")]
    if what == "load" and brought:
        raise ModelInputError(
            f"'{brought[0]:.80}' is not taken from callers; {name} is loaded as it is "
            "in its directory, with the options of its model.toml"
        )
    await (model.load() if what == "load" else model.unload())


def asked_timeout(timeout_us: object, left_s: float | None) -> float | None:
    """Returns how long an answer is of use: by its deadline, or Triton's parameter.

    Raises:
      ModelInputError: the parameter is no number of microseconds.
    """
    if timeout_us is None:
        return left_s
    if (
        isinstance(timeout_us, bool)
        or not isinstance(timeout_us, int | float)
        or not timeout_us >= 0  # NaN is not below it, and no number either
    ):
        raise ModelInputError(
            "the parameter 'timeout' is a number of microseconds, and 0 where the "
            f"request has none of its own; it is {timeout_us!s:.40}"
        )
    asked_s = min(timeout_us, _LONGEST_S * 1_000_000) / 1e6
    if not asked_s:
        return left_s
    return asked_s if left_s is None else min(left_s, asked_s)
