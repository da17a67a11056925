"""Small models, their losses, and the loops that a JAX user would write by hand."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgraph.coordination.data.slots import Lease, SlotPlan
from jgraph.graph.graph import eval_graph
from jgraph.runtime.data.batches import ArrayReader, LeasedBatches
from jgraph.train.step.train_step import TrainStep

BATCH = 8


def data(examples: int = 40, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, 4)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int32)


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


class NnxMLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)]
        )

    def __call__(self, x: Any) -> Any:
        return self.layers[1](nnx.relu(self.layers[0](x)))


class NnxDeep(nnx.Module):
    """Many small parameters."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        first, last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        inside = [nnx.Linear(8, 8, rngs=rngs) for _ in range(18)]
        self.layers = nnx.List([first, *inside, last])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = jax.nn.tanh(layer(x))
        return self.layers[-1](x)


class NnxWide(nnx.Module):
    """A kernel that is large enough to be cut, and parameters that are not."""

    def __init__(self, rngs: nnx.Rngs, width: int = 256) -> None:
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.dense = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.dense(nnx.relu(self.first(x)))))


class NnxNorm(nnx.Module):
    """BatchNorm and dropout."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        # Without relu the gradient of the first bias is rounding alone.
        return self.last(self.dropout(self.norm(nnx.relu(self.first(x)))))


def nnx_loss(model: Any, batch: Any) -> Any:
    x, y = batch
    return cross_entropy(model(x), y)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))


def linen_loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return cross_entropy(LinenMLP().apply({"params": params}, x), y)


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


def linen_norm_loss(variables: Any, batch: Any, rng: Any) -> Any:
    x, y = batch
    logits, updates = LinenNorm().apply(
        variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": rng}
    )
    accuracy = jnp.mean(logits.argmax(-1) == y)
    return cross_entropy(logits, y), {**updates, "accuracy": accuracy}


def batches_of(
    fields: Mapping[str, Any], batch_size: int, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yields the batches that a Trainer takes of these fields, without end."""
    reader = ArrayReader(fields)
    plan = SlotPlan(reader.parts, batch_size, seed)
    leased = LeasedBatches(reader, plan)
    for epoch in itertools.count():
        for slot in plan.order(epoch):
            count = plan.span(slot).batches
            for index in range(count):
                yield leased.read(Lease(epoch, slot, 0, count), index)


def values_alone(
    step: TrainStep, fields: Mapping[str, Any], workers: int, steps: int
) -> Any:
    """Returns the values after steps in one process, on all workers' batches at once.

    Each of ``workers`` brings ``BATCH`` examples to a step.
    """
    stream = batches_of(fields, BATCH)
    graph = step.graph({k: v[: workers * BATCH] for k, v in fields.items()})
    run = jax.jit(lambda values, feeds: eval_graph(graph, values, feeds)[1])
    values: Any = step.initial_values
    for number in range(steps):
        batches = [next(stream) for _ in range(workers)]
        together = {k: np.concatenate([b[k] for b in batches]) for k in fields}
        feeds = [*jax.tree.leaves(together), np.int32(number), np.int32(0)]
        values = run(values, feeds)
    return values


def parameters(model: Any) -> list[Any]:
    """Returns the parameters of an nnx model, in the order of their names."""
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def step_by_hand(graph: Any, loss: Callable[[Any, Any], Any], tx: Any) -> Any:
    """Returns a step of a plain loop: of (parameters, state, batch) the new ones.

    Args:
      graph: of an nnx model that has parameters alone.
      loss: of the model and a batch.
      tx: the optimizer.
    """

    @jax.jit
    def step(params: Any, opt: Any, batch: Any) -> Any:
        def value(params: Any) -> Any:
            return loss(nnx.merge(graph, params), batch)

        updates, opt = tx.update(jax.grad(value)(params), opt, params)
        return optax.apply_updates(params, updates), opt

    return step


def assert_close(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Says which array is another one than was wanted, but for rounding."""
    for value, due in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, due, rtol=1e-5, atol=1e-6)


def by_hand(
    params: Any,
    loss: Callable[[Any, Any], Any],
    tx: optax.GradientTransformation,
    steps: int,
    seed: int = 0,
) -> tuple[Any, list[float]]:
    """Returns (parameters, losses) of a plain loop over ``loss(params, batch)``."""

    @jax.jit
    def step(params: Any, opt: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return value, optax.apply_updates(params, updates), opt

    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH, seed)
    opt, losses = tx.init(params), []
    for _ in range(steps):
        batch = next(stream)
        value, params, opt = step(params, opt, (batch["x"], batch["y"]))
        losses.append(float(value))
    return params, losses
