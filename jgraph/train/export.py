"""Export of trained models: versions that servers answer with, without user code."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import (
    Any,
    Final,
    Literal,
    Protocol,
    TypeAlias,
    final,
    overload,
    runtime_checkable,
)

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta, unfreeze

from jgraph import _compat
from jgraph.client.session import Session
from jgraph.cluster.wait_message import show_wait
from jgraph.counts import is_share
from jgraph.errors import (
    ArtifactError,
    CallbackError,
    JGError,
    NotExportableError,
)
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.tracing.concrete import as_graph_error, users_line
from jgraph.plan.program.program import SegmentCode
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.serving.artifact import (
    ModelManifest,
    digest_of,
    model_directory,
    write_version,
)
from jgraph.serving.exported_model import ExportedModel, LoadedFunction
from jgraph.serving.labels import check_label, set_label
from jgraph.serving.saved_model.convert import write_saved_model
from jgraph.serving.signature import (
    DEFAULT,
    Array,
    Signature,
    TensorSpec,
)
from jgraph.train.export_live import export_live
from jgraph.train.export_program import export_program, refuse_for_tasks
from jgraph.train.hash_tables.hash_table import linen_tables, nnx_tables
from jgraph.train.live.live_model import LiveSource
from jgraph.train.model.losses import positional
from jgraph.train.model.served import (
    Example,
    as_array,
    called,
    check_no_tables,
    names_after_first,
    output_spec,
    outputs_of,
    rows_independent,
)
from jgraph.train.model.trees import Tree, named_state, path_of, string_keys
from jgraph.train.run.run import Predictor

_PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")
"""What JAX exports for, on whatever machine."""
Call: TypeAlias = Callable[[Tree, Any, Callable[..., Any] | None], Any]


@runtime_checkable
class Trained(Protocol):
    """What has a trained model: a Trainer, a Run."""

    def predictor(self) -> Predictor:
        """Returns the model as a function."""

    def live_source(self) -> LiveSource:
        """Returns the model as it is trained."""


@overload
def export(
    model: Any,
    example: Any,
    path: str | Path,
    *,
    fn: Callable[..., Any] | None = ...,
    params: Any = ...,
    version: int | None = ...,
    signatures: Mapping[str, Callable[..., Any]] | None = ...,
    batch: str | None = ...,
    platforms: Sequence[str] | None = ...,
    label: str | None = ...,
    rtol: float = ...,
    format: Literal["jgraph"] = ...,
    session: Session | None = ...,
    rows: Literal["copy", "ps"] = ...,
) -> ExportedModel: ...
@overload
def export(
    model: Any,
    example: Any,
    path: str | Path,
    *,
    fn: Callable[..., Any] | None = ...,
    params: Any = ...,
    version: int | None = ...,
    signatures: Mapping[str, Callable[..., Any]] | None = ...,
    batch: str | None = ...,
    platforms: Sequence[str] | None = ...,
    rtol: float = ...,
    format: Literal["saved_model"],
    tensorflow: str | Path | None = ...,
) -> Path: ...
@short_traceback
def export(
    model: Any,
    example: Any,
    path: str | Path,
    *,
    fn: Callable[..., Any] | None = None,
    params: Any = None,
    version: int | None = None,
    signatures: Mapping[str, Callable[..., Any]] | None = None,
    batch: str | None = "b",
    platforms: Sequence[str] | None = None,
    label: str | None = None,
    rtol: float = 1e-5,
    format: Literal["jgraph", "saved_model"] = "jgraph",  # noqa: A002
    tensorflow: str | Path | None = None,
    session: Session | None = None,
    rows: Literal["copy", "ps"] = "copy",
) -> ExportedModel | Path:
    """Writes a version of a model, for ``jg.serve`` and ``ExportedModel.predict``.

    A version holds compiled-to-be code, arrays and an example: a server needs neither
    your code nor Flax. Whether the answer of a row depends on the rows beside it is
    tried; if it does, servers compute each request alone.

    Args:
      model: a Trainer, a Run, an ``nnx.Module``, ``(linen.Module, variables)``, or a
        function.
      example: a batch as the model takes it: an array, a dict, or a tuple of arguments.
        Inputs are called by the keys, or by the names of the arguments, or ``x``.
      path: directory of the model, ``models/ctr``.
      fn: called in place of the model: ``fn(model, x)``, or ``fn(params, x)`` for
        linen, as in ``Trainer.predict``. A dict that it returns names the outputs;
        else there is ``y``, or ``y_0``, ``y_1``.
      params: of a function: then called as ``function(params, x)``.
      version: its number; one more than the newest if unset.
      signatures: more functions like ``fn``, by name.
      batch: None: only batches of the size of the example are taken, and none are
        computed together.
      platforms: what to compile for, e.g. ``("cpu", "cuda")``; this one if unset.
      label: what the version is to be called; moved from another one.
      rtol: how much, relatively, an answer may differ by the rows beside it.
      format: ``"saved_model"``: as TensorFlow and TensorFlow Serving load it; returns
        its directory. TensorFlow writes it, in a process of its own.
      tensorflow: a Python that has TensorFlow; this one if unset, or that of
        ``JGRAPH_TENSORFLOW_PYTHON``.
      session: has the variables that ``model``, a function, uses on the tasks of a
        cluster; it is then exported as a program for as many tasks, with their values.
      rows: ``"ps"``: no array is written. Parameters stay on the parameter servers of
        the run, and servers that are given its cluster answer with them as they are
        trained, as ``run.serve`` does.

    Raises:
      ArtifactError: a number that is taken, a random number in the function, an output
        without a row for each example; or the directory cannot be written.
      CallbackError: the function calls back into Python.
      NotExportableError: JAX cannot export it. What the function itself raises on the
        example is raised as it is.

    Example:
      >>> import tempfile
      >>> import jgraph as jg
      >>> x = np.ones((2, 3), np.float32)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     f = lambda w, x: {"score": x @ w}
      ...     jg.export(f, x, f"{directory}/m", params=np.ones(3, np.float32))
      ExportedModel('m', version=1)
    """
    where = model_directory(path)
    check_label(where, label)
    platform = jax.export.default_export_platform()
    _check_options(fn, signatures, platforms, platform, rtol)
    if session is not None:
        refuse_for_tasks(
            fn=fn,
            params=params,
            signatures=signatures,
            platforms=platforms,
            tensorflow=tensorflow,
            format=None if format == "jgraph" else format,
        )
        number = export_program(
            model, example, where, session, version=version, batch=batch, rtol=rtol
        )
        if label is not None:
            set_label(where, label, number)
        return ExportedModel(where / str(number)).verify()
    if rows != "copy":
        return _exported_live(
            model,
            example,
            where,
            rows,
            fn,
            label,
            {
                "params": params,
                "signatures": signatures,
                "platforms": platforms,
                "tensorflow": tensorflow,
                "format": None if format == "jgraph" else format,
            },
            version=version,
            batch=batch,
            rtol=rtol,
        )
    if format == "saved_model":
        if label is not None:
            raise ArtifactError("a SavedModel has no labels; leave label= away")
        with tempfile.TemporaryDirectory() as directory:
            exported = export(
                model,
                example,
                Path(directory) / where.name,
                fn=fn,
                params=params,
                signatures=signatures,
                batch=batch,
                platforms=platforms,
                rtol=rtol,
            )
            return write_saved_model(
                exported, where, version=version, tensorflow=tensorflow, rtol=rtol
            )
    if str(format) != "jgraph" or tensorflow is not None:
        raise ArtifactError(
            f'format={format!r}, tensorflow={tensorflow!r}: give format="jgraph", or '
            '"saved_model", which takes tensorflow='
        )
    targets = tuple(platforms or (platform,))
    with show_wait(f"exporting {where.name}"):
        source = _source(model, params)
        source = replace(source, values=_as_in_jax(source.values))
        call_example = Example.of(example, batch=batch)
        arrays = _named_arrays(source.values)
        functions = {DEFAULT: fn, **(signatures or {})}
        exports: dict[str, Signature] = {}
        programs: dict[str, bytes] = {}
        for name, function in functions.items():
            signature, code = _exported(
                source, call_example, function, targets, list(arrays)
            )
            if platform in targets:
                segment = SegmentCode(signature.program, code, targets, name)
                run = CompileCache().load(segment)
                trial = LoadedFunction(signature, run, list(arrays.values()))
                independent = rows_independent(
                    trial, signature, call_example, rtol, name
                )
                signature = replace(signature, rows_independent=independent, rtol=rtol)
            exports[name] = signature
            programs[signature.program] = code
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = ModelManifest(exports, {}, targets, {"time": now})
        row = call_example.values if batch is None else call_example.rows(0, 1)
        number = write_version(
            where, manifest, arrays, programs, dict.fromkeys(exports, row), version
        )
    if label is not None:
        set_label(where, label, number)
    return ExportedModel(where / str(number)).verify()


def _check_options(
    fn: object,
    signatures: object,
    platforms: object,
    here: str,
    rtol: object,
) -> None:
    """Refuses options that cannot be, before anything is traced.

    Raises:
      ArtifactError: names one, and what to give.
    """
    if not (signatures is None or isinstance(signatures, Mapping)):
        raise ArtifactError(
            f"signatures={signatures!r:.60}: give a dict of functions by name"
        )
    for name, one in {"fn": fn, **(signatures or {})}.items():
        if not callable(one) and (one is not None or name != "fn"):
            raise ArtifactError(
                f"'{name!s:.80}' is {one!r:.60}; give a function of the model and x"
            )
    known = sorted({*_PLATFORMS, here})
    is_list = isinstance(platforms, list | tuple) and set(platforms) <= set(known)
    if platforms is not None and not is_list:
        raise ArtifactError(
            f"platforms={platforms!r:.60}: give a list of some of {', '.join(known)}"
        )
    if not is_share(rtol):
        raise ArtifactError(f"rtol={rtol!r:.40}: give a number from 0 to 1")


def _exported_live(
    model: Any,
    example: Any,
    where: Path,
    rows: str,
    fn: Callable[..., Any] | None,
    label: str | None,
    others: Mapping[str, Any],
    **options: Any,
) -> ExportedModel:
    if rows != "ps":
        raise ArtifactError(f'rows={rows!r}: give "copy", or "ps"')
    for name, value in others.items():
        if value is not None:
            raise ArtifactError(f'rows="ps" goes with no {name}=; leave it away')
    if not isinstance(model, Trained):
        raise ArtifactError(
            'rows="ps" serves a model from the parameter servers that train it; give '
            f"the Trainer or the Run, not a {type(model).__name__}"
        )
    number = export_live(model.live_source(), example, where, fn, **options)
    if label is not None:
        set_label(where, label, number)
    return ExportedModel(where / str(number)).verify()


@final
@dataclass(frozen=True, slots=True)
class _Source:
    """A model as a function of values and inputs.

    Attributes:
      call: ``call(values, inputs, fn)``; ``inputs`` is a dict, an array, or a tuple.
      values: its arrays.
      names: names of the arguments that are inputs, for a tuple of them.
    """

    call: Call
    values: Tree
    names: Callable[[Callable[..., Any] | None], Sequence[str]]


def _source(model: Any, params: Any) -> _Source:
    if params is not None and not _is_function(model):
        raise ArtifactError("params= belongs to a function; this model has its own")
    if isinstance(model, Trained):
        return _of_trained(model.predictor())
    if isinstance(model, nnx.Module):
        return _of_nnx(model)
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], nn.Module):
        return _of_linen(model[0], model[1])
    if _is_function(model):
        return _of_function(model, params)
    hint = "; give (module, variables)" if isinstance(model, nn.Module) else ""
    raise ArtifactError(
        f"cannot export a {type(model).__name__}{hint}: give a Trainer, a Run, an "
        "nnx.Module, (linen.Module, variables), or a function"
    )


def _is_function(model: Any) -> bool:
    is_model = isinstance(model, nnx.Module | nn.Module | Trained)
    return callable(model) and not is_model


def _of_trained(predictor: Predictor) -> _Source:
    check_no_tables(predictor.tables)

    def call(values: Tree, x: Any, fn: Callable[..., Any] | None) -> Any:
        return called(predictor.predict, values["params"], values["state"], x, fn)

    values = {"params": predictor.params, "state": predictor.state}
    return _Source(call, values, names_after_first)


def _of_nnx(model: nnx.Module) -> _Source:
    check_no_tables([table.rows for table in nnx_tables(model)])
    parts: Any = nnx.split(model, nnx.RngState, ...)
    graph, rngs, state = parts
    values, back = named_state(state)

    def call(values: Tree, x: Any, fn: Callable[..., Any] | None) -> Any:
        copy = nnx.merge(graph, rngs, back(values["params"]))
        copy.eval()
        inputs = x if isinstance(x, tuple) else (x,)
        return copy(*inputs) if fn is None else fn(copy, *inputs)

    names = lambda fn: positional(model.__call__) if fn is None else positional(fn)[1:]
    return _Source(call, {"params": values}, names)


def _of_linen(module: nn.Module, variables: Any) -> _Source:
    check_no_tables([table.rows for table in linen_tables(variables)])
    values = string_keys(unfreeze(meta.unbox(variables)))

    def call(values: Tree, x: Any, fn: Callable[..., Any] | None) -> Any:
        inputs = x if isinstance(x, tuple) else (x,)
        if fn is not None:
            return fn(values, *inputs)
        return module.apply(values, *inputs)

    names = lambda fn: positional(module.__call__) if fn is None else positional(fn)[1:]
    return _Source(call, values, names)


def _of_function(function: Callable[..., Any], params: Any) -> _Source:
    first = 0 if params is None else 1
    values = {} if params is None else {"params": params}

    def call(values: Tree, x: Any, fn: Callable[..., Any] | None) -> Any:
        inputs = x if isinstance(x, tuple) else (x,)
        before = () if params is None else (values["params"],)
        return (fn or function)(*before, *inputs)

    return _Source(call, values, lambda fn: positional(fn or function)[first:])


def _as_in_jax(values: Tree) -> Tree:
    """Returns arrays of the dtypes that code is traced for."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, value: as_array(f"'{_name(keys)}'", value), values
    )


