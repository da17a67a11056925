"""Workers of a training run: their data, and their loop requests."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from jgraph.client.runs.follower import RunFollower
from jgraph.client.runs.questions import Question
from jgraph.client.state.sources import open_source_on
from jgraph.cluster.loop_messages import LoopReport, LoopRequest
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.run.cuts import tell_every
from jgraph.coordination.step.step_metrics import CONTRIBUTIONS, metrics_by_name
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.train.data.data import Dataset
from jgraph.train.data.feeding import Feeding
from jgraph.train.data.forms import Stream
from jgraph.train.data.shares import Shares
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order
from jgraph.train.strategies.prepared import Prepared


@final
class Workers:
    """The workers of a cluster: their data, and what each is asked to do.

    Args:
      state: what they train.
    """

    def __init__(self, state: RemoteState) -> None:
        self._state = state
        self._cluster = state.cluster
        self.tasks = state.cluster.tasks("worker")
        self._data = f"{state.step.container}/data"
        self.feeding: Feeding | None = None
        """Gives the workers data that only this process can read."""
        # Which data the workers hold: the same data of a later fit is not sent again.
        self._digests: dict[TaskName, str] = {}
        self.renews_data = False
        """Whether one of them may have lost its data since it was given that."""

    def renew_tasks(self) -> bool:
        """Takes note of who has joined the cluster since, or left; returns whether."""
        tasks = self._cluster.renewed_tasks("worker")
        changed = tasks != self.tasks
        self.tasks = tasks
        self._state.done += [0] * (len(tasks) - len(self._state.done))
        return changed

    def upload(
        self,
        graph: Graph,
        order: Order,
        book: Callable[[], BatchBook] | None = None,
    ) -> None:
        """Gives every worker the data, unless it has it; also who takes them back.

        Args:
          graph: of the step.
          order: what to train.
          book: where the run begins, if its workers train in step.
        """
        dataset, workers = order.dataset, list(dict.fromkeys(self.tasks))
        if self.renews_data:
            self._digests.clear()
            if dataset.source or self.feeding is not None:
                for task in workers:
                    self.renew(task, graph, dataset)
            self.renews_data = False
        if dataset.source or self.feeding is not None:  # the workers have opened it
            return
        if dataset.fed is not None:
            fields = _fields(graph, dataset)
            reader, shares = dataset.reader(), None
            if book is not None and isinstance(reader, Stream):
                begins = book()
                shares = Shares(reader.take, begins.given_back, begins.end)
            self.feeding = Feeding(self._cluster, self._data, reader, fields, shares)
            self._digests.clear()
            for task in workers:
                self.feeding.begin(task)
            return
        digest = dataset.digest()
        # A ps: it is there as long as the run.
        holder = self._cluster.tasks("ps")[:1] if order.lease_s is None else []
        for task in [*workers, *holder]:
            if self._digests.pop(task, "") != digest:
                self._put(task, graph, dataset)
            self._digests[task] = digest

    def renew(self, worker: TaskName, graph: Graph, dataset: Dataset) -> None:
        """Gives the data to a worker that was started again."""
        if dataset.source:
            open_source_on(self._cluster, worker, dataset.source)
        elif self.feeding is not None:
            self.feeding.begin(worker)
        else:
            self._put(worker, graph, dataset)

    def _put(self, worker: TaskName, graph: Graph, dataset: Dataset) -> None:
        fields = zip(_fields(graph, dataset), dataset.fields.values(), strict=True)
        self._state.session.put_data(worker, self._data, dict(fields))

    def forget_data(self) -> None:
        """Sends the data anew next time: a worker may have been started anew.

        Raises:
          JGError: the data is what ended the run.
        """
        self._digests.clear()
        if self.feeding is not None and self.feeding.error is not None:
            raise self.feeding.error

    def forget(self, worker: str) -> None:
        """Sends the data anew to a worker next time, which is lost."""
        self._digests.pop(TaskName(worker), None)

    def ran_out(self, report: LoopReport) -> bool:
        """Whether a loop is over as there is no more data."""
        is_over = self.feeding is not None and self.feeding.is_over
        return is_over and report.state == "done"

    def end_feeding(self) -> None:
        """Gives no more data to the workers."""
        if self.feeding is not None:
            self.feeding.close()
            self.feeding = None

    def requests(
        self,
        prepared: Prepared,
        order: Order,
        *,
        step_timeout_s: float,
        prefetch: int = 0,
        pace_s: float = 0.0,
    ) -> list[LoopRequest]:
        """Returns one request per worker.

        Args:
          prepared: the step, registered.
          order: what to train.
          step_timeout_s: limit for one step.
          prefetch: steps that are begun while the one before is computed.
          pace_s: of the steps that a worker takes alone, where it is told their number.
        """
        local = self._state.step.local
        graph, together = prepared.graph, bool(prepared.on_ps)
        feeds = {feed.name for feed in graph.feeds}
        dataset = order.dataset
        halts = 0 if together else min(order.halts, default=0)
        return [
            LoopRequest(
                task=worker,
                handle=prepared.handles[replica],
                data=dataset.source or self._data,
                data_feeds=_fields(graph, dataset) if dataset.source else (),
                steps=order.steps,
                batch_size=order.batch_size,
                seed=order.seed,
                replica=replica,
                first_step=self._state.done[replica],
                step_feed="step" if "step" in feeds else "",
                replica_feed="replica" if "replica" in feeds else "",
                batch_feed="slot" if "slot" in feeds else "",
                step_timeout_s=step_timeout_s,
                report_every_s=order.report_every_s,
                finite=None if together else prepared.finite,
                tell_every=tell_every(halts, len(self.tasks)) if halts else 0,
                prefetch=prefetch,
                pace_feed="steps" if "steps" in feeds else "",
                pace_s=pace_s,
                pace_most=0 if local is None else local.count,
            )
            for replica, worker in enumerate(self.tasks)
        ]

    def note(self, report: LoopReport) -> None:
        """Learns from a report how many steps its replica has done."""
        self._state.done += [0] * (report.replica + 1 - len(self._state.done))
        if len(report.steps):
            self._state.done[report.replica] = int(report.steps[-1]) + 1


def chunk_of(
    report: LoopReport, names: Sequence[str], replica: int, *, together: bool = False
) -> Chunk:
    """Returns a report as what ``replica`` did.

    Args:
      report: of a loop.
      names: of its fetches; none: they are left out.
      replica: who stands for what it did.
      together: it is of synchronous training, and ``replica`` stands for all.
    """
    metrics = metrics_by_name(names, report.fetches)
    return Chunk(
        replica,
        report.steps,
        report.seconds,
        metrics,
        report.times,
        report.dropped,
        batches=int(metrics[CONTRIBUTIONS].sum()) if together else None,
        began=report.began_s,
    )


def _fields(graph: Graph, dataset: Dataset) -> tuple[str, ...]:
    """Returns the feeds of the data, in the order of its fields."""
    return tuple(feed.name for feed in graph.feeds[: len(dataset.fields)])


def chunks_of(
    run: RunFollower, names: Sequence[str], *, together: bool
) -> Iterator[tuple[LoopReport | None, Chunk | None]]:
    """Yields each report of a run, or None, and what there is to tell then, if any.

    Args:
      run: the run.
      names: of the fetches of its steps.
      together: training is synchronous.
    """
    beside: list[Chunk] = []
    none = np.empty(0)
    for report in run:
        if isinstance(report, Question):
            yield None, Chunk(0, none, none, {}, question=report)
        elif report.restored is not None:
            beside.clear()
            yield report, Chunk(0, none, none, {}, restored=report.restored)
        elif report.rescaled is not None:
            yield report, Chunk(0, none, none, {}, rescaled=report.rescaled)
        elif together and len(report.steps) and report.position is None:
            beside.append(chunk_of(report, (), report.replica))  # another loop decides
            yield report, None
        elif len(report.steps):
            replica = 0 if together else report.replica
            chunk = chunk_of(report, names, replica, together=together)
            yield report, replace(chunk, of_workers=tuple(beside))
            beside.clear()
        else:
            yield report, None


def end_run(run: RunFollower) -> None:
    """Stops a run and waits for its end: no step of it comes later."""
    run.stop()
    with contextlib.suppress(Exception):
        for _ in run:
            continue
