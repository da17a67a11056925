"""Costs for ``jgraph simulate``: ``python -m benchmarks calibrate [--check]``.

Measures what a step, a frame and a byte cost the tasks of a cluster on this machine, by
null steps of one and of four workers with nothing and with 16 MB, and writes them to
``cost_model.json``: of each the median of three measurements, on clusters of their own.
One JSON line for each transport.

``--check`` predicts other configurations from them and measures each: asynchronous,
synchronous, and synchronous with a backup worker, of nothing and of 8 MB, with two and
with eight workers; 4 MB with a wait of 50 ms in place of computing; and a slow worker,
waited for and not. Fails if the median of the errors is more than 15 %, or one more
than 30 %. All tasks share the cores of this machine, less what other processes took of
them meanwhile.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import jgraph as jg
from benchmarks import machines, measure
from benchmarks.null_step import MODES, NullStep, NullSync
from benchmarks.straggler import training
from jgraph.client.placement.measuring import measure as measured_model
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.coordination.sync.aggregation import Contributed
from jgraph.coordination.sync.roster import Roster
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import Link, TaskSpeed
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.gates.step_columns import (
    columns_of,
    slots_in,
    slots_of,
    steps_of,
)
from jgraph.testing import Computing, Costs, dense_step, load_costs, simulate
from jgraph.testing.scale.costs import CROWD, save_costs
from jgraph.testing.scale.simulate import Mode

MB: Final = 16
_MANY: Final = CROWD - 1  # and a ps
GBIT: Final = 10.0
ROUNDS: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Found:
    """What a configuration cost: CPU per step of a ps and of a worker, and its time."""

    ps_s: float
    worker_s: float
    step_s: float
    steps_per_s: float
    cores: float


@final
class Cores:
    """Cores that other processes left, while a block runs."""

    def __init__(self, work: NullStep | None) -> None:
        self._work = work
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, *interrupts = map(int, columns)
        busy = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
        ours = time.process_time()
        if self._work is not None:
            ours += sum(self._work.cpu_seconds().values())
        return time.perf_counter(), busy, ours

    def left(self) -> float:
        """Returns how many, on average since the beginning."""
        seconds, busy, ours = (
            b - a for a, b in zip(self._began, self._now(), strict=True)
        )
        others = max(0.0, busy - ours)
        return max(0.5, (os.cpu_count() or 1) - others / seconds)


def cost_of(work: NullStep, workers: int, steps: int) -> Found:
    """Runs steps of each worker."""
    cores, before = Cores(work), work.cpu_seconds()
    times = work.run(workers, steps)
    left, after = cores.left(), work.cpu_seconds()
    each = {task: (after[task] - before[task]) / steps for task in after}
    wanted = workers
    if isinstance(work, NullSync):
        wanted -= work.backups
        times = [work.updated] * wanted
    rates = measure.rates(times)
    return Found(
        ps_s=sum(s for t, s in each.items() if t.startswith("/job:ps/")),
        worker_s=sum(s for t, s in each.items() if "worker" in t) / workers,
        step_s=rates.p50 / 1e3,
        steps_per_s=rates.steps_per_s,
        cores=left,
    )


def configured(
    mode: str,
    mb: float,
    workers: int,
    transport: TransportChoice,
    *,
    ps: int = 1,
    rounds: int = 3,
    backups: int = 0,
    wait_s: float = 0.0,
    seconds: float = 1.0,
) -> list[Found]:
    """Returns what the rounds of a configuration cost."""
    kind: Any = "dense" if mb else "scalar"
    options: Any = {"ps": ps, "workers": workers, "transport": transport}
    with MODES[mode](kind, mb=mb, compute_wait_s=wait_s, **options) as work:
        if isinstance(work, NullSync):
            work.backups = backups
        work.run(workers, 5)
        began = time.perf_counter()
        work.run(workers, 10)
        steps = max(10, int(10 * seconds / (time.perf_counter() - began)))
        return [cost_of(work, workers, steps) for _ in range(rounds)]


def median(found: Sequence[Found], name: str) -> float:
    """Returns the median of a figure over rounds."""
    return float(statistics.median(getattr(one, name) for one in found))


def step_id_s() -> float:
    """Returns the CPU time of a step's name in a frame, with what the arbiter does."""
    count, ps = 1000, TaskName("/job:ps/task:1")
    roster = Roster(f"w{n}" for n in range(count))

    def once() -> None:
        steps = tuple((f"w{n}", 7) for n in range(count))
        slots = slots_in(range(count))
        told = pb.Contributions(steps=columns_of(roster, steps), slots=slots)
        there = pb.Contributions.FromString(told.SerializeToString())
        slots_there = slots_of(there.slots)
        event = Contributed(ps, steps_of(roster, there.steps), 0, slots_there)
        assert len(event.steps) == count

    return measure.micros(once, 50) / count / 1e6 / 2  # of each side a half


