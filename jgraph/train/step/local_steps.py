"""Local SGD steps: what a worker computes alone between two updates of the model.

A worker reads the parameters once, of a table the rows that it needs, takes some steps
of its own optimizer on batches one after the other, and contributes how far it came:
the parameters that it read less those that it has. To the ps that is a gradient like
any other. The state of its optimizer is the worker's own, and stays there from one
round to the next.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", 2017 (FedAvg); Douillard et al., "DiLoCo: Distributed Low-
Communication Training of Language Models", 2023.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Final, Literal, TypeAlias, final, get_args

import jax
import jax.numpy as jnp
import optax

from jgraph.coordination.step.step_metrics import LOCAL_STEPS
from jgraph.graph.device import device
from jgraph.graph.variable import Variable
from jgraph.plan.program.replicas import own_state
from jgraph.train.model.checks import all_finite, value_and_grad
from jgraph.train.model.optimizer import CalledOptimizer, Optimizer
from jgraph.train.model.trees import Tree, group_with_parameters, path_of
from jgraph.train.step.fragments import Carry, Fragments
from jgraph.train.tables.local_rows import (
    RoundRows,
    StoredRows,
    check_kept,
    round_rows,
    why_whole,
)
from jgraph.train.tables.row_step import Computed, Rows, RowStep, Sparse
from jgraph.train.tables.row_tables import RowTables

InnerState: TypeAlias = Literal["keep", "average", "reset"]
"""What becomes of the state of a worker's own optimizer after a round."""

INNER_STATES: Final[tuple[InnerState, ...]] = get_args(InnerState)

OUTER, INNER = "outer", "inner"
"""In the optimizer's state of a run, where that of workers is averaged: its parts."""

_ROUNDS: Final = "rounds"


@final
@dataclass(frozen=True, slots=True)
class LocalRule:
    """How a worker trains alone in a round.

    Attributes:
      tx: the optimizer of its steps.
      count: steps of a round, at most.
      paced: a round has as many as it is told.
      weighs: a round counts by its steps, or by the examples of its client; else each
        counts alike.
      inner_state: what becomes of the state of ``tx`` after a round.
      epochs: of a client's own data in a round, whose batch says how many steps these
        are; 0: its data is not its own.
      proximal: how strongly parameters are held to those at the begin of the round.
      fragments: of the parameters, of which a contribution is one.
      overlap: steps that a worker takes before what came of its contribution is mixed
        into its parameters.
      mix: how much of its own it keeps then, 0 to 1.
      row_budget: how many rows of a table the steps of a round may need; 0: any number.
    """

    tx: Optimizer
    count: int = 0
    paced: bool = False
    weighs: bool = False
    inner_state: InnerState = "keep"
    epochs: int = 0
    proximal: float = 0.0
    row_budget: int = 0
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.5

    @property
    def is_streamed(self) -> bool:
        """Whether workers go on with parameters of their own after an exchange."""
        return self.fragments > 1 or self.overlap > 0

    @property
    def why_whole(self) -> str:
        """Why rows of no table can travel alone; empty: they can."""
        if self.epochs:
            return "Federated reads all parameters at the begin of a round"
        if self.is_streamed:
            return "of fragments all rows are read in turn"
        if self.inner_state == "average":
            return "inner_state='average' is of the state of all its rows"
        return ""