def _named_arrays(values: Tree) -> dict[str, Array]:
    flat = jax.tree_util.tree_flatten_with_path(values)[0]
    return {_name(keys): value for keys, value in flat}


def _name(keys: tuple[Any, ...]) -> str:
    return "/".join(path_of(keys)) or "params"


def _exported(
    source: _Source,
    example: Example,
    fn: Callable[..., Any] | None,
    platforms: tuple[str, ...],
    arguments: list[str],
) -> tuple[Signature, bytes]:
    """Returns the signature of a function, and its code."""
    call_example = example.called(source.names(fn) if example.kind == "tuple" else ())
    tree = jax.tree.structure(source.values)
    names: list[str] = []

    def flat(*args: Any) -> list[Any]:
        values = jax.tree.unflatten(tree, args[: len(arguments)])
        inputs = call_example.passed(args[len(arguments) :])
        outputs = outputs_of(source.call(values, inputs, fn))
        names[:] = outputs
        return list(outputs.values())

    types = [
        jax.ShapeDtypeStruct(np.shape(v), jnp.result_type(v))
        for v in jax.tree.leaves(source.values)
    ]
    fixed = [
        jax.ShapeDtypeStruct(v.shape, v.dtype) for v in call_example.values.values()
    ]
    scope = jax.export.SymbolicScope(["b >= 1"])
    specs, free = [], []
    for name, value in call_example.values.items():
        shape: Any = value.shape
        if call_example.batch is not None:
            text = ",".join(["b", *map(str, value.shape[1:])])
            shape = jax.export.symbolic_shape(text, scope=scope)
        free.append(jax.ShapeDtypeStruct(shape, value.dtype))
        sizes = tuple(None if _compat.is_symbolic(n) else int(n) for n in shape)
        specs.append(TensorSpec(name, value.dtype.name, sizes))
    _check_traced(flat, [*types, *free], [*types, *fixed])
    code, avals = _lowered(flat, [*types, *free], platforms)
    outputs = [
        output_spec(name, aval, call_example.batch)
        for name, aval in zip(names, avals, strict=True)
    ]
    signature = Signature(
        digest_of(code),
        tuple(specs),
        tuple(outputs),
        tuple(arguments),
        is_batched=call_example.batch is not None,
    )
    return signature, code