def costs_of(transport: TransportChoice, gbit: float, speed: TaskSpeed) -> Costs:
    """Measures the costs of a transport."""
    names = ("ps_s", "worker_s", "step_s")

    def of(mode: str, mb: float, workers: int, ps: int = 1) -> dict[str, float]:
        found = configured(mode, mb, workers, transport, ps=ps)
        return {name: median(found, name) for name in names}

    alone, two_ps, large = (
        of("async", 0, 1),
        of("async", 0, 1, ps=2),
        of("async", MB, 1),
    )
    many, many_large = of("async", 0, _MANY), of("async", MB, _MANY)
    sync, sync_large = of("sync", 0, 1), of("sync", MB, 1)
    sync_many, sync_many_large = of("sync", 0, _MANY), of("sync", MB, _MANY)
    nbytes, others = MB * 1e6, _MANY - 1
    # Of many workers: how many times as much what one worker costs alone does.
    crowding = (many["ps_s"] / _MANY + many["worker_s"]) / (
        alone["ps_s"] + alone["worker_s"]
    )
    crowding_sync = max(1.0, sync_many["worker_s"] / sync["worker_s"])
    worker_byte_s = (large["worker_s"] - alone["worker_s"]) / (2 * nbytes)
    crowding_bytes = (many_large["worker_s"] - many["worker_s"]) / (
        2 * nbytes * worker_byte_s
    )
    # An update costs u + n c, with n contributions.
    contribution_s = (sync_many["ps_s"] / crowding_sync - sync["ps_s"]) / others
    bytes_of_one = sync_large["ps_s"] - sync["ps_s"]
    bytes_of_many = (sync_many_large["ps_s"] - sync_many["ps_s"]) / crowding_bytes
    contribution_bytes = (bytes_of_many - bytes_of_one) / others
    worker_ps_s = max(0.0, two_ps["worker_s"] - alone["worker_s"])
    machine_us = {
        name: machines.cost_us(machine, 1_000)
        for name, machine in machines.MACHINES.items()
    }
    cpu = alone["ps_s"] + alone["worker_s"]
    return Costs(
        date=measure.today(),
        machine=f"{platform.machine()}, {_processor()}",
        cores=os.cpu_count() or 1,
        transport=transport,
        worker_step_s=max(0.0, alone["worker_s"] - worker_ps_s),
        worker_ps_s=worker_ps_s,
        worker_byte_s=worker_byte_s,
        push_s=alone["ps_s"],
        push_byte_s=(large["ps_s"] - alone["ps_s"]) / (2 * nbytes),
        contribution_s=max(0.0, contribution_s),
        contribution_byte_s=max(0.0, contribution_bytes / (2 * nbytes)),
        update_s=max(0.0, sync["ps_s"] - contribution_s),
        update_byte_s=max(0.0, (bytes_of_one - contribution_bytes) / nbytes),
        # A worker sends each ps a frame and gets one.
        frame_s=worker_ps_s / 2,
        step_id_s=step_id_s(),
        arbiter_event_s=machine_us["arbiter"] / 1e6,
        gate_event_s=machine_us["gate"] / 1e6,
        dispatch_event_s=machine_us["dispatch"] / 1e6,
        crowding_async=max(1.0, crowding),
        crowding_sync=crowding_sync,
        crowding_bytes=max(1.0, crowding_bytes),
        link=Link(max(0.0, alone["step_s"] - cpu) / 2, gbit * 1e9 / 8),
        speed=speed,
    )


def middle_of(rounds: Sequence[Costs]) -> Costs:
    """Returns costs of which each is the median: clusters differ, more than steps."""

    def middle(values: Iterable[float]) -> float:
        return float(statistics.median(values))

    costs: dict[str, Any] = {
        name: middle(one.seconds()[name] for one in rounds)
        for name in rounds[0].seconds()
    }
    latency_s = middle(one.link.latency_s for one in rounds)
    link = replace(rounds[0].link, latency_s=latency_s)
    return replace(rounds[0], **costs, link=link)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return "unknown processor"


def worker_speed() -> TaskSpeed:
    """Returns how fast a worker of this machine computes."""
    with jg.LocalCluster(ps=1, workers=1) as cluster:
        model = measured_model(cluster)
        return model.tasks[cluster.tasks("worker")[0]]


# ---------------------------------------------------------------- predictions


