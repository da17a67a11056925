"""Training step of a pipeline: its passes in order, its tables, its optax update."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgraph.client.session import Session
from jgraph.errors import PipelineError
from jgraph.graph.device import device
from jgraph.graph.rows.rows import unique_rows
from jgraph.graph.sharding import Partitioner
from jgraph.graph.tracing.function import Function
from jgraph.graph.variable import Variable
from jgraph.plan.schedule import Pass, Schedule, simulate
from jgraph.train.checkpoint import checkpoint
from jgraph.train.model.optimizer import CalledOptimizer
from jgraph.train.model.trees import Tree, group_with_parameters, path_of
from jgraph.train.pipeline.stage_passes import Leaves, StagePasses
from jgraph.train.tables.ids import without_no_id


class Replicas(Protocol):
    """A pipeline, as far as its step needs it."""

    replicas: tuple[tuple[str, ...], ...]
    """Devices of each stage, for each replica."""

    def apply(self, params: Sequence[Tree], x: Tree) -> Tree:
        """Returns what the last stage gives for a batch in one piece."""
        ...

    def shares(self, batch: Tree, what: str) -> list[Tree]:
        """Returns the part of a batch of each replica, in order."""
        ...

    def gradients(
        self,
        params: Sequence[Tree],
        x: Sequence[Tree],
        targets: Sequence[Tree],
        *,
        input_gradients: bool,
    ) -> tuple[jax.Array, list[Tree], Tree]:
        """Returns the loss, its gradients, and those of the whole batch's ``x``."""
        ...


@final
class PipelineStep:
    """Variables of a pipeline, and the function that trains them.

    Parameters of stage (or layer) ``s`` and the optimizer's state for them live on its
    task, that of the first replica; they are called ``params/<s>/…`` and
    ``opt/…/<s>/…``. Of tables, only the rows travel that a batch looks up, to each
    replica those of its part, and only they are updated.

    Args:
      pipe: the pipeline.
      params: initial parameters of each stage (or layer).
      tx: the optimizer.
      homes: device of each of these.
      container: of the variables.
      tables: initial values by the name that their ids have in ``x``.
      table_device: where tables live.
      partitioner: of tables.

    Attributes:
      train: ``session.run(step.train, x, targets)`` trains one step and returns the
        loss. It is a ``jg.function``.
      forward: likewise gives what the last stage makes of ``x``, of a batch in one
        piece; ``jg.export(step.forward, x, path, session=session)`` writes it.
      variables: all of them.
    """

    def __init__(
        self,
        pipe: Replicas,
        params: Sequence[Tree],
        tx: optax.GradientTransformation,
        homes: Sequence[str],
        container: str = "",
        *,
        tables: Mapping[str, Any] | None = None,
        table_device: str = "/job:ps",
        partitioner: Partitioner | None = None,
    ) -> None:
        self._pipe, self._tx = pipe, CalledOptimizer(tx)
        values = {name: np.asarray(value) for name, value in (tables or {}).items()}
        rows = {name: len(value) for name, value in values.items()}
        self._tables = PipelineTables(rows, [devices[0] for devices in pipe.replicas])
        all_params = joined(list(params), values)
        state = {
            "params": all_params,
            "opt": jax.jit(self._tx.init)(all_params),
            "global_step": np.zeros((), np.int32),
        }
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        paths = [path_of(keys) for keys, _ in leaves]
        groups = [group.split("/") for group in group_with_parameters(paths)]
        pairs = []
        for path, group, (_, value) in zip(paths, groups, leaves, strict=True):
            table, stage = table_of(group, value, rows), stage_of(group)
            home = "" if stage is None else homes[stage]
            variable = Variable(
                "/".join(path),
                value,
                device=table_device if table else home,
                container=container,
                partitioner=partitioner if table else None,
            )
            pairs.append((variable, table))
        self._variable_tables = tuple(pairs)
        self.variables = tuple(variable for variable, _ in pairs)
        self.train = Function(self._train, "pipeline")
        self.forward = Function(self._forward, "pipeline_forward")

    def _forward(self, x: Any) -> Any:
        places = self._tables.places(x)
        reads = [
            (variable, places[table][0] if table else ...)
            for variable, table in self._variable_tables
            if variable.name.startswith("params/")
        ]
        by_name = {variable.name: variable[rows] for variable, rows in reads}
        now = self._with_values([by_name.get(v.name) for v in self.variables])
        stages, tables = apart(now["params"])
        return self._pipe.apply(stages, self._tables.looked_up(x, tables, places))

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
        matches = [v for v in self.variables if v.name.startswith(prefix)]
        values = session.read(matches)
        return self._with_values([values.get(v.name) for v in self.variables])

    def _with_values(self, values: Sequence[Any]) -> Tree:
        return jax.tree.unflatten(self._tree, values)

    def _train(self, x: Any, targets: Any) -> Any:
        parts, goals = self._pipe.shares(x, "x"), self._pipe.shares(targets, "targets")
        places = self._tables.places(x)
        reads = [(v, places[t][0] if t else ...) for v, t in self._variable_tables]
        now = self._with_values([variable[rows] for variable, rows in reads])
        stages, tables = apart(now["params"])
        if len(parts) == 1:
            inputs = [self._tables.looked_up(x, tables, places)]
        else:
            inputs = [self._looked_up(part, n) for n, part in enumerate(parts)]
        loss, grads, into = self._pipe.gradients(
            stages, inputs, goals, input_gradients=bool(places)
        )
        if places:
            grads = joined(grads, self._tables.gradients(into, tables, places))
        updates, opt = self._tx.update(grads, now["opt"], now["params"], value=loss)
        new = {
            "params": optax.apply_updates(now["params"], updates),
            "opt": opt,
            "global_step": now["global_step"] + 1,
        }
        for (variable, rows), value in zip(reads, jax.tree.leaves(new), strict=True):
            variable[rows] = value.astype(variable.dtype)
        return loss

    def _looked_up(self, part: Any, replica: int) -> Any:
        """Returns a replica's part of a batch with the rows that it alone needs."""
        places = self._tables.some(part)
        tables = {
            table: variable[places[table][0]]
            for variable, table in self._variable_tables
            if variable.name.startswith("params/") and table
        }
        return self._tables.looked_up(part, tables, places, replica)


