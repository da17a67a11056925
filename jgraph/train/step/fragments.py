"""Fragments of a model: parameters that are exchanged in turn, and mixed in later.

A round is cut into as many exchanges as there are fragments, one after each piece of
its steps. Each is of one fragment alone, so the most bytes at once fall by their
number. What comes of an exchange is mixed into a worker's parameters some steps later,
and the worker computes meanwhile.

Fragments are ranges of bytes of the model, its parameters one after the other, cut
between rows. Which is exchanged follows from the number of the update alone, so nobody
has to agree on it.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
Distributed Free Lunch", 2025.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.graph.rows.rows import NO_ID, unique_rows
from jgraph.graph.tracing.alone import alone
from jgraph.graph.variable import Variable
from jgraph.train.model.trees import Tree, path_of
from jgraph.train.tables.row_step import Rows
from jgraph.view.units import count_text

Carry: TypeAlias = tuple[Tree, Tree, Tree]
"""Parameters, the state of the optimizer, and the model's state, between two steps."""

Take: TypeAlias = Callable[[Carry, Any, Any], tuple[Carry, Any]]
"""Takes some steps: of (carry, batches, seeds); returns also what is told of each."""


def fragment_rows(
    sizes: Sequence[tuple[int, int]], count: int
) -> tuple[tuple[int, ...], ...]:
    """Returns, of each parameter, the row at which each fragment begins, and the end.

    Args:
      sizes: of each parameter its rows, and the bytes of one.
      count: how many fragments there are.

    Example:
      >>> fragment_rows([(4, 100), (2, 200)], 2)
      ((0, 4, 4), (0, 0, 2))
      >>> fragment_rows([(3, 8), (1, 8)], 4)
      ((0, 1, 2, 3, 3), (0, 0, 0, 0, 1))
    """
    total = sum(rows * nbytes for rows, nbytes in sizes)
    bounds, before = [], 0
    for rows, nbytes in sizes:
        # A row is of the fragment in which its first byte is.
        firsts = [
            math.ceil((number * total - before * count) / (nbytes * count))
            for number in range(count)
        ]
        bounds.append((*(min(max(first, 0), rows) for first in firsts), rows))
        before += rows * nbytes
    return tuple(bounds)


def due_in(number: Any, count: int) -> Any:
    """Returns which fragment an update is of.

    Args:
      number: of the update, from 0; an int, or int32 in a graph.
      count: how many fragments there are.
    """
    return number % count


def newest_before(number: Any, count: int) -> Any:
    """Returns which fragment the update before one was of; see ``due_in``."""
    return (number + count - 1) % count


def has_missed(expected: Any, number: Any) -> Any:
    """Returns whether a worker has not read all updates before one, and reads all now.

    Args:
      expected: the update that it contributes to next; 0: it has nothing yet.
      number: of the update that is due.
    """
    return (expected == 0) | (expected != number)