@final
class LocalSteps:
    """The steps of a round, and the variables that each worker has for them.

    They go on from one ``fit`` to the next, and are not part of a checkpoint. Where the
    state of the optimizer is averaged it is part of the model's state, and of a
    checkpoint.

    Args:
      rule: how steps are taken.
      params: of the model, or their shapes and dtypes.
      container: of the variables.
      state: of the model, or its shapes and dtypes.
    """

    def __init__(
        self, rule: LocalRule, params: Tree, container: str, state: Tree = None
    ) -> None:
        self.rule = rule
        self.tx = CalledOptimizer(rule.tx)
        """Makes the steps."""
        self.count = rule.count
        """Steps of a round, at most; 0: a batch says how many."""
        self.variables: tuple[Variable, ...] = ()
        """Those of the worker that the step is planned for; the last counts rounds."""
        self._params, self._container = params, container
        self._slots: tuple[tuple[str, str, Any], ...] = ()
        if rule.inner_state != "average":
            self._slots = self._state_of(params)
        if rule.inner_state == "keep":
            self.variables = self._kept()
        self.fragments: Fragments | None = None
        """How the parameters are exchanged in turn; None: all at once."""
        if rule.is_streamed:
            self.fragments = Fragments(
                *(params, state, rule.fragments, rule.overlap, rule.mix, self._own)
            )

    @property
    def own(self) -> list[Variable]:
        """All that a worker has for its steps, whatever a batch is."""
        pieces = [] if self.fragments is None else self.fragments.variables
        return [*self.variables, *pieces]

    def _state_of(self, params: Tree) -> tuple[tuple[str, str, Any], ...]:
        """Returns of each leaf of the optimizer's state name, parameter and type."""
        tree = {"opt": jax.eval_shape(self.tx.init, params), "params": params}
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        paths = [path_of(path) for path, _ in leaves]
        return tuple(
            ("/".join(path[1:]), group, leaf)
            for path, group, (_, leaf) in zip(
                paths, group_with_parameters(paths), leaves, strict=True
            )
            if path[0] == "opt"
        )

    def _kept(self) -> tuple[Variable, ...]:
        types = [(name, leaf.shape, leaf.dtype) for name, _, leaf in self._slots]
        return tuple(self._own(*each) for each in [*types, (_ROUNDS, (), jnp.int32)])

    def _own(self, name: str, shape: tuple[int, ...], dtype: Any) -> Variable:
        """Returns a variable of a worker, zeros at first."""
        return Variable(
            own_state(name),
            (shape, dtype, jnp.zeros),
            device="/job:worker/task:0",
            container=self._container,
        )

    def whole(self, tables: RowTables, sparse: Sparse) -> dict[str, str]:
        """Returns why tables travel whole in a round, by name: those that have to.

        Args:
          tables: that are looked up by rows.
          sparse: as for ``Trainer``.

        Raises:
          ConfigError: a hash table would have to.
        """
        found = tables.tables
        if why := self.rule.why_whole:
            return {table.name: why for table in found}
        numbers = {table.name: table.number for table in found}
        slots = {
            name: (group, leaf.shape)
            for name, group, leaf in self._slots
            if group in numbers
        }
        if self.rule.inner_state == "keep":
            check_kept(found, slots)
        owners = [numbers.get(group) for _, group, _ in self._slots]
        try:
            return why_whole(found, self.tx, self._params, slots, owners, sparse)
        except Exception as error:  # noqa: BLE001  # of the user's optimizer
            reason = shorten(str(error), 100, placeholder=" …")
            why = f"the workers' optimizer fails on rows of it: {reason}"
            return {table.name: why for table in found}

    def known_rows(self, by_rows: RowStep | None) -> dict[str, Variable]:
        """Returns, by table, which rows a worker keeps state of the optimizer for."""
        if by_rows is None or self.rule.inner_state != "keep":
            return {}
        groups = {group for _, group, _ in self._slots}
        return {
            table.name: self._own(f"{_ROUNDS}/{table.name}", (table.rows,), jnp.int32)
            for table in by_rows.tables.tables
            if table.name in groups
        }

    @property
    def is_averaged(self) -> bool:
        """Whether the state of the workers' optimizers is averaged."""
        return self.rule.inner_state == "average"

    @property
    def note(self) -> str:
        """A line for the plan."""
        if epochs := self.rule.epochs:
            return (
                f"{epochs} epoch{'s' * (epochs > 1)} of a client's own optimizer, on "
                "its own data, make a contribution"
            )
        if self.fragments is not None:
            return (
                f"{self.count} steps of each worker's own optimizer make an update; "
                f"{self.fragments.note}"
            )
        most = "up to " if self.rule.paced else ""
        return f"{most}{self.count} steps of each worker's own optimizer make an update"

    def batch(self, round_batch: Any) -> Any:
        """Returns the types of the batch of one step, given those of a round."""
        if self.rule.epochs:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype),
                round_batch["data"],
            )
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (x.shape[0] // self.count, *x.shape[1:]), x.dtype
            ),
            round_batch,
        )

    def computed(
        self,
        loss: Callable[..., Any],
        read: Callable[[Mapping[str, Rows]], Tree],
        round_batch: Any,
        step: Any,
        replica: Any,
        steps: Any = None,
        by_rows: RowStep | None = None,
    ) -> Computed:
        """Returns what a round comes to; called inside a graph.

        Args:
          loss: as ``Adapter.loss``.
          read: gives the parameters and the model's state; of some tables rows.
          round_batch: the batches of all steps, one after the other; of a client what
            a ``RoundReader`` reads.
          step: number of the round, int32.
          replica: number of the worker, int32.
          steps: how many to take, int32; None: as many as a round has at most.
          by_rows: the tables of which rows travel; None: none.
        """
        with device("/job:worker"):
            batches, count, examples = self._batches(round_batch)
            rows = None
            if by_rows is not None:
                seeds = step * count + jnp.arange(count, dtype=jnp.int32)
                batches = by_rows.all_checked(batches, replica, seeds)
                rows = round_rows(by_rows, batches, replica, seeds)
        now = read({} if rows is None else rows.by_name)
        with device("/job:worker"):
            if self.rule.epochs:
                steps = round_batch["round"]["steps"][0]
            positions = [] if rows is None else list(rows.positions)

            def take(carry: Any, inputs: Any) -> Any:
                *old, seed = carry
                batch, places = inputs
                step_loss = loss if rows is None else rows.loss(places)
                new, results = self._step(
                    *(step_loss, old, batch, (replica, seed), now["params"])
                )
                return (*new, seed + 1), results

            stored = self._stored(by_rows, rows)
            begin = self._begin(now, stored)
            inputs = batches, positions
            carry = now["params"], begin, now["state"], step * count
            if steps is None:
                carry, (losses, metrics) = jax.lax.scan(take, carry, inputs)
                value, metrics = losses.mean(), jax.tree.map(_over_steps, metrics)
            else:
                carry, value, metrics = _some(take, carry, inputs, steps)
                metrics = {**metrics, LOCAL_STEPS: steps}
            params, opt, state, _ = carry
            way = jax.tree.map(lambda old, new: old - new, now["params"], params)
            ok = None
            if self.rule.epochs:
                # Nothing stays of a round that does not count.
                ok = all_finite((value, way, state, opt))
                keep = lambda new, old: jnp.where(ok, new, old)
                opt = jax.tree.map(keep, opt, begin)
                state = jax.tree.map(keep, state, now["state"])
            self._keep(opt, stored)
            weight = None
            if self.rule.weighs and steps is not None:
                by_steps = steps.astype(jnp.float32) / count
                weight = by_steps if examples is None else examples
            averaged = opt if self.is_averaged else None
            used = {} if rows is None else rows.by_name
            return Computed(
                *(value, metrics, state, way, used, _no_loss, weight, averaged, ok)
            )

    def streamed(
        self,
        fragments: Fragments,
        loss: Callable[..., Any],
        tree: Tree,
        round_batch: Any,
        step: Any,
        replica: Any,
        by_rows: RowStep | None = None,
    ) -> Computed:
        """Returns what the steps before an exchange come to; called inside a graph.

        Args:
          fragments: of which one is exchanged.
          loss: as ``Adapter.loss``.
          tree: the variables of the model.
          round_batch: the batches of all steps, one after the other.
          step: number of the update, int32.
          replica: number of the worker, int32.
          by_rows: the tables whose ids are looked at; all of them travel whole.
        """
        *inner, rounds = self.variables

        def take(carry: Any, batches: Any, seeds: Any) -> Any:
            def one(carry: Any, inputs: Any) -> Any:
                batch, seed = inputs
                return self._step(loss, carry, batch, (replica, seed), carry[0])

            return jax.lax.scan(one, carry, (batches, seeds))

        def inputs(round_batch: Any, step: Any) -> tuple[Any, Any]:
            batches, count, _ = self._batches(round_batch)
            return batches, step * count + jnp.arange(count, dtype=jnp.int32)

        with device("/job:worker"):
            if by_rows is not None:
                batches, seeds = inputs(round_batch, step)
                good = by_rows.all_checked(batches, replica, seeds)
                round_batch = jax.tree.map(
                    lambda x, whole: x.reshape(whole.shape), good, round_batch
                )
            number = rounds[...]
            leaves = [variable[...] for variable in inner]
            opt = jax.tree.structure(jax.eval_shape(self.tx.init, self._params))

        def begin(params: Tree) -> Tree:
            fresh = jax.tree.leaves(self.tx.init(params))
            pairs = zip(leaves, fresh, strict=True)
            values = [jnp.where(number > 0, old, new) for old, new in pairs]
            return jax.tree.unflatten(opt, values)

        known = jax.tree.unflatten(opt, leaves)
        piece = fragments.steps(
            *(take, known, begin, tree, inputs, (round_batch, step))
        )
        losses, metrics = piece.results
        with device("/job:worker"):
            _, last, state = piece.carry
            self._keep(last, {})
            rounds[...] = number + 1
            value, metrics = losses.mean(), jax.tree.map(_over_steps, metrics)
        return Computed(value, metrics, state, piece.way, piece.rows, _no_loss)

    def _step(
        self,
        loss: Callable[..., Any],
        carry: Sequence[Any],
        batch: Any,
        draws: tuple[Any, Any],
        start: Tree,
    ) -> tuple[Carry, Any]:
        """Returns what a step comes to, and its loss and metrics.

        Args:
          loss: of the step.
          carry: parameters, the state of the optimizer, and the model's state.
          batch: of the step.
          draws: number of the worker and seed, which random numbers follow from.
          start: the parameters at the begin of the round.
        """
        params, opt, state = carry
        compute = value_and_grad(loss)
        (value, (metrics, state)), grads = compute(params, state, batch, draws)
        if mu := self.rule.proximal:
            pull = lambda g, p, begin: g + (mu * (p - begin)).astype(g.dtype)
            grads = jax.tree.map(pull, grads, params, start)
        updates, opt = self.tx.update(grads, opt, params, value=value)
        return (optax.apply_updates(params, updates), opt, state), (value, metrics)

    def _stored(
        self, by_rows: RowStep | None, rows: RoundRows | None
    ) -> dict[str, StoredRows]:
        """Returns, by table, the rows of the optimizer's state that are kept."""
        if rows is None:
            return {}
        known = self.known_rows(by_rows)
        return {
            name: StoredRows(variable, rows.by_name[name])
            for name, variable in known.items()
        }

    def _batches(self, round_batch: Any) -> tuple[Any, int, Any]:
        """Returns the batches of a round, how many, and the examples of its client."""
        if self.rule.epochs:
            batches = jax.tree.map(lambda x: x[0], round_batch["data"])
            count = jax.tree.leaves(batches)[0].shape[0]
            return batches, count, round_batch["round"]["examples"][0]
        # Not -1: a field may have no values.
        cut = lambda x: x.reshape(self.count, x.shape[0] // self.count, *x.shape[1:])
        return jax.tree.map(cut, round_batch), self.count, None

    def metric_types(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the types of the metrics of a round, given those of a step."""
        if not (self.rule.paced or self.rule.epochs):
            return dict(metrics)
        return {**metrics, LOCAL_STEPS: jax.ShapeDtypeStruct((), jnp.int32)}

    def _begin(self, now: Tree, stored: Mapping[str, StoredRows]) -> Any:
        """Returns the state of the optimizer at the begin of a round."""
        match self.rule.inner_state:
            case "average":
                return now["opt"][INNER]
            case "reset":
                return self.tx.init(now["params"])
        *inner, rounds = self.variables
        fresh, tree = jax.tree.flatten(self.tx.init(now["params"]))
        number = rounds[...]
        opt = [
            stored[group].read(variable, value)
            if group in stored
            else jnp.where(number > 0, variable[...], value)
            for variable, (_, group, _), value in zip(
                inner, self._slots, fresh, strict=True
            )
        ]
        rounds[...] = number + 1
        for rows in stored.values():
            rows.take_note()
        return jax.tree.unflatten(tree, opt)

    def _keep(self, opt: Any, stored: Mapping[str, StoredRows]) -> None:
        if self.rule.inner_state != "keep":
            return
        leaves = jax.tree.leaves(opt)
        for variable, (_, group, _), value in zip(
            self.variables[:-1], self._slots, leaves, strict=True
        ):
            if group in stored:
                stored[group].write(variable, value)
            else:
                variable[...] = value


def _some(take: Callable[..., Any], carry: Any, batches: Any, steps: Any) -> Any:
    """Returns what the first of the steps come to: state, loss and metrics."""
    first = jax.tree.map(lambda x: x[0], batches)
    types = jax.eval_shape(take, carry, first)[1]
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), types)

    def one(number: Any, so_far: Any) -> Any:
        carry, sums = so_far
        carry, results = take(carry, jax.tree.map(lambda x: x[number], batches))
        add = lambda total, value: total + value.astype(total.dtype)
        return carry, jax.tree.map(add, sums, results)

    carry, sums = jax.lax.fori_loop(0, steps, one, (carry, sums))

    def mean(total: jax.Array, type_: Any) -> jax.Array:
        inexact = jnp.issubdtype(total.dtype, jnp.inexact)
        return (total / steps).astype(type_.dtype) if inexact else total

    return carry, *jax.tree.map(mean, sums, types)


def _wide(dtype: Any) -> Any:
    """Returns the dtype in which values are summed: half types as float32."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.promote_types(dtype, jnp.float32) if inexact else dtype


def _over_steps(values: jax.Array) -> jax.Array:
    """Returns a metric of a round: a count is that of all its examples."""
    if jnp.issubdtype(values.dtype, jnp.inexact):
        return values.mean(0)
    return values.sum(0, dtype=values.dtype)


def _no_loss(params: Tree) -> jax.Array:
    raise AssertionError("the update is where no batch is")
