"""A training step in two graphs: workers contribute gradients, ps apply their mean."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp

from jgraph.coordination.step.finite import FiniteCheck
from jgraph.coordination.step.step_metrics import WHOLE
from jgraph.coordination.sync.rounds import not_to_count
from jgraph.graph.device import DeviceSpec, device
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.program.accumulate import MEAN, SLOT, SUM
from jgraph.train.model.checks import FINITE, warn_of_same_draws
from jgraph.train.model.metrics import (
    NOT_FINITE,
    needs_pieces,
    num_pieces,
    pieces as in_pieces,
)
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.privacy.secure_words import SecureWords
from jgraph.train.step.batch_pieces import BatchPieces
from jgraph.train.step.compress import Counted, PackedRows
from jgraph.train.step.local_steps import INNER
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.row_mean import JoinedRows, RowMean
from jgraph.train.tables.row_step import Computed, Rows
from jgraph.train.tables.row_tables import RowTable

LOSS = f"{MEAN}loss"
_TAKE_PART = f"{MEAN}take part"
_METRIC = f"{MEAN}metric/"


@final
class SyncStep:
    """The graphs of synchronous training, over the variables of a ``TrainStep``.

    What is averaged has variables of its own, ``mean/params/Dense_0/kernel`` for the
    gradient of ``params/Dense_0/kernel``, on the same task: gradients, the loss,
    metrics, and the model's state (BatchNorm statistics). Of a table of which rows
    travel these are ids and rows, see ``RowMean``.

    Args:
      step: the variables, the loss and the optimizer.
      batch: shapes and dtypes of one worker's batch.
      contributions: of how many a mean is, at most.
      replicas: how many workers may contribute; as many if unset.
      cut: a worker's batch is of several pieces, of which ``batch`` is one; None: of
        one.
      secure: the ps see sums of what is contributed alone; None: they see each.
    """

    def __init__(
        self,
        step: TrainStep,
        batch: Any,
        contributions: int,
        replicas: int | None = None,
        cut: BatchPieces | None = None,
        secure: SecureSum | None = None,
    ) -> None:
        self._step = step
        self._batch = batch
        self._cut = cut
        self._by_rows = step.row_step(batch)
        tree = step.unflatten(list(step.variables))
        home, local = tree["global_step"].device, step.local
        self._weight: Weight | None = None
        if cut is not None or (local is not None and local.rule.weighs):
            self._weight = Weight(home, step.container)
        counts = {t.name: self._most(t) for t in self._tables}
        if (fragments := step.fragments) is not None:
            by_rows = [v for v in jax.tree.leaves(tree["params"]) if v.shape]
            counts = {v.name: n for v, n in zip(by_rows, fragments.most, strict=True)}
        self._grads = jax.tree.map(
            lambda v: (
                RowMean(v, counts[v.name], contributions)
                if v.name in counts
                else self._beside(v)
            ),
            tree["params"],
        )
        self._state = jax.tree.map(self._beside, tree["state"])
        self._inner = None
        if local is not None and local.is_averaged:
            self._inner = jax.tree.map(self._beside, tree["opt"][INNER])
        loss, metrics = step.metric_types(batch)
        dtype = jnp.promote_types(loss.dtype, jnp.float32)
        self._loss = self._mean(LOSS, (), dtype, home)
        self._whole = {n for n, m in metrics.items() if needs_pieces(m.dtype)}
        self._metrics = {
            name: self._mean(_METRIC + name, *self._mean_type(name, value), home)
            for name, value in metrics.items()
        }
        self._counter: Counted | None = None
        if step.compression is not None:
            self._counter = Counted(replicas or contributions, home, step.container)
        self._take_part: Variable | None = None
        self._secure: SecureWords | None = None
        self._sums: list[Variable] = []
        if secure is not None:
            types = jax.tree.map(lambda v: v.spec.aval, tree["state"])
            sums = jax.tree.map(lambda v: self._beside(v, SUM), tree["params"])
            self._secure = SecureWords(secure, sums, types, loss, metrics)
            others = (self._secure.others,)
            self._sums = [
                *jax.tree.leaves(sums),
                self._mean(f"{SUM}others", others, jnp.uint32, home),
            ]
        elif step.private is not None:
            shape = (replicas or contributions,)
            self._take_part = self._mean(_TAKE_PART, shape, jnp.float32, home)

    @property
    def entropy(self) -> jax.ShapeDtypeStruct | None:
        """The type of what an update draws noise from; None: it draws none."""
        private = self._step.private
        return None if private is None else private.entropy(self._step.adapter.params)

    @property
    def words(self) -> int:
        """How many words of a secure sum a contribution has; 0: it is none."""
        return 0 if self._secure is None else self._secure.words

    def dense_means(self, reads: Collection[str]) -> list[Variable]:
        """Returns the means of the gradients of which no rows travel.

        Args:
          reads: as for ``gradient_graph``.
        """
        means = [v for v in jax.tree.leaves(self._grads) if isinstance(v, Variable)]
        return [v for v in means if _contributed(v, reads)]

    def apply_graph(self) -> Graph:
        """Returns the graph of an update from what is averaged.

        Fetches are ``['loss']`` and the metrics, averaged as well; those of whole
        numbers in pieces, see ``jgraph.train.model.metrics``. Of private training
        ``entropy`` is a feed, and of secure sums ``unmask``.
        """
        if self._secure is not None:
            return self._apply_graph_of_sums(self._secure)
        constants = self._step.constants(self._batch)
        params = self._step.unflatten(list(self._step.variables))["params"]

        def apply_mean(entropy: Any = None) -> dict[str, Any]:
            rows: dict[str, JoinedRows] = {}

            def read(variable: Variable | RowMean) -> Any:
                if isinstance(variable, Variable):
                    return variable[...]
                rows[variable.table.name], mean = variable.read()
                return mean

            whole = {n: v[...] for n, v in self._metrics.items() if n in self._whole}
            loss, metrics, grads, state, inner = self._mean_of(
                jax.tree.map(
                    read,
                    (
                        self._loss,
                        {n: v for n, v in self._metrics.items() if n not in whole},
                        *(self._grads, self._state, self._inner),
                    ),
                )
            )
            if self._counter is not None:
                self._counter.count()
            if self._take_part is not None:
                grads = self._noised(grads, self._take_part[...], entropy)
            grads = jax.tree.map(lambda g, v: g.astype(v.dtype), grads, params)
            checks = self._step.check(loss, grads)
            self._step.update(
                *(loss, grads, state, checks, constants, self._by_rows, rows),
                inner=inner,
            )
            metrics |= {WHOLE + name: value for name, value in whole.items()}
            return {"loss": loss, **metrics, **checks}

        means = [v for mean in self._means() for v in _averaged(mean)]
        variables = [*self._step.variables, *means, *self._times]
        feeds = [] if self.entropy is None else [self.entropy]
        return trace(apply_mean, *feeds, variables=variables)[0]

    def _apply_graph_of_sums(self, secure: SecureWords) -> Graph:
        constants = self._step.constants(self._batch)
        private = self._step.private

        def apply_sum(unmask: Any, entropy: Any = None) -> dict[str, Any]:
            means = secure.unmasked([v[...] for v in self._sums], unmask)
            grads, metrics = means.grads, dict(means.metrics)
            if private is not None:
                total = jax.tree.map(lambda x: x * means.weight.astype(x.dtype), grads)
                grads = private.mean(total, entropy, private.expected(self._batch))
            tree = self._step.unflatten(list(self._step.variables))
            grads = jax.tree.map(lambda g, v: g.astype(v.dtype), grads, tree["params"])
            state = jax.tree.map(
                lambda new, old: jnp.where(means.weight > 0, new, old[...]),
                *(means.state, tree["state"]),
            )
            checks = {FINITE: (means.weight > 0)[None]}
            self._step.update(means.loss, grads, state, checks, constants, None, {})
            metrics = {WHOLE * (n in self._whole) + n: v for n, v in metrics.items()}
            metrics[NOT_FINITE] = means.not_finite.astype(jnp.int32)
            return {"loss": means.loss, **metrics, **checks}

        feeds = [secure.feed] + ([] if self.entropy is None else [self.entropy])
        variables = [*self._step.variables, *self._sums]
        return trace(apply_sum, *feeds, variables=variables)[0]

    def finite_check(self, graph: Graph) -> FiniteCheck | None:
        """Returns which fetch of an update's graph says what is finite; None: none.

        A secure sum says whether anybody's contribution was.

        Args:
          graph: from ``apply_graph``.
        """
        if self._secure is None:
            return self._step.finite_check(graph)
        return FiniteCheck(self._step.metric_names(graph).index(FINITE), ("loss",))

    def _noised(self, means: Any, take_part: Any, entropy: Any) -> Any:
        """Returns private gradients, given their means without noise.

        Args:
          means: of as many contributions as came, each a sum.
          take_part: float32[replicas]: a share for each of those.
          entropy: makes noise.
        """
        private = self._step.private
        assert private is not None  # so there is take_part
        count = jnp.round(1 / jnp.max(take_part))
        total = jax.tree.map(lambda mean: mean * count.astype(mean.dtype), means)
        return private.mean(total, entropy, private.expected(self._batch))

    def gradient_graph(self, reads: Collection[str]) -> Graph:
        """Returns the graph of one worker's contribution.

        Feeds are those of ``TrainStep.graph`` and ``slot``, the int32 number of the
        batch, by which contributions are known, see also ``not_to_count``; and
        ``steps``, int32, where workers are told how many to take alone, or ``pieces``,
        how many pieces of a batch there are. The only fetch is its own loss.

        Args:
          reads: names of the variables, or shards, that the update reads. Others, as
            the gradients of frozen parameters, stay on the worker.
        """
        means = [v for mean in self._means() for v in _contributed(mean, reads)]
        tasks = sorted({str(s.device) for v in means for s in v.shards})
        slots = [self._slot(i, task) for i, task in enumerate(tasks)]
        compression = self._step.compression
        names = [n for n in self._step.names if n.startswith("params/")]
        pairs = zip(names, jax.tree.leaves(self._grads), strict=True)
        frozen = {name for name, mean in pairs if not _contributed(mean, reads)}

        def contribute(
            batch: Any,
            step: Any,
            replica: Any,
            slot: Any,
            steps: Any = None,
            pieces: Any = None,
            mask: Any = None,
        ) -> dict[str, Any]:
            if self._cut is None:
                computed = self._step.computed(
                    self._by_rows, batch, step, replica, steps
                )
            else:
                computed = self._step.computed_in(
                    *(self._cut, self._by_rows, batch, pieces, step, replica)
                )
            if self._secure is not None:
                contributed = self._secured(computed, mask)
                self._write({m: contributed[m.name] for m in means}, slots, slot)
                return {"loss": computed.loss}
            result, who = self._weighed(computed), dict[str, Any]()
            grads = result.grads
            if compression is not None and self._counter is not None:
                last = compression.last_counted(self._counter.of(replica))
                rows = {n: some.unique for n, some in result.rows.items()}
                parts = {} if self._step.fragments is None else rows
                others = {*frozen, *(rows.keys() - parts.keys())}
                grads = compression.sent(grads, others, last, parts)
                with device("/job:worker"):
                    who = {self._counter.who.name: self._counter.named(replica)}
            if self._weight is not None:
                who[self._weight.variable.name] = result.weight
            if (part := self._take_part) is not None:
                with device("/job:worker"):
                    who[part.name] = jax.nn.one_hot(replica, *part.shape)
            with device("/job:worker"):
                metrics = {
                    name: in_pieces(value) if name in self._whole else value
                    for name, value in result.metrics.items()
                }
                values = {
                    **_pairs(self._grads, grads, result.rows),
                    **_pairs(self._state, result.state),
                    **_pairs(self._metrics, metrics),
                    **_pairs(self._inner, result.inner),
                    LOSS: result.loss.astype(self._loss.dtype),
                    **who,
                }
            number = _number_of(computed, slot)
            self._write({m: values[m.name] for m in means}, slots, number)
            return {"loss": computed.loss}

        number = jax.ShapeDtypeStruct((), jnp.int32)
        own = self._step.own_of(self._by_rows)
        variables = [*self._step.variables, *means, *slots, *own, *self._times]
        feeds: tuple[Any, ...] = self._batch, number, number, number
        local = self._step.local
        if local is not None and local.rule.paced:
            feeds = *feeds, number
        if self._cut is not None:
            feeds = self._cut.together(self._batch), *feeds[1:], None, number
        if self._secure is not None:
            feeds = *feeds, *([None] * (6 - len(feeds))), self._secure.feed
        graph, _ = trace(contribute, *feeds, variables=variables)
        warn_of_same_draws(graph)
        notes = [*(self._by_rows.notes if self._by_rows else ())]
        beside = (compression, local, self._cut, self._step.private, self._secure)
        notes += [each.note for each in beside if each]
        return replace(graph, notes=tuple(notes))

    def _secured(self, result: Computed, mask: Any) -> dict[str, Any]:
        """Returns what a client contributes to a secure sum, by name of the variable.

        Called inside a graph.
        """
        local, secure = self._step.local, self._secure
        assert secure is not None  # who asks has some
        weighs = local is not None and local.rule.weighs
        values = secure.contribution(result, mask, weighs=weighs)
        names = [variable.name for variable in self._sums]
        return dict(zip(names, values, strict=True))

    def _write(
        self, values: Mapping[Any, Any], slots: Sequence[Variable], slot: Any
    ) -> None:
        """Writes what is contributed, and of which batch; called inside a graph."""
        with device("/job:worker"):
            slot = slot + 0  # a feed stays on the worker, what it computes travels
        for variable, value in values.items():
            variable[...] = value
        for variable in slots:
            variable[...] = slot

    def _weighed(self, result: Computed) -> Computed:
        """Returns what a worker contributes of what it made; called inside a graph."""
        if self._weight is None:
            return result
        whole = {n: v for n, v in result.metrics.items() if n in self._whole}
        with device("/job:worker"):
            others = {
                n: v.astype(self._metrics[n].dtype)
                for n, v in result.metrics.items()
                if n not in whole
            }
            weigh = partial(self._weight.given, weight=result.weight)
            return replace(
                result,
                loss=weigh(result.loss),
                metrics={**weigh(others), **whole},
                state=weigh(result.state),
                grads=weigh(result.grads),
                inner=weigh(result.inner),
            )

    def _mean_of(self, means: Any) -> Any:
        """Returns what an update is made of, given the means of what came."""
        return means if self._weight is None else self._weight.mean_of(means)

    @property
    def _tables(self) -> Sequence[RowTable]:
        return self._by_rows.tables.tables if self._by_rows else ()

    def _most(self, table: RowTable) -> int:
        return table.count if self._by_rows is None else self._by_rows.most(table)

    def _means(self) -> list[Variable | RowMean]:
        if self._secure is not None:
            return [*self._sums]
        trees = (self._grads, self._state, self._inner, self._metrics, self._loss)
        counters = [] if self._counter is None else [self._counter.who]
        weights = [] if self._weight is None else [self._weight.variable]
        parts = [] if self._take_part is None else [self._take_part]
        return [*jax.tree.leaves(trees), *counters, *weights, *parts]

    @property
    def _times(self) -> list[Variable]:
        return [] if self._counter is None else [self._counter.times]

    def _beside(self, variable: Variable, prefix: str = MEAN) -> Variable:
        """Returns the variable for the mean of one, or the sum, cut as that one is."""
        dtype = jnp.uint32 if prefix == SUM else self._type_of_mean(variable.dtype)
        return Variable(
            prefix + variable.name,
            (variable.shape, dtype, None),
            device=variable.device,
            container=self._step.container,
            sharding=variable.spec.sharding,
            shard_devices=variable.spec.shard_devices,
        )

    def _mean_type(self, name: str, value: Any) -> tuple[tuple[int, ...], Any]:
        """Returns shape and dtype of the mean of a metric."""
        if name in self._whole:
            return (num_pieces(value.dtype), *value.shape), jnp.float32
        # Means of counts are no whole numbers.
        inexact = jnp.issubdtype(value.dtype, jnp.inexact)
        dtype = self._type_of_mean(value.dtype) if inexact else jnp.float32
        return value.shape, dtype

    def _type_of_mean(self, dtype: Any) -> Any:
        """Returns what means of arrays are: times a weight they may be large."""
        return dtype if self._weight is None else _wide(dtype)

    def _mean(
        self, name: str, shape: tuple[int, ...], dtype: Any, home: DeviceSpec
    ) -> Variable:
        container = self._step.container
        init: Any = (shape, dtype, None)
        return Variable(name, init, device=home, container=container)

    def _slot(self, index: int, task: str) -> Variable:
        init: Any = ((), jnp.int32, None)
        container = self._step.container
        return Variable(f"{SLOT}{index}", init, device=task, container=container)


@final
class Weight:
    """Weight of a contribution in the mean that an update is made of.

    Workers contribute values times a weight, and the weight. The mean of the former
    over the mean of the latter is the weighted mean. Whole numbers, which count or
    choose, are averaged as they are, and half types as float32, which holds them times
    any weight. The variable of the weight lies beside the number of updates.

    Args:
      home: the task that counts updates.
      container: of the variable.
    """

    def __init__(self, home: DeviceSpec, container: str) -> None:
        self.variable = Variable(
            f"{MEAN}weight", ((), jnp.float32, None), device=home, container=container
        )

    def given(self, values: Any, weight: jax.Array) -> Any:
        """Returns what a worker contributes; called inside its graph.

        Args:
          values: a tree of what it made.
          weight: float32, more than 0.
        """
        return jax.tree.map(lambda x: x * _as(weight, x) if _is_real(x) else x, values)

    def mean_of(self, values: Any) -> Any:
        """Returns the weighted means, given the plain ones; called inside a graph."""
        weight = self.variable[...]
        return jax.tree.map(lambda x: x / _as(weight, x) if _is_real(x) else x, values)


def _number_of(computed: Computed, slot: Any) -> Any:
    """Returns the number by which a contribution is known; called inside a graph."""
    if computed.ok is None:
        return slot
    with device("/job:worker"):
        return jnp.where(computed.ok, slot, not_to_count(slot))


def _is_real(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _wide(dtype: Any) -> Any:
    is_half = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4
    return jnp.float32 if is_half else dtype


def _as(weight: jax.Array, value: Any) -> jax.Array:
    return weight.astype(_wide(value.dtype))


def _averaged(mean: Variable | RowMean) -> tuple[Variable, ...]:
    return mean.averaged if isinstance(mean, RowMean) else (mean,)


def _contributed(
    mean: Variable | RowMean, reads: Collection[str]
) -> tuple[Variable, ...]:
    """Returns what a worker writes, given what the update reads."""
    ids, *rows = (any(s.name in reads for s in v.shards) for v in _averaged(mean))
    if not isinstance(mean, RowMean):
        return (mean,) if ids else ()
    # Rows are summed by their ids.
    return mean.contributed if any(rows) else mean.contributed[:ids]


def _pairs(
    means: Any, values: Any, rows: Mapping[str, Rows] | None = None
) -> dict[str, Any]:
    """Returns what to contribute, by name of the variable."""
    by_name: dict[str, Any] = {}
    leaves = zip(jax.tree.leaves(means), jax.tree.leaves(values), strict=True)
    for mean, value in leaves:
        if isinstance(mean, RowMean):
            assert rows is not None  # of every table
            unique = rows[mean.table.name].unique
            if isinstance(value, PackedRows):
                by_name |= mean.cut(unique, value.values, value.unpacked)
            else:
                by_name |= mean.cut(unique, value.astype(mean.table.dtype))
        else:
            same = value.dtype == mean.dtype
            by_name[mean.name] = value if same else value.astype(mean.dtype)
    return by_name
