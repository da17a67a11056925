"""One training step as a graph: variables for all state, loss, gradients, update."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import optax

from jgraph.coordination.step.finite import FiniteCheck
from jgraph.coordination.step.step_metrics import LOCAL_STEPS
from jgraph.errors import ConfigError
from jgraph.graph.device import device, is_worker
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableSpec
from jgraph.graph.rows.padded_rows import spread_rows
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.train.hash_tables.hash_state import TrainedTable, trained_tables
from jgraph.train.hash_tables.hash_step import (
    check_lookups,
    refuse_tables,
    table_specs,
)
from jgraph.train.model.adapters import Adapter, Make
from jgraph.train.model.checks import (
    FINITE,
    finite,
    value_and_grad,
    warn_of_same_draws,
)
from jgraph.train.model.optimizer import CalledOptimizer, LossOf, Optimizer
from jgraph.train.model.trees import Tree, group_with_parameters, names_of, path_of
from jgraph.train.privacy.private_update import PrivateUpdate, SampledBatch
from jgraph.train.step.arrange import Arrangement, groups_of
from jgraph.train.step.batch_pieces import BatchPieces
from jgraph.train.step.compress import Compression, GradientDtype
from jgraph.train.step.fragments import Fragments, check_slots
from jgraph.train.step.local_steps import INNER, OUTER, LocalRule, LocalSteps
from jgraph.train.tables.row_mean import Touched, row_layout
from jgraph.train.tables.row_step import Computed, RowStep, Sparse, decide
from jgraph.train.tables.row_tables import find_row_tables

_NEEDS_PS: Final = (
    "which lives on parameter servers; use jg.Trainer(…, "
    "cluster=jg.LocalCluster(ps=1, workers=1), strategy=jg.AsyncPS())"
)


@final
class TrainStep:
    """The variables of a training run and the step that changes them.

    The state of a run is one tree: ``{"params", "opt", "state", "global_step"}``. Each
    leaf is a variable named by its path, ``params/Dense_0/kernel``,
    ``opt/0/mu/Dense_0/kernel``. Loss and gradients are placed on ``/job:worker``; the
    update is not placed and so lands where its variables are.

    Args:
      adapter: the model and its loss.
      tx: the optimizer, which sees the parameters as nested dicts; or one for each
        top-level name of them.
      check_finite: compute which gradients are finite, and skip an update that is not:
        it does not count as a step either.
      arrangement: how variables are cut and placed.
      container: of the variables.
      sparse: as for ``Trainer``.
      alone: one replica makes all updates, and numbers them as ``global_step`` does.
        An update that follows one that was skipped is skipped too.
      gradient_dtype: of gradients that travel; see ``Compression``.
      local: how a worker trains alone between two updates, which ``tx`` makes of how
        far it came; see ``LocalSteps``.
      private: what is done to gradients; see ``PrivateUpdate``. An optimizer is told
        nothing of the loss then, which has no noise.
    """

    def __init__(
        self,
        adapter: Adapter,
        tx: Optimizer,
        *,
        check_finite: bool = False,
        arrangement: Arrangement | None = None,
        container: str = "",
        sparse: Sparse = "auto",
        alone: bool = False,
        gradient_dtype: GradientDtype | None = None,
        local: LocalRule | None = None,
        private: PrivateUpdate | None = None,
    ) -> None:
        self.adapter = adapter
        self.container = container
        self._sparse: Sparse = sparse
        self._alone = alone
        self.private = private
        """What is done to gradients before an update; None: nothing."""
        if private is not None:
            private.check(adapter.params)
        self._row_steps: dict[str, RowStep | None] = {}
        self._constants: dict[str, frozenset[str]] = {}
        self._tx = CalledOptimizer(tx)
        self._check_finite = check_finite
        self.local = None
        if local is not None:
            self.local = LocalSteps(local, adapter.params, container, adapter.state)
        state_maker = (
            None
            if adapter.make is None
            else partial(made_state, adapter.make, self._init)
        )
        if state_maker is None:
            opt = jax.jit(self._init)(adapter.params)
            tree = new_state(adapter.params, opt, adapter.state)
        else:
            tree = (
                jax.jit(state_maker)()
                if arrangement is None
                else jax.eval_shape(state_maker)
            )
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(tree)
        paths = [path_of(keys) for keys, _ in leaves]
        self._groups = groups = group_with_parameters(paths)
        ps = () if arrangement is None else arrangement.ps
        if arrangement is not None and not ps:
            refuse_tables(adapter.tables, _NEEDS_PS)
        names = names_of(paths)
        of = dict(zip(names, groups, strict=True))
        self.arrangement = arrangement or Arrangement()
        """How the variables are cut and placed."""
        cut = self.arrangement.table_shards
        specs = table_specs(adapter.tables, self._tx.init, tree["params"], of, cut)
        self._tables = partial(trained_tables, adapter.tables, specs, container)
        values = [
            on_its_task(state_maker, number, value)
            for number, (_, value) in enumerate(leaves)
        ]
        self._variables_on = partial(
            Arrangement.variables,
            names=names,
            groups=groups,
            values=values,
            container=container,
            tables=specs,
        )
        self.variables: tuple[Variable, ...] = self._variables_on(self.arrangement)
        self.initial_values: list[Any] = [value for _, value in leaves]
        """Of a large model on a cluster, only their types."""
        if self.fragments is not None:
            check_slots(self.variables, groups)
        self.compression = None
        if gradient_dtype is not None:
            parameters = [v for v in self.variables if v.name.startswith("params/")]
            self.compression = Compression(parameters, gradient_dtype, container)

    def _init(self, params: Tree) -> Tree:
        """Returns the state of the optimizer of a run that begins."""
        outer = self._tx.init(params)
        if self.local is None or not self.local.is_averaged:
            return outer
        return {OUTER: outer, INNER: self.local.tx.init(params)}

    def on(self, ps: int) -> "TrainStep":
        """Returns this step with its variables where they are with so many ps."""
        other = copy(self)
        other.move_to(ps)
        return other

    def move_to(self, ps: int) -> None:
        """Takes note that the variables lie on so many ps from now on."""
        self.arrangement = self.arrangement.on(ps)
        self.variables = self._variables_on(self.arrangement)

    def look_at(self, homes: Mapping[TaskName, TaskName]) -> None:
        """Takes note that parts of owners lie elsewhere from now on.

        Args:
          homes: who has the part of each owner that is away.
        """
        self.arrangement = replace(self.arrangement, homes=homes)
        self.variables = self._variables_on(self.arrangement)

    @property
    def groups(self) -> dict[str, list[VariableSpec]]:
        """What must live together: a parameter, or a shard, and its optimizer state."""
        return groups_of(self.variables, self._groups)

    @property
    def fragments(self) -> Fragments | None:
        """How the parameters are exchanged in turn; None: all at once."""
        return None if self.local is None else self.local.fragments

    @property
    def tables(self) -> list[TrainedTable]:
        """The hash tables on parameter servers."""
        variables = [v for v in self.variables if v.spec.table is not None]
        tasks = {
            v.name: tuple(TaskName(str(s.device)) for s in v.shards) for v in variables
        }
        return self._tables(tasks)

    @property
    def own(self) -> list[Variable]:
        """What each worker has for itself; left-overs begin anew in each ``fit``."""
        residuals = () if self.compression is None else self.compression.residuals
        return [*residuals, *(() if self.local is None else self.local.own)]

    def own_of(self, by_rows: RowStep | None) -> list[Variable]:
        """Returns what each worker has for itself in a step.

        Args:
          by_rows: the tables of which rows travel in that step; None: none.
        """
        known = {} if self.local is None else self.local.known_rows(by_rows)
        return [*self.own, *known.values()]

    @property
    def plain(self) -> list[Variable]:
        """The variables that are no columns of hash tables."""
        return [variable for variable in self.variables if not variable.spec.table]

    @property
    def owners(self) -> list[TaskName]:
        """The workers that hold variables, sorted; none: only ps do."""
        tasks = {str(shard.device) for v in self.variables for shard in v.shards}
        return sorted(TaskName(task) for task in tasks if is_worker(task))

    @property
    def tables_apart(self) -> list[str] | None:
        """The tables that the owners of all else do not hold; None: none own it."""
        owners = self.arrangement.owners
        return None if owners is None else sorted(owners.tables)

    @property
    def names(self) -> list[str]:
        """Names of the variables, in order."""
        return [variable.name for variable in self.variables]

    def unflatten(self, values: Sequence[Any]) -> Tree:
        """Returns the tree of state with ``values``, one per variable, in order."""
        return jax.tree.unflatten(self.tree, values)

    def graph(self, batch: Any) -> Graph:
        """Returns the graph of a step on batches of these shapes and dtypes.

        Feeds are the leaves of ``batch``, ``step`` and ``replica`` (int32); fetches are
        ``['loss']`` and the metrics.
        """
        by_rows, constants = self.row_step(batch), self.constants(batch)

        def train_step(
            batch: Any, step: Any, replica: Any, entropy: Any = None
        ) -> dict[str, Any]:
            return self._step(by_rows, constants, batch, step, replica, entropy)

        number = jax.ShapeDtypeStruct((), jnp.int32)
        feeds = [batch, number, number]
        variables, notes = [*self.variables], [*(by_rows.notes if by_rows else ())]
        if self.private is not None:
            feeds.append(self.private.entropy(self.adapter.params))
            notes.append(self.private.note)
        variables += self.own_of(by_rows)
        if self.compression is not None:
            notes.append(self.compression.note)
        if self.local is not None:
            notes.append(self.local.note)
        graph, _ = trace(train_step, *feeds, variables=variables)
        warn_of_same_draws(graph)
        return replace(graph, notes=tuple(notes))

    def row_step(self, batch: Any) -> RowStep | None:
        """Returns what goes by rows in a step on such batches; None: nothing may."""
        key = str(jax.tree.map(lambda x: (x.shape, x.dtype), batch))
        if key not in self._row_steps:
            off = self.local is not None and self.local.rule.epochs > 0
            off |= self.private is not None
            self._row_steps[key] = None if off else self._decide(batch)
        return self._row_steps[key]

    def constants(self, batch: Any) -> frozenset[str]:
        """Returns names of state, e.g. frozen parameters, that is never written."""
        key = str(jax.tree.map(lambda x: (x.shape, x.dtype), batch))
        if key not in self._constants:
            now = self.unflatten([v.spec.aval for v in self.variables])
            seen = batch.examples if isinstance(batch, SampledBatch) else batch
            seen = seen if self.local is None else self.local.batch(seen)
            same = unchanged_state(self.adapter, now["params"], now["state"], seen)
            names = [name for name in self.names if name.startswith("state/")]
            self._constants[key] = frozenset(compress(names, same))
            if self.private is not None and not all(same):
                raise ConfigError(
                    f"the loss changes {names[same.index(False)]}, as BatchNorm does: "
                    "that is made of the data of all, and gets no noise; with privacy= "
                    "use a model without, for example with LayerNorm or GroupNorm"
                )
        return self._constants[key]

    def _decide(self, batch: Any) -> RowStep | None:
        avals = [variable.spec.aval for variable in self.variables]
        now = self.unflatten(avals)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        count = 1
        if self.local is not None:
            batch, count = self.local.batch(batch), self.local.count
        row_tables = find_row_tables(
            self.adapter.loss,
            now["params"],
            now["state"],
            batch,
            (number, number),
            [name for name in self.names if name.startswith("params/")],
            small=self._sparse == "lazy",  # its numbers hang on no size
            looks=self._looks,
        )
        if not self.tables:
            refuse_tables(self.adapter.tables, _NEEDS_PS)
        by_keys = {t.name for t in row_tables.tables if t.hashed}
        check_lookups(self.adapter.tables, by_keys, row_tables.dense)
        if self._sparse == "off":
            row_tables = row_tables.without(
                {
                    table.name: "sparse='off'"
                    for table in (*row_tables.tables, *row_tables.looked_at)
                    if not table.hashed
                }
            )
        if self.local is not None:
            whole = self.local.whole(row_tables, self._sparse)
            row_tables = row_tables.without(whole)
        if not (row_tables.tables or row_tables.dense):
            return None
        slots = {
            name: (group, aval.shape)
            for name, group, aval in zip(self.names, self._groups, avals, strict=True)
            if name.startswith("opt/")
        }
        by_rows = decide(
            *(row_tables, self._tx, now["params"], slots, self._beside),
            *(self._sparse, count),
        )
        if self._alone:
            return by_rows.in_one_place()
        budget = 0 if self.local is None else self.local.rule.row_budget
        return replace(by_rows, budget=budget)

    @property
    def _looks(self) -> list[str]:
        """The tables that travel whole if they are small, with a look at their ids.

        Gradients of rows are not compressed, those of a whole table would be; and among
        owners tables lie apart.
        """
        is_exact = self._sparse in {"auto", "exact"}
        apart = self._alone or self.local is not None or bool(self.arrangement.owners)
        if not is_exact or apart or self.compression is not None:
            return []
        return [v.name for v in self.variables if len(v.shards) == 1]

    @property
    def _beside(self) -> list[int | None]:
        """Per leaf of the optimizer's state the number of the parameter's leaf."""
        numbers = {
            name: number
            for number, name in enumerate(
                name for name in self.names if name.startswith("params/")
            )
        }
        return [
            numbers.get(group)
            for name, group in zip(self.names, self._groups, strict=True)
            if name.startswith("opt/")
        ]

    def metric_names(self, graph: Graph) -> list[str]:
        """Returns the name of each fetch of a step's graph, in order."""
        places = list(range(len(graph.fetches)))
        metrics = jax.tree.unflatten(graph.out_tree, places)
        return sorted(metrics, key=metrics.__getitem__)

    def finite_check(self, graph: Graph) -> FiniteCheck | None:
        """Returns which fetch of a step's graph says what is finite; None: none."""
        if not self._check_finite:
            return None
        parameters = [n for n in self.names if n.startswith("params/")]
        leaves = ("loss", *parameters)
        return FiniteCheck(self.metric_names(graph).index(FINITE), leaves)

    def reported(self, graph: Graph) -> list[str]:
        """Returns the names of those fetches that loops report, in order."""
        return [name for name in self.metric_names(graph) if name != FINITE]

    def _read(self, rows: Mapping[str, Touched]) -> Tree:
        values = [
            variable[rows[group].unique if group in rows else ...]
            for variable, group in zip(self.variables, self._groups, strict=True)
        ]
        return self.unflatten(values)

    def _step(
        self,
        by_rows: RowStep | None,
        constants: frozenset[str],
        batch: Any,
        step: Any,
        replica: Any,
        entropy: Any = None,
    ) -> dict[str, Any]:
        result = self.computed(by_rows, batch, step, replica)
        with device("/job:worker"):
            checks = self.check(result.loss, result.grads)
        loss, state, rows = result.loss, result.state, result.rows
        grads, metrics, came = result.grads, result.metrics, result.ok
        if came is not None:
            with device("/job:worker"):
                # Nor does what rounding leaves of it stay.
                grads = jax.tree.map(lambda g: jnp.where(came, g, 0), grads)
                steps = jnp.where(came, metrics[LOCAL_STEPS], 0)
                metrics = {**metrics, LOCAL_STEPS: steps}
        if self.compression is not None:
            grads = self.compression.sent(grads, set(rows))
        if self.private is not None:
            grads = self.private.mean(grads, entropy, self.private.expected(batch))
        self.update(
            *(loss, grads, state, checks, constants, by_rows, rows),
            loss_of=None if self.local is not None else result.loss_of,
            number=step if self._alone else None,
            came=came,
        )
        return {"loss": loss, **metrics, **checks}

    def computed(
        self,
        by_rows: RowStep | None,
        batch: Any,
        step: Any,
        replica: Any,
        steps: Any = None,
    ) -> Computed:
        """Returns what a worker makes of its batch; called inside a graph.

        Args:
          by_rows: from ``row_step``.
          batch: the batch.
          step: number of the step, int32.
          replica: number of the worker, int32.
          steps: how many it takes alone, int32; None: as many as ``LocalSteps`` says.
        """
        if self.local is not None and self.fragments is not None:
            tree = self.unflatten(list(self.variables))
            return self.local.streamed(
                *(self.fragments, self.adapter.loss, tree, batch, step, replica),
                by_rows=by_rows,
            )
        if self.local is not None:
            way = self.local.computed(
                *(self.adapter.loss, self._read, batch, step, replica, steps, by_rows)
            )
            if self.private is None:
                return way
            # Who it is of would be told of its data.
            return replace(way, grads=self.private.clipped(way.grads), ok=None)
        if self.private is not None:
            now, loss_fn = self._read({}), self.adapter.loss
            return self.private.computed(loss_fn, now, batch, step, replica)
        seeds = (replica, step)
        tables = by_rows.tables.tables if by_rows else ()
        loss_fn = self.adapter.loss
        with device("/job:worker"):
            if by_rows:
                looks = by_rows.tables.ids_looked_at(batch, seeds)
                batch = by_rows.tables.checked(batch, looks)
            table_rows = by_rows.rows(batch, seeds) if by_rows and tables else []
            if by_rows and tables:
                loss_fn = by_rows.tables.loss([rows.positions for rows in table_rows])
        rows = {
            table.name: each for table, each in zip(tables, table_rows, strict=True)
        }
        now = self._read(rows)
        with device("/job:worker"):
            compute = value_and_grad(loss_fn)
            (loss, (metrics, state)), grads = compute(
                now["params"], now["state"], batch, seeds
            )

        def loss_of(params: Tree) -> jax.Array:
            with device("/job:worker"):
                value: jax.Array = loss_fn(params, now["state"], batch, seeds)[0]
                return value

        return Computed(loss, metrics, state, grads, rows, loss_of)

    def computed_in(
        self,
        cut: BatchPieces,
        by_rows: RowStep | None,
        batch: Any,
        count: Any,
        step: Any,
        replica: Any,
    ) -> Computed:
        """Returns what a worker makes of its pieces, as sums; called inside a graph.

        Args:
          cut: how the batch is cut.
          by_rows: from ``row_step`` of a piece; the ids of its tables are looked at.
          batch: the pieces, and room for more.
          count: how many pieces are there, int32.
          step: number of the step, int32.
          replica: number of the worker, int32.
        """
        now = self._read({})
        loss = self.adapter.loss
        return cut.computed(loss, now, by_rows, batch, count, step, replica)

    def metric_types(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Returns shape and dtype of the loss, and of each metric, on such batches."""
        if self.local is not None:
            batch = self.local.batch(batch)
        if isinstance(batch, SampledBatch):
            batch = batch.examples
        number = jax.ShapeDtypeStruct((), jnp.int32)
        now = self.unflatten([variable.spec.aval for variable in self.variables])
        loss, (metrics, _) = jax.eval_shape(
            self.adapter.loss, now["params"], now["state"], batch, (number, number)
        )
        if self.local is not None:
            metrics = self.local.metric_types(metrics)
        return loss, dict(metrics)

    def check(self, loss: Any, grads: Tree) -> dict[str, Any]:
        """Returns the ``FINITE`` metric if it is asked for; called inside a graph."""
        return {FINITE: finite(loss, grads)} if self._check_finite else {}

    def update(
        self,
        loss: Any,
        grads: Tree,
        state: Tree,
        checks: Mapping[str, Any],
        constants: frozenset[str],
        by_rows: RowStep | None,
        rows: Mapping[str, Touched],
        loss_of: LossOf | None = None,
        number: Any = None,
        inner: Tree = None,
        came: Any = None,
    ) -> None:
        """Applies gradients and counts the step; called inside a graph.

        Args:
          loss: of the step.
          grads: of the parameters, rows for those in ``rows``.
          state: the model's new state.
          checks: from ``check``.
          constants: from ``TrainStep.constants``.
          by_rows: from ``row_step``.
          rows: the rows of each table that has them, by name.
          loss_of: the loss of the batch, where there is one.
          number: of the step; one that does not follow the newest update is skipped
            like one that is not well. None: replicas have numbers of their own.
          inner: the state of the workers' own optimizers, if that is averaged.
          came: whether a round is finite; one that is not is counted, and changes
            nothing. None: that is not looked at.
        """
        if by_rows is not None and self.fragments is None:
            rows, grads = self._whole_updates(by_rows, rows, grads)
        # Read anew: gradients are of the values that travelled to the worker, the
        # update is of those that lie here when it runs.
        old = self._read(rows)
        reads_padding = by_rows is not None and by_rows.update.reads_padding
        if reads_padding or self.fragments is not None:
            old = self._padded_with_zeros(rows, old)
        extra_args = {"value": loss, "value_fn": None if rows else loss_of}
        if self.private is not None:
            extra_args = {"value": jnp.zeros_like(loss), "value_fn": None}
        ok = None
        if checks:
            ok = checks[FINITE].all()
            ok = ok if number is None else ok & (old["global_step"] == number)
        self._update(old, grads, extra_args, state, (ok, came), rows, constants, inner)

    def _update(
        self,
        old: Tree,
        grads: Tree,
        extra_args: Mapping[str, Any],
        state: Tree,
        checked: tuple[Any, Any],
        rows: Mapping[str, Touched],
        constants: frozenset[str],
        inner: Tree,
    ) -> None:
        ok, came = checked
        opt = old["opt"] if inner is None else old["opt"][OUTER]
        updates, opt = self._tx.update(grads, opt, old["params"], **extra_args)
        new = {
            "params": optax.apply_updates(old["params"], updates),
            "opt": opt if inner is None else {OUTER: opt, INNER: inner},
            "state": state,
            "global_step": old["global_step"] + 1,
        }
        if self.fragments is not None:
            last = (old["global_step"] + 1) % self.fragments.count == 0
            new["opt"] = self._counted(last, new["opt"], old["opt"])
        if came is not None:
            keep = lambda n, o: jnp.where(came, n, o)
            number = new["global_step"]
            new = jax.tree.map(keep, new, {k: old[k] for k in new})
            new["global_step"] = number
        if ok is not None:
            keep = lambda n, o: jnp.where(ok, n, o)
            new = jax.tree.map(keep, new, {k: old[k] for k in new})
        self._write(new, rows, constants)

    def _counted(self, last: Any, new: Tree, old: Tree) -> Tree:
        """Returns the state of the optimizer after an update of one fragment.

        What is of no parameter, such as a count of updates, is that of a round: all its
        fragments see the same.

        Args:
          last: whether it is the last one of a round.
          new: the state as the optimizer makes it.
          old: the state before.
        """
        names = [name for name in self.names if name.startswith("opt/")]
        groups = dict(zip(self.names, self._groups, strict=True))
        leaves, tree = jax.tree.flatten(new)
        values = [
            value
            if groups[name].startswith("params/")
            else jnp.where(last, value, before)
            for name, value, before in zip(
                names, leaves, jax.tree.leaves(old), strict=True
            )
        ]
        return jax.tree.unflatten(tree, values)

    def _whole_updates(
        self, by_rows: RowStep, rows: Mapping[str, Touched], grads: Tree
    ) -> tuple[Mapping[str, Touched], Tree]:
        """Makes whole gradients for tables that are to be updated as a whole."""
        leaves, tree = jax.tree.flatten(grads)
        parameters = {variable.name: variable for variable in self.variables}
        for table in by_rows.tables.tables:
            if table.number in by_rows.whole:
                leaves[table.number] = spread_rows(
                    rows[table.name].unique,
                    leaves[table.number],
                    layout=row_layout(parameters[table.name]),
                )
        remaining = {
            table.name: rows[table.name]
            for table in by_rows.tables.tables
            if table.number not in by_rows.whole
        }
        return remaining, jax.tree.unflatten(tree, leaves)

    def _padded_with_zeros(self, rows: Mapping[str, Touched], tree: Tree) -> Tree:
        leaves = [
            rows[group].padded_with_zeros(leaf) if group in rows else leaf
            for group, leaf in zip(self._groups, jax.tree.leaves(tree), strict=True)
        ]
        return self.unflatten(leaves)

    def _write(
        self, new: Tree, rows: Mapping[str, Touched], constants: frozenset[str]
    ) -> None:
        leaves = jax.tree.leaves(new)
        for variable, group, value in zip(
            self.variables, self._groups, leaves, strict=True
        ):
            if variable.name in constants:
                continue
            same = value.dtype == variable.dtype
            where = rows[group].unique if group in rows else ...
            variable[where] = value if same else value.astype(variable.dtype)


def new_state(params: Tree, opt: Tree, state: Tree) -> Tree:
    """Returns the state of a run that begins."""
    step = jnp.zeros((), jnp.int32)
    return {"params": params, "opt": opt, "state": state, "global_step": step}


def made_state(make: Make, init: Callable[[Tree], Tree]) -> Tree:
    """Returns the state of a run, made by a function, and by one of its optimizer."""
    params, state = make()
    return new_state(params, init(params), state)


def on_its_task(state_maker: Callable[[], Tree] | None, number: int, value: Any) -> Any:
    """Returns a value, or its type and the function that makes it alone."""
    if state_maker is None or not isinstance(value, jax.ShapeDtypeStruct):
        return value
    return value.shape, value.dtype, lambda *_: jax.tree.leaves(state_maker())[number]


def unchanged_state(
    adapter: Adapter, params: Tree, state: Tree, batch: Any
) -> list[bool]:
    """Returns, for each leaf of state, whether a loss gives it back unchanged.

    Args:
      adapter: has the loss.
      params: parameters, or their shapes and dtypes.
      state: likewise.
      batch: likewise.
    """
    same: list[bool] = []

    def follow(params: Tree, state: Tree, batch: Any, step: Any) -> None:
        _, (_, new) = adapter.loss(params, state, batch, (step, step))
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
        same.extend(after is before for after, before in pairs)

    if jax.tree.leaves(state):
        number = jax.ShapeDtypeStruct((), jnp.int32)
        jax.eval_shape(follow, params, state, batch, number)
    return same