@final
class Fragments:
    """The fragments of a model, and what each worker has for them.

    A worker has its own parameters and those that it read last, both of the size of the
    model; and the number of the update that it contributes to next. One that has missed
    an update, or has nothing yet, reads all and begins there.

    Args:
      params: of the model, or their shapes and dtypes.
      state: of the model, likewise.
      count: how many fragments there are.
      overlap: steps that a worker takes before it mixes in what came of an exchange.
      mix: how much of its own parameters it keeps then, 0 to 1.
      make: makes a variable of a worker, zeros at first, of (name, shape, dtype).

    Raises:
      ConfigError: there are more fragments than the model can be cut into.
    """

    def __init__(
        self,
        params: Tree,
        state: Tree,
        count: int,
        overlap: int,
        mix: float,
        make: Callable[[str, tuple[int, ...], Any], Variable],
    ) -> None:
        self.count = count
        self.overlap = overlap
        self._mix = mix if overlap else 0.0
        flat = jax.tree_util.tree_flatten_with_path(params)[0]
        types = [("/".join(path_of(path)), leaf) for path, leaf in flat]
        sizes = [
            (leaf.shape[0], math.prod(leaf.shape[1:]) * leaf.dtype.itemsize)
            for _, leaf in types
            if _is_cut(leaf)
        ]
        self._bounds = fragment_rows(sizes, count)
        if (most := _most(self._bounds, sizes)) < count:
            raise ConfigError(
                f"fragments={count}, and the parameters of this model can be cut into "
                f"{most} between their rows; write fragments={most} or fewer"
            )
        self.most = [
            max(end - begin for begin, end in pairwise(each)) for each in self._bounds
        ]
        """Of each parameter that is cut, rows of a fragment at most."""
        self._mine = [make(f"local/{n}", x.shape, x.dtype) for n, x in types]
        self._base = [make(f"base/{n}", x.shape, x.dtype) for n, x in types]
        self._next = make("next", (), jnp.int32)
        self._state: list[Variable] = []
        if overlap:
            leaves = jax.tree_util.tree_flatten_with_path(state)[0]
            self._state = [
                make(f"state/{'/'.join(path_of(path))}", x.shape, x.dtype)
                for path, x in leaves
            ]

    @property
    def variables(self) -> list[Variable]:
        """What each worker has for them."""
        return [*self._mine, *self._base, *self._state, self._next]

    @property
    def note(self) -> str:
        """Words for a line of the plan."""
        later = ""
        if self.overlap:
            later = f", and mixed in after {count_text(self.overlap, 'step')}"
        return (
            f"one of {self.count} fragments of the parameters is exchanged in each "
            f"update{later}"
        )

    def steps(
        self,
        take: Take,
        inner: Tree,
        begin: Callable[[Tree], Tree],
        tree: Tree,
        inputs: Callable[..., tuple[Any, Any]],
        feeds: Sequence[Any],
    ) -> "Piece":
        """Returns what the steps before an exchange come to; called inside a graph.

        Args:
          take: takes steps.
          inner: the state of the optimizer that the worker has.
          begin: gives that with which it begins on parameters that it reads.
          tree: the variables of the model on their tasks.
          inputs: makes of the feeds the batches of the steps, ``[steps, …]``, and their
            seeds, int32[steps].
          feeds: what the worker is given.
        """
        variables, params_tree = jax.tree.flatten(tree["params"])
        with device("/job:worker"):
            mine = [v[...] for v in self._mine]
            own = jax.tree.unflatten(params_tree, mine)
            ahead = self._ahead(take, own, inner, tree["state"], inputs, feeds)
        number = tree["global_step"][...]
        state = jax.tree.map(lambda v: v[...], tree["state"])
        with device("/job:worker"):
            joins = has_missed(self._next[...], number)
            newest = newest_before(number, self.count)
            asked = self._rows(variables, newest, joins)
        read = [
            variable[...] if rows is None else variable[rows[0].unique]
            for variable, rows in zip(variables, asked, strict=True)
        ]
        with device("/job:worker"):
            old = (own, inner, state) if ahead is None else ahead[0]
            leaves = zip(jax.tree.leaves(old[0]), asked, read, strict=True)
            params = jax.tree.unflatten(
                params_tree, [self._mixed(joins, *each) for each in leaves]
            )
            places = zip(self._base, asked, read, strict=True)
            base = [_placed(v[...], *each) for v, *each in places]
            now = params, begin(params), state
            if ahead is None:
                carry, results = take(now, *inputs(*feeds))
            else:
                mixed = jax.tree.map(
                    lambda a, b: self._mix_of(a, b) if _is_real(a) else a, old[2], state
                )
                carry, before = jax.lax.cond(
                    joins,
                    lambda: take(now, *self._cut(inputs(*feeds), 0)),
                    lambda: ((params, old[1], mixed), ahead[1]),
                )
                carry, after = take(carry, *self._cut(inputs(*feeds), 1))
                both = lambda a, b: jnp.concatenate([a, b])
                results = jax.tree.map(both, before, after)
            new = jax.tree.leaves(carry[0])
            values = [*new, *base, *(jax.tree.leaves(carry[2]) if self._state else [])]
            for variable, value in zip(self.variables[:-1], values, strict=True):
                variable[...] = value
            self._next[...] = number + 1
            due_now = self._rows(variables, due_in(number, self.count))
            way = [
                a - b if rows is None else rows_at(a, rows[1]) - rows_at(b, rows[1])
                for a, b, rows in zip(base, new, due_now, strict=True)
            ]
            rows_of = {
                variable.name: rows[0]
                for variable, rows in zip(variables, due_now, strict=True)
                if rows is not None
            }
        return Piece(carry, results, jax.tree.unflatten(params_tree, way), rows_of)

    def _ahead(
        self,
        take: Take,
        params: Tree,
        inner: Tree,
        state: Tree,
        inputs: Callable[..., tuple[Any, Any]],
        feeds: Sequence[Any],
    ) -> Any:
        """Returns what the steps come to that need no answer; None: there are none."""
        if not self.overlap:
            return None
        own = [variable[...] for variable in self._state]
        carry = params, inner, jax.tree.unflatten(jax.tree.structure(state), own)

        def steps(carry: Carry, *feeds: Any) -> Any:
            return take(carry, *self._cut(inputs(*feeds), 0))

        leaves, tree = jax.tree.flatten((carry, *feeds))
        results = jax.eval_shape(steps, carry, *feeds)

        def flat(*leaves: Any) -> Sequence[Any]:
            return jax.tree.leaves(steps(*jax.tree.unflatten(tree, leaves)))

        # A segment of its own, of feeds alone: one with what waits for an answer, or
        # one that takes something from such a one, would wait too.
        segment = alone("steps ahead", flat, *leaves)
        return jax.tree.unflatten(jax.tree.structure(results), segment(leaves))

    def _cut(self, inputs: Any, part: int) -> Any:
        """Returns the inputs of the steps before the answer (0), or of those after."""
        where = slice(self.overlap, None) if part else slice(self.overlap)
        return jax.tree.map(lambda x: x[where], inputs)

    def _rows(
        self, variables: Sequence[Variable], number: Any, joins: Any = None
    ) -> list[tuple[Rows, jax.Array] | None]:
        """Returns the rows of a fragment, and their places; None: it is whole.

        Args:
          variables: the parameters.
          number: of the fragment, int32.
          joins: whether it is all rows in place of these; None: it is not.
        """
        bounds, most = iter(self._bounds), iter(self.most)
        found: list[tuple[Rows, jax.Array] | None] = []
        for variable in variables:
            if not _is_cut(variable):
                found.append(None)
                continue
            rows, limits = variable.shape[0], jnp.array(next(bounds), jnp.int32)
            size = next(most)
            places = jnp.arange(size if joins is None else rows, dtype=jnp.int32)
            ids = limits[number] + places
            there = ids < limits[number + 1]
            if joins is not None:
                ids, there = jnp.where(joins, places, ids), there | joins
            unique, positions = unique_rows(
                jnp.where(there, ids, NO_ID),
                rows=rows,
                feature=variable.name,
                drop=True,
            )
            one = Rows(unique, positions, there.sum(dtype=jnp.int32))
            found.append((one, jnp.where(there, ids, rows)))
        return found

    def _mixed(self, joins: Any, own: Any, rows: Any, read: Any) -> jax.Array:
        """Returns a worker's parameter with what it read mixed in."""
        old = own if rows is None else rows_at(own, rows[1])
        return _placed(own, rows, jnp.where(joins, read, self._mix_of(old, read)))

    def _mix_of(self, own: Any, read: Any) -> Any:
        if not self._mix:
            return read
        return (self._mix * own + (1 - self._mix) * read).astype(own.dtype)


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """What the steps before an exchange come to.

    Attributes:
      carry: after the last one.
      results: of each step.
      way: how far the fragment came: rows of the parameters.
      rows: which these are, by name; of others the way is whole.
    """

    carry: Carry
    results: Any
    way: Tree
    rows: Mapping[str, Rows]


