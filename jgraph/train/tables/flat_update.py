"""Backward slices of an optimizer's update: some of its results, and what they need.

An optimizer computes each parameter for itself, as a rule. What one of them becomes is
then a small part of the update, and that alone is compiled and looked at.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.graph.tracing.inline import inline_calls

Run: TypeAlias = Callable[[Sequence[Any]], list[jax.Array]]
"""Takes all operands, and computes some results."""


@final
@dataclass(frozen=True, slots=True)
class FlatUpdate:
    """A function of arrays whose first operands are what its results replace.

    Attributes:
      jaxpr: without calls.
      consts: the values of its ``constvars``.

    Example:
      >>> def update(w, n, gradient):
      ...     return w - gradient / (n + 1), n + 1
      >>> flat = FlatUpdate.traced(update, [1.0, 0.0, 2.0])
      >>> [f"{bits:b}" for bits in flat.needs()]
      ['111', '10']
      >>> [x.item() for x in flat.of([1])([1.0, 4.0, 2.0])]
      [5.0]
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]

    @classmethod
    def traced(
        cls, fn: Callable[..., Sequence[Any]], operands: Sequence[Any]
    ) -> "FlatUpdate":
        """Returns a function as it computes on operands of these types."""
        jaxpr, consts, _ = _compat.make_jaxpr(fn, *operands)
        flat = inline_calls(jaxpr, consts)
        return cls(flat.jaxpr, flat.consts)

    def needs(self) -> list[int]:
        """Returns the operands that each result follows from: bits of a number.

        So one pass serves all results.
        """
        bits = {var: 1 << n for n, var in enumerate(self.jaxpr.invars)}
        for equation in self.jaxpr.eqns:
            found = 0
            for var in _vars(equation.invars):
                found |= bits.get(var, 0)
            bits.update(dict.fromkeys(equation.outvars, found))
        return [
            0 if isinstance(atom, Literal) else bits.get(atom, 0)
            for atom in self.jaxpr.outvars
        ]

    def operations(self, *, numbers: bool) -> list[str]:
        """Returns what is computed, in order, without the sizes of arrays.

        Args:
          numbers: with the numbers that are written into it.
        """
        return _operations(self.jaxpr, numbers=numbers)

    def slice(self, results: Sequence[int]) -> Jaxpr:
        """Returns the jaxpr of some results, with all operands."""
        outvars = [self.jaxpr.outvars[n] for n in results]
        return _compat.build_jaxpr(
            constvars=self.jaxpr.constvars,
            consts=self.consts,
            invars=self.jaxpr.invars,
            outvars=outvars,
            equations=makers_of(self.jaxpr, outvars),
        )

    def of(self, results: Sequence[int]) -> Run:
        """Returns what computes some results; each has the type of its operand."""
        jaxpr = self.slice(results)

        def run(operands: Sequence[Any]) -> list[jax.Array]:
            values = jax.core.eval_jaxpr(jaxpr, self.consts, *operands)
            olds = (jnp.asarray(operands[n]) for n in results)
            return [
                value if value.dtype == old.dtype else value.astype(old.dtype)
                for value, old in zip(values, olds, strict=True)
            ]

        return run

    def computes_alike(self, other: "FlatUpdate", results: Sequence[int]) -> bool:
        """Whether both compute some results by the same operations on operands.

        Of two that are told apart by nothing here, the results are the same, bit by
        bit, if the operands are.
        """
        return _Alike(
            dict(zip(self.jaxpr.constvars, self.consts, strict=True)),
            dict(zip(other.jaxpr.constvars, other.consts, strict=True)),
            dict(zip(self.jaxpr.invars, other.jaxpr.invars, strict=True)),
        ).jaxprs(self.slice(results), other.slice(results))


def _operations(jaxpr: Jaxpr, *, numbers: bool) -> list[str]:
    texts = []
    for equation in jaxpr.eqns:
        literals = [a.val for a in equation.invars if isinstance(a, Literal)]
        texts.append(f"{equation.primitive.name} {literals if numbers else ''}")
        for _, body in _compat.inner_jaxprs(equation):
            texts += _operations(_compat.open_jaxpr(body), numbers=numbers)
    return texts


def makers_of(jaxpr: Jaxpr, atoms: Sequence[Atom]) -> list[Equation]:
    """Returns the equations that some values follow from, in program order."""
    needed = set(_vars(atoms))
    equations = []
    for equation in reversed(jaxpr.eqns):
        if any(var in needed for var in equation.outvars):
            equations.append(equation)
            needed.update(_vars(equation.invars))
    return equations[::-1]


_MOST_COMPARED: Final = 4096
"""Elements of a constant; larger ones are taken for different."""


@final
@dataclass(frozen=True, slots=True)
class _Alike:
    """A comparison of two jaxprs, whose values have other names.

    Attributes:
      consts: the constants of one.
      other_consts: those of the other.
      names: what a value of one is called in the other.
    """

    consts: dict[Var, Any]
    other_consts: dict[Var, Any]
    names: dict[Var, Var]

    def jaxprs(self, one: Jaxpr, other: Jaxpr) -> bool:
        if len(one.eqns) != len(other.eqns):
            return False
        pairs = zip(one.eqns, other.eqns, strict=True)
        return all(self._equations(a, b) for a, b in pairs) and self._atoms(
            one.outvars, other.outvars
        )

    def _equations(self, one: Equation, other: Equation) -> bool:
        same = (
            one.primitive is other.primitive
            and len(one.outvars) == len(other.outvars)
            and self._atoms(one.invars, other.invars)
            and _same_params(one.params, other.params)
        )
        self.names.update(zip(one.outvars, other.outvars, strict=False))
        return same

    def _atoms(self, one: Sequence[Atom], other: Sequence[Atom]) -> bool:
        return len(one) == len(other) and all(map(self._atom, one, other))

    def _atom(self, one: Atom, other: Atom) -> bool:
        if str(one.aval) != str(other.aval):
            return False
        if isinstance(one, Literal):
            return isinstance(other, Literal) and _same_array(one.val, other.val)
        if isinstance(other, Literal):
            return False
        if one in self.consts:
            known = other in self.other_consts
            return known and _same_array(self.consts[one], self.other_consts[other])
        return self.names.get(one) is other


def _same_params(one: dict[str, Any], other: dict[str, Any]) -> bool:
    # Bodies of loops are traced anew each time: what they print as tells them.
    return one.keys() == other.keys() and all(
        bool(a is b) or str(a) == str(b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _same_array(one: Any, other: Any) -> bool:
    if one is other:
        return True
    a, b = np.asarray(one), np.asarray(other)
    alike = a.dtype == b.dtype and a.shape == b.shape and a.size <= _MOST_COMPARED
    return alike and a.tobytes() == b.tobytes()


def _vars(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def followed(updates: Sequence[FlatUpdate], first: Collection[int]) -> list[int]:
    """Returns the results that follow from some operands, and what these follow from.

    Over any number of steps, in each of which a result replaces the operand of its
    position.

    Args:
      updates: a step may be any of these.
      first: positions of operands.
    """
    columns = zip(*(update.needs() for update in updates), strict=True)
    needs = [reduce(or_, each) for each in columns]
    found, before = sum(1 << n for n in first), -1
    while found != before:
        before = found
        for n, needed in enumerate(needs):
            if needed & found:
                found |= 1 << n
    todo = [n for n in range(len(needs)) if found >> n & 1]
    numbers = set(todo)
    while todo:
        needed = needs[todo.pop()]
        new = {n for n in range(len(needs)) if needed >> n & 1} - numbers
        numbers |= new
        todo += new
    return sorted(numbers)
