"""Pipeline: a model in stages on several tasks, one graph for a whole step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import optax

from jgraph.errors import PipelineError
from jgraph.graph.device import device
from jgraph.graph.sharding import Partitioner
from jgraph.plan.schedule import (
    Schedule,
    ScheduleName,
    schedule as schedule_of,
    simulate,
)
from jgraph.train.data.fields import split_batch
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.stage import as_stage
from jgraph.train.pipeline.stage_passes import StagePasses, is_float, type_of
from jgraph.train.pipeline.step import PipelineGraph, PipelineStep

Loss: TypeAlias = Callable[[Tree, Tree], Any]


@final
class Pipeline:
    """A model cut into stages that run on several tasks, microbatch after microbatch.

    A step is one graph: the batch is cut into microbatches, and each stage's forward
    and backward pass on each of them is a segment on the stage's task. Their order is a
    table, ``schedule``; print it to see the order and the share of time in which tasks
    wait (the bubble). Loss and gradients are those of the whole batch in one piece.

    Args:
      stages: what each stage computes: a ``linen.Module``, an ``nnx.Module``, or a
        function ``(params, x)``. Each gives what the next one takes, arrays in pytrees.
      loss: ``loss(outputs of the last stage, targets)``, the mean over the examples.
      microbatches: into how many parts a batch is cut.
      schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``, see
        ``jgraph.plan.schedule``.
      tasks: devices of the stages, or how many workers; stage ``s`` is on ``tasks[s %
        len(tasks)]``. ``/job:worker/task:<s>`` if unset.

    Attributes:
      schedule: the table.
      devices: of each stage.

    Raises:
      PipelineError: no such schedule, no stage, or numbers that do not fit.

    Source: Huang et al., "GPipe", 2019; Narayanan et al., "Memory-Efficient
    Pipeline-Parallel DNN Training", 2021.

    Example:
      >>> import jax.numpy as jnp
      >>> pipe = Pipeline(
      ...     [lambda w, x: jnp.tanh(x @ w), lambda w, x: x @ w],
      ...     lambda y, t: ((y - t) ** 2).mean(),
      ...     microbatches=2,
      ... )
      >>> pipe
      <Pipeline 1f1b: 2 stages on 2 tasks, 2 microbatches, bubble 33.3%,
      at most 2 held>
      >>> pipe.devices
      ['/job:worker/task:0', '/job:worker/task:1']
      >>> params = [jnp.ones((3, 4)), jnp.ones((4, 1))]
      >>> loss, grads = pipe.value_and_grad(params, jnp.ones((6, 3)), jnp.ones((6, 1)))
      >>> [g.shape for g in grads]
      [(3, 4), (4, 1)]
    """

    def __init__(
        self,
        stages: Sequence[Any],
        loss: Loss,
        *,
        microbatches: int,
        schedule: ScheduleName | str = "1f1b",
        tasks: int | Sequence[str] | None = None,
    ) -> None:
        self._stages = [as_stage(number, stage) for number, stage in enumerate(stages)]
        self._loss = loss
        count = len(self._stages) if tasks is None else tasks
        names = (
            [f"/job:worker/task:{number}" for number in range(count)]
            if isinstance(count, int)
            else list(count)
        )
        self.schedule: Schedule = schedule_of(
            schedule,
            stages=len(self._stages),
            tasks=len(names),
            microbatches=microbatches,
        )
        self.devices = [
            names[self.schedule.row_of(number)] for number in range(len(self._stages))
        ]

    def init(self, seed: int, x: Tree) -> list[Tree]:
        """Returns initial parameters of stages that are Flax modules.

        Args:
          seed: decides those of linen modules.
          x: a batch, or the types of one.

        Raises:
          PipelineError: a stage is a function, does not take what the one before it
            gives, or has other state than parameters.
        """
        inputs = jax.tree.map(type_of, x)
        keys = jax.random.split(jax.random.key(seed), len(self._stages))
        params: list[Tree] = []
        for stage, key in zip(self._stages, keys, strict=True):
            params.append(stage.init(key, inputs))
            inputs = stage.outputs(params[-1], inputs)
        return params

    @property
    def bubble(self) -> float:
        """The part of the tasks' time in which they wait, if stages take equal time.

        A backward pass is taken to last as long as two forward passes.
        """
        return simulate(self.schedule).bubble

    def apply(self, params: Sequence[Tree], x: Tree) -> Tree:
        """Returns what the last stage gives for a batch in one piece, each on its task.

        Args:
          params: parameters of each stage.
          x: what the first stage takes.
        """
        for stage, tree, where in zip(self._stages, params, self.devices, strict=True):
            with device(where):
                x = stage.apply(tree, x)
        return x

    def value_and_grad(
        self,
        params: Sequence[Tree],
        x: Tree,
        targets: Tree,
        *,
        input_gradients: bool = False,
    ) -> tuple[jax.Array, Any]:
        """Returns the loss and its gradients; for use inside a ``jg.function``.

        Args:
          params: parameters of each stage.
          x: arrays with the batch as first dimension, for the first stage.
          targets: likewise, for the loss.
          input_gradients: give the gradient of ``x`` too.

        Returns:
          The loss, and gradients like ``params``; with ``input_gradients`` a pair of
          these and of gradients like ``x`` (None for what is no float).

        Raises:
          FeedError: the batch cannot be cut.
          PipelineError: a stage does not take what the one before it gives, or the loss
            is no number.
        """
        self._check_params(params)
        with device(self.devices[0]):
            inputs = split_batch(x, self.schedule.microbatches, "x")
        with device(self.devices[-1]):
            goals = split_batch(targets, self.schedule.microbatches, "targets")
        graph = PipelineGraph(
            self.schedule,
            self.devices,
            self._passes(params, inputs[0], goals[0], input_gradients=input_gradients),
            [jax.tree.leaves(tree) for tree in params],
        )
        graph.run([*map(jax.tree.leaves, inputs)], [*map(jax.tree.leaves, goals)])
        with device(self.devices[-1]):
            loss = jnp.stack([graph.losses[k] for k in range(len(inputs))]).mean()
        grads = [
            jax.tree.unflatten(jax.tree.structure(tree), graph.sums[stage])
            for stage, tree in enumerate(params)
        ]
        if not input_gradients:
            return loss, grads
        with device(self.devices[0]):
            return loss, (grads, _joined(x, graph.input_gradients))

    def step(
        self,
        params: Sequence[Tree],
        tx: optax.GradientTransformation,
        *,
        container: str = "",
        tables: Mapping[str, Any] | None = None,
        table_device: str = "/job:ps",
        partitioner: Partitioner | None = None,
    ) -> PipelineStep:
        """Returns a training step over variables that live with their stages.

        Args:
          params: initial parameters of each stage.
          tx: the optimizer; it sees the list of all stages' parameters, or with tables
            ``{"stages": that list, "tables": tables}``.
          container: of the variables.
          tables: embedding tables ``[rows, width]`` that stay on parameter servers, by
            the name of their ids in ``x``, which then is a dict: the first stage takes
            rows ``float[..., width]`` where ``x`` has ids ``int32[...]``. Rows that a
            batch does not look up are not updated: as by one process for SGD and
            Adagrad, lazily for what moves without a gradient (momentum, Adam).
          table_device: where tables live.
          partitioner: cuts tables into shards, e.g. ``jg.fixed_size_partitioner(2)``.

        Raises:
          PipelineError: another number of trees than of stages.
        """
        self._check_params(params)
        return PipelineStep(
            self.value_and_grad,
            self.apply,
            params,
            tx,
            self.devices,
            container,
            tables=tables,
            table_device=table_device,
            partitioner=partitioner,
        )

    def __repr__(self) -> str:
        return f"<Pipeline {str(self.schedule).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        return self.schedule._repr_html_()

    # ------------------------------------------------------------ inside

    def _passes(
        self, params: Sequence[Tree], x: Tree, targets: Tree, *, input_gradients: bool
    ) -> list[StagePasses]:
        inputs, passes = jax.tree.map(type_of, x), []
        for number, stage in enumerate(self._stages):
            is_last = number == len(self._stages) - 1
            stage_passes = StagePasses(
                stage.what,
                self._last if is_last else _without_targets(stage.apply),
                jax.tree.map(type_of, params[number]),
                inputs,
                jax.tree.map(type_of, targets) if is_last else (),
                input_gradients=bool(number) or input_gradients,
                share=1 / self.schedule.microbatches if is_last else None,
            )
            passes.append(stage_passes)
            inputs = stage_passes.outputs
        return passes

    def _last(self, params: Tree, inputs: Tree, targets: Tree) -> Any:
        return self._loss(self._stages[-1].apply(params, inputs), targets)

    def _check_params(self, params: Sequence[Tree]) -> None:
        if len(params) != len(self._stages):
            raise PipelineError(
                f"params has {len(params)} trees and there are {len(self._stages)} "
                "stages; give a list with one tree per stage"
            )
        for stage, tree in zip(self._stages, params, strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                if not is_float(type_of(leaf)):
                    raise PipelineError(
                        f"{stage.what} has a parameter {jax.tree_util.keystr(path)} of "
                        f"{type_of(leaf).dtype}, which has no gradient; make it a "
                        "constant of the stage"
                    )


def _without_targets(
    apply: Callable[[Tree, Tree], Tree],
) -> Callable[[Tree, Tree, Tree], Tree]:
    return lambda params, inputs, _: apply(params, inputs)


def _joined(x: Tree, parts: dict[int, list[Any]]) -> Tree:
    """Returns a tree like ``x`` of the gradients of its floats."""
    columns = zip(*(parts[k] for k in range(len(parts))), strict=True)
    arrays = (jnp.concatenate(column) for column in columns)
    return jax.tree.map(
        lambda leaf: next(arrays) if is_float(type_of(leaf)) else None, x
    )