@final
@dataclass(slots=True)
class PipelineGraph:
    """The values between the passes of one step, while it is traced.

    The order of tracing is the order of running on each task
    (``jgraph.graph.tracing.alone``), so going through the schedule is all that is
    needed to follow it.

    Attributes:
      schedule: who runs what.
      devices: of each stage.
      passes: of each stage.
      params: leaves of each stage's parameters.
      losses: of each microbatch.
      sums: of each stage, of its parameters' gradients.
      input_gradients: of each microbatch, of what the first stage takes.
    """

    schedule: Schedule
    devices: Sequence[str]
    passes: Sequence[StagePasses]
    params: Sequence[Leaves]
    losses: dict[int, Any] = field(default_factory=dict)
    sums: dict[int, Leaves] = field(default_factory=dict)
    input_gradients: dict[int, Leaves] = field(default_factory=dict)
    _inputs: dict[Pass, Leaves] = field(default_factory=dict)
    _residuals: dict[Pass, Leaves] = field(default_factory=dict)
    _gradients: dict[Pass, Leaves] = field(default_factory=dict)
    _targets: Sequence[Leaves] = ()

    def run(self, inputs: Sequence[Leaves], targets: Sequence[Leaves]) -> None:
        """Traces all passes.

        Args:
          inputs: of each microbatch, what the first stage takes.
          targets: of each microbatch, what the last stage takes besides.
        """
        self._inputs = {Pass(0, k): leaves for k, leaves in enumerate(inputs)}
        self._targets = targets
        together = self._together()
        for work in simulate(self.schedule).begins:
            with device(self.devices[work.stage]):
                if work in together:
                    self._both(work)
                elif not work.backward:
                    self._forward(work)
                elif Pass(work.stage, work.microbatch) not in together:
                    self._backward(work)

    def _together(self) -> set[Pass]:
        """Returns forward passes of the last stage that their backward passes follow.

        Nothing comes in between, so both are one segment and keep nothing.
        """
        last = len(self.passes) - 1
        row = self.schedule.rows[self.schedule.row_of(last)]
        return {
            work
            for work, then in itertools.pairwise(row)
            if work.stage == last and then == Pass(last, work.microbatch, True)
        }

    def _stage_inputs(self, work: Pass) -> Leaves:
        inputs = self._inputs[Pass(work.stage, work.microbatch)]
        if work.stage == len(self.passes) - 1:
            return [*inputs, *self._targets[work.microbatch]]
        return inputs

    def _forward(self, work: Pass) -> None:
        outputs, self._residuals[work] = self.passes[work.stage].forward(
            self.params[work.stage], self._stage_inputs(work), str(work)
        )
        self._give(work, outputs)

    def _give(self, work: Pass, outputs: Leaves) -> None:
        if work.stage == len(self.passes) - 1:
            (self.losses[work.microbatch],) = outputs
        else:
            self._inputs[Pass(work.stage + 1, work.microbatch)] = outputs

    def _backward(self, work: Pass) -> None:
        sums, gradients = self.passes[work.stage].backward(
            self.params[work.stage],
            self._stage_inputs(work),
            self._residuals.pop(Pass(work.stage, work.microbatch)),
            self._gradients.pop(work, []),
            self.sums.get(work.stage, []),
            str(work),
        )
        self._pass_back(work, sums, gradients)

    def _both(self, work: Pass) -> None:
        sums = self.sums.get(work.stage, [])
        outputs, *gradients = self.passes[work.stage].both(
            self.params[work.stage], self._stage_inputs(work), sums, f"{work} and back"
        )
        self._give(work, outputs)
        self._pass_back(work, *gradients)

    def _pass_back(self, work: Pass, sums: Leaves, gradients: Leaves) -> None:
        self.sums[work.stage] = sums
        if work.stage:
            self._gradients[Pass(work.stage - 1, work.microbatch, True)] = gradients
        else:
            self.input_gradients[work.microbatch] = gradients


