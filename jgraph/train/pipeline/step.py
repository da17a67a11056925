"""The training step of a pipeline: variables, gradients, and the optax update."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import optax

from jgraph.client.session import Session
from jgraph.graph.sharding import Partitioner
from jgraph.graph.tracing.function import Function
from jgraph.graph.variable import Variable
from jgraph.train.checkpoint import checkpoint
from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.model.trees import Tree, group_with_parameters, path_of
from jgraph.train.pipeline.tables import (
    PipelineTables,
    apart,
    joined,
    stage_of,
    table_of,
)


@final
class PipelineStep:
    """Variables of a pipeline, and the function that trains them.

    Parameters of stage ``s`` and the optimizer's state for them live on the stage's
    task; they are called ``params/<s>/…`` and ``opt/…/<s>/…``. Of tables, only the rows
    travel that a batch looks up, and only they are updated.

    Args:
      value_and_grad: from (parameters, x, targets) to loss and gradients, and with
        ``input_gradients`` those of x.
      params: initial parameters of each stage.
      tx: the optimizer.
      devices: of each stage.
      container: of the variables.
      tables: initial values by the name that their ids have in ``x``.
      table_device: where tables live.
      partitioner: of tables.

    Attributes:
      train: ``session.run(step.train, x, targets)`` trains one step and returns the
        loss. It is a ``jg.function``.
      variables: all of them.
    """

    def __init__(
        self,
        value_and_grad: Callable[..., Any],
        params: Sequence[Tree],
        tx: optax.GradientTransformation,
        devices: Sequence[str],
        container: str = "",
        *,
        tables: Mapping[str, Any] | None = None,
        table_device: str = "/job:ps",
        partitioner: Partitioner | None = None,
    ) -> None:
        self._value_and_grad, self._tx = value_and_grad, CalledOptimizer(tx)
        given = {name: np.asarray(value) for name, value in (tables or {}).items()}
        rows = {name: len(value) for name, value in given.items()}
        self._tables = PipelineTables(rows, devices[0])
        trained = joined(list(params), given)
        state = {
            "params": trained,
            "opt": jax.jit(self._tx.init)(trained),
            "global_step": np.zeros((), np.int32),
        }
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        paths = [path_of(keys) for keys, _ in leaves]
        groups = [group.split("/") for group in group_with_parameters(paths)]
        made = []
        for path, group, (_, value) in zip(paths, groups, leaves, strict=True):
            table, stage = table_of(group, value, rows), stage_of(group)
            home = "" if stage is None else devices[stage]
            variable = Variable(
                "/".join(path),
                value,
                device=table_device if table else home,
                container=container,
                partitioner=partitioner if table else None,
            )
            made.append((variable, table))
        self._made = tuple(made)
        self.variables = tuple(variable for variable, _ in made)
        self.train = Function(self._train, "pipeline")

    def params(self, session: Session) -> list[Tree]:
        """Returns the parameters of each stage as they are now."""
        stages, _ = apart(self._now(session, "params/")["params"])
        return stages

    def tables(self, session: Session) -> dict[str, Any]:
        """Returns the tables as they are now, whole."""
        _, tables = apart(self._now(session, "params/tables/")["params"])
        return tables

    def save(
        self, session: Session, path: str | Path, *, overwrite: bool = False
    ) -> Path:
        """Writes parameters, optimizer state and number of steps as a checkpoint.

        It is laid out as those of ``Trainer``: ``params`` is the list of the stages'
        trees, or has ``stages`` and ``tables``.

        Raises:
          CheckpointError: the directory exists, or cannot be written.
        """
        tree = {**self._now(session), "state": {}}
        return checkpoint.save(path, tree, overwrite=overwrite)

    def restore(self, session: Session, path: str | Path) -> int:
        """Goes on from a checkpoint; returns the number of steps that were trained.

        The tasks may be others, and more or fewer, than those it was saved on.

        Raises:
          CheckpointError: none there, a damaged one, or one of another model.
        """
        like = self._with_values([v.spec.aval for v in self.variables])
        tree = checkpoint.restore(path, {**like, "state": {}})
        del tree["state"]
        values = jax.tree.leaves(jax.tree.map(np.asarray, tree))
        session.write(dict(zip(self.variables, values, strict=True)))
        return int(tree["global_step"])

    def _now(self, session: Session, prefix: str = "") -> Tree:
        wanted = [v for v in self.variables if v.name.startswith(prefix)]
        values = session.read(wanted)
        return self._with_values([values.get(v.name) for v in self.variables])

    def _with_values(self, values: Sequence[Any]) -> Tree:
        return jax.tree.unflatten(self._tree, values)

    def _train(self, x: Any, targets: Any) -> Any:
        places = self._tables.places(x)
        used = [(v, places[t][0] if t else ...) for v, t in self._made]
        now = self._with_values([variable[rows] for variable, rows in used])
        stages, found = apart(now["params"])
        taken = self._tables.looked_up(x, found, places)
        if places:
            loss, (grads, into) = self._value_and_grad(
                stages, taken, targets, input_gradients=True
            )
            grads = joined(grads, self._tables.gradients(into, found, places))
        else:
            loss, grads = self._value_and_grad(stages, taken, targets)
        updates, opt = self._tx.update(grads, now["opt"], now["params"], value=loss)
        new = {
            "params": optax.apply_updates(now["params"], updates),
            "opt": opt,
            "global_step": now["global_step"] + 1,
        }
        for (variable, rows), value in zip(used, jax.tree.leaves(new), strict=True):
            variable[rows] = value.astype(variable.dtype)
        return loss
