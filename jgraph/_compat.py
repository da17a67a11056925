"""The only file that knows which JAX is installed.

Everything here is a name or a small function whose home or spelling differs between
the JAX versions that jgraph supports (0.10 on Python 3.11, 0.12 on newer Pythons), or
that JAX has not made public. Each entry names what made it necessary.
"""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.export
from jax._src import core as jax_core, lib as jax_lib, source_info_util
from jax._src.config import (
    default_prng_impl,
    trace_context,
    traceback_in_locations_limit,
)
from jax._src.core import (
    InconclusiveDimensionOperation,  # public from 0.12 on only
    Literal,
    Primitive,
    Var,
)
from jax._src.export import _export
from jax._src.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo

# jax.extend.core has the same names, but with jax.extend comes Pallas, which a server
# would load at each start: a twentieth of what all its imports cost.

Atom: TypeAlias = "Var | Literal"
Equation: TypeAlias = Any  # jax.extend.core.JaxprEqn
Jaxpr: TypeAlias = Any  # jax.extend.core.Jaxpr; ClosedJaxpr and Jaxpr merge in 0.11

__all__ = [
    "UNKNOWN_LINE",
    "Atom",
    "Equation",
    "InconclusiveDimensionOperation",
    "Jaxpr",
    "Literal",
    "Primitive",
    "Var",
    "add_cpu_platform",
    "array_type",
    "build_jaxpr",
    "call_body",
    "calling_line",
    "fresh_var",
    "inner_jaxprs",
    "is_checkpoint",
    "is_dropped",
    "is_ref",
    "is_symbolic",
    "is_wide",
    "join_collectives",
    "make_jaxpr",
    "member_means",
    "mesh_axes",
    "name_stack_of",
    "new_var",
    "no_locations",
    "open_jaxpr",
    "portable_code",
    "rebuild_equation",
    "release_arguments",
    "run_equation",
    "same_types",
    "size_at",
    "size_names",
    "stable_custom_calls",
    "trace_settings",
    "type_error",
    "unbound_axis",
    "under",
    "user_line",
    "wide_types",
    "with_outer_scope",
    "without_source",
    "writes",
]

# An equation's source line is the innermost frame outside of this package: examples are
# programs of users.
_PACKAGE = pathlib.Path(__file__).parent
source_info_util.register_exclusion(f"{_PACKAGE}{os.sep}")
source_info_util.register_inclusion(f"{_PACKAGE / 'examples'}{os.sep}")

# JAX names what it lets programs call only where it checks it, when exporting.
stable_custom_calls: frozenset[str] = frozenset(
    _export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE  # noqa: SLF001
)

# One class with Jaxpr from 0.11 on.
_ClosedJaxpr: Any = getattr(jax_core, "ClosedJaxpr", jax_core.Jaxpr)

# jaxlib keeps what numpy arrays lent it until this is called.
_jaxlib: Any = jax_lib
_collect_garbage: Callable[[], None] = _jaxlib.xla_client._xla.collect_garbage  # noqa: SLF001

# Of the oldest JAX that jgraph supports. JAX writes that of four weeks before itself.
_STABLEHLO = "1.17.0"
_OWN_STABLEHLO: str = stablehlo.get_version_from_compatibility_requirement(
    stablehlo.StablehloCompatibilityRequirement.WEEK_4
)

# A process that was not heard of for so long is lost for the others.
_HEARTBEAT_S = 30

# What JAX makes narrower unless it is told not to.
_WIDE = frozenset(("float64", "int64", "uint64", "complex128"))

# Primitives that only call their one body, with the same operands and results. All
# versions so far: jit was pjit, checkpoint is remat2, custom_vjp_call had a suffix.
# Others with bodies (scan, while, cond, reduce, custom_linear_solve, ...) stay whole.
_CALLS = re.compile(
    r"(p?jit|((closed|core)_)?call|remat\d*|checkpoint"
    r"|custom_(jvp|vjp)_call(_jaxpr)?)\Z"
)


def make_jaxpr(fn: Any, *args: Any) -> tuple[Jaxpr, list[Any], Any]:
    """Returns (open jaxpr, constants, tree of output avals) of ``fn(*args)``."""
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    return open_jaxpr(closed), list(closed.consts), out


