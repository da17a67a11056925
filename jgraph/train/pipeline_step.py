"""The training step of a pipeline: variables, gradients, and the optax update."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import optax

from jgraph.cluster.session import Session
from jgraph.graph.function import Function
from jgraph.graph.variable import Variable
from jgraph.train.trees import Tree, group_with_parameters, path_of


@final
class PipelineStep:
    """Variables of a pipeline, and the function that trains them.

    Parameters of stage ``s`` and the optimizer's state for them live on the stage's
    task; they are called ``params/<s>/…`` and ``opt/…/<s>/…``.

    Args:
      value_and_grad: from (parameters, x, targets) to loss and gradients.
      params: initial parameters of each stage.
      tx: the optimizer.
      devices: of each stage.
      container: of the variables.

    Attributes:
      train: ``session.run(step.train, x, targets)`` trains one step and returns the
        loss. It is a ``jg.function``.
      variables: all of them.
    """

    def __init__(
        self,
        value_and_grad: Callable[[Tree, Any, Any], Any],
        params: Sequence[Tree],
        tx: optax.GradientTransformation,
        devices: Sequence[str],
        container: str = "",
    ) -> None:
        self._value_and_grad, self._tx = value_and_grad, tx
        state = {"params": list(params), "opt": jax.jit(tx.init)(list(params))}
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        paths = [path_of(keys) for keys, _ in leaves]
        groups = [group.split("/") for group in group_with_parameters(paths)]
        self.variables = tuple(
            Variable(
                "/".join(path),
                value,
                device=devices[int(group[1])] if group[0] == "params" else "",
                container=container,
            )
            for path, group, (_, value) in zip(paths, groups, leaves, strict=True)
        )
        self.train = Function(self._train, "pipeline")

    def params(self, session: Session) -> list[Tree]:
        """Returns the parameters of each stage as they are now."""
        wanted = [v for v in self.variables if v.name.startswith("params/")]
        values = session.read(wanted)
        shaped = self._with_values([values.get(v.name) for v in self.variables])
        found: list[Tree] = shaped["params"]
        return found

    def _with_values(self, values: Sequence[Any]) -> Tree:
        return jax.tree.unflatten(self._tree, values)

    def _train(self, x: Any, targets: Any) -> Any:
        now = self._with_values([variable[...] for variable in self.variables])
        loss, grads = self._value_and_grad(now["params"], x, targets)
        updates, opt = self._tx.update(grads, now["opt"], now["params"])
        new = {"params": optax.apply_updates(now["params"], updates), "opt": opt}
        for variable, value in zip(self.variables, jax.tree.leaves(new), strict=True):
            variable[...] = value.astype(variable.dtype)
        return loss
