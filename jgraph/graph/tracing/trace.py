"""Tracing of a Python function over variables to a Graph."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import jax.numpy as jnp

from jgraph import _compat
from jgraph.errors import GraphError, VariableMismatchError
from jgraph.graph.device import current_device, device
from jgraph.graph.graph import Graph
from jgraph.graph.ir import Feed, VariableKey, VariableSpec
from jgraph.graph.tracing.concrete import as_graph_error
from jgraph.graph.tracing.feeds import named_feeds, named_outputs
from jgraph.graph.tracing.inline import inline_calls
from jgraph.graph.variable import _BINDING, Variable
from jgraph.loading import uncollected

# jit caches the traces of inner functions. A variable is read through a context, which
# jit cannot see; a user context with a fresh value per trace makes it trace anew.
_TRACE = jax.make_user_context(0)
_counter = itertools.count(1)

# What JAX raises about code that it cannot trace.
_TRACING_ERRORS = (
    NotImplementedError,
    TypeError,
    ValueError,
    IndexError,
    jax.errors.InconclusiveDimensionOperation,
)


@uncollected()
def trace(
    fn: Callable[..., Any],
    *args: Any,
    variables: Sequence[Variable] | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> tuple[Graph, tuple[Variable, ...]]:
    """Returns the graph of ``fn(*args, **kwargs)`` and the variables it uses.

    A ``jg.device`` scope around the call is the outermost scope of the graph.

    Args:
      fn: a JAX-traceable function that may read and write variables.
      *args: arrays or ``jax.ShapeDtypeStruct``, in pytrees; names of feeds are the
        paths of these, with the parameter names of ``fn``.
      variables: the variables that ``fn`` may use, if known; else, or when it uses
        others too, ``fn`` is run once more to find them.
      name: name of the graph; the function's own if unset.
      **kwargs: like ``args``.

    Raises:
      FeedError: an argument that is neither an array nor a number.
      GraphError: a result that is not an array; code that needs the value of one.
      VariableMismatchError: two variables of one name with different specs.
      PlacementError: a loop whose body names two tasks.

    Example:
      >>> w = Variable("w", jnp.ones(3), device="/job:ps/task:0")
      >>> def step(x):
      ...     w[...] = w[...] + x
      ...     return {"sum": w[...].sum()}
      >>> graph, variables = trace(step, jnp.ones(3))
      >>> graph.feeds[0].name, graph.fetches, variables
      ('x', ("['sum']",),
       (Variable('w', float32[3], device='/job:ps/task:0'),))
    """
    title: str = name or getattr(fn, "__name__", "") or type(fn).__name__
    feeds, in_tree = named_feeds(fn, title, args, kwargs)
    used = _Variables()
    for variable in variables or ():
        used.add(variable)
    traced = _Trace(used.listed(), used)
    jaxpr, consts = _run(traced, fn, in_tree, feeds, title)
    if len(used.listed()) > len(traced.variables):
        traced = _Trace(used.listed(), used)
        jaxpr, consts = _run(traced, fn, in_tree, feeds, title)
    known = traced.variables
    if len(used.listed()) > len(known):
        raise GraphError(
            f"{title} uses other variables each time it runs, now also "
            f"'{used.listed()[-1].name}'; make variables outside of it, once"
        )
    touched = [i for i, v in enumerate(known) if v.spec.key in traced.touched]
    _refuse_captured_refs(consts, title)
    flat = inline_calls(_refs_as_inputs(jaxpr, len(known), touched), consts)
    graph = Graph(
        jaxpr=flat.jaxpr,
        consts=flat.consts,
        variables=tuple(known[i].spec for i in touched),
        feeds=feeds,
        fetches=traced.fetches,
        stamps=flat.stamps,
        out_tree=traced.out_tree,
        name=title,
    )
    return graph, tuple(known[i] for i in touched)


def retrace(
    graph: Graph,
    variables: Sequence[VariableSpec],
    run: Callable[[list[Any], list[Any]], list[Any]],
) -> Graph:
    """Returns a graph of other equations with the feeds and fetches of ``graph``.

    Args:
      graph: gives the names of what goes in and out.
      variables: those of the new graph.
      run: called with a Ref per variable and a value per feed; returns the fetches.
    """
    count = len(variables)

    def over_values(values: list[Any], feeds: list[Any]) -> list[Any]:
        with _TRACE(next(_counter)):
            return run([jax.new_ref(value) for value in values], feeds)

    jaxpr, consts, _ = _compat.make_jaxpr(
        over_values, [v.aval for v in variables], [f.aval for f in graph.feeds]
    )
    flat = inline_calls(_refs_as_inputs(jaxpr, count, list(range(count))), consts)
    return replace(
        graph,
        jaxpr=flat.jaxpr,
        consts=flat.consts,
        variables=tuple(variables),
        stamps=flat.stamps,
    )


def _run(
    traced: "_Trace",
    fn: Callable[..., Any],
    in_tree: Any,
    feeds: Sequence[Feed],
    title: str,
) -> tuple[_compat.Jaxpr, list[Any]]:
    try:
        jaxpr, consts, _ = _compat.make_jaxpr(
            traced.run(fn, in_tree, title),
            [v.spec.aval for v in traced.variables],
            [f.aval for f in feeds],
        )
    except _TRACING_ERRORS as error:
        if (clear := as_graph_error(error, title)) is not None:
            raise clear from error
        # Some transformations do not know Refs; JAX says so in words of its inside.
        reason = str(error).splitlines()[0] if str(error) else ""
        if "State effect" in reason or "JaxprInputEffect" in reason:
            raise GraphError(
                f"{title} uses a variable in a place where JAX allows no state "
                f"({reason}); read it before, value = w[...], and use the value there"
            ) from error
        if str(Variable) in reason:
            raise GraphError(
                f"{title} gives a variable where an array belongs ({reason}); give "
                "its value, w[...]"
            ) from error
        raise
    return jaxpr, consts


def _around() -> AbstractContextManager[None]:
    """The device scope of the caller: JAX starts a trace without named scopes."""
    outer = current_device()
    return device(outer) if outer else nullcontext()


@final
@dataclass(slots=True)
class _Variables:
    """The variables that a function uses, by (container, name)."""

    _by_key: dict[VariableKey, Variable] = field(default_factory=dict)

    def add(self, variable: Variable) -> None:
        spec = variable.spec
        if _is_too_wide(spec.dtype):
            raise GraphError(
                f"variable '{spec.name}' is {spec.dtype}, and here JAX has no 64-bit "
                "types; write jax.config.update('jax_enable_x64', True) at the top of "
                "your program"
            )
        other = self._by_key.setdefault(spec.key, variable).spec
        if other != spec:
            raise VariableMismatchError(
                f"variable '{spec.name}' is used twice with different properties: "
                f"{_describe(other)}, and {_describe(spec)}; use one jg.Variable "
                "object for both, or another name or container",
                variable=spec.name,
            )

    def listed(self) -> list[Variable]:
        return list(self._by_key.values())


def _is_too_wide(dtype: Any) -> bool:
    """Whether JAX would make values of this dtype narrower, as it is set here."""
    return _compat.is_wide(dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype


def _describe(spec: VariableSpec) -> str:
    place = f" on '{spec.device}'" if spec.device else ""
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]{place}"


@final
@dataclass(slots=True)
class _Trace:
    """One run of the function under ``jax.make_jaxpr``, and what it left behind."""

    variables: list[Variable]
    used: _Variables
    touched: set[VariableKey] = field(default_factory=set)
    fetches: tuple[str, ...] = ()
    out_tree: Any = None

    def run(
        self, fn: Callable[..., Any], in_tree: Any, title: str
    ) -> Callable[[list[Any], list[Any]], list[Any]]:
        """Returns ``fn`` over the values of the variables and the feeds."""

        def over_values(values: list[Any], leaves: list[Any]) -> list[Any]:
            refs = {
                v.spec.key: jax.new_ref(x)
                for v, x in zip(self.variables, values, strict=True)
            }
            args, kwargs = jax.tree_util.tree_unflatten(in_tree, leaves)
            token = _BINDING.set(lambda variable: self._find(variable, refs))
            try:
                with _TRACE(next(_counter)), _around():
                    result = fn(*args, **kwargs)
            finally:
                _BINDING.reset(token)
            outputs, self.fetches, self.out_tree = named_outputs(result, title)
            return outputs

        return over_values

    def _find(self, variable: Variable, refs: dict[VariableKey, Any]) -> Any:
        self.used.add(variable)
        key = variable.spec.key
        self.touched.add(key)
        return refs[key] if key in refs else _Unknown(variable.spec)


@final
@dataclass(frozen=True, slots=True)
class _Unknown:
    """Stands for a variable in the run that finds it: reads are zeros."""

    spec: VariableSpec

    def __getitem__(self, index: Any) -> Any:
        dtype = self.spec.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.zeros(self.spec.shape, dtype)[index]
        data = jax.eval_shape(jax.random.key_data, self.spec.aval)
        zeros = jnp.zeros(data.shape, data.dtype)
        return jax.random.wrap_key_data(zeros, dtype=dtype)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


def _refs_as_inputs(jaxpr: Any, count: int, touched: list[int]) -> Any:
    """Returns the jaxpr with the Refs themselves as inputs.

    Tracing over values made ``count`` new_ref equations; their results become the
    inputs in place of the values, and Refs that were never used are left out.
    """
    values = jaxpr.invars[:count]
    new_refs = {e.invars[0]: e for e in jaxpr.eqns if e.primitive.name == "new_ref"}
    refs = [new_refs[values[i]].outvars[0] for i in touched]
    drop = {id(new_refs[v]) for v in values}
    return jaxpr.replace(
        eqns=[e for e in jaxpr.eqns if id(e) not in drop],
        invars=[*refs, *jaxpr.invars[count:]],
    )


def _refuse_captured_refs(consts: Sequence[Any], title: str) -> None:
    for value in consts:
        if _compat.is_ref(jax.typeof(value)):
            raise GraphError(
                f"{title} uses a jax.Ref from outside, {jax.typeof(value)}; it has no "
                "name and no task. Make it a jg.Variable(name, value, device=…)"
            )
