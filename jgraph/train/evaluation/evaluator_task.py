"""Evaluator task: takes snapshots of the model and loops over the evaluation data.

One program copies the model's variables, and the number of updates, from the ps to
variables on the evaluator. All that one ps holds is read at one moment, and no worker
waits for it. The evaluator then runs its own loop over the data. Tables of which the
evaluation only looks up rows are not copied: their rows come from the ps as they are
when they are looked up. A hash table does not change by that.

Source: tensorflow/python/distribute/sidecar_evaluator.py, which reads checkpoints.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.loop_messages import LoopRequest
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.errors import ClusterError
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.program.program import Program
from jgraph.train.data.data import Data, Dataset, as_dataset, check_alike
from jgraph.train.data.forms import Stream
from jgraph.train.data.source import Source
from jgraph.train.evaluation.evaluate import BATCH_SIZE, check_metrics, weighted
from jgraph.train.evaluation.evaluations import Evaluation, Evaluations
from jgraph.train.model.adapters import Metric
from jgraph.train.model.metrics import named_metrics
from jgraph.train.state.placement import plan_on
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.row_step import RowStep, Sparse
from jgraph.train.tables.row_tables import RowTables, find_row_tables
from jgraph.train.tables.row_update import RowUpdate

JOB = "evaluator"
"""The job whose first task evaluates."""

_STEP_S = 60.0


def evaluator_of(cluster: Cluster | None) -> TaskName | None:
    """Returns the task that evaluates while others train; None if there is none."""
    tasks = [] if cluster is None else cluster.tasks(JOB)
    return tasks[0] if tasks else None


def as_evaluated(
    data: Data | Source | None, cluster: Cluster | None, training_data: Dataset
) -> Dataset | None:
    """Opens what is to be evaluated where that is done, or checks arrays.

    Raises:
      DataError: data that cannot be used, or of another kind than ``training_data``.
      SourceError: it cannot be opened there.
    """
    if data is None:
        return None
    task = evaluator_of(cluster)
    if not isinstance(data, Source):
        dataset = as_dataset(data, "eval_data")
        once = isinstance(dataset.fed, Stream) and dataset.fed.has_end
        if task is not None or once:
            dataset = dataset.in_memory()
    else:
        dataset = data.open(None) if task is None else data.open(cluster, [task])
    check_alike(training_data, dataset, "the training data")
    return dataset


@final
@dataclass(slots=True)
class _EvalStep:
    """The program for batches of one type.

    Attributes:
      program: as it is shipped.
      feeds: of the fields of the data, in order.
      names: of the metrics, in the order of the fetches.
      copy_names: names of the variables that it reads in the snapshot.
      handle: of the program once it is registered.
    """

    program: Program
    feeds: tuple[str, ...]
    names: list[str]
    copy_names: frozenset[str]
    handle: str = ""


@final
class EvaluatorTask:
    """Evaluates the model of a training run on one task.

    Args:
      step: the variables of the run.
      metrics: as for ``Trainer``.
      cluster: where they are.
      task: evaluates.
      by_rows: look rows up on the ps where the evaluation needs no more of a table.
    """

    def __init__(
        self,
        step: TrainStep,
        metrics: Mapping[str, Metric],
        cluster: Cluster,
        task: TaskName,
        *,
        by_rows: bool,
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._cluster = cluster
        self._task = task
        self._by_rows = by_rows
        self._container = f"{step.container}/evaluator"
        self._copies = {v.name: self._copy(v) for v in step.variables}
        self._eval_steps: dict[str, _EvalStep] = {}
        self._snapshots: dict[frozenset[str], Callable[[], Any]] = {}
        # One evaluation at a time: the next one takes the place of the snapshot.
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._upload_digest = ""

    def prepare(self, dataset: Dataset) -> Callable[[], Evaluation]:
        """Traces and plans for this data; returns what evaluates on it, in any thread.

        Raises:
          ConfigError: a metric is not a scalar, or there is nothing to evaluate.
        """
        passes = [(p, self._program(dataset, p.batch_size)) for p in _plans(dataset)]
        return partial(self._evaluate, dataset, passes)

    def close(self) -> None:
        """Drops the snapshot and its programs."""
        with self._lock:
            self._forget()
            with suppress(ClusterError):
                self._cluster.reset(self._container)

    # ------------------------------------------------------------ programs

    def _copy(self, variable: Variable) -> Variable:
        # Never initialised: a snapshot is what writes it first.
        return Variable(
            variable.name,
            (variable.shape, variable.dtype, None),
            device=self._task,
            container=self._container,
        )

    def _program(self, dataset: Dataset, batch_size: int) -> _EvalStep:
        batch = dataset.avals(batch_size)
        key = str(batch)
        if key not in self._eval_steps:
            self._eval_steps[key] = self._eval_step(batch, len(dataset.fields))
        return self._eval_steps[key]

    def _eval_step(self, batch: Any, fields: int) -> _EvalStep:
        tables = self._row_tables(batch) if self._by_rows else None
        rows = {table.name for table in tables.tables} if tables else set[str]()
        model = [n for n in self._step.names if n.startswith(("params/", "state/"))]
        copy_names = frozenset(model) - rows
        variables = [
            self._copies[v.name] if v.name in copy_names else v
            for v in self._step.variables
        ]

        def evaluate(batch: Any) -> dict[str, Any]:
            with device(self._task):
                return self._metrics_of(tables, variables, batch)

        graph, _ = trace(evaluate, batch, variables=variables)
        avals = [v.aval for v in graph.jaxpr.outvars]
        names = self._step.metric_names(graph)
        check_metrics(dict(zip(names, avals, strict=True)))
        plan = plan_on(self._cluster, graph, self._task)
        feeds = tuple(feed.name for feed in graph.feeds[:fields])
        return _EvalStep(plan.program.peeking(), feeds, names, copy_names)

    def _compute(self, params: Any, state: Any, batch: Any, _: Any) -> dict[str, Any]:
        evaluate = self._step.adapter.evaluate
        return named_metrics(evaluate(params, state, batch, self._metrics))

    def _row_tables(self, batch: Any) -> RowTables:
        now = self._step.unflatten([v.spec.aval for v in self._step.variables])
        names = [name for name in self._step.names if name.startswith("params/")]
        return find_row_tables(
            self._compute, now["params"], now["state"], batch, (), names
        )

    def _metrics_of(
        self, tables: RowTables | None, variables: Iterable[Variable], batch: Any
    ) -> dict[str, Any]:
        compute, rows = self._compute, {}
        if tables is not None:
            batch = tables.checked(batch, tables.ids_looked_at(batch, ()))
        if tables is not None and tables.tables:
            never = RowUpdate()
            table_rows = RowStep(tables, never, frozenset(), ()).rows(batch, ())
            compute = tables.loss([each.positions for each in table_rows])
            rows = {t.name: r for t, r in zip(tables.tables, table_rows, strict=True)}
        values = [
            variable[rows[name].unique if name in rows else ...]
            if name.startswith(("params/", "state/"))
            else None
            for name, variable in zip(self._step.names, variables, strict=True)
        ]
        now = self._step.unflatten(values)
        return compute(now["params"], now["state"], batch, ())

    def _snapshot(self, names: frozenset[str]) -> Callable[[], Any]:
        if names not in self._snapshots:
            pairs = [
                (v, self._copies[v.name])
                for v in self._step.variables
                if v.name in names
            ]
            count = self._step.variables[self._step.names.index("global_step")]

            def snapshot() -> Any:
                for variable, copy in pairs:
                    copy[...] = variable[...]
                return count[...]

            self._snapshots[names] = snapshot
        return self._snapshots[names]

    # ------------------------------------------------------------ running

    def _evaluate(
        self, dataset: Dataset, passes: list[tuple[SlotPlan, _EvalStep]]
    ) -> Evaluation:
        with self._lock:
            try:
                session = self._session = self._session or self._cluster.session()
                self._upload(session, dataset, passes[0][1].feeds)
                step = self._take_snapshot(session, [p for _, p in passes])
                rows: list[Mapping[str, float]] = []
                weights: list[int] = []
                for slots, eval_step in passes:
                    new = self._run(session, dataset, slots, eval_step)
                    rows += new
                    weights += [slots.batch_size] * len(new)
                return Evaluation(step, weighted(rows, weights))
            except BaseException:
                self._forget()  # the task may have been started anew
                raise

    def _upload(
        self, session: Session, dataset: Dataset, feeds: tuple[str, ...]
    ) -> None:
        digest = dataset.digest()
        if not dataset.source and digest != self._upload_digest:
            arrays = dict(zip(feeds, dataset.fields.values(), strict=True))
            session.put_data(self._task, self._container, arrays)
        self._upload_digest = digest

    def _take_snapshot(self, session: Session, passes: Iterable[_EvalStep]) -> int:
        names = frozenset[str]().union(*(p.copy_names for p in passes))
        nbytes = sum(nbytes_of(v.spec) for v in self._step.variables if v.name in names)
        limit = _STEP_S + bulk_timeout_s(nbytes)
        return int(session.run(self._snapshot(names), timeout_s=limit))

    def _run(
        self, session: Session, dataset: Dataset, slots: SlotPlan, eval_step: _EvalStep
    ) -> list[Mapping[str, float]]:
        if not eval_step.handle:
            eval_step.handle = session.register(eval_step.program)
        request = LoopRequest(
            task=self._task,
            handle=eval_step.handle,
            data=dataset.source or self._container,
            data_feeds=eval_step.feeds if dataset.source else (),
            steps=slots.batches_per_epoch,
            batch_size=slots.batch_size,
            step_timeout_s=_STEP_S,
            plan=slots,
        )
        rows: list[Mapping[str, float]] = []
        for report in session.run_loops([request]):
            rows += [
                dict(zip(eval_step.names, values, strict=True))
                for values in zip(*report.fetches, strict=True)
            ]
        return rows

    def _forget(self) -> None:
        session, self._session = self._session, None
        self._upload_digest = ""
        for eval_step in self._eval_steps.values():
            eval_step.handle = ""
        if session is not None:
            with suppress(ClusterError):
                session.close()


def make_evaluator_task(
    step: TrainStep,
    metrics: Mapping[str, Metric],
    cluster: Cluster | None,
    sparse: Sparse,
) -> EvaluatorTask | None:
    """Returns what evaluates on the cluster; None: it has no task for that."""
    task = evaluator_of(cluster)
    if cluster is None or task is None:
        return None
    return EvaluatorTask(step, metrics, cluster, task, by_rows=sparse != "off")


def make_evaluations(
    evaluator_task: EvaluatorTask | None,
    evaluate: Callable[..., Evaluation],
    data: Data | Source | None,
    dataset: Dataset | None,
    *,
    whole: bool = False,
) -> Evaluations | None:
    """Returns what evaluates in a run: on the evaluator task if there is one, or here.

    None if nothing is to be evaluated.

    Args:
      evaluator_task: evaluates beside it.
      evaluate: evaluates here.
      data: by the user.
      dataset: from ``as_evaluated``.
      whole: what is evaluated is kept, so it comes here, and is evaluated here.
    """
    if data is None or dataset is None:
        return None
    # What only the evaluator has opened is opened here when that is needed.
    here = partial(evaluate, dataset if dataset.is_here else data)
    if whole:
        whole_here = partial(here, whole=True)
        return Evaluations(whole_here, halted=lambda go_on: whole_here(go_on=go_on))
    return Evaluations(
        here, None if evaluator_task is None else evaluator_task.prepare(dataset)
    )


def _plans(dataset: Dataset) -> list[SlotPlan]:
    """Cuts the data into whole batches, and into what is left after them.

    Example: 600 examples are 2 batches of 256, and 1 of 88.
    """
    parts = dataset.parts
    whole, rest = divmod(sum(part.examples for part in parts), BATCH_SIZE)
    plans = [SlotPlan(parts, BATCH_SIZE, 0, shuffle="none")] if whole else []
    if not rest:
        return plans
    tail, remaining = list[Part](), rest
    for part in reversed(parts):  # of others nothing: a part keeps its number
        count = min(remaining, part.examples)
        first = part.first + part.examples - count
        tail.append(replace(part, first=first, examples=count))
        remaining -= count
    return [*plans, SlotPlan(tail[::-1], rest, 0, shuffle="none")]
