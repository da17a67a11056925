"""Local SGD steps: what a worker computes alone between two updates of the model.

A worker reads the parameters once, takes some steps of its own optimizer on batches one
after the other, and contributes how far it came: the parameters that it read less those
that it has. To the ps that is a gradient like any other. The state of its optimizer is
the worker's own, and stays there from one round to the next.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", 2017 (FedAvg); Douillard et al., "DiLoCo: Distributed Low-
Communication Training of Language Models", 2023.
"""

from collections.abc import Callable
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import optax

from jgraph.graph.device import device
from jgraph.graph.variable import Variable
from jgraph.plan.program.replicas import own_prefix
from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.model.trees import Tree, path_of
from jgraph.train.tables.row_step import Computed

_ROUNDS: Final = "rounds"


@final
class LocalSteps:
    """The steps of a round, and the variables that each worker has for them.

    They begin anew in each ``fit``, and are not part of a checkpoint.

    Args:
      tx: makes the steps.
      count: of a round.
      params: of the model, or their shapes and dtypes.
      container: of the variables.
    """

    def __init__(
        self, tx: CalledOptimizer, count: int, params: Tree, container: str
    ) -> None:
        self._tx = tx
        self.count = count
        state = jax.eval_shape(tx.init, params)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        types = [("/".join(path_of(path)), leaf) for path, leaf in leaves]
        types.append((_ROUNDS, jax.ShapeDtypeStruct((), jnp.int32)))
        self.variables = tuple(
            Variable(
                f"{own_prefix(0)}inner/{name}",
                (leaf.shape, leaf.dtype, jnp.zeros),
                device="/job:worker/task:0",
                container=container,
            )
            for name, leaf in types
        )
        """Those of the worker that the step is planned for; the last counts rounds."""

    @property
    def note(self) -> str:
        """A line for the plan."""
        return f"{self.count} steps of each worker's own optimizer make an update"

    def batch(self, round_batch: Any) -> Any:
        """Returns the types of the batch of one step, given those of a round."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (x.shape[0] // self.count, *x.shape[1:]), x.dtype
            ),
            round_batch,
        )

    def computed(
        self,
        loss: Callable[..., Any],
        now: Tree,
        round_batch: Any,
        step: Any,
        replica: Any,
    ) -> Computed:
        """Returns what a round comes to; called inside a graph.

        Args:
          loss: as ``Adapter.loss``.
          now: has the parameters and the model's state.
          round_batch: the batches of all steps, one after the other.
          step: number of the round, int32.
          replica: number of the worker, int32.
        """
        *inner, rounds = self.variables
        with device("/job:worker"):
            batches = jax.tree.map(
                lambda x: x.reshape(self.count, -1, *x.shape[1:]), round_batch
            )
            number = rounds[...]
            first = jax.tree.leaves(self._tx.init(now["params"]))
            opt = [
                jnp.where(number > 0, variable[...], fresh)
                for variable, fresh in zip(inner, first, strict=True)
            ]

            def take(carry: Any, batch: Any) -> Any:
                params, opt, state, seed = carry
                compute = jax.value_and_grad(loss, has_aux=True)
                (value, (metrics, state)), grads = compute(
                    params, state, batch, (replica, seed)
                )
                updates, opt = self._tx.update(grads, opt, params, value=value)
                params = optax.apply_updates(params, updates)
                return (params, opt, state, seed + 1), (value, metrics)

            begin = jax.tree.unflatten(self._tree, opt)
            carry = now["params"], begin, now["state"], step * self.count
            carry, (losses, metrics) = jax.lax.scan(take, carry, batches)
            params, opt, state, _ = carry
            for variable, value in zip(inner, jax.tree.leaves(opt), strict=True):
                variable[...] = value
            rounds[...] = number + 1
            way = jax.tree.map(lambda old, new: old - new, now["params"], params)
            return Computed(
                losses.mean(),
                jax.tree.map(_over_steps, metrics),
                state,
                way,
                {},
                _no_loss,
            )


def _over_steps(values: jax.Array) -> jax.Array:
    """Returns a metric of a round: a count is that of all its examples."""
    if jnp.issubdtype(values.dtype, jnp.inexact):
        return values.mean(0)
    return values.sum(0, dtype=values.dtype)


def _no_loss(params: Tree) -> jax.Array:
    raise AssertionError("the update is where no batch is")
