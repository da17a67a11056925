"""Pipeline: a model in stages on several tasks, one graph for a whole step."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import optax

from jgraph.client.placement.auto import AutoPlacement
from jgraph.errors import PipelineError
from jgraph.graph.device import device
from jgraph.graph.sharding import Partitioner
from jgraph.plan.auto.chain import Balance, Bounds
from jgraph.plan.schedule import (
    Schedule,
    ScheduleName,
    schedule as schedule_of,
    simulate,
)
from jgraph.train.data.fields import split_batch
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.balancing import (
    balanced,
    balanced_tasks,
    microbatch_types,
    stages_of,
)
from jgraph.train.pipeline.stage import Stage, as_stage, without_targets
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
      balance: what ``jg.auto(cluster)`` gives: ``stages`` are then layers, as many as
        you like, of which neighbours make a stage for each of ``tasks`` (those of
        ``balance`` if unset), in their order. The slowest stage is made as short as
        can be, by the work of layers and the speeds of tasks and links, within the
        limits of memory. Parameters, checkpoints and gradients are those of layers,
        whatever the cut. It is made once, when types are known: by ``step`` or
        ``value_and_grad``.

    Attributes:
      schedule: the table.
      devices: of each stage.
      balance: which layers are on which task, and why; print it. None before the cut
        is made, and without ``balance=``.

    Raises:
      PipelineError: no such schedule, no stage, or numbers that do not fit.
      MemoryLimitError: when the cut is made: none keeps the limits of ``balance``.

    Source: Huang et al., "GPipe", 2019; Narayanan et al., "Memory-Efficient
    Pipeline-Parallel DNN Training", 2021; "PipeDream", 2019 (balance).

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

      As many layers as you like, cut by what the tasks of a cluster can do:

      >>> import optax
      >>> import jgraph as jg
      >>> server = jg.Server({"worker": ["localhost:0"]})
      >>> with jg.connect(server.target) as cluster:
      ...     pipe = Pipeline(
      ...         [lambda w, x: jnp.tanh(x @ w)] * 6,
      ...         lambda y, t: ((y - t) ** 2).mean(),
      ...         microbatches=2,
      ...         balance=jg.auto(cluster),
      ...     )
      >>> step = pipe.step([jnp.eye(8)] * 6, optax.sgd(0.1), x=jnp.ones((4, 8)))
      >>> pipe.balance
      <Balance of 6 layers; print it to see why>
      >>> server.stop()
    """

    def __init__(
        self,
        stages: Sequence[Any],
        loss: Loss,
        *,
        microbatches: int,
        schedule: ScheduleName | str = "1f1b",
        tasks: int | Sequence[str] | None = None,
        balance: AutoPlacement | None = None,
    ) -> None:
        kind = "stage" if balance is None else "layer"
        self._layers = [as_stage(n, stage, kind) for n, stage in enumerate(stages)]
        self._loss = loss
        self._placement = balance
        self._batch: Tree = None
        self.balance: Balance | None = None
        count: int | Sequence[str] | None = tasks
        if balance is not None:
            count = balanced_tasks(balance, len(self._layers), tasks, schedule)
        elif count is None:
            count = len(self._layers)
        names = (
            [f"/job:worker/task:{number}" for number in range(count)]
            if isinstance(count, int)
            else list(count)
        )
        self.schedule: Schedule = schedule_of(
            schedule,
            stages=len(self._layers) if balance is None else len(names),
            tasks=len(names),
            microbatches=microbatches,
        )
        self.devices = [
            names[self.schedule.row_of(n)] for n in range(self.schedule.stages)
        ]

    def init(self, seed: int, x: Tree) -> list[Tree]:
        """Returns initial parameters of stages (or layers) that are Flax modules.

        Args:
          seed: decides those of linen modules.
          x: a batch, or the types of one; a cut is made for batches like it.

        Raises:
          PipelineError: a stage is a function, does not take what the one before it
            gives, or has other state than parameters.
        """
        self._batch = inputs = jax.tree.map(type_of, x)
        keys = jax.random.split(jax.random.key(seed), len(self._layers))
        params: list[Tree] = []
        for layer, key in zip(self._layers, keys, strict=True):
            params.append(layer.init(key, inputs))
            inputs = layer.outputs(params[-1], inputs)
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
          params: parameters of each stage (or layer).
          x: what the first stage takes.
        """
        self._check_params(params)
        bounds = self._bounds(params, lambda: self._microbatch(x))
        stages = zip(self._stages(bounds), pairwise(bounds), self.devices, strict=True)
        for stage, (first, end), where in stages:
            with device(where):
                x = stage.apply(params[first:end], x)
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
          params: parameters of each stage (or layer).
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
        types = jax.tree.map(type_of, inputs[0])
        bounds = self._bounds(params, lambda: types, input_gradients=input_gradients)
        trees = [list(params[first:end]) for first, end in pairwise(bounds)]
        graph = PipelineGraph(
            self.schedule,
            self.devices,
            self._passes(
                self._stages(bounds),
                trees,
                types,
                goals[0],
                input_gradients=input_gradients,
            ),
            [jax.tree.leaves(tree) for tree in trees],
        )
        graph.run([*map(jax.tree.leaves, inputs)], [*map(jax.tree.leaves, goals)])
        with device(self.devices[-1]):
            loss = jnp.stack([graph.losses[k] for k in range(len(inputs))]).mean()
        grads = [
            gradient
            for stage, tree in enumerate(trees)
            for gradient in jax.tree.unflatten(
                jax.tree.structure(tree), graph.sums[stage]
            )
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
        x: Tree = None,
        container: str = "",
        tables: Mapping[str, Any] | None = None,
        table_device: str = "/job:ps",
        partitioner: Partitioner | None = None,
    ) -> PipelineStep:
        """Returns a training step over variables that live with their stages.

        Args:
          params: initial parameters of each stage (or layer).
          tx: the optimizer; it sees the list of all stages' parameters, or with tables
            ``{"stages": that list, "tables": tables}``.
          x: with ``balance=``: a batch, or the types of one, by which layers are cut
            into stages; that of ``init`` if unset.
          container: of the variables.
          tables: embedding tables ``[rows, width]`` that stay on parameter servers, by
            the name of their ids in ``x``, which then is a dict: the first stage takes
            rows ``float[..., width]`` where ``x`` has ids ``int32[...]``. Rows that a
            batch does not look up are not updated: as by one process for SGD and
            Adagrad, lazily for what moves without a gradient (momentum, Adam).
          table_device: where tables live.
          partitioner: cuts tables into shards, e.g. ``jg.fixed_size_partitioner(2)``.

        Raises:
          PipelineError: another number of trees than of stages, or layers are to be
            cut and nothing says what a batch is.
          MemoryLimitError: no cut keeps the limits of ``balance``.
        """
        self._check_params(params)
        bounds = self._bounds(
            params,
            lambda: self._microbatch(self._batch if x is None else x, tables),
            tx=tx,
            tables=tables,
            input_gradients=bool(tables),
        )
        parts = zip(self.devices, pairwise(bounds), strict=True)
        return PipelineStep(
            self.value_and_grad,
            self.apply,
            params,
            tx,
            [where for where, (first, end) in parts for _ in range(first, end)],
            container,
            tables=tables,
            table_device=table_device,
            partitioner=partitioner,
        )

    def __repr__(self) -> str:
        cut = ""
        if self.balance is not None:
            cut = f"; {self.balance.layers_text} layers"
        elif self._placement is not None:
            cut = f"; {len(self._layers)} layers, not yet cut"
        return f"<Pipeline {str(self.schedule).splitlines()[0]}{cut}>"

    def _repr_html_(self) -> str:
        why = "" if self.balance is None else self.balance._repr_html_()
        return self.schedule._repr_html_() + why

    # ------------------------------------------------------------ inside

    def _microbatch(self, batch: Tree, tables: Mapping[str, Any] | None = None) -> Tree:
        if batch is None:
            raise PipelineError(
                "balance= weighs layers by what they compute for a batch, and nothing "
                "says what a batch is; give step a batch, or the types of one: x="
            )
        return microbatch_types(batch, self.schedule.microbatches, tables)

    def _bounds(
        self, params: Sequence[Tree], inputs: Callable[[], Tree], **known: Any
    ) -> Bounds:
        """Returns which layers each stage has; decides it the first time.

        Args:
          params: of each layer.
          inputs: gives the types of what the first layer takes of a microbatch.
          known: see ``balanced``.
        """
        if self._placement is None:
            return tuple(range(len(self._layers) + 1))
        if self.balance is None:
            self.balance = balanced(
                self._placement,
                self._layers,
                params,
                inputs(),
                self.schedule,
                self.devices,
                **known,
            )
        return self.balance.bounds

    def _stages(self, bounds: Bounds) -> list[Stage]:
        return stages_of(self._layers, bounds)

    def _passes(
        self,
        stages: Sequence[Stage],
        params: Sequence[list[Tree]],
        inputs: Tree,
        targets: Tree,
        *,
        input_gradients: bool,
    ) -> list[StagePasses]:
        passes = []
        for number, stage in enumerate(stages):
            is_last = number == len(stages) - 1
            stage_passes = StagePasses(
                stage.what,
                self._last(stage) if is_last else without_targets(stage.apply),
                jax.tree.map(type_of, params[number]),
                inputs,
                jax.tree.map(type_of, targets) if is_last else (),
                input_gradients=bool(number) or input_gradients,
                share=1 / self.schedule.microbatches if is_last else None,
            )
            passes.append(stage_passes)
            inputs = stage_passes.outputs
        return passes

    def _last(self, stage: Stage) -> Callable[[Tree, Tree, Tree], Any]:
        return lambda params, inputs, targets: self._loss(
            stage.apply(params, inputs), targets
        )

    def _check_params(self, params: Sequence[Tree]) -> None:
        kind = "stage" if self._placement is None else "layer"
        if len(params) != len(self._layers):
            raise PipelineError(
                f"params has {len(params)} trees and there are {len(self._layers)} "
                f"{kind}s; give a list with one tree per {kind}"
            )
        for stage, tree in zip(self._layers, params, strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                if not is_float(type_of(leaf)):
                    raise PipelineError(
                        f"{stage.what} has a parameter {jax.tree_util.keystr(path)} of "
                        f"{type_of(leaf).dtype}, which has no gradient; make it a "
                        f"constant of the {kind}"
                    )


def _joined(x: Tree, parts: dict[int, list[Any]]) -> Tree:
    """Returns a tree like ``x`` of the gradients of its floats."""
    columns = zip(*(parts[k] for k in range(len(parts))), strict=True)
    arrays = (jnp.concatenate(column) for column in columns)
    return jax.tree.map(
        lambda leaf: next(arrays) if is_float(type_of(leaf)) else None, x
    )
