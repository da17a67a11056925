"""Load balancing of a pipeline: its tasks, and the stages that its layers make."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import optax

from jgraph.client.placement.auto import AutoPlacement
from jgraph.errors import PipelineError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.chain import Balance, Chain, LayerCost
from jgraph.plan.schedule import Schedule
from jgraph.train.data.fields import split_batch
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.layer_costs import layer_costs, stored_nbytes, tree_nbytes
from jgraph.train.pipeline.replicas import Rows, TaskArray, dealt, task_rows
from jgraph.train.pipeline.stage import Stage
from jgraph.train.pipeline.stage_passes import is_float, type_of


def balanced_tasks(
    balance: AutoPlacement,
    layers: int,
    tasks: TaskArray | None,
    replicas: int | None,
    schedule: str,
) -> Rows:
    """Returns the tasks of a balanced pipeline's stages, one each, per replica.

    Args:
      balance: what knows the speeds of tasks.
      layers: how many there are to cut.
      tasks: devices, or how many of those of ``balance`` each replica has, from the
        first on; all if unset.
      replicas: how many there are; the rows of ``tasks``, or 1, if unset.
      schedule: its name.

    Raises:
      PipelineError: ``balance`` does not know such tasks, or there are more of them
        than layers, or the schedule has several stages on each.
    """
    if not isinstance(balance, AutoPlacement):
        raise PipelineError(
            f"balance is {balance!r:.60}; give what jg.auto(cluster) returns"
        )
    if schedule == "interleaved":
        raise PipelineError(
            "balance= cuts one stage for each task, and 'interleaved' has several; "
            "choose schedule='1f1b' or 'gpipe', or give stages without balance="
        )
    rows = _rows(balance.planner.tasks, tasks, replicas)
    check_known(balance, rows)
    stages = len(rows[0]) if rows else 0
    if layers < stages:
        raise PipelineError(
            f"balance= cannot cut {layers} layers for {stages} tasks; give at "
            "least as many layers, or tasks= with fewer"
        )
    return rows


def check_known(balance: AutoPlacement, rows: Rows) -> None:
    """Refuses tasks of which nobody knows how fast they are, and one for two stages.

    Raises:
      PipelineError: names the task.
    """
    names = [name for row in rows for name in row]
    homes = [task_of(name) for name in names]
    known = balance.cost_model.tasks
    for name, home in zip(names, homes, strict=True):
        if home not in known:
            raise PipelineError(
                f"tasks names '{name}', and balance knows how fast {', '.join(known)} "
                "are; give tasks of the cluster of jg.auto(cluster)"
            )
        if homes.count(home) > 1:
            raise PipelineError(
                f"tasks names '{home}' more than once, and balance= cuts one stage for "
                "each task; name each once"
            )


def _rows(
    offered: Sequence[str], tasks: TaskArray | None, replicas: int | None
) -> Rows:
    """Returns the devices of each replica, of those that there are.

    Example:
      >>> _rows(["a", "b", "c", "d"], 1, 2)
      (('a',), ('b',))
      >>> _rows(["a", "b", "c", "d"], None, 2)
      (('a', 'b'), ('c', 'd'))
    """
    rows = task_rows(1 if tasks is None else tasks, replicas)
    if tasks is not None and not isinstance(tasks, int):
        return rows
    count = replicas or 1
    most = len(offered) // count
    if tasks is None:
        if most:
            return dealt(offered, count)
        what, each = f"replicas is {count}", ""
    else:
        if 1 <= tasks <= most:
            return dealt(offered[: tasks * count], count)
        what = f"tasks is {tasks}"
        each = f" for each of {count} replicas" if count > 1 else ""
    raise PipelineError(
        f"{what}, and balance has {len(offered)} ({', '.join(offered)}); give "
        f"1 to {most or len(offered)}{each}, or their names"
    )


def task_of(name: str) -> TaskName:
    """Returns the task that a device is of; ``""`` if it names none.

    Example:
      >>> task_of("/job:worker/task:1/device:cpu:0")
      '/job:worker/task:1'
    """
    return TaskName(DeviceSpec.from_string(name).task_name or "")


def balanced(
    balance: AutoPlacement,
    layers: Sequence[Stage],
    params: Sequence[Tree],
    inputs: Tree,
    schedule: Schedule,
    replicas: Rows,
    *,
    tx: optax.GradientTransformation | None = None,
    tables: Mapping[str, Any] | None = None,
    input_gradients: bool = False,
) -> Balance:
    """Returns which layers go to which task.

    Args:
      balance: knows how fast tasks and links are, and the limits of memory.
      layers: in order.
      params: of each.
      inputs: types of what the first one takes of a microbatch.
      schedule: of the stages.
      replicas: devices of the stages, for each replica.
      tx: the optimizer, if it is known.
      tables: that are on parameter servers, by name.
      input_gradients: whether those of the first layer's inputs are wanted.

    Raises:
      MemoryLimitError: nothing keeps the limits.
      PipelineError: a layer does not take what the one before it gives.
    """
    types = [jax.tree.map(type_of, tree) for tree in params]
    below = {name: type_of(table) for name, table in (tables or {}).items()}
    stored = stored_nbytes(types, tx, below)
    most_held = schedule.most_held()
    costs = layer_costs(layers, types, inputs, stored, input_gradients=input_gradients)
    first, *others = (tuple(map(task_of, row)) for row in replicas)

    def chain(costs: Sequence[LayerCost], tasks: Sequence[TaskName]) -> Chain:
        return Chain(
            costs,
            tasks,
            most_held,
            balance.cost_model,
            balance.planner.limits,
            waiting=(schedule.microbatches - most_held[0]) * tree_nbytes(inputs),
            beside=[t for row in (first, *others) if row != tasks for t in row],
        )

    # Other replicas are sent parameters, and hold nothing of the optimizer.
    sent = stored_nbytes(types, None, below)
    without = [
        replace(cost, stored_nbytes=nbytes)
        for cost, nbytes in zip(costs, sent, strict=True)
    ]
    return chain(costs, first).balance([chain(without, row) for row in others])


def microbatch_types(
    batch: Tree, microbatches: int, tables: Mapping[str, Any] | None = None
) -> Tree:
    """Returns the types of what the first layer takes of a microbatch.

    Args:
      batch: arrays, or the types of them.
      microbatches: how many a batch has.
      tables: whose rows it takes where a batch has ids.

    Raises:
      FeedError: the batch cannot be cut.
    """
    types = jax.tree.map(type_of, batch)
    for name, table in (tables or {}).items():
        ids = types.get(name) if isinstance(types, Mapping) else None
        if ids is not None and not is_float(ids):
            rows = jax.ShapeDtypeStruct((*ids.shape, *table.shape[1:]), table.dtype)
            types = {**types, name: rows}
    return jax.eval_shape(lambda x: split_batch(x, microbatches, "x")[0], types)


def stages_of(layers: Sequence[Stage], bounds: Sequence[int]) -> list[Stage]:
    """Returns stages that take a list of their layers' parameters.

    Args:
      layers: in order.
      bounds: stage ``s`` has the layers from ``bounds[s]`` on.

    Example:
      >>> layers = [Stage(f"layer {n}", lambda w, x: w * x) for n in range(3)]
      >>> first, second = stages_of(layers, [0, 2, 3])
      >>> first.apply([2, 3], 1), second.what
      (6, 'layer 2')
    """
    return [_stage(layers[first:end]) for first, end in pairwise(bounds)]


def _stage(layers: Sequence[Stage]) -> Stage:
    first, last = layers[0].what, layers[-1].what
    what = first if len(layers) == 1 else f"the stage from {first} to {last}"
    return Stage(what, partial(_apply, layers))


def _apply(layers: Sequence[Stage], params: Sequence[Tree], x: Tree) -> Tree:
    for layer, tree in zip(layers, params, strict=True):
        x = layer.applied(tree, x)
    return x
