"""Simulated training: what a cluster of any size would do, before it is paid for.

Decisions are made by the machines that ship, at true counts. What a task does costs
what calibration measured; bytes are fluid and share networks.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias, final

from jgraph.counts import check_flags
from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.work import Work
from jgraph.plan.plan import Plan
from jgraph.plan.traffic import Held, Message, StepTraffic
from jgraph.testing.scale.asynchronous import AsynchronousRun
from jgraph.testing.scale.cluster import Part, SimulatedCluster, parts_of, shares_of
from jgraph.testing.scale.computing import Computing
from jgraph.testing.scale.costs import Costs, load_costs
from jgraph.testing.scale.synchronous import SynchronousRun
from jgraph.testing.virtual_time import Simulation
from jgraph.view.units import bytes_text, ms_text

Mode: TypeAlias = Literal["sync", "async"]
_COUNTS: Final = tuple(
    sorted({n for power in range(11) for n in (1 << power, 3 << power >> 1)})
)
"""Numbers of ps that are tried: 1, 2, 3, 4, 6, 8, 12, and so on."""
_TRIED_STEPS: Final = 6
_IDLE_TRIES: Final = 3
"""So many numbers of ps may be no faster than fewer before no more are tried."""
_FASTER, _NEARLY = 1.01, 1.05
NOT_MODELLED: Final = (
    "not modelled: packets that are lost where many send to one, switches that several "
    "hosts share, page faults, caches, and what else runs on a host"
)


@final
@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated cluster did.

    Attributes:
      mode: "sync" or "async".
      workers: how many.
      ps: how many have a part of the model.
      seconds: of virtual time.
      step_s: seconds of a worker's step: p50, p90, p99. In synchronous training of an
        update.
      steps_per_s: steps that count, of all workers, after the first of each.
      busy: share of the time that the busiest task of each kind was at work.
      machine_s: measured CPU time of the machines of the busiest task, per update
        (of an asynchronous run per step), by machine.
      dropped: contributions that came too late.
      ledger: bytes sent and arrived, batches dealt and counted.
      trace: when steps or updates ended.
      costs: what it was made of.
      notes: what a reader has to know.
    """

    mode: Mode
    workers: int
    ps: int
    seconds: float
    step_s: Mapping[str, float]
    steps_per_s: float
    busy: Mapping[str, float]
    machine_s: Mapping[str, float]
    dropped: int
    ledger: Mapping[str, float]
    trace: tuple[float, ...]
    costs: Costs
    notes: tuple[str, ...]

    def __str__(self) -> str:
        steps = ", ".join(f"{p} {ms_text(s)}" for p, s in self.step_s.items())
        busy = ", ".join(f"{name} {100 * x:.0f} %" for name, x in self.busy.items())
        machines = ", ".join(f"{n} {ms_text(s)}" for n, s in self.machine_s.items())
        each = "an update" if self.mode == "sync" else "a step"
        return "\n".join(
            [
                f"simulated: {self.mode}, {self.workers} workers, {self.ps} ps: "
                f"{self.steps_per_s:.4g} steps/s of all workers",
                f"  {each} takes {steps}",
                f"  busy: {busy}",
                f"  machines, measured CPU of {each}: {machines}",
                *([f"  {self.dropped} steps came too late"] if self.dropped else []),
                *(f"  {note}" for note in self.notes),
                str(self.costs),
                NOT_MODELLED,
            ]
        )