@final
@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration: what is measured, and how it is predicted from cores left."""

    name: str
    measured: Callable[[], tuple[float, float]]
    predicted: Callable[[float], float]


def null_steps(
    costs: Costs, mode: Mode, mb: float, workers: int, backups: int, wait_ms: float = 0
) -> Checked:
    """Returns a configuration of null steps, in steps/s of all workers."""

    def measured() -> tuple[float, float]:
        found = configured(
            mode, mb, workers, "auto", backups=backups, wait_s=wait_ms / 1e3
        )
        return median(found, "steps_per_s"), median(found, "cores")

    def predicted(cores: float) -> float:
        return simulate(
            dense_step(int(mb * 1e6) or 4, variables=1),
            workers=workers,
            ps=1,
            mode=mode,
            steps=200,  # work on a shared host takes what chance draws
            backup_workers=backups,
            computing=Computing(wait_ms / 1e3),
            costs=costs,
            cores=cores,
        ).steps_per_s

    kind = f"{mode}{' with a backup' * bool(backups)}"
    wait = f", {wait_ms:g} ms" if wait_ms else ""
    return Checked(f"{kind}, {mb:g} MB{wait}, {workers} workers", measured, predicted)


def stragglers(costs: Costs, backups: int) -> Checked:
    """Returns steps with a slow worker, in updates/s."""
    waits = {0: 0.02, 1: 0.02, 2: 0.12}

    def measured() -> tuple[float, float]:
        with jg.LocalCluster(ps=1, workers=3) as cluster:
            run = training(cluster, backups, waits, 100_000)
            cores = Cores(None)
            ms = statistics.median(run(20) for _ in range(3))
            return 1e3 / ms, max(1.0, cores.left())

    def predicted(cores: float) -> float:
        found = simulate(
            dense_step(400_000, variables=1),
            workers=3,
            ps=1,
            steps=20,
            backup_workers=backups,
            computing=Computing(0.02, slow=(1.0, 1.0, 6.0)),
            costs=costs,
            cores=cores,
        )
        return 1 / found.step_s["p50"]

    how = "left out" if backups else "waited for"
    return Checked(f"a slow worker of three {how}", measured, predicted)


def configurations(costs: Costs) -> list[Checked]:
    """Returns all that is predicted; none of it is what costs were made of."""
    modes: list[tuple[Mode, int]] = [("async", 0), ("sync", 0), ("sync", 1)]
    return [
        *(
            null_steps(costs, mode, mb, workers, backups)
            for mode, backups in modes
            for mb in (0, 8)
            for workers in (2, 8)
        ),
        null_steps(costs, "async", 4, 8, 0, wait_ms=50),
        stragglers(costs, backups=0),
        stragglers(costs, backups=1),
    ]


def check(costs: Costs) -> list[float]:
    """Predicts and measures; prints a line for each; returns the errors."""
    errors = []
    for one in configurations(costs):
        found, cores = one.measured()
        expected = one.predicted(cores)
        error = abs(expected - found) / found
        errors.append(error)
        measure.emit(
            "calibrate",
            configuration=one.name,
            measured_per_s=round(found, 2),
            simulated_per_s=round(expected, 2),
            error=round(error, 3),
            cores_left=round(cores, 2),
        )
    return errors


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="predict, and measure")
    parser.add_argument("--costs", type=Path, help="predict from these, measure none")
    parser.add_argument("--output", type=Path, default=Path("cost_model.json"))
    parser.add_argument(
        "--gbit",
        type=float,
        default=GBIT,
        help="network of a simulated host each way; this machine has none to measure",
    )
    a = parser.parse_args(args)
    if a.costs is None:
        speed = worker_speed()
        found: dict[str, Costs] = {}
        transports: tuple[TransportChoice, ...] = ("auto", "network")
        for transport in transports:
            rounds = [costs_of(transport, a.gbit, speed) for _ in range(ROUNDS)]
            found[transport] = costs = middle_of(rounds)
            us = {
                n: round(1e6 * s, 6)
                for n, s in costs.seconds().items()
                if n[-2:] == "_s"
            }
            measure.emit("calibrate", transport=transport, us=us)
        save_costs(found, a.output)
    if a.check:
        errors = check(load_costs(a.costs or a.output, "auto"))
        middle, worst = statistics.median(errors), max(errors)
        measure.emit(
            "calibrate", median_error=round(middle, 3), worst_error=round(worst, 3)
        )
        if middle > 0.15 or worst > 0.3:
            sys.exit(f"errors of {middle:.0%} in the middle and {worst:.0%} at worst")


if __name__ == "__main__":
    main()