def scan_parts(equation: Equation) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried.

    JAX 0.12 has a tree of the operands in place of the two numbers.
    """
    params = equation.params
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = map(list, params["ft_in"].unpack())
    return len(consts), len(carry)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Returns the jaxpr with constants as ``constvars``.

    JAX 0.10 has ClosedJaxpr beside Jaxpr; 0.11 made them one class.
    """
    if isinstance(jaxpr, _ClosedJaxpr):
        return getattr(jaxpr, "jaxpr", jaxpr)
    return jaxpr


def is_ref(aval: Any) -> bool:
    """Whether a value of this aval is a Ref (AbstractRef is not public)."""
    return hasattr(aval, "inner_aval")


def mesh_axes(exported: Any) -> dict[str, int]:
    """Returns the axes of the mesh that a program was exported for.

    What JAX says of its arguments in public names them, and not their sizes.
    """
    inputs, outputs = exported._in_named_shardings, exported._out_named_shardings  # noqa: SLF001
    for sharding in (*inputs, *outputs):
        if sharding is not None and not sharding.mesh.empty:
            return dict(sharding.mesh.shape)
    return {"all": exported.nr_devices}


def is_symbolic(size: Any) -> bool:
    """Whether a dimension is an expression over names (``jax.export``)."""
    return bool(jax.export.is_symbolic_dim(size))


def size_names(size: Any) -> frozenset[str]:
    """Returns the names in a symbolic dimension; there is no public way."""
    return frozenset(size._get_vars())  # noqa: SLF001


def size_at(size: Any, sizes: Mapping[str, int]) -> int:
    """Returns a symbolic dimension for these sizes; there is no public way."""
    return int(size._evaluate(dict(sizes)))  # noqa: SLF001


def array_type(atom: Atom) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array in a jaxpr; of a Ref, those of its value."""
    aval: Any = atom.aval
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def inner_jaxprs(equation: Equation) -> Iterator[tuple[str, Any]]:
    """Yields (parameter name, closed or open jaxpr) of an equation's bodies.

    Found by the type of the parameter: names differ between versions
    (``pjit`` became ``jit``, ``remat2`` becomes ``remat3``).
    """
    kinds = (jax_core.Jaxpr, _ClosedJaxpr)
    for name, value in equation.params.items():
        if isinstance(value, kinds):
            yield name, value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((name, v) for v in value if isinstance(v, kinds))


def name_stack_of(equation: Equation) -> str:
    """Returns the equation's stack of named scopes as text.

    ``JaxprEqn.source_info`` is not documented; its text form has been stable.
    """
    return str(equation.source_info.name_stack)


def call_body(equation: Equation) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Returns (open body, its constants) if the equation is a plain call, else None."""
    if not _CALLS.match(equation.primitive.name):
        return None
    bodies = [body for _, body in inner_jaxprs(equation)]
    if len(bodies) != 1:
        return None
    jaxpr, consts = open_jaxpr(bodies[0]), getattr(bodies[0], "consts", ())
    same = len(jaxpr.invars) == len(equation.invars)
    return (jaxpr, consts) if same else None


def is_checkpoint(equation: Equation) -> bool:
    """Whether the equation is a ``jax.checkpoint`` (remat2, remat3 to come)."""
    name: str = equation.primitive.name
    return name.startswith(("remat", "checkpoint"))


def fresh_var(like: Var) -> Var:
    """Returns a new variable of the same type; a dropped one stays dropped."""
    return type(like)(like.aval)


def new_var(aval: Any) -> Var:
    """Returns a variable of this type that no equation makes yet."""
    return Var(aval)


def is_dropped(var: Any) -> bool:
    """Whether an equation's result is never read."""
    return isinstance(var, jax_core.DropVar)


def rebuild_equation(
    equation: Equation,
    rename: Callable[[Any], Any],
    outvars: Sequence[Var],
) -> Equation:
    """Returns the equation on other operands and results.

    Effects on Refs name the Ref's variable, so they are renamed too.
    """
    effects = {
        e.replace(rename(e.input)) if isinstance(getattr(e, "input", None), Var) else e
        for e in equation.effects
    }
    return equation.replace(
        invars=[rename(v) for v in equation.invars],
        outvars=list(outvars),
        effects=effects,
    )