def _check_traced(
    flat: Callable[..., Any], types: Sequence[Any], of_example: Sequence[Any]
) -> None:
    """Refuses what servers cannot run; the function's own mistakes are left as is.

    Args:
      flat: the function.
      types: what it is exported for.
      of_example: the same, with the sizes of the example.
    """
    try:
        jaxpr, _, _ = _compat.make_jaxpr(flat, *types)
    except Exception as error:
        if isinstance(error, JGError):
            raise
        if _is_traced(flat, of_example):
            line = users_line(error.__traceback__)
            raise NotExportableError(
                "the model takes batches of the example's size, and not of any"
                f"{line and f', at {line}'}: {type(error).__name__}: "
                f"{_first_line(error)}; write that line with operations of jax.numpy "
                "for any number of rows, or give batch=None for batches of one size",
                line=line,
            ) from error
        if (clear := as_graph_error(error, "the model")) is not None:
            raise NotExportableError(clear.message, **clear.details) from error
        raise
    for equation, line in _equations(jaxpr):
        _check_equation(equation, line)


def _is_traced(flat: Callable[..., Any], types: Sequence[Any]) -> bool:
    try:
        jax.eval_shape(flat, *types)
    except Exception:  # noqa: BLE001  # whoever asks has an error already
        return False
    return True