def simulate(
    plan: Plan | StepTraffic,
    *,
    workers: int,
    ps: int | None = None,
    mode: Mode = "sync",
    steps: int = 20,
    backup_workers: int = 0,
    max_staleness: int | None = None,
    computing: Computing | None = None,
    costs: Costs | None = None,
    cores: float | None = None,
    seed: int = 0,
    sharded: bool = False,
    max_readers: int | None = None,
) -> Simulated:
    """Returns what a cluster would do with a plan.

    Args:
      plan: of one worker's step: ``trainer.plan(…)``, or ``Plan.load('plan.json')``.
      workers: how many.
      ps: how many; those that get no variable do nothing. If unset, the fewest that are
        nearly as fast as any number, of those that were tried.
      mode: "sync" or "async".
      steps: of each worker.
      backup_workers: workers whose contributions an update does not wait for.
      max_staleness: bound of an asynchronous run.
      computing: times of a worker's step; if unset, as its work takes at the measured
        speed.
      costs: measured ones; those that come with the package if unset.
      cores: all tasks share one host with so many, where work takes what it costs on
        average; if unset each has its own, and work takes what it costs.
      seed: the same one gives the same run.
      sharded: large variables are cut into as many shards as there are ps, as by
        ``jg.min_max_variable_partitioner``.
      max_readers: how many workers read from a ps at a time, of a synchronous run; all
        if unset.

    Raises:
      ConfigError: numbers that mean nothing, or a plan that says nothing of ps.

    Example:
      >>> step = dense_step(nbytes=4_000_000)
      >>> found = simulate(step, workers=4, ps=2, computing=Computing(0.1))
      >>> found.workers, len(found.trace), found.ledger["counted"]
      (4, 20, 80)
    """
    check_flags(sharded=sharded)
    _check(workers, ps, mode, steps, backup_workers, max_staleness, cores)
    if max_readers is not None and (mode != "sync" or max_readers < 1):
        raise ConfigError(
            f"max_readers is {max_readers}, and mode '{mode}'; it is 1 or more, of "
            "mode 'sync'"
        )
    step = plan.traffic() if isinstance(plan, Plan) else plan
    if not step.on_ps or not step.read + step.written:
        raise ConfigError(
            f"the plan '{step.name}' sends nothing between a ps and a worker, so there "
            "is nothing to simulate; make it on a cluster with ps: jg.LocalCluster("
            "ps=1, workers=1), trainer.plan(data, batch_size=…).save('plan.json')"
        )
    costs = load_costs() if costs is None else costs
    notes = []
    if computing is None:
        computing = Computing(computing_s(step, costs))
    notes.append(f"a worker computes {computing}")
    if ps is None:
        few = partial(
            simulate,
            *(step,),
            workers=workers,
            mode=mode,
            steps=min(steps, _TRIED_STEPS),
            backup_workers=backup_workers,
            max_staleness=max_staleness,
            computing=computing,
            costs=costs,
            cores=cores,
            seed=seed,
            sharded=sharded,
            max_readers=max_readers,
        )
        rates = _rates(lambda count: few(ps=count))
        ps = _enough(rates)
        notes.append(_why(ps, rates))
    shares = shares_of(step, ps, sharded=sharded)
    notes += _of_shares(step, ps, len(shares), sharded=sharded)
    notes.append(
        f"a step reads {bytes_text(step.read)} and sends {bytes_text(step.written)}"
    )
    sim = Simulation(seed)
    if cores is not None:
        costs = costs.crowded(mode, workers + len(shares), cores)
    # Tasks of one host compute in one piece, as they are planned.
    parts = [Part()] if cores is not None else parts_of(step, costs, len(shares))
    message = costs.message(mode)
    cluster = SimulatedCluster(
        sim, costs, shares, workers, computing, message, seed, cores, parts
    )
    if mode == "sync":
        readers = 0 if max_readers is None else max_readers
        return _synchronous(cluster, steps, workers - backup_workers, readers, notes)
    return _asynchronous(cluster, steps, max_staleness, notes)


def _rates(of: Callable[[int], Simulated]) -> dict[int, float]:
    """Returns steps per second by the number of ps, until more are no faster."""
    rates: dict[int, float] = {}
    for count in _COUNTS:
        found = of(count)
        if found.ps < count:
            break  # there is nothing for the others
        rates[count] = found.steps_per_s
        if len(rates) > _IDLE_TRIES:
            *before, _, _, _ = rates.values()
            if max(rates.values()) < _FASTER * max(before):
                break
    return rates


def _enough(rates: Mapping[int, float]) -> int:
    """Returns the fewest ps that are nearly as fast as any.

    Example:
      >>> _enough({1: 50.0, 2: 99.0, 3: 100.0})
      2
    """
    least = max(rates.values()) / _NEARLY
    return min(count for count, rate in rates.items() if rate >= least)


def _why(ps: int, rates: Mapping[int, float]) -> str:
    """Returns why so many were taken: those with half, and the fastest, beside it."""
    fastest = max(rates, key=rates.__getitem__)
    half = max((count for count in rates if count <= ps / 2), default=ps)
    beside = ", ".join(
        f"{rates[count]:.4g} with {count}" for count in sorted({half, ps, fastest})
    )
    return f"{ps} ps are the fewest within 5 % of the fastest tried; steps/s: {beside}"


def _of_shares(step: StepTraffic, ps: int, having: int, *, sharded: bool) -> list[str]:
    """Returns what a reader has to know of the variables of so many ps."""
    count, notes = len(step.on_ps), list[str]()
    partitioner = f"partitioner=jg.min_max_variable_partitioner({ps})"
    if having < ps:
        variables = "variable" if count == 1 else "variables"
        cut = (
            "" if sharded else f", or cut large ones: --sharded, Trainer({partitioner})"
        )
        notes.append(
            f"{ps - having} of {ps} ps have no variable and do nothing: the plan has "
            f"{count} {variables}; take {having} ps{cut}"
        )
    if sharded:
        notes.append(f"large variables are cut into shards: Trainer({partitioner})")
    return notes


