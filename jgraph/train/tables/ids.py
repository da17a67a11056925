"""Ids of lookups: their computation from the batch, and checks of bad ones."""

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph._compat import Atom, Equation, Var
from jgraph.graph.rows.find_keys import find_keys_p
from jgraph.graph.rows.rows import LEAST_ID, NO_ID, Part
from jgraph.train.tables.flat_update import makers_of

OF_BAGS = "jgraph_bags"
"""Name of the scope of lookups in which places may have no id."""
_PARTS = {"slice", "rev", "transpose", "copy", "copy_p", "broadcast_in_dim"}


def usable_ids(
    ids: jax.Array, rows: int, mode: str, *, of_bags: bool = False
) -> jax.Array:
    """Returns ids as int32[n] for ``unique_rows``.

    Args:
      ids: as the loss has them.
      rows: of the table.
      mode: of the lookup.
      of_bags: ``NO_ID`` is none. Elsewhere it is an id like others, out of range.

    Example:
      >>> usable_ids(jnp.array([[3, 9]]), 5, "clip").tolist()
      [3, 4]
      >>> usable_ids(jnp.array([3, 9]), 5, "drop").tolist()
      [3, -2147483648]
    """
    ids = wide_ids(ids.reshape(-1))
    if mode == "clip":
        return jnp.clip(ids, 0, rows - 1).astype(jnp.int32)
    if mode == "drop":
        is_usable = (ids >= 0) & (ids < rows)
        return jnp.where(is_usable, ids, NO_ID).astype(jnp.int32)
    if ids.dtype.itemsize > 4:
        # Beyond int32 an id would come back as a small one.
        ids = jnp.where((ids > rows) | (ids < NO_ID), rows, ids)
    ids = ids.astype(jnp.int32)
    return ids if of_bags else without_no_id(ids)


def without_no_id(ids: jax.Array) -> jax.Array:
    """Returns ids of which none is taken for no id: ``LEAST_ID`` is as wrong.

    Example:
      >>> without_no_id(jnp.array([3, -(2**31)])).tolist()
      [3, -2147483647]
    """
    return jnp.where(ids == NO_ID, LEAST_ID, ids)


def wide_ids(ids: jax.Array) -> jax.Array:
    """Returns ids as signed numbers of 32 bits or more, each as large as it was.

    uint32 beyond int32 is past the last row of every table and stays so, as the largest
    int32.

    Example:
      >>> wide_ids(jnp.array([7, 255], "uint8")).tolist()
      [7, 255]
      >>> wide_ids(jnp.array([7, 2**32 - 1], "uint32")).tolist()
      [7, 2147483647]
    """
    if ids.dtype in (jnp.int32, jnp.int64):
        return ids
    if ids.dtype in (jnp.uint32, jnp.uint64):
        dtype = jnp.int32 if ids.dtype == jnp.uint32 else jnp.int64
        most = np.iinfo(dtype).max
        return jnp.where(ids > most, most, ids).astype(dtype)
    return ids.astype(jnp.int32)


def first_bad_id(ids: jax.Array, rows: int) -> jax.Array:
    """Returns the first of int32[n] ids that has no row, else ``NO_ID``.

    Example:
      >>> first_bad_id(jnp.array([3, 9, -1]), 5).item()
      9
    """
    bad = (ids != NO_ID) & ((ids < 0) | (ids >= rows))
    return jnp.where(bad.any(), ids[jnp.argmax(bad)], NO_ID)