Places: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Per table its rows that a batch needs, each once, and which of them each id is."""


@final
@dataclass(frozen=True, slots=True)
class PipelineTables:
    """The tables of a pipeline, by the name that their ids have in a batch.

    Attributes:
      rows: how many each has.
      first: devices of the first stage of each replica, which takes rows in place of
        ids.
    """

    rows: Mapping[str, int]
    first: Sequence[str]

    def places(self, x: Tree) -> Places:
        """Returns which rows a batch needs; other ids than those of rows are refused.

        Raises:
          PipelineError: the batch has no such ids.
        """
        return self._places(x, drop=False)

    def some(self, x: Tree) -> Places:
        """Returns which rows a part of a batch needs, of which ``places`` has all."""
        return self._places(x, drop=True)

    def _places(self, x: Tree, *, drop: bool) -> Places:
        for name in self.rows:
            ids = x.get(name) if isinstance(x, Mapping) else None
            if getattr(ids, "dtype", None) != jnp.int32:
                raise PipelineError(
                    f"x['{name}'] has to be int32 ids of the table '{name}'; give x as "
                    "a dict with the ids of each table by its name"
                )
        return {
            name: unique_rows(
                without_no_id(x[name].reshape(-1)),
                rows=count,
                feature=f"x['{name}']",
                drop=drop,
            )
            for name, count in self.rows.items()
        }

    def looked_up(
        self, x: Tree, tables: Mapping[str, Any], places: Places, replica: int = 0
    ) -> Tree:
        """Returns a batch, or a replica's part of it, with rows in place of ids."""
        if not self.rows:
            return x
        with device(self.first[replica]):
            rows = {
                name: tables[name][positions].reshape(*x[name].shape, -1)
                for name, (_, positions) in places.items()
            }
        return {**x, **rows}

    def gradients(
        self, into: Tree, tables: Mapping[str, Any], places: Places
    ) -> dict[str, Any]:
        """Returns the gradients of the rows, given those of what was looked up."""
        with device(self.first[0]):
            return {
                name: jnp.zeros_like(tables[name])
                .at[positions]
                .add(into[name].reshape(positions.size, -1))
                for name, (_, positions) in places.items()
            }


def joined(stages: list[Tree], tables: Mapping[str, Any]) -> Tree:
    """Returns all parameters: the stages' alone where there are no tables."""
    return {"stages": stages, "tables": dict(tables)} if tables else stages


def apart(params: Tree) -> tuple[list[Tree], dict[str, Any]]:
    """Returns the parameters of the stages, and the tables."""
    if isinstance(params, dict):
        return params["stages"], params["tables"]
    return params, {}


def table_of(group: list[str], value: Any, rows: Mapping[str, int]) -> str:
    """Returns of which table a variable has the rows; ``""`` of none.

    Args:
      group: path of the parameter that it belongs to.
      value: what the variable begins with.
      rows: of each table.
    """
    is_table = group[:2] == ["params", "tables"]
    shape = jax.numpy.shape(value)
    return group[2] if is_table and shape[:1] == (rows[group[2]],) else ""


def stage_of(group: list[str]) -> int | None:
    """Returns the stage that a parameter belongs to, by its path."""
    number = group[2 if group[1:2] == ["stages"] else 1 :][:1]
    return int(number[0]) if group[0] == "params" and number[0].isdigit() else None