def computing_s(step: StepTraffic, costs: Costs) -> float:
    """Returns how long a worker computes: as its operations take where calibrated."""
    return costs.speed.seconds(step.work.get(step.driver, Work()))


def dense_step(nbytes: int, variables: int = 64) -> StepTraffic:
    """Returns a step that reads and writes so many bytes, in variables of one size.

    Example:
      >>> dense_step(nbytes=640).read
      640
    """
    ps, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
    each = nbytes // variables
    held = tuple(Held(f"v{n}", ps, each) for n in range(variables))
    total = each * variables
    sent = Message(ps, worker, total), Message(worker, ps, total)
    return StepTraffic("dense", worker, held, sent, {})


def _check(
    workers: int,
    ps: int | None,
    mode: str,
    steps: int,
    backup_workers: int,
    max_staleness: int | None,
    cores: float | None,
) -> None:
    for name, number in (("workers", workers), ("ps", ps), ("steps", steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; give 1 or more")
    if mode not in {"sync", "async"}:
        raise ConfigError(f"mode is {mode!r}; give 'sync' or 'async'")
    if not 0 <= backup_workers < workers:
        raise ConfigError(
            f"backup_workers is {backup_workers} of {workers} workers; at least one "
            "worker is no backup"
        )
    if mode == "async" and backup_workers:
        raise ConfigError(
            "an asynchronous step waits for nobody, so backup_workers means nothing; "
            "use mode='sync'"
        )
    if max_staleness is not None and (mode == "sync" or max_staleness < 0):
        raise ConfigError(
            f"max_staleness is {max_staleness}, and mode '{mode}'; it is 0 or more, of "
            "mode 'async'"
        )
    if cores is not None and not (math.isfinite(cores) and cores > 0):
        raise ConfigError(f"cores is {cores}; give a number above 0")


def _synchronous(
    cluster: SimulatedCluster,
    steps: int,
    wanted: int,
    readers: int,
    notes: Sequence[str],
) -> Simulated:
    run = SynchronousRun(cluster, steps, wanted, readers)
    run.run()
    updates = _lengths(run.ended)
    return Simulated(
        mode="sync",
        workers=len(cluster.workers),
        ps=cluster.ps,
        seconds=run.seconds,
        step_s=_percentiles(updates),
        steps_per_s=wanted / statistics.fmean(updates),
        busy=cluster.busy(run.seconds),
        machine_s=_each(run.cpu_s, steps),
        dropped=run.dropped,
        ledger={
            **cluster.ledger(),
            "computed": sum(w.done for w in cluster.workers),
            "counted": sum(run.contributions),
            "frames of contributions": run.frames,
        },
        trace=tuple(run.ended),
        costs=cluster.costs,
        notes=tuple(notes),
    )


def _asynchronous(
    cluster: SimulatedCluster,
    steps: int,
    max_staleness: int | None,
    notes: Sequence[str],
) -> Simulated:
    total = steps * len(cluster.workers)
    run = AsynchronousRun(cluster, total, max_staleness)
    run.run()
    # While all of them run, and after the first step of each.
    busy = [w.ended for w in cluster.workers if w.ended]
    start, end = max(e[0] for e in busy), min(e[-1] for e in busy)
    count = sum(start < t <= end for e in busy for t in e)
    lengths = [s for e in busy for s in _lengths(e)]
    return Simulated(
        mode="async",
        workers=len(cluster.workers),
        ps=cluster.ps,
        seconds=cluster.sim.now,
        step_s=_percentiles(lengths),
        steps_per_s=count / (end - start) if count else total / cluster.sim.now,
        busy=cluster.busy(cluster.sim.now),
        machine_s=_each(run.cpu_s, total),
        dropped=0,
        ledger={
            **cluster.ledger(),
            "computed": sum(w.done for w in cluster.workers),
            "counted": run.done,
            "again": run.again,
        },
        trace=tuple(t for e in busy for t in e),
        costs=cluster.costs,
        notes=tuple(notes),
    )


def _lengths(ends: Sequence[float]) -> list[float]:
    """Returns how long each took, without the first, whose beginning is another."""
    return [b - a for a, b in itertools.pairwise(ends)] or list(ends)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) == 1:
        return dict.fromkeys(("p50", "p90", "p99"), seconds[0])
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def _each(cpu_s: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: seconds / count for name, seconds in cpu_s.items()}