@final
class Ids:
    """What the ids of lookups are made from."""

    def __init__(self, jaxpr: Any, first_feed: int) -> None:
        self._jaxpr = jaxpr
        self._makers = {v: e for e in jaxpr.eqns for v in e.outvars}
        self._inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        self._first_feed = first_feed

    def raw(self, index: Atom, mode: str) -> Atom:
        """Returns the ids behind an index.

        Args:
          index: of a gather.
          mode: of the lookup. Where ids out of range are errors, negative ones are:
            they are those before negative ones were counted from the end.
        """
        atom = self._before_reshape(index)
        return (self._before_wrap(atom) if mode == "error" else None) or atom

    def keys(self, ids: Atom) -> "Atom | None":
        """Returns the keys, uint32[…, 2], that ids are the rows of in a hash table."""
        equation = self._maker(self._before_reshape(ids))
        is_hashed = equation is not None and equation.primitive is find_keys_p
        return equation.invars[1] if equation is not None and is_hashed else None

    def _maker(self, atom: Atom) -> Equation | None:
        return self._makers.get(atom) if isinstance(atom, Var) else None

    def _before_reshape(self, atom: Atom) -> Atom:
        equation = self._maker(atom)
        while equation is not None and _is_reshape(equation):
            atom = equation.invars[0]
            equation = self._maker(atom)
        return atom

    def _before_wrap(self, atom: Atom) -> "Atom | None":
        """Returns x of ``select_n(x < 0, x, x + rows)``, as JAX's indexing writes."""
        select = self._maker(atom)
        if select is None or select.primitive.name != "select_n":
            return None
        test, plain, wrap = select.invars
        less, add = self._maker(test), self._maker(wrap)
        is_wrap = (
            less is not None
            and add is not None
            and (less.primitive.name, add.primitive.name) == ("lt", "add")
            and less.invars[0] is plain
            and add.invars[0] is plain
        )
        return plain if is_wrap else None

    def inputs(self, atoms: Sequence[Atom]) -> tuple[list[Equation], list[int]]:
        """Returns the equations and the operands that values are made from."""
        equations = makers_of(self._jaxpr, atoms)
        needs = {v for e in equations for v in e.invars if isinstance(v, Var)}
        needs |= {v for v in atoms if isinstance(v, Var)}
        return equations, sorted(i for v, i in self._inputs.items() if v in needs)

    def feed(self, ids: Atom) -> int | None:
        """Returns of which feed ids are elements, as they come; None: of none."""
        equation = self._maker(ids)
        while equation is not None and (_is_reshape(equation) or _is_part(equation)):
            ids = equation.invars[0]
            equation = self._maker(ids)
        return self._feed(ids)

    def fed_part(self, ids: Atom) -> tuple[int, Part] | None:
        """Returns the feed of which ids are elements, and the part that is ids.

        None: they are computed, or what is ids has holes.
        """
        part: Part | None = None  # all of it
        equation = self._maker(ids)
        while equation is not None and (_is_reshape(equation) or _is_part(equation)):
            if part is not None or equation.primitive.name == "slice":
                part = _part_before(equation, part)
                if part is None:
                    return None
            ids = equation.invars[0]
            equation = self._maker(ids)
        feed = self._feed(ids)
        if feed is None:
            return None
        whole = tuple((0, size) for size in _compat.array_type(ids).shape)
        return feed, whole if part is None else part

    def whole_feed(self, ids: Atom) -> int | None:
        """Returns of which feed ids are all elements, in order; None: of none."""
        return self._feed(self._before_reshape(ids))

    def _feed(self, atom: Atom) -> int | None:
        number = self._inputs.get(atom, -1) if isinstance(atom, Var) else -1
        return number - self._first_feed if number >= self._first_feed else None

    def refused(self, ids: Atom) -> str | None:
        """Returns why rows cannot be looked up by these ids beforehand, or None."""
        _, inputs = self.inputs([ids])
        if any(i < self._first_feed for i in inputs):
            return "its ids follow from parameters or state, not from the batch alone"
        return None if inputs else "its ids are the same in every step"

    def feature(self, ids: Atom, feeds: Sequence[str]) -> str:
        """Returns the names of the feeds that ids come from."""
        _, inputs = self.inputs([ids])
        names = dict.fromkeys(feeds[i - self._first_feed] for i in inputs)
        return " and ".join(names)

    def sliced(self, ids: Sequence[Atom], consts: Any) -> tuple[Any, list[int]]:
        """Returns the jaxpr of the ids alone, and which feeds it takes."""
        equations, inputs = self.inputs(ids)
        jaxpr = _compat.build_jaxpr(
            constvars=self._jaxpr.constvars,
            consts=consts,
            invars=[self._jaxpr.invars[i] for i in inputs],
            outvars=ids,
            equations=equations,
        )
        return jaxpr, [i - self._first_feed for i in inputs]


def _is_reshape(equation: Equation) -> bool:
    """Whether elements stay as they are, in their order."""
    if equation.primitive.name in ("reshape", "squeeze", "expand_dims"):
        return True
    if equation.primitive.name == "convert_element_type":
        source, target = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        return all(np.can_cast(source, dtype) for dtype in (np.int32, target))
    if equation.primitive.name != "broadcast_in_dim":
        return False
    source, target = equation.invars[0].aval, equation.outvars[0].aval
    return bool(math.prod(source.shape) == math.prod(target.shape))


def _part_before(equation: Equation, part: Part | None) -> Part | None:
    """Returns the part of an operand that a part of the result is made of.

    None: it is none that has a beginning and an end along each axis.

    Args:
      equation: a slice, or one whose results are the elements of its operand.
      part: of its result; None: all of it.
    """
    params = equation.params
    match equation.primitive.name:
        case "slice" if all(n == 1 for n in params["strides"] or ()):
            begins = params["start_indices"]
            if part is None:
                part = tuple((0, n) for n in equation.outvars[0].aval.shape)
            return tuple(
                (at + start, at + end)
                for at, (start, end) in zip(begins, part, strict=True)
            )
        case "squeeze" if part is not None:
            rest, ones = iter(part), params["dimensions"]
            axes = range(equation.invars[0].aval.ndim)
            return tuple((0, 1) if n in ones else next(rest) for n in axes)
        case "convert_element_type" | "copy" | "copy_p":
            return part
    return None


def _is_part(equation: Equation) -> bool:
    """Whether each element is one of the operand."""
    return equation.primitive.name in _PARTS
