"""A training step in two graphs: workers contribute gradients, ps apply their mean."""

from collections.abc import Collection
from typing import Any, final

import jax
import jax.numpy as jnp

from jgraph.graph.device import DeviceSpec, device
from jgraph.graph.ir import Graph
from jgraph.graph.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.accumulate import MEAN, SLOT
from jgraph.train.step import TrainStep

LOSS = f"{MEAN}loss"
_METRIC = f"{MEAN}metric/"


@final
class SyncStep:
    """The graphs of synchronous training, over the variables of a ``TrainStep``.

    What is averaged has variables of its own, ``mean/params/Dense_0/kernel`` for the
    gradient of ``params/Dense_0/kernel``, on the same task: gradients, the loss,
    metrics, and the model's state (BatchNorm statistics).

    Args:
      step: the variables, the loss and the optimizer.
      batch: shapes and dtypes of one worker's batch.
      replicas: how many workers there are.
    """

    def __init__(self, step: TrainStep, batch: Any, replicas: int) -> None:
        self._step = step
        self._batch = batch
        self._replicas = replicas
        tree = step.unflatten(list(step.variables))
        self._grads = jax.tree.map(self._beside, tree["params"])
        self._state = jax.tree.map(self._beside, tree["state"])
        home = tree["global_step"].device
        self._loss = self._mean(LOSS, (), jnp.float32, home)
        self._metrics = {
            name: self._mean(
                _METRIC + name,
                value.shape,
                # Means of counts are no whole numbers.
                value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else "float32",
                home,
            )
            for name, value in self._metric_types().items()
        }

    def apply_graph(self) -> Graph:
        """Returns the graph of an update from what is averaged.

        Fetches are ``['loss']`` and the metrics, averaged as well.
        """
        kept = self._step.kept(self._batch)

        def apply_mean() -> dict[str, Any]:
            read = lambda tree: jax.tree.map(lambda v: v[...], tree)
            loss, grads, state = map(read, (self._loss, self._grads, self._state))
            checks = self._step.check(loss, grads)
            self._step.update(loss, grads, state, checks, kept)
            metrics = {name: v[...] for name, v in self._metrics.items()}
            return {"loss": loss, **metrics, **checks}

        variables = [*self._step.variables, *self._means()]
        return trace(apply_mean, variables=variables)[0]

    def gradient_graph(self, used: Collection[str]) -> Graph:
        """Returns the graph of one worker's contribution.

        Feeds are those of ``TrainStep.graph``; the only fetch is its own loss.

        Args:
          used: names of the variables, or shards, that the update reads. Others, as
            the gradients of frozen parameters, stay on the worker.
        """
        means = [v for v in self._means() if any(s.name in used for s in v.shards)]
        tasks = sorted({str(s.device) for v in means for s in v.shards})
        slots = [self._slot(i, task) for i, task in enumerate(tasks)]

        def contribute(batch: Any, step: Any, replica: Any) -> dict[str, Any]:
            now = self._step.read()
            with device("/job:worker"):
                loss, metrics, state, grads = self._step.gradients(
                    now, batch, step, replica
                )
                values = {
                    **self._pairs(self._grads, grads),
                    **self._pairs(self._state, state),
                    **self._pairs(self._metrics, metrics),
                    LOSS: loss.astype(jnp.float32),
                }
                slot = step * self._replicas + replica
            for mean in means:
                mean[...] = values[mean.name]
            for variable in slots:
                variable[...] = slot
            return {"loss": loss}

        number = jax.ShapeDtypeStruct((), jnp.int32)
        variables = [*self._step.variables, *means, *slots]
        return trace(contribute, self._batch, number, number, variables=variables)[0]

    def _means(self) -> list[Variable]:
        trees = (self._grads, self._state, self._metrics, self._loss)
        return list(jax.tree.leaves(trees))

    def _beside(self, variable: Variable) -> Variable:
        """Returns the variable for the mean of one, cut as that one is."""
        cut, shape = variable.spec.sharding, variable.shape
        counts = [cut.shards if cut and n == cut.axis else 1 for n in range(len(shape))]
        return Variable(
            MEAN + variable.name,
            (shape, variable.dtype, None),
            device=variable.device,
            container=self._step.container,
            partitioner=None if cut is None else lambda *_: counts,
            partition_strategy=cut.layout.kind if cut else "div",
            shard_devices=variable.spec.shard_devices,
        )

    def _mean(
        self, name: str, shape: tuple[int, ...], dtype: Any, home: DeviceSpec
    ) -> Variable:
        container = self._step.container
        init: Any = (shape, dtype, None)
        return Variable(name, init, device=home, container=container)

    def _slot(self, index: int, task: str) -> Variable:
        init: Any = ((), jnp.int32, None)
        container = self._step.container
        return Variable(f"{SLOT}{index}", init, device=task, container=container)

    def _metric_types(self) -> dict[str, Any]:
        number = jax.ShapeDtypeStruct((), jnp.int32)
        tree = self._step.unflatten(self._step.initial_values)
        _, metrics, _, _ = jax.eval_shape(
            self._step.gradients, tree, self._batch, number, number
        )
        return dict(metrics)

    def _pairs(self, means: Any, values: Any) -> dict[str, Any]:
        leaves = zip(jax.tree.leaves(means), jax.tree.leaves(values), strict=True)
        return {
            mean.name: value if value.dtype == mean.dtype else value.astype(mean.dtype)
            for mean, value in leaves
        }
