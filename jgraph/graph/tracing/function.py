"""``jg.function``: a Python function whose graphs are traced once per argument type."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, final, overload

import jax
import jax.export
from jax.tree_util import tree_unflatten

from jgraph._compat import trace_settings
from jgraph.errors import UninitializedError
from jgraph.graph.device import current_device
from jgraph.graph.graph import Graph
from jgraph.graph.sizes import Symbolic, with_names
from jgraph.graph.tracing.feeds import named_feeds
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.view import markup


@final
class Function:
    """A function over variables; made by ``jg.function``.

    Called inside another traced function it is that function's code. A session runs
    it: ``sess.run(step, x)``.

    Example:
      >>> import jax.numpy as jnp
      >>> step = Function(jnp.sin)
      >>> print(step.graph(jax.ShapeDtypeStruct((3,), "float32")))
      graph sin
        feeds
          x: float32[3]
        equations
          %0:float32[3] = sin x
        fetches
          result: %0
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        symbolic: Symbolic | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._symbolic = symbolic
        self._scope = jax.export.SymbolicScope()
        self._name: str = name or getattr(fn, "__name__", "") or type(fn).__name__
        self._traced: dict[Any, tuple[Graph, tuple[Variable, ...]]] = {}

    @property
    def name(self) -> str:
        """Name of the function, and of its graphs."""
        return self._name

    @functools.cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...]:
        """Parameters of the function; none if it does not tell, as some built-ins."""
        try:
            return tuple(inspect.signature(self).parameters.values())
        except (TypeError, ValueError):
            return ()

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Returns the graph for arguments of these types.

        Args:
          *args: arrays, numbers or ``jax.ShapeDtypeStruct``, in pytrees.
          **kwargs: likewise.

        Raises:
          UserError: the function cannot be traced; see
            ``jgraph.graph.tracing.trace.trace``.
        """
        return self.trace(*args, **kwargs)[0]

    def trace(self, *args: Any, **kwargs: Any) -> tuple[Graph, tuple[Variable, ...]]:
        """Returns the graph, and the variables in the order of ``graph.variables``."""
        feeds, tree = named_feeds(self._fn, self._name, args, kwargs)
        if self._symbolic is not None:
            named = with_names(feeds, self._symbolic, self._scope, self._name)
            feeds = tuple(named)
            args, kwargs = tree_unflatten(tree, [feed.aval for feed in feeds])
        avals = tuple((f.aval.shape, f.aval.dtype, f.aval.weak_type) for f in feeds)
        key = tree, avals, current_device(), trace_settings()
        if key not in self._traced:
            last = next(reversed(self._traced.values()), None)
            known = last[1] if last else None
            self._traced[key] = trace(
                self._fn, *args, variables=known, name=self._name, **kwargs
            )
        return self._traced[key]

    @property
    def traces(self) -> int:
        """Number of graphs that are kept."""
        return len(self._traced)

    def forget(self) -> None:
        """Forgets all graphs: the next are of variables as they are bound then."""
        self._traced.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function's code here; variables need a trace around it.

        Raises:
          UninitializedError: it uses a variable, and no session runs it.
        """
        try:
            return self._fn(*args, **kwargs)
        except UninitializedError as error:
            if not error.details.get("outside"):
                raise
            name = error.details["variable"]
            raise UninitializedError(
                f"'{self._name}' was called here, where variable '{name}' has no "
                f"value; let a session run it: sess.run({self._name}, …)",
                variable=name,
            ) from error

    def positional(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments by position as far as possible, however they were given.

        Example:
          >>> Function(lambda x, y: x + y).positional((1,), {"y": 2})
          ((1, 2), {})
        """
        remaining = dict(kwargs)
        for parameter in self.parameters[len(args) :]:
            by_both = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if not by_both or parameter.name not in remaining:
                break
            args = (*args, remaining.pop(parameter.name))
        return args, remaining

    def __repr__(self) -> str:
        return f"jg.function({self._name}, traced {len(self._traced)} times)"

    def _repr_html_(self) -> str:
        parameters = ", ".join(parameter.name for parameter in self.parameters)
        facts: dict[str, object] = {"called with": parameters or "nothing"}
        for graph, variables in self._traced.values():
            feeds = ", ".join(str(feed.aval) for feed in graph.feeds) or "nothing"
            names = ", ".join(variable.name for variable in variables)
            facts[f"traced for {feeds}"] = f"variables {names}" if names else ""
        return markup.facts(f"jg.function {self._name}", facts)


@overload
def function(
    fn: Callable[..., Any], *, symbolic: Symbolic | None = None
) -> Function: ...


@overload
def function(*, symbolic: Symbolic) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    fn: Callable[..., Any] | None = None, *, symbolic: Symbolic | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a function over variables that a session can run.

    Args:
      fn: a JAX-traceable function; arguments and results are pytrees of arrays.
      symbolic: shapes with names in place of sizes, as ``jax.export.symbolic_shape``
        writes them: ``"batch, ..."`` for all arguments that are arrays, or by argument,
        ``{"x": "batch, ..."}``, and those that are not named keep their sizes. The
        function is then traced, planned and sent once for all sizes from 1 on; a task
        compiles its part for each size that comes. Inside, ``x.shape[0]`` is no number:
        what needs one (``if``, ``range``) is refused with its line.

    Example:
      >>> import jax.numpy as jnp
      >>> w = Variable("w", jnp.ones(3))
      >>> @function
      ... def dot(x):
      ...     return jnp.dot(x, w[...])
      >>> [feed.name for feed in dot.graph(jnp.zeros(3)).feeds]
      ['x']
      >>> @function(symbolic="b, ...")
      ... def mean(x):
      ...     return x.sum() / x.shape[0]
      >>> mean.graph(jnp.zeros((4, 3))) is mean.graph(jnp.zeros((5, 3)))
      True
    """
    if fn is None:
        return functools.partial(function, symbolic=symbolic)
    if isinstance(fn, Function) and symbolic is None:
        return fn
    return Function(fn, symbolic=symbolic)