def _is_cut(leaf: Any) -> bool:
    return len(leaf.shape) > 0


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def rows_at(value: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the rows at these places; zeros for places past the last row."""
    return value.at[places].get(mode="fill", fill_value=0)


def placed_rows(
    value: jax.Array, places: jax.Array | None, new: jax.Array
) -> jax.Array:
    """Returns an array with new rows at these places; None: with all of it new."""
    return new if places is None else value.at[places].set(new, mode="drop")


def _placed(value: jax.Array, rows: Any, new: jax.Array) -> jax.Array:
    return placed_rows(value, None if rows is None else rows[1], new)


def _most(bounds: Sequence[Sequence[int]], sizes: Sequence[tuple[int, int]]) -> int:
    """Returns into how many fragments a model can be cut, if not into all of these."""
    count = len(bounds[0]) - 1 if bounds else 0
    while count > 1:
        each = fragment_rows(sizes, count)
        if all(any(p[n] < p[n + 1] for p in each) for n in range(count)):
            break
        count -= 1
    return max(count, 1)


def check_slots(variables: Sequence[Variable], groups: Sequence[str]) -> None:
    """Refuses an optimizer of updates that keeps no row for each of a parameter's.

    Args:
      variables: of a run.
      groups: of each the parameter that it belongs to, or its own name.

    Raises:
      ConfigError: names what it keeps.
    """
    shapes = {variable.name: variable.shape for variable in variables}
    for variable, group in zip(variables, groups, strict=True):
        if variable.shape != shapes.get(group, variable.shape):
            raise ConfigError(
                f"outer= keeps {variable.name} of shape {variable.shape} for {group} "
                f"of shape {shapes[group]}, and fragments= cuts between rows; use an "
                "optimizer whose state has the shape of the parameter, such as "
                "optax.sgd(0.7, momentum=0.9, nesterov=True)"
            )
