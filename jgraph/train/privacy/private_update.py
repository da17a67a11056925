"""Private updates in the graph: gradients clipped one by one, sums with noise.

Source: Abadi et al., "Deep Learning with Differential Privacy", 2016. Noise is the mean
of several normal numbers, so that the rounding of one tells nothing of its sum (Holohan
and Braghin, "Secure Random Sampling in Differential Privacy", 2021).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.train.model.checks import value_and_grad
from jgraph.train.model.trees import Tree, path_of
from jgraph.train.privacy.options import Privacy
from jgraph.train.tables.row_step import Computed

_DRAWS: Final = 4
"""Normal numbers that make one of noise; each has a key of 64 bits of its own."""


@final
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["examples", "sampled"],
    meta_fields=["expected"],
)
@dataclass(frozen=True, slots=True)
class SampledBatch:
    """A batch that is a sample, or its types.

    Attributes:
      examples: arrays of the shape [capacity, …], as the data is structured.
      sampled: bool[capacity]: which rows are examples; first those that are.
      expected: examples that an update is of, on average.
    """

    examples: Any
    sampled: Any
    expected: int


@final
@dataclass(frozen=True, slots=True)
class PrivateUpdate:
    """What is done to gradients on their way to an update.

    Attributes:
      privacy: the options.
      clients: units of an update, if each worker is one; 0: examples are.
    """

    privacy: Privacy
    clients: int = 0

    @property
    def note(self) -> str:
        """A line for the plan."""
        privacy = self.privacy
        return (
            f"private: what each {privacy.unit} adds is cut to the norm "
            f"{privacy.clip:g}; their sum gets noise of {privacy.noise_multiplier:g} "
            "times that"
        )

    def check(self, params: Tree) -> None:
        """Refuses parameters of which sums are rounded before they have noise.

        One unit more may change the rounding of every number of a sum, by far more than
        ``clip`` together.

        Args:
          params: of the model, or their shapes and dtypes.

        Raises:
          ConfigError: names one, and says what to write.
        """
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        for path, leaf in leaves:
            if leaf.dtype not in (jnp.float32, jnp.float64):
                raise ConfigError(
                    "privacy= needs parameters of float32, and "
                    f"{'/'.join(path_of(path))} is of {leaf.dtype}: sums of it are "
                    "rounded before they have noise, and what that tells of one is not "
                    "in epsilon; write "
                    "param_dtype=jnp.float32 (dtype=jnp.bfloat16 may stay, it is what "
                    "layers compute in)"
                )

    def expected(self, batch: Any) -> int:
        """Returns how many units an update is of, on average."""
        return batch.expected if isinstance(batch, SampledBatch) else self.clients

    def entropy(self, params: Tree) -> jax.ShapeDtypeStruct:
        """Returns the type of what noise is made of: a feed of each update."""
        words = (len(jax.tree.leaves(params)), _DRAWS, 2)
        return jax.ShapeDtypeStruct(words, jnp.uint32)

    def computed(
        self,
        loss: Callable[..., Any],
        now: Tree,
        batch: SampledBatch,
        step: Any,
        replica: Any,
    ) -> Computed:
        """Returns the sum of clipped gradients; called inside a graph.

        An example whose gradient is not finite adds nothing. Loss and metrics are means
        over the sample.

        Args:
          loss: as ``Adapter.loss``.
          now: has the parameters and the model's state.
          batch: the sample.
          step: number of the step, int32.
          replica: number of the worker, int32.
        """
        with device("/job:worker"):
            room = batch.sampled.shape[0]
            at_once = min(self.privacy.examples_at_once, room)
            rows = -(-room // at_once) * at_once
            padded = jax.tree.map(
                lambda x: jnp.pad(x, [(0, rows - room)] + [(0, 0)] * (x.ndim - 1)),
                (batch.examples, batch.sampled),
            )
            count = batch.sampled.sum()

            def of_one(params: Tree, example: Any, number: Any) -> Any:
                alone = jax.tree.map(lambda x: x[None], example)
                value, (metrics, _) = loss(
                    params, now["state"], alone, (replica, number)
                )
                return value, metrics

            def part(index: Any) -> Any:
                first = index * at_once
                cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, at_once)
                examples, sampled = jax.tree.map(cut, padded)
                numbers = step * rows + first + jnp.arange(at_once)
                compute = value_and_grad(of_one)
                each = jax.vmap(compute, in_axes=(None, 0, 0))
                results, grads = each(now["params"], examples, numbers)
                return self._clipped_sum(grads, sampled), _sums(results, sampled)

            def add(index: Any, total: Any) -> Any:
                return jax.tree.map(jnp.add, total, part(index))

            first = jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(part, 0)
            )
            parts = (count + at_once - 1) // at_once
            grads, (value, metrics) = jax.lax.fori_loop(0, parts, add, first)
            value, metrics = jax.tree.map(partial(_mean, count=count), (value, metrics))
            return Computed(value, metrics, now["state"], grads, {}, _no_loss)

    def clipped(self, way: Tree) -> Tree:
        """Returns what a client adds, cut; called inside a graph."""
        with device("/job:worker"):
            each = jax.tree.map(lambda x: x[None], way)
            return self._clipped_sum(each, jnp.ones(1, bool))

    def _clipped_sum(self, grads: Tree, sampled: jax.Array) -> Tree:
        """Returns the sum of what units add, each cut to the norm.

        Args:
          grads: with a first axis of units.
          sampled: bool[units]: which of them take part.
        """
        leaves = jax.tree.leaves(grads)
        squares = sum(
            jnp.square(leaf.astype(jnp.float32)).reshape(len(sampled), -1).sum(1)
            for leaf in leaves
        )
        norms = jnp.sqrt(squares)
        takes_part = sampled & jnp.isfinite(norms)
        scale = jnp.minimum(1.0, self.privacy.clip / jnp.maximum(norms, 1e-30))

        def total(leaf: jax.Array) -> jax.Array:
            shape = (-1, *[1] * (leaf.ndim - 1))
            cut = leaf.astype(jnp.float32) * scale.reshape(shape)
            summed: jax.Array = jnp.where(takes_part.reshape(shape), cut, 0).sum(0)
            return summed.astype(leaf.dtype)

        return jax.tree.map(total, grads)

    def mean(self, total: Tree, entropy: jax.Array, expected: int) -> Tree:
        """Returns a sum with noise, over the expected number of units.

        Not placed: where the update is, once for all who contribute.

        Args:
          total: like the parameters.
          entropy: of ``entropy``.
          expected: units.
        """
        deviation = self.privacy.noise_multiplier * self.privacy.clip
        leaves, tree = jax.tree.flatten(total)

        def noised(leaf: jax.Array, words: jax.Array) -> jax.Array:
            draws = [
                jax.random.normal(
                    jax.random.wrap_key_data(words[n], impl="threefry2x32"),
                    leaf.shape,
                    jnp.float32,
                )
                for n in range(_DRAWS)
            ]
            noise = sum(draws[1:], draws[0]) * (deviation / math.sqrt(_DRAWS))
            mean: jax.Array = (leaf.astype(jnp.float32) + noise) / expected
            return mean.astype(leaf.dtype)

        means = [noised(leaf, entropy[n]) for n, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, means)


def _sums(results: Any, sampled: jax.Array) -> Any:
    """Returns values of examples, summed over those that are some."""

    def total(values: jax.Array) -> jax.Array:
        shape = (-1, *[1] * (values.ndim - 1))
        taken = jnp.where(sampled.reshape(shape), values, jnp.zeros((), values.dtype))
        return taken.sum(0, dtype=values.dtype)

    return jax.tree.map(total, results)


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    """Returns a metric of a sample: a count is that of all its examples."""
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    mean: jax.Array = total / jnp.maximum(count, 1).astype(total.dtype)
    return mean


def _no_loss(params: Tree) -> jax.Array:
    raise AssertionError("an optimizer is told nothing of the loss")