def _lowered(
    flat: Callable[..., Any], types: Sequence[Any], platforms: tuple[str, ...]
) -> tuple[bytes, Sequence[Any]]:
    def model(*args: Any) -> Any:  # its name is in the code, and so in the digest
        return flat(*args)

    model_jit = jax.jit(model, keep_unused=True)
    try:
        with _compat.no_locations():
            module = jax.export.export(model_jit, platforms=platforms)(*types)
            return _compat.portable_code(module), module.out_avals
    except Exception as error:  # of JAX, since the function was traced
        raise NotExportableError(
            f"JAX cannot export the model for {', '.join(platforms)}: "
            f"{type(error).__name__}: {_first_line(error)}; write that operation with "
            "those of jax.numpy; batch=None, if it needs sizes that are known"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _equations(jaxpr: Any, outer: str = "") -> Iterator[tuple[Any, str]]:
    """Yields each equation, and the line of the user's code that made it."""
    for equation in jaxpr.eqns:
        line = _compat.user_line(equation)
        line = outer if outer and line == _compat.UNKNOWN_LINE else line
        yield equation, line
        for _, inner in _compat.inner_jaxprs(equation):
            yield from _equations(_compat.open_jaxpr(inner), line)


def _check_equation(equation: Any, line: str) -> None:
    name = equation.primitive.name
    if "callback" in name or "callback" in equation.params or name == "debug_print":
        raise CallbackError(
            f"the model calls back into Python at {line}, and a server has none of "
            "your Python; remove the call, or return the value as an output"
        )
    if name in ("random_bits", "threefry2x32", "rng_bit_generator"):
        raise ArtifactError(
            f"the model draws random numbers at {line}, so an answer would be the same "
            "draw each time; take dropout away with deterministic=True, or give the "
            "random numbers as an input"
        )
