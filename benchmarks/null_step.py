"""The null step of the OSDI'16 paper: read the variables, do nothing, write an update.

Run: ``python -m benchmarks.null_step --kind dense --mb 8 --workers 1 4``. Every
worker's server runs its own loop: it reads from the ps, sends back a constant as large
as what it read, and the ps adds that. Prints one JSON line per number of workers.

``scalar``: one number per ps. ``dense``: ``--mb`` megabytes, spread over the ps.
``sparse``: 32 random rows of ``--rows`` x 64; the table stays where it is.
``--mode sync``: every update is the mean of what all workers sent for it.

Source: Abadi et al., "TensorFlow: A System for Large-Scale Machine Learning", OSDI
2016, section 6.2; its figure 7 uses 16 ps tasks.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, get_args

import numpy as np

import jgraph as jg
from benchmarks import measure, null_graphs as graphs
from benchmarks.namespaces import cluster_of_two_hosts
from benchmarks.null_graphs import LOOKUPS, WIDTH, Kind
from benchmarks.on_cluster import OnCluster
from jgraph.client.cluster import Cluster
from jgraph.client.runs.gates import open_gate
from jgraph.cluster.loop_messages import LoopReport, LoopRequest, SyncRequest
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.accumulate import MEAN, averaging, contributing
from jgraph.train.tables.row_mean import RowMean

ROWS = 1_000_000
EXAMPLES = 4096
"""Of one number each; an epoch of a few would make its order part of the figure."""
GATE = "null"


class NullStep(OnCluster):
    """A cluster whose first workers run null steps when asked.

    Args:
      kind: what is read and written.
      mb: megabytes of a dense model.
      rows: rows of a sparse table.
      count: variables, where they are many.
      ps: parameter servers; with none, all is on the worker.
      workers: the most workers that will run.
      transport: how tensors travel, see ``jg.LocalCluster``.
      compute_wait_s: what every step waits in place of computing.
      tls: whether all between tasks is encrypted.
      on: a cluster that is there; else one is started here.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        mb: float = 8,
        rows: int = ROWS,
        count: int = 0,
        ps: int = 1,
        workers: int = 1,
        transport: TransportChoice = "auto",
        compute_wait_s: float = 0.0,
        tls: bool = False,
        on: Cluster | None = None,
    ) -> None:
        self.kind = kind
        self.rows = rows
        self.done = 0
        self._wait_s = compute_wait_s
        start_s = 60.0 + 5 * (ps + workers)  # dozens of processes share few cores
        way: Any = {"transport": transport, "tls": tls, "timeout_s": start_s}
        super().__init__(on or jg.LocalCluster(ps=ps, workers=workers, **way))
        try:
            self.session = self.cluster.session()
            self.variables = graphs.make_variables(kind, mb, rows, ps, count)
            self.session.initialize(self.variables)
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        made = graphs.trace_rows if self.kind == "sparse" else graphs.trace_whole
        self._feed(self._planned(made(self.variables), self.cluster.tasks("worker")[0]))

    def _feed(self, planned: Plan) -> None:
        if self.kind == "sparse":
            # Every batch is of different rows: lost updates can then be counted.
            self._register(planned, np.arange(self.rows, dtype=np.int32), LOOKUPS)
        else:
            self._register(planned, np.ones(EXAMPLES, np.float32), 1)

    def _planned(self, graph: jg.Graph, driver: TaskName) -> Plan:
        return plan(
            graph,
            tasks=self.cluster.tasks(),
            driver=driver,
            default=DeviceSpec.from_string(driver),
        )

    def _register(self, planned: Plan, data: Any, batch: int) -> None:
        self.bytes_per_step, self.batch = planned.nbytes_per_step, batch
        self._slots = SlotPlan([Part("x", len(data))], batch, seed=0)
        self._handles = {}
        for worker in self.cluster.tasks("worker"):
            program = planned.program.rename_task(planned.program.driver, worker)
            self.session.put_data(worker, "x", {"x": data})
            self._handles[worker] = self.session.register(program)

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs ``steps`` steps on each of the first ``workers`` workers."""
        reports = list(self.session.run_loops(self._requests(workers, steps)))
        self.done += workers * steps
        return [_seconds(reports, replica) for replica in range(workers)]

    def _requests(self, workers: int, steps: int, **more: Any) -> list[LoopRequest]:
        return [
            LoopRequest(
                task=worker,
                handle=self._handles[worker],
                data="x",
                steps=steps,
                batch_size=self.batch,
                seed=replica,
                replica=replica,
                compute_wait_s=self._wait_s,
                **more,
            )
            for replica, worker in enumerate(self.cluster.tasks("worker")[:workers])
        ]

    def check(self) -> None:
        """Raises if an update was lost, or a table travelled."""
        if self.kind == "sparse":
            table = self.variables[0]
            lookups = LOOKUPS * WIDTH * 4
            assert self.bytes_per_step < 3 * lookups, (
                "more than rows went over the wire"
            )

            def totals() -> Any:
                with jg.device(table.device):
                    return table[...].sum(axis=0)

            totals_now = self.session.run(totals)
            assert np.all(totals_now == LOOKUPS * self.done), "lost updates"
            return
        values = self.session.read(self.variables)
        assert all(np.all(v == self.done) for v in values.values()), "lost updates"


class NullSync(NullStep):
    """Null steps of synchronous training: an update takes one step of every worker.

    Attributes:
      backups: workers that an update does not wait for.
      updated: when the updates of the last run were made.
    """

    backups = 0
    updated: Any = ()

    def _prepare(self) -> None:
        ps = [TaskName(str(v.device)) for v in self.variables]
        self._shards = sorted(set(ps))
        workers = self.cluster.tasks("worker")
        if self.kind == "sparse":
            mean = RowMean(self.variables[0], LOOKUPS, len(workers))
            graph = graphs.trace_row_contribution(mean)
            apply = graphs.trace_row_mean(mean)
        else:
            means = [graphs.beside(MEAN, v) for v in self.variables]
            graph = graphs.trace_contribution(self.variables, means)
            apply = graphs.trace_mean(self.variables, means)
        planned = self._planned(graph, workers[0])
        self._feed(replace(planned, program=contributing(planned.program, GATE)))
        applied = self._planned(apply, self._shards[0])
        program = averaging(applied.program, GATE, self._shards)
        self._apply = self.session.register(program)

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs ``steps`` steps on each of the first ``workers`` workers."""
        open_gate(self.cluster, GATE, self._shards, synchronous=True, version=self.done)
        requests = self._requests(
            workers, steps, first_step=self.done, batch_feed="slot"
        )
        arbiter = LoopRequest(
            task=self._shards[0],
            handle=self._apply,
            data="",
            steps=steps,
            batch_size=0,
            replica=workers,
            sync=SyncRequest(
                gate=GATE,
                version=self.done,
                wanted=workers - self.backups,
                replicas={request.handle: request.task for request in requests},
                shards=self._shards,
                plan=self._slots,
            ),
        )
        reports = list(self.session.run_loops([arbiter, *requests]))
        self.done += steps
        self.updated = _seconds(reports, workers)
        return [_seconds(reports, replica) for replica in range(workers)]


