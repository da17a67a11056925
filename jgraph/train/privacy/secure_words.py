"""Words of secure sums in the graph: what a client contributes as uint32, and back.

A real value becomes fixed point, times the weight of its client. How far parameters
moved has ``bits`` between ``-clip`` and ``clip``. Loss, metrics and the model's state
have no such bound: each is two words, of what is before the point and after. Whole
numbers are summed as they are. All sums are modulo 2^32, where masks go away.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.train.model.checks import all_finite
from jgraph.train.model.metrics import needs_pieces, pieces
from jgraph.train.model.trees import Tree
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.tables.row_step import Computed

_HEADER: Final = 3  # how many clients, what they count together, how many do not


@final
@dataclass(frozen=True, slots=True)
class Unmasked:
    """What a sum comes to: means over all who are in it.

    Attributes:
      loss: of the clients.
      metrics: by name; of whole numbers in pieces, see ``model.metrics``.
      grads: like the parameters.
      state: like the model's state.
      weight: that of all together, uint32: 0 if nobody's contribution is finite.
      not_finite: whose is not: how many.
    """

    loss: Any
    metrics: Mapping[str, Any]
    grads: Tree
    state: Tree
    weight: Any
    not_finite: Any


@final
class SecureWords:
    """What secure sums are made of, as variables and as flat arrays.

    Args:
      options: of the user.
      grads: variables of the sums of what parameters moved, like the parameters.
      state: types of the model's state.
      loss: its type.
      metrics: types by name.

    Raises:
      ConfigError: a number of 64 bits has no place in a word.
    """

    def __init__(
        self,
        options: SecureSum,
        grads: Tree,
        state: Tree,
        loss: Any,
        metrics: Mapping[str, Any],
    ) -> None:
        self._options = options
        self._grads = grads
        leaves, self._state = jax.tree.flatten(state)
        self._names = [*metrics]
        self._types = [loss, *metrics.values(), *leaves]
        for one in self._types:
            if not _is_real(one) and np.dtype(one.dtype).itemsize > 4:
                raise ConfigError(
                    "secure_sum= sums numbers of 32 bits, and a metric or the state of "
                    f"the model is of {one.dtype}; make it int32"
                )
        self.others = _HEADER + sum(map(_words, self._types))
        """Words beside those of the parameters."""

    @property
    def words(self) -> int:
        """How many there are in all."""
        return sum(map(_size, jax.tree.leaves(self._grads))) + self.others

    @property
    def feed(self) -> jax.ShapeDtypeStruct:
        """Type of a mask, and of what takes those of a sum away."""
        return jax.ShapeDtypeStruct((self.words,), jnp.uint32)

    @property
    def note(self) -> str:
        """A line for the plan."""
        return (
            f"secure sums: a client contributes {self.words:,} words of "
            f"{self._options.bits} bits under masks"
        )

    def contribution(
        self, result: Computed, mask: jax.Array, *, weighs: bool
    ) -> list[Any]:
        """Returns what a client contributes, that of parameters first, others last.

        Called inside a graph.

        Args:
          result: what it made.
          mask: uint32[words].
          weighs: it counts by its examples.
        """
        with device("/job:worker"):
            moved = jax.tree.leaves(result.grads)
            metrics = [result.metrics[name] for name in self._names]
            beside = [result.loss, *metrics, *jax.tree.leaves(result.state)]
            finite = all_finite((moved, beside))
            weight = jnp.ones((), jnp.uint32)
            if weighs and result.weight is not None:
                most = self._options.max_weight
                weight = jnp.clip(jnp.rint(result.weight), 1, most).astype(jnp.uint32)
            weight = jnp.where(finite, weight, 0)
            bad = (~finite).astype(jnp.uint32)
            others = [jnp.stack([jnp.ones((), jnp.uint32), weight, bad])]
            others += [self._wide(x, weight) for x in beside]
            values = [self._fixed(x, weight) for x in moved]
            return _plus([*values, jnp.concatenate(others)], mask)

    def unmasked(self, sums: Sequence[jax.Array], correction: jax.Array) -> Unmasked:
        """Returns means, given the sums under masks; called inside the update.

        Args:
          sums: of ``contribution``.
          correction: what takes the masks away, uint32[words].
        """
        *moved, others = _plus(sums, correction)
        count, weight, bad = others[0], others[1], others[2]
        values, place = [], _HEADER
        for one in self._types:
            end = place + _words(one)
            values.append(self._narrow(others[place:end], one, count, weight))
            place = end
        loss, *rest = values
        names = len(self._names)
        grads = jax.tree.structure(self._grads)
        return Unmasked(
            loss,
            dict(zip(self._names, rest[:names], strict=True)),
            jax.tree.unflatten(grads, [self._mean(x, weight) for x in moved]),
            jax.tree.unflatten(self._state, rest[names:]),
            *(weight, bad),
        )

    @property
    def _most(self) -> int:
        return (1 << self._options.bits) - 1

    def _fixed(self, values: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns how far a parameter moved, in fixed point."""
        clip = self._options.clip
        real = jnp.nan_to_num(values.astype(jnp.float32))
        places = (jnp.clip(real, -clip, clip) + clip) * (self._most / (2 * clip))
        return jnp.rint(places).astype(jnp.uint32) * weight

    def _mean(self, total: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns the mean of fixed points, of which whole parts are exact."""
        whole, rest = _divided(total, weight)
        half = self._most // 2
        places = (whole.astype(jnp.int32) - half).astype(jnp.float32) + rest - 0.5
        mean = places * (2 * self._options.clip / self._most)
        return jnp.where(weight > 0, mean, 0)

    def _wide(self, values: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns a value of any size as words."""
        flat = values.reshape(-1)
        if not _is_real(values):
            return flat.astype(jnp.uint32)
        bits = self._options.bits
        half = float(1 << (bits - 1))
        real = jnp.clip(jnp.nan_to_num(flat.astype(jnp.float32)), -half, half - 1)
        whole = jnp.floor(real)
        part = jnp.minimum(jnp.rint((real - whole) * (1 << bits)), self._most)
        both = jnp.concatenate([whole + half, part])
        return both.astype(jnp.uint32) * weight

    def _narrow(
        self, words: jax.Array, type_: Any, count: jax.Array, weight: jax.Array
    ) -> jax.Array:
        """Returns the mean of values that became words."""
        if not _is_real(type_):
            total = words.reshape(type_.shape)
            if needs_pieces(type_.dtype):
                return pieces(total.astype(type_.dtype)) / count.astype(jnp.float32)
            return (total // count).astype(type_.dtype)
        bits = self._options.bits
        (whole, whole_rest), (part, part_rest) = (
            _divided(half, weight) for half in jnp.split(words, 2)
        )
        before = (whole.astype(jnp.int32) - (1 << (bits - 1))).astype(jnp.float32)
        after = (part.astype(jnp.float32) + part_rest) / (1 << bits)
        mean = jnp.where(weight > 0, before + whole_rest + after, jnp.nan)
        return mean.reshape(type_.shape).astype(type_.dtype)


def _is_real(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _size(value: Any) -> int:
    return math.prod(tuple[int, ...](value.shape))


def _words(type_: Any) -> int:
    return _size(type_) * (1 + _is_real(type_))


def _divided(total: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the whole part of a quotient, and the rest of it as float32."""
    by = jnp.maximum(weight, 1)
    return total // by, (total % by).astype(jnp.float32) / by.astype(jnp.float32)


def _plus(values: Sequence[jax.Array], flat: jax.Array) -> list[jax.Array]:
    """Returns values plus those of a flat array, modulo 2^32."""
    found, place = list[jax.Array](), 0
    for one in values:
        end = place + _size(one)
        found.append(one + flat[place:end].reshape(one.shape))
        place = end
    return found
