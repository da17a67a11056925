"""Costs of a pipeline's layers: work, bytes sent and bytes held, from their types."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jgraph import _compat
from jgraph._compat import Literal
from jgraph.graph.cost import nbytes_of_value, peak_nbytes
from jgraph.plan.auto.chain import LayerCost
from jgraph.plan.auto.work import work_of
from jgraph.plan.program.types import value_type
from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.model.trees import Tree, group_with_parameters, path_of
from jgraph.train.pipeline.stage import Stage, without_targets
from jgraph.train.pipeline.stage_passes import Leaves, StagePasses, is_float
from jgraph.train.pipeline.step import joined, stage_of


def layer_costs(
    layers: Sequence[Stage],
    params: Sequence[Tree],
    inputs: Tree,
    stored: Sequence[int],
    *,
    input_gradients: bool,
) -> list[LayerCost]:
    """Returns what each layer asks for; a function given again is not traced again.

    Args:
      layers: in order.
      params: types of the parameters of each.
      inputs: types of what the first one takes of a microbatch.
      stored: bytes of the variables of each.
      input_gradients: whether those of the first layer's inputs are wanted.

    Raises:
      PipelineError: a layer does not take what the one before it gives.
    """
    known: dict[Any, tuple[LayerCost, Tree]] = {}
    found = []
    for number, (layer, tree) in enumerate(zip(layers, params, strict=True)):
        wants = bool(number) or input_gradients
        leaves, structure = jax.tree.flatten((tree, inputs))
        key = layer.apply, wants, stored[number], structure, tuple(leaves)
        if key not in known:
            passes = StagePasses(
                layer.what,
                without_targets(layer.apply),
                tree,
                inputs,
                (),
                input_gradients=wants,
            )
            cost = _cost(passes, jax.tree.leaves(tree), inputs, stored[number])
            known[key] = cost, passes.outputs
        cost, inputs = known[key]
        found.append(cost)
    return found


def _cost(passes: StagePasses, params: Leaves, inputs: Tree, stored: int) -> LayerCost:
    outputs = jax.tree.leaves(passes.outputs)
    floats = [leaf for leaf in outputs if is_float(leaf)]
    num_residuals = 0

    def both(params: Leaves, inputs: Leaves, gradients: Leaves) -> Leaves:
        nonlocal num_residuals
        results, residuals = passes.forward(params, inputs)
        num_residuals = len(residuals)
        back = passes.backward(params, inputs, residuals, gradients, [])
        return [*results, *residuals, *back[0], *back[1]]

    jaxpr, _, _ = _compat.make_jaxpr(both, params, jax.tree.leaves(inputs), floats)
    values = jaxpr.outvars[: len(outputs) + num_residuals]
    output_vars, residual_vars = (
        {v for v in part if not isinstance(v, Literal)}
        for part in (values[: len(outputs)], values[len(outputs) :])
    )
    bodies = [
        _compat.open_jaxpr(body)
        for equation in jaxpr.eqns
        for _, body in _compat.inner_jaxprs(equation)
    ]
    extra = [peak_nbytes(b.eqns) - sum(map(nbytes_of_value, b.invars)) for b in bodies]
    return LayerCost(
        work=work_of(jaxpr.eqns, jaxpr.outvars),
        output_nbytes=tree_nbytes(outputs),
        returned_nbytes=tree_nbytes(floats),
        stored_nbytes=stored,
        gradient_nbytes=tree_nbytes(params),
        held_nbytes=tree_nbytes(inputs)
        + sum(map(nbytes_of_value, residual_vars - output_vars)),
        held_output_nbytes=sum(map(nbytes_of_value, residual_vars & output_vars)),
        extra_nbytes=max([0, *extra]),
    )


def stored_nbytes(
    params: Sequence[Tree],
    tx: optax.GradientTransformation | None,
    tables: Mapping[str, Any],
) -> list[int]:
    """Returns the bytes of the variables of each layer: parameters, optimizer's state.

    Args:
      params: types of the parameters of each layer.
      tx: the optimizer, if there is one.
      tables: types of what it sees beside the layers.
    """
    all_params = joined(list(params), tables)
    state: Tree = {"params": all_params}
    if tx is not None:
        state["opt"] = jax.eval_shape(CalledOptimizer(tx).init, all_params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    groups = group_with_parameters([path_of(keys) for keys, _ in leaves])
    found = [0] * len(params)
    for group, (_, leaf) in zip(groups, leaves, strict=True):
        layer = stage_of(group.split("/"))
        if layer is not None:
            found[layer] += tree_nbytes(leaf)
    return found


def tree_nbytes(tree: Tree) -> int:
    """Returns the bytes of all arrays of a tree, or of their types."""
    return sum(value_type(leaf).nbytes for leaf in jax.tree.leaves(tree))
