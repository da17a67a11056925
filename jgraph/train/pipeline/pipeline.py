"""Pipeline: a model in stages on several tasks, one graph for a whole step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import optax

from jgraph.client.placement.auto import AutoPlacement
from jgraph.counts import check_flags
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
from jgraph.train.data.fields import part_size, split_batch
from jgraph.train.model.optimizer import check_optimizer
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.balancing import (
    balanced,
    balanced_tasks,
    check_known,
    microbatch_types,
    stages_of,
)
from jgraph.train.pipeline.replicas import Rows, TaskArray, dealt, task_rows
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

    With several replicas, each on tasks of its own, a batch is first cut into one part
    per replica. Parameters are those of the first replica's tasks: the others get them
    in each step, and their gradients are summed there.

    Args:
      stages: what each stage computes: a ``linen.Module``, an ``nnx.Module``, or a
        function ``(params, x)``. Each gives what the next one takes, arrays in pytrees.
      loss: ``loss(outputs of the last stage, targets)``, the mean over the examples.
      microbatches: into how many parts a batch, or a replica's part of it, is cut.
      schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``, see
        ``jgraph.plan.schedule``.
      tasks: devices of the stages, or how many workers; stage ``s`` is on ``tasks[s %
        len(tasks)]``. ``/job:worker/task:<s>`` if unset. An array of devices, as nested
        lists or of NumPy, has a row for each replica.
      replicas: how many there are. Tasks without rows are dealt to them: replica ``r``
        of ``n`` tasks has those from ``r * n`` on.
      balance: what ``jg.auto(cluster)`` gives: ``stages`` are then layers, as many as
        you like, of which neighbours make a stage for each of ``tasks`` (those of
        ``balance`` if unset), in their order. The slowest stage is made as short as
        can be, by the work of layers and the speeds of tasks and links, within the
        limits of memory. All replicas have one cut, for the slowest of them.
        Parameters, checkpoints and gradients are those of layers,
        whatever the cut. It is made once, when types are known: by ``step`` or
        ``value_and_grad``.

    Attributes:
      schedule: the table, of each replica.
      replicas: devices of each stage, for each replica.
      balance: which layers are on which task, and why; print it. None before the cut
        is made, and without ``balance=``.

    Raises:
      PipelineError: no such schedule, no stage, or numbers that do not fit; rows of
        different lengths, or a task in two of them.
      DeviceSpecError: a task that is no device.
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
      >>> Pipeline([jnp.matmul], jnp.mean, microbatches=2, replicas=3).replicas
      (('/job:worker/task:0',), ('/job:worker/task:1',), ('/job:worker/task:2',))

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
        tasks: TaskArray | None = None,
        replicas: int | None = None,
        balance: AutoPlacement | None = None,
    ) -> None:
        kind = "stage" if balance is None else "layer"
        if not isinstance(stages, Iterable):
            raise PipelineError(
                f"stages is a {type(stages).__name__}; give a list with a Flax module, "
                "or a function (params, x), for each stage"
            )
        if not callable(loss):
            raise PipelineError(
                f"loss is {loss!r:.60}; give a function of outputs and targets, for "
                "example lambda y, t: ((y - t) ** 2).mean()"
            )
        self._layers = [as_stage(n, stage, kind) for n, stage in enumerate(stages)]
        self._loss = loss
        self._placement = balance
        self._batch: Tree = None
        self.balance: Balance | None = None
        of_replica = len(self._layers) if tasks is None else tasks
        self._is_dealt = balance is None and isinstance(of_replica, int)
        if balance is None:
            rows = task_rows(of_replica, replicas)
        else:
            layers = len(self._layers)
            rows = balanced_tasks(balance, layers, tasks, replicas, schedule)
        count = len(rows[0]) if rows else 0
        self.schedule: Schedule = schedule_of(
            schedule,
            stages=len(self._layers) if balance is None else count,
            tasks=count,
            microbatches=microbatches,
        )
        self.replicas = self._of_stages(rows)

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
    def devices(self) -> list[str]:
        """The devices of the stages; with replicas those of the first one."""
        return list(self.replicas[0])

    @property
    def bubble(self) -> float:
        """The part of the tasks' time in which they wait, if stages take equal time.

        A backward pass is taken to last as long as two forward passes.
        """
        return simulate(self.schedule).bubble

    @property
    def loss(self) -> "PipelineLoss":
        """The loss as a function ``(params, x, targets)``, also for ``jg.towers``.

        Example:
          >>> import jax.numpy as jnp
          >>> pipe = Pipeline(
          ...     [lambda w, x: w * x, lambda w, x: w + x],
          ...     lambda y, t: ((y - t) ** 2).mean(),
          ...     microbatches=2,
          ... )
          >>> params, x = [jnp.ones(()), jnp.ones(())], jnp.arange(8.0)
          >>> float(pipe.loss(params, x, x))
          1.0
        """
        return PipelineLoss(self._whole_loss, self.over)

    def apply(self, params: Sequence[Tree], x: Tree) -> Tree:
        """Returns what the last stage gives for a batch in one piece, each on its task.

        Args:
          params: parameters of each stage (or layer).
          x: what the first stage takes.
        """
        self._check_params(params)
        bounds = self._bounds(params, lambda: self._types(x))
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
        check_flags(input_gradients=input_gradients)
        loss, grads, into = self.gradients(
            params,
            self.shares(x, "x"),
            self.shares(targets, "targets"),
            input_gradients=input_gradients,
        )
        return loss, ((grads, into) if input_gradients else grads)

    def shares(self, batch: Tree, what: str) -> list[Tree]:
        """Returns the part of a batch of each replica, in order.

        Args:
          batch: arrays with the examples as first dimension.
          what: the batch, for the message.

        Raises:
          FeedError: it cannot be cut for the replicas, and these parts into
            microbatches.
        """
        replicas, microbatches = len(self.replicas), self.schedule.microbatches
        if replicas == 1:
            return [batch]
        of = f"{microbatches} microbatches for each of {replicas} replicas"
        part_size(batch, replicas * microbatches, what, of)
        return split_batch(batch, replicas, what)

    def gradients(
        self,
        params: Sequence[Tree],
        x: Sequence[Tree],
        targets: Sequence[Tree],
        *,
        input_gradients: bool = False,
    ) -> tuple[jax.Array, list[Tree], Tree]:
        """Returns the loss and its gradients, given each replica's part of the batch.

        Args:
          params: parameters of each stage.
          x: per replica what ``value_and_grad`` takes, as ``shares`` gives it.
          targets: likewise.
          input_gradients: give the gradients of ``x`` too.

        Returns:
          The loss, gradients like ``params``, and those of the whole batch like its
          ``x``, or None if they are not wanted.
        """
        check_flags(input_gradients=input_gradients)
        self._check_params(params)
        parts = [*map(self._microbatches, self.replicas, x, targets)]
        inputs, goals = parts[0]
        types = jax.tree.map(type_of, inputs[0])
        bounds = self._bounds(params, lambda: types, input_gradients=input_gradients)
        trees = [list(params[first:end]) for first, end in pairwise(bounds)]
        passes = self._passes(
            self._stages(bounds),
            trees,
            types,
            goals[0],
            input_gradients=input_gradients,
        )
        leaves = [jax.tree.leaves(tree) for tree in trees]
        graphs, losses = [], []
        for devices, (inputs, goals) in zip(self.replicas, parts, strict=True):
            graph = PipelineGraph(self.schedule, devices, passes, leaves)
            graph.run([*map(jax.tree.leaves, inputs)], [*map(jax.tree.leaves, goals)])
            graphs.append(graph)
            with device(devices[-1]):
                each = [graph.losses[k] for k in range(len(inputs))]
                losses.append(jnp.stack(each).mean())
        with device(self.devices[-1]):
            loss = losses[0] if len(losses) == 1 else jnp.stack(losses).mean()
        grads = [
            gradient
            for stage, tree in enumerate(trees)
            for gradient in jax.tree.unflatten(
                jax.tree.structure(tree), self._summed(stage, graphs)
            )
        ]
        if not input_gradients:
            return loss, grads, None
        with device(self.devices[0]):
            of_inputs = [
                graph.input_gradients[k]
                for graph in graphs
                for k in range(self.schedule.microbatches)
            ]
            return loss, grads, _joined(x[0], of_inputs)

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

        With replicas these are the stages of the first one, and what is saved does not
        depend on the number of replicas.

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
          ConfigError: ``tx`` is no optax optimizer, and no dict of them.
          MemoryLimitError: no cut keeps the limits of ``balance``.
        """
        check_optimizer(tx)
        self._check_params(params)
        bounds = self._bounds(
            params,
            lambda: self._types(self._batch if x is None else x, tables),
            tx=tx,
            tables=tables,
            input_gradients=bool(tables),
        )
        parts = zip(self.devices, pairwise(bounds), strict=True)
        return PipelineStep(
            self,
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
        replicas = len(self.replicas)
        many = f"{replicas} replicas of " if replicas > 1 else ""
        return f"<Pipeline {many}{str(self.schedule).splitlines()[0]}{cut}>"

    def _repr_html_(self) -> str:
        why = "" if self.balance is None else self.balance._repr_html_()
        return self.schedule._repr_html_() + why

    def over(self, tasks: TaskArray) -> "Pipeline":
        """Returns the same pipeline with other replicas.

        Args:
          tasks: how many replicas, if tasks are dealt to them; devices, dealt to
            replicas of as many tasks as this one has; an array with a row for each.

        Raises:
          PipelineError: no such number, or another number of tasks for a replica.

        Example:
          >>> import jax.numpy as jnp
          >>> pipe = Pipeline([jnp.matmul], jnp.mean, microbatches=2)
          >>> pipe.over(["worker:1", "worker:2"])
          <Pipeline 2 replicas of 1f1b: 1 stages on 1 tasks, 2 microbatches,
          bubble 0.0%, at most 1 held>
        """
        each = len(self.schedule.rows)
        if isinstance(tasks, int):
            if tasks == len(self.replicas):
                return self
            if not self._is_dealt:
                raise PipelineError(
                    f"{tasks} replicas of a pipeline whose {len(self.replicas)} "
                    f"{'have' if len(self.replicas) > 1 else 'has'} tasks by name; "
                    "give an array of devices, with a row for each replica"
                )
            rows = task_rows(each, tasks)
        else:
            rows = task_rows(tasks)
            if len(rows) == 1 and rows[0] and not len(rows[0]) % each:
                rows = dealt(rows[0], len(rows[0]) // each)
        if not rows or len(rows[0]) != each:
            count = len(rows[0]) if rows else 0
            raise PipelineError(
                f"each replica of this pipeline has {each} tasks, and tasks has "
                f"{'rows of ' if len(rows) > 1 else ''}{count}; give a row of {each} "
                "for each replica"
            )
        if self._placement is not None:
            check_known(self._placement, rows)
        other = copy(self)
        other.replicas = self._of_stages(rows)
        return other

    # ------------------------------------------------------------ inside

    def _of_stages(self, rows: Rows) -> Rows:
        """Returns the devices of each replica's stages, given those of its tasks."""
        stages = range(self.schedule.stages)
        return tuple(
            tuple(row[self.schedule.row_of(stage)] for stage in stages) for row in rows
        )

    def _microbatches(
        self, devices: Sequence[str], x: Tree, targets: Tree
    ) -> tuple[list[Tree], list[Tree]]:
        """Returns the microbatches of a replica, where its first and last stage are."""
        count = self.schedule.microbatches
        with device(devices[0]):
            inputs = split_batch(x, count, "x")
        with device(devices[-1]):
            return inputs, split_batch(targets, count, "targets")

    def _summed(self, stage: int, graphs: Sequence[PipelineGraph]) -> list[Any]:
        """Returns the gradients of a stage, where its parameters are."""
        sums = graphs[0].sums[stage]
        with device(self.devices[stage]):
            for graph in graphs[1:]:
                added = zip(sums, graph.sums[stage], strict=True)
                sums = [total + one for total, one in added]
        return sums

    def _types(self, batch: Tree, tables: Mapping[str, Any] | None = None) -> Tree:
        if batch is None:
            raise PipelineError(
                "balance= weighs layers by what they compute for a batch, and nothing "
                "says what a batch is; give step a batch, or the types of one: x="
            )
        count = self.schedule.microbatches * len(self.replicas)
        return microbatch_types(batch, count, tables)

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
                self.replicas,
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
        share = 1 / (self.schedule.microbatches * len(self.replicas))
        for number, stage in enumerate(stages):
            is_last = number == len(stages) - 1
            stage_passes = StagePasses(
                stage.what,
                self._last(stage) if is_last else without_targets(stage.apply),
                jax.tree.map(type_of, params[number]),
                inputs,
                jax.tree.map(type_of, targets) if is_last else (),
                input_gradients=bool(number) or input_gradients,
                share=share if is_last else None,
            )
            passes.append(stage_passes)
            inputs = stage_passes.outputs
        return passes

    def _whole_loss(self, params: Sequence[Tree], x: Tree, targets: Tree) -> Any:
        outputs = self.apply(params, x)
        with device(self.devices[-1]):
            return self._loss(outputs, targets)

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


def _joined(x: Tree, parts: Sequence[Sequence[Any]]) -> Tree:
    """Returns a tree like ``x`` of the gradients of its floats."""
    arrays = (jnp.concatenate(column) for column in zip(*parts, strict=True))
    return jax.tree.map(
        lambda leaf: next(arrays) if is_float(type_of(leaf)) else None, x
    )


@final
@dataclass(frozen=True, slots=True)
class PipelineLoss:
    """The loss of a pipeline as a function ``(params, x, targets)``.

    ``jg.towers(pipe.loss, 2)`` is the pipeline with two replicas. Called by itself it
    computes a batch in one piece, each stage on its task.

    Attributes:
      whole: the loss of a batch in one piece.
      over: gives the pipeline over other tasks.
    """

    whole: Callable[[Sequence[Tree], Tree, Tree], Any]
    over: Callable[[TaskArray], Pipeline]

    def __call__(self, params: Sequence[Tree], x: Tree, targets: Tree) -> Any:
        """Returns the loss of a batch in one piece."""
        return self.whole(params, x, targets)
