"""Horizontal vectorization of updates: one flat computation for variables alike.

An optimizer does the same to each element of each parameter. Where the new values of
many small variables are computed by equal elementwise operations on values of their
own shapes, and on single numbers, these variables can lie in one flat array, and the
operations run on it once. What an executable takes and gives is then one array for all
of them: arguments and results of XLA cost microseconds each.

The new value of each variable has a ``form``: its operations with the shapes left out,
the single numbers by what they are, and its leaves (old values of variables, inputs of
the segment) by where they occur first. Variables of one form are a ``LaneGroup``.
"""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Literal, Var
from jgraph.plan.program.nodes import PACKABLE
from jgraph.plan.program.types import is_key

SMALL_BYTES: Final = 16 << 10
"""Of a variable that is worth to be packed; for larger ones a copy costs more."""

LEAST: Final = 8
"""Variables of a group; with fewer there is little to be had."""

_DEEPEST: Final = 64
"""Operations in a row, from a new value back; optimizers have some twenty."""

_ELEMENTWISE: Final = frozenset(
    {
        *("abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "copy", "copy_p"),
        *("convert_element_type", "div", "eq", "erf", "exp", "exp2", "expm1", "floor"),
        *("ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic"),
        *("lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "round"),
        *("reduce_precision", "rsqrt", "select_n", "sign", "sqrt", "square"),
        *("stop_gradient", "sub", "tanh", "xor"),
    }
)

Run: TypeAlias = tuple[int, ...]
"""Variables that lie in one flat array, in order."""

Operand: TypeAlias = tuple[Any, ...]
"""``("leaf", n)``, ``("step", n)``, ``("number", n)`` or ``("literal", its value)``."""


@final
@dataclass(frozen=True, slots=True)
class LaneGroup:
    """Variables whose new values are computed alike.

    Attributes:
      variables: that are written, in order.
      leaves: what the form takes; of each, the variable (its old value) or the input of
        the segment that every variable has there.
      steps: the form: an equation of the first variable, and its operands.
      result: the operand that is the new value.
      numbers: the single numbers that operands name, by their number.
    """

    variables: Run
    leaves: tuple[Run | tuple[Var, ...], ...]
    steps: tuple[tuple[Equation, tuple[Operand, ...]], ...]
    result: Operand
    numbers: Mapping[int, Var]

    def runs(self) -> list[Run]:
        """Returns the variables that lie together: those written, and of each leaf."""
        taken = [x for x in self.leaves if isinstance(x[0], int)]
        return list(dict.fromkeys([self.variables, *taken]))

    def input_packs(self) -> list[tuple[Var, ...]]:
        """Returns the inputs that lie together, of each leaf."""
        return [x for x in self.leaves if not isinstance(x[0], int)]


def lane_groups(
    equations: Sequence[Equation],
    reads: Mapping[Var, int],
    written: Mapping[int, Atom],
    inputs: Sequence[Var],
) -> list[LaneGroup]:
    """Returns the groups of a segment; a variable is written by one at most.

    Args:
      equations: of the segment, in order, but for reads and writes of variables.
      reads: values that are old values of variables.
      written: the new values of variables.
      inputs: values from outside.
    """
    forms = _Forms(equations, reads, frozenset(inputs))
    alike: dict[Hashable, list[tuple[int, _Form]]] = {}
    for variable, atom in written.items():
        if _is_small(atom) and (form := forms.form(atom)) is not None:
            alike.setdefault(form.key, []).append((variable, form))
    groups = [
        _group(sorted(members, key=lambda member: member[0]))
        for members in alike.values()
        if len(members) >= LEAST
    ]
    return _consistent(groups, written)


def run_group(
    group: LaneGroup, leaves: Sequence[Any], number: Callable[[Var], Any]
) -> Any:
    """Returns the new values of a group's variables, flat.

    Args:
      group: says what to do.
      leaves: flat arrays.
      number: gives a single number.
    """
    size = leaves[0].shape
    results: list[Any] = []

    def value(operand: Operand, atom: Any) -> Any:
        match operand[0]:
            case "leaf":
                return leaves[operand[1]]
            case "step":
                return results[operand[1]]
            case "number":
                return number(group.numbers[operand[1]])
            case _:
                return atom.val if isinstance(atom, Literal) else None

    for equation, operands in group.steps:
        values = [
            value(operand, atom)
            for operand, atom in zip(operands, equation.invars, strict=True)
        ]
        if equation.primitive.name == "broadcast_in_dim":
            results.append(jnp.broadcast_to(values[0], size))
        else:
            results += _compat.run_equation(equation, values)
    result = value(group.result, None)
    return jnp.broadcast_to(result, size)


def _is_small(atom: Atom) -> bool:
    aval: Any = atom.aval
    plain = not isinstance(atom, Literal) and not is_key(aval) and aval.shape != ()
    return bool(
        plain
        and aval.dtype.name in PACKABLE
        and 0 < aval.size * aval.dtype.itemsize <= SMALL_BYTES
    )


@final
@dataclass(frozen=True, slots=True)
class _Form:
    """How one new value is computed."""

    key: Hashable
    leaves: tuple[Var | int, ...]
    steps: tuple[tuple[Equation, tuple[Operand, ...]], ...]
    result: Operand
    numbers: Mapping[int, Var]


class _NoForm(Exception):  # noqa: N818  # says that a value is computed otherwise
    """A value is not computed element by element."""


@dataclass(slots=True)
class _Forms:
    """Forms of the values of a segment.

    Equal numbers count as one: an optimizer computes its rates for each leaf again.
    """

    equations: Sequence[Equation]
    reads: Mapping[Var, int]
    inputs: frozenset[Var]
    maker: dict[Var, Equation] = field(default_factory=dict)
    _known: dict[Var, int] = field(default_factory=dict)
    _names: dict[Hashable, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # In program order, so that what a number follows from is known before.
        for equation in self.equations:
            self.maker |= dict.fromkeys(equation.outvars, equation)
            for var in equation.outvars:
                if var.aval.shape == ():
                    self.number(var)

    def form(self, atom: Atom) -> _Form | None:
        """Returns the form of a new value; None if it is not elementwise."""
        aval: Any = atom.aval
        walk = _Walk(self, aval.shape)
        try:
            result = walk.operand(atom)
        except _NoForm:
            return None
        if not walk.leaves:
            return None
        # Leaves that are variables and leaves that come from outside differ in kind.
        kinds = tuple(
            (type(leaf), dtype)
            for leaf, dtype in zip(walk.leaves, walk.dtypes, strict=True)
        )
        key = tuple(walk.keys), result, kinds, aval.dtype.name
        leaves = tuple(walk.leaves)
        return _Form(key, leaves, tuple(walk.steps), result, walk.numbers)

    def number(self, var: Var) -> int:
        """Returns what equal single numbers have in common."""
        if var not in self._known:
            self._known[var] = self._names.setdefault(self._name(var), len(self._names))
        return self._known[var]

    def _name(self, var: Var) -> Hashable:
        """Returns what tells a single number; those before it have theirs."""
        if var in self.reads:
            return "read", self.reads[var]
        equation = self.maker.get(var)
        if equation is None or len(equation.outvars) != 1 or equation.effects:
            return "value", var
        operands = []
        for atom in equation.invars:
            if isinstance(atom, Literal):
                operands.append(_literal(atom))
            elif atom.aval.shape == () and not _compat.is_ref(atom.aval):
                operands.append(("number", self.number(atom)))
            else:
                return "value", var
        params = _params(equation)
        return ("value", var) if params is None else (params, tuple(operands))


@dataclass(slots=True)
class _Walk:
    """The way from a new value back to what it is computed of."""

    forms: _Forms
    shape: tuple[int, ...]
    leaves: list[Var | int] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    steps: list[tuple[Equation, tuple[Operand, ...]]] = field(default_factory=list)
    keys: list[Hashable] = field(default_factory=list)
    numbers: dict[int, Var] = field(default_factory=dict)
    _operands: dict[Var, Operand] = field(default_factory=dict)
    _depth: int = 0

    def operand(self, atom: Atom) -> Operand:
        if isinstance(atom, Literal):
            return _literal(atom)
        if atom not in self._operands:
            self._operands[atom] = self._new(atom)
        return self._operands[atom]

    def _new(self, var: Var) -> Operand:
        forms = self.forms
        aval: Any = var.aval
        if aval.shape == ():
            number = forms.number(var)
            self.numbers.setdefault(number, var)
            return "number", number
        if var in forms.reads:
            return self._leaf(forms.reads[var], var)
        if var in forms.inputs:
            return self._leaf(var, var)
        equation = forms.maker.get(var)
        self._depth += 1
        if equation is None or self._depth > _DEEPEST or not self._fits(equation):
            raise _NoForm
        operands = tuple(self.operand(atom) for atom in equation.invars)
        self._depth -= 1
        self.steps.append((equation, operands))
        self.keys.append((_params(equation), operands, aval.dtype.name))
        return "step", len(self.steps) - 1

    def _leaf(self, leaf: Var | int, var: Var) -> Operand:
        aval: Any = var.aval
        if aval.shape != self.shape or aval.dtype.name not in PACKABLE:
            raise _NoForm
        if leaf not in self.leaves:
            self.leaves.append(leaf)
            self.dtypes.append(aval.dtype.name)
        return "leaf", self.leaves.index(leaf)

    def _fits(self, equation: Equation) -> bool:
        name = equation.primitive.name
        avals: list[Any] = [atom.aval for atom in equation.invars]
        shapes = {aval.shape for aval in avals} - {()}
        result: Any = equation.outvars[0].aval
        if result.shape != self.shape:
            return False
        if name == "broadcast_in_dim":
            return not shapes and len(equation.invars) == 1
        known = name in _ELEMENTWISE and _params(equation) is not None
        return known and shapes == {self.shape}


def _literal(atom: Literal) -> Operand:
    aval: Any = atom.aval
    if aval.shape != ():
        raise _NoForm
    value = np.asarray(atom.val).tobytes()
    return "literal", aval.dtype.name, value, bool(aval.weak_type)


def _params(equation: Equation) -> Hashable | None:
    """Returns an operation without the shapes of its values; None: nobody can tell."""
    leave_out = {"shape", "broadcast_dimensions"}
    broadcast = equation.primitive.name == "broadcast_in_dim"
    params = tuple(
        (name, value)
        for name, value in sorted(equation.params.items())
        if not (broadcast and name in leave_out)
    )
    try:
        hash(params)
    except TypeError:
        return None
    return equation.primitive, getattr(equation, "ctx", None), params


def _group(members: Sequence[tuple[int, _Form]]) -> LaneGroup:
    first = members[0][1]
    leaves: Any = tuple(zip(*(form.leaves for _, form in members), strict=True))
    variables = tuple(variable for variable, _ in members)
    return LaneGroup(variables, leaves, first.steps, first.result, first.numbers)


def _consistent(
    groups: Sequence[LaneGroup], written: Container[int]
) -> list[LaneGroup]:
    """Returns groups in which a variable always has the same neighbours.

    A variable lies in one flat array: who takes it takes all of that array, and who
    writes it writes all of it.
    """
    chosen: list[LaneGroup] = []
    runs: dict[int, Run] = {}
    for group in sorted(groups, key=lambda g: -len(g.variables)):
        wanted = group.runs()
        apart = sum(map(len, wanted)) == len({v for run in wanted for v in run})
        if apart and all(runs.get(v, run) == run for run in wanted for v in run):
            chosen.append(group)
            runs |= {v: run for run in wanted for v in run}
    while True:
        whole = {group.variables for group in chosen}
        sound = [
            group
            for group in chosen
            if all(
                run in whole or not any(v in written for v in run)
                for run in group.runs()
            )
        ]
        if len(sound) == len(chosen):
            return chosen
        chosen = sound