def run_equation(
    equation: Equation, operands: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Returns the results of an equation on other operands, under its own scopes.

    Args:
      equation: what to do.
      operands: a value per operand; what stands for a literal is not looked at.
      params: parameters in place of the equation's own.
    """
    # As jax.core.eval_jaxpr does it, which would want a jaxpr for each equation.
    primitive = equation.primitive
    values = [
        v.val if isinstance(v, Literal) else value
        for v, value in zip(equation.invars, operands, strict=True)
    ]
    bound = primitive.get_bind_params(equation.params if params is None else params)
    with under(equation), equation.ctx.manager:
        results = primitive.bind(*values, **bound)
    return list(results) if primitive.multiple_results else [results]


def under(equation: Equation) -> AbstractContextManager[Any]:
    """Gives operations traced inside the scopes and the source line of an equation."""
    source = equation.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    manager: AbstractContextManager[Any] = source_info_util.user_context(
        source.traceback, name_stack=stack
    )
    return manager


def with_outer_scope(equation: Equation, outer: Equation) -> Equation:
    """Returns the equation with the scopes of ``outer`` around its own."""
    stack = outer.source_info.name_stack + equation.source_info.name_stack
    return equation.replace(source_info=equation.source_info.replace(name_stack=stack))


def build_jaxpr(
    *,
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    equations: Sequence[Equation],
    constvars: Sequence[Var] = (),
    consts: Sequence[Any] = (),
) -> Jaxpr:
    """Returns an open jaxpr; JAX from 0.11 on keeps the constants' values in it."""
    fields: dict[str, Any] = {
        "constvars": list(constvars),
        "invars": list(invars),
        "outvars": list(outvars),
        "eqns": list(equations),
        "effects": set().union(*(e.effects for e in equations)),
    }
    empty = _empty_jaxpr()
    if isinstance(empty, _ClosedJaxpr):  # one class with Jaxpr from 0.11 on
        fields["consts"] = list(consts)
    return empty.replace(**fields)


@functools.cache
def _empty_jaxpr() -> Jaxpr:
    """Returns a jaxpr with debug information, which the constructor wants.

    Tracing it each time would take longer than all else that is done with one equation.
    """
    return open_jaxpr(jax.make_jaxpr(lambda: ())())


def writes(equation: Equation, ref: Var) -> bool:
    """Whether the equation changes the value of a Ref among its operands."""
    # The effect classes are not public; there are Read, Write and Accum.
    return any(
        getattr(e, "input", None) is ref and not type(e).__name__.startswith("Read")
        for e in equation.effects
    )


UNKNOWN_LINE = "unknown line"


def user_line(equation: Equation) -> str:
    """Returns ``file:line (function)`` of the user's code that made the equation."""
    text: str = source_info_util.summarize(equation.source_info)
    return text or UNKNOWN_LINE


def calling_line() -> str:
    """Returns ``file:line (function)`` of the user's code that this call comes from."""
    text: str = source_info_util.summarize(source_info_util.current())
    return text or UNKNOWN_LINE


def unbound_axis(error: NameError) -> str:
    """Returns the named axis that a collective did not find; empty: another error."""
    found = re.search(r"[Uu]nbound axis name:?\s+['\"]?(\w+)", str(error))
    return found[1] if found else ""


def release_arguments() -> None:
    """Lets go of the numpy arrays that finished computations took without a copy.

    JAX does it at its next garbage collection; memory shared with a peer cannot wait:
    until then the peer sends into memory that is new. The function is not public.
    """
    _collect_garbage()


def type_error(equations: Sequence[Equation]) -> str | None:
    """Returns what JAX's checker finds wrong with the equations' types, or None."""
    outputs = {v for e in equations for v in e.outvars}
    used = dict.fromkeys(v for e in equations for v in e.invars if isinstance(v, Var))
    free = [v for v in used if v not in outputs]
    try:
        jax_core.check_jaxpr(build_jaxpr(invars=free, outvars=[], equations=equations))
    except jax_core.JaxprTypeError as error:
        return str(error)
    return None


def without_source(equation: Equation) -> Equation:
    """Returns the equation without its source line and scopes."""
    return equation.replace(source_info=source_info_util.new_source_info())


def no_locations() -> AbstractContextManager[Any]:
    """Keeps file names and line numbers out of what is lowered inside.

    The context manager of this option is not public; the public ``jax.config.update``
    would change it for all threads.
    """
    manager: AbstractContextManager[Any] = traceback_in_locations_limit(0)
    return manager


def portable_code(exported: Any) -> bytes:
    """Returns exported code as bytes that every JAX that jgraph supports can read.

    Code that has no older form stays as JAX writes it; who cannot read that says so.
    """
    if stablehlo.get_smaller_version(_OWN_STABLEHLO, _STABLEHLO) != _OWN_STABLEHLO:
        client = jax.local_devices()[0].client
        with suppress(RuntimeError), mlir.make_ir_context():
            module = exported.mlir_module(serialized=False)
            code = _jaxlib._jax.mlir.serialize_portable_artifact(  # noqa: SLF001
                module, _STABLEHLO, client.serialize_with_sdy
            )
            exported = replace(exported, mlir_module_serialized=code)
    return bytes(exported.serialize())


def add_cpu_platform() -> None:
    """Has JAX open its CPU beside the accelerators that ``JAX_PLATFORMS`` names.

    Without effect once JAX has opened its devices.
    """
    config: Any = jax.config
    named = config.jax_platforms
    if named and "cpu" not in named.split(","):
        config.update("jax_platforms", f"{named},cpu")


def is_wide(dtype: Any) -> bool:
    """Whether JAX has values of this dtype only with ``jax_enable_x64``."""
    return str(dtype) in _WIDE


def wide_types() -> AbstractContextManager[Any]:
    """Keeps 64-bit types as they are inside, for this thread alone."""
    manager: AbstractContextManager[Any] = jax.enable_x64(True)
    return manager


def narrow_types() -> AbstractContextManager[Any]:
    """Has no 64-bit types inside, for this thread alone."""
    manager: AbstractContextManager[Any] = jax.enable_x64(False)
    return manager


def same_types() -> AbstractContextManager[Any]:
    """Has 64-bit types in another thread if they are on in this one."""
    is_on = jax.dtypes.canonicalize_dtype("float64") == "float64"
    return wide_types() if is_on else narrow_types()


def trace_settings() -> tuple[Any, ...]:
    """Returns all that a trace depends on beside its arguments.

    As jit keys its own, which is not public; jit forgets which generator is meant.
    """
    return (*trace_context(), default_prng_impl.value)


def join_collectives(address: str, members: int, rank: int, host: str) -> None:
    """Makes this process one of several that take part in XLA's collectives.

    Called before JAX opens its devices, of which the first one takes part. What JAX
    would choose itself listens on all addresses of this host.

    Args:
      address: where the first of them listens for the others.
      members: how many processes there are.
      rank: number of this one.
      host: address of this host, where others reach this process.
    """
    from jax._src import distributed, xla_bridge  # nothing else needs them

    bridge: Any = xla_bridge

    def make_cpu() -> Any:
        client: Any = distributed.global_state.client
        gloo = bridge._jax.make_gloo_tcp_collectives(  # noqa: SLF001
            distributed_client=client, hostname=host
        )
        return bridge.make_cpu_client(collectives=gloo)

    # Where nothing else is known, a lost process ends all others at once.
    config: Any = jax.config
    config.update("jax_enable_recoverability", True)
    bridge.register_backend_factory("cpu", make_cpu, priority=0, fail_quietly=False)
    jax.distributed.initialize(
        address,
        members,
        rank,
        local_device_ids=[0],
        coordinator_bind_address=address,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
    )


def member_means(members: int, size: int) -> Callable[[Any], Any]:
    """Returns what averages arrays over the processes of ``join_collectives``.

    It takes float32[members, size] on each of them, and gives float32[size]: the mean
    of the rows that have the rank of this one.
    """
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    local = jax.local_devices()[0]
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([firsts[rank] for rank in range(members)], ("members",))
    spec = PartitionSpec("members")

    def scattered(rows: Any) -> Any:
        total = jax.lax.psum_scatter(rows, "members", scatter_dimension=1, tiled=True)
        return total / members

    def sliced(rows: Any) -> Any:
        total, rank = jax.lax.psum(rows, "members"), jax.lax.axis_index("members")
        return jax.lax.dynamic_slice_in_dim(total, rank, 1, axis=1) / members

    # gloo takes twice as long to scatter a sum as to give all of it to everybody.
    own = sliced if local.platform == "cpu" else scattered
    mean = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec))
    sharding, shape = NamedSharding(mesh, spec), (members, members, size)

    def means(rows: Any) -> Any:
        here = [jax.device_put(rows[None], local)]
        joint = jax.make_array_from_single_device_arrays(shape, sharding, here)
        return jax.device_get(mean(joint).addressable_shards[0].data)[0, 0]

    return means
