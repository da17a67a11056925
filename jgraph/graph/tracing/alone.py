"""Isolated functions: each call is a segment of its own, in program order.

Of all other operations, cutting makes as few segments as it can, and they run as soon
as their inputs are there. A call of an ``Alone`` function is one segment whatever is
around it, and the calls on one task run one after the other, in the order in which
they were traced. So a schedule of a pipeline is stated by the order of calls alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from jgraph import _compat
from jgraph._compat import Atom, Jaxpr, Literal, Var
from jgraph.graph.rows.rows import primitive
from jgraph.graph.tracing.inline import inline_calls


@final
class Alone:
    """A traced function over flat arrays; call it inside a traced function.

    All calls of one object are one piece of code: lowered once, compiled once per task.

    Args:
      name: of the function, for people.
      jaxpr: open, without Refs.
      consts: the values of its ``constvars``; they become operands of the call.

    Attributes:
      operands: of the arguments those that the results depend on; a call is given all.

    Example:
      >>> import jax.numpy as jnp
      >>> twice = alone("twice", lambda x, y: [x * 2], jnp.ones(3), jnp.ones(1000))
      >>> twice.operands
      (0,)
      >>> twice([jnp.ones(3), jnp.ones(1000)])[0].tolist()
      [2.0, 2.0, 2.0]
    """

    __slots__ = ("_body", "_consts", "_name", "operands")

    def __init__(self, name: str, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        equations = needed_for(jaxpr.outvars, jaxpr.eqns)
        used = {v for e in equations for v in e.invars if isinstance(v, Var)}
        used |= {v for v in jaxpr.outvars if isinstance(v, Var)}
        operands = [
            (v, c) for v, c in zip(jaxpr.constvars, consts, strict=True) if v in used
        ]
        self.operands = tuple(n for n, v in enumerate(jaxpr.invars) if v in used)
        self._name = name
        self._consts = [value for _, value in operands]
        self._body = _compat.build_jaxpr(
            invars=[
                *(v for v, _ in operands),
                *(jaxpr.invars[n] for n in self.operands),
            ],
            outvars=jaxpr.outvars,
            equations=equations,
        )

    def __call__(self, args: Sequence[Any], label: str = "") -> list[Any]:
        """Returns the results; ``label`` names this call, for people."""
        operands = [args[n] for n in self.operands]
        results: list[Any] = alone_p.bind(
            *self._consts,
            *operands,
            body=self._body,
            name=self._name,
            label=label or self._name,
        )
        return results


def alone(name: str, fn: Callable[..., Sequence[Any]], *args: Any) -> Alone:
    """Returns a function of flat arrays, traced for arguments of these types."""
    jaxpr, consts, _ = _compat.make_jaxpr(fn, *args)
    flat = inline_calls(jaxpr, consts)
    return Alone(name, flat.jaxpr, flat.consts)


def needed_for(outvars: Sequence[Atom], equations: Sequence[Any]) -> list[Any]:
    """Returns the equations that results are computed by, in order."""
    needed = {v for v in outvars if not isinstance(v, Literal)}
    found = []
    for equation in reversed(equations):
        if equation.effects or any(v in needed for v in equation.outvars):
            found.append(equation)
            needed.update(v for v in equation.invars if isinstance(v, Var))
    return found[::-1]


def _run(*args: Any, body: Jaxpr, name: str, label: str) -> list[Any]:
    del name, label
    results: list[Any] = jax.core.eval_jaxpr(body, (), *args)
    return results


alone_p = primitive(
    "alone", _run, lambda *_, body, **__: [v.aval for v in body.outvars]
)
