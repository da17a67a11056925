"""``jg.function``: a Python function whose graphs are traced once per argument type."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, final

import jax

from jgraph.graph.device import current_device
from jgraph.graph.feeds import named_feeds
from jgraph.graph.ir import Graph
from jgraph.graph.trace import trace
from jgraph.graph.variable import Variable


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

    def __init__(self, fn: Callable[..., Any], name: str | None = None) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
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
          UserError: the function cannot be traced; see ``jgraph.graph.trace.trace``.
        """
        return self.trace(*args, **kwargs)[0]

    def trace(self, *args: Any, **kwargs: Any) -> tuple[Graph, tuple[Variable, ...]]:
        """Returns the graph, and the variables in the order of ``graph.variables``."""
        feeds, tree = named_feeds(self._fn, self._name, args, kwargs)
        avals = tuple((f.aval.shape, f.aval.dtype, f.aval.weak_type) for f in feeds)
        key = (tree, avals, current_device(), jax.config.read("jax_enable_x64"))
        if key not in self._traced:
            last = next(reversed(self._traced.values()), None)
            known = last[1] if last else None
            self._traced[key] = trace(
                self._fn, *args, variables=known, name=self._name, **kwargs
            )
        return self._traced[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function's code here; variables need a trace around it."""
        return self._fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"jg.function({self._name}, traced {len(self._traced)} times)"


def function(fn: Callable[..., Any]) -> Function:
    """Makes a function over variables that a session can run.

    Args:
      fn: a JAX-traceable function; arguments and results are pytrees of arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> w = Variable("w", jnp.ones(3))
      >>> @function
      ... def dot(x):
      ...     return jnp.dot(x, w[...])
      >>> [feed.name for feed in dot.graph(jnp.zeros(3)).feeds]
      ['x']
    """
    return fn if isinstance(fn, Function) else Function(fn)