def _seconds(reports: Sequence[LoopReport], replica: int) -> Any:
    return np.concatenate([r.seconds for r in reports if r.replica == replica])


MODES: dict[str, type[NullStep]] = {"async": NullStep, "sync": NullSync}


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument(
        "--kind", choices=["scalar", "dense", "sparse"], default="dense"
    )
    parser.add_argument("--mb", type=float, default=8)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--transport", choices=get_args(TransportChoice), default="auto"
    )
    parser.add_argument("--mode", choices=list(MODES), default="async")
    parser.add_argument("--tls", action="store_true", help="encrypted")
    parser.add_argument(
        "--namespaces",
        action="store_true",
        help="ps and workers in two network namespaces, as on two hosts, encrypted",
    )
    parser.add_argument("--steps", type=int, default=200, help="of each worker a round")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args(args)
    if a.mode == "sync" and not a.ps:
        parser.error("--mode sync takes --ps 1 or more")
    if a.namespaces and (len(a.workers) > 1 or a.transport != "auto"):
        parser.error("--namespaces takes one number of workers, and no --transport")
    for workers in a.workers:
        with ExitStack() as stack:
            hosts = None
            if a.namespaces:
                two = cluster_of_two_hosts(a.ps, workers)
                hosts = stack.enter_context(two)
            work = MODES[a.mode](
                a.kind,
                mb=a.mb,
                rows=a.rows,
                ps=a.ps,
                workers=workers,
                transport=a.transport,
                tls=a.tls,
                on=hosts,
            )
            stack.enter_context(work)
            work.run(workers, min(a.steps, 20))
            rounds = [
                measure.rates_of(work.run, workers, a.steps) for _ in range(a.rounds)
            ]
            work.check()
            measure.emit(
                "null_step",
                **configuration(a.kind, a.mb, a.rows, a.ps, workers),
                mode=a.mode,
                transport=a.transport,
                tls=a.tls or a.namespaces,
                namespaces=a.namespaces,
                ways=ways_of(work.cluster),
                steps=a.steps,
                rounds=a.rounds,
                **measure.rate_figures(rounds),
                bytes_per_step=work.bytes_per_step,
                peak_rss_mb=work.peaks(),
            )


def ways_of(cluster: Cluster) -> list[str]:
    """Returns how frames leave for other tasks."""
    tasks = cluster.status().tasks
    return sorted({way for task in tasks for way in task.ways.values()})


def configuration(
    kind: str, mb: float, rows: int, ps: int, workers: int
) -> dict[str, Any]:
    """Returns what a line says about its configuration."""
    sizes: dict[str, Any] = {"dense": {"mb": mb}, "sparse": {"rows": rows}}
    return {"kind": kind, **sizes.get(kind, {}), "ps": ps, "workers": workers}


if __name__ == "__main__":
    main()
