"""CPU time of the state machines as the number of workers grows; fails above n log n.

Run: ``python -m benchmarks.machines``. Each machine takes all events of one update, or
one ask of each worker, alone in this process. Prints one JSON line per machine and
number of workers: the least CPU time of the rounds, in microseconds per event, and the
ratio to that with the fewest workers. What the caches of a processor make slower counts
too, so twice the growth of n log n is let through.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from benchmarks import measure
from jgraph.coordination.data.dispatch import Asked, Dispatch
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.sync import sync_gate
from jgraph.coordination.sync.aggregation import (
    Applied,
    Arbiter,
    Contributed,
    DataAsked,
    DealData,
)
from jgraph.coordination.sync.sync_gate import SyncGate
from jgraph.graph.ir import TaskName

BATCHES: Final = 16
"""Batches that a worker asks ``Dispatch`` for at once."""


def arbiter(workers: int, rounds: int) -> Iterator[int]:
    """Updates of one ps; yields the events of each."""
    ps = TaskName("/job:ps/task:0")
    tasks = {f"w{i}": TaskName(f"/job:worker/task:{i}") for i in range(workers)}
    plan = SlotPlan([Part("data", 2 * rounds * workers)], batch_size=1, seed=0)
    data = SyncData(plan, tasks)
    machine = Arbiter([ps], tasks, data, wanted=workers, version=0, steps=2 * rounds)
    for version in range(rounds):
        slots = []
        for name in tasks:
            (answer,) = machine.handle(DataAsked(name, 1, idle=True))
            assert isinstance(answer, DealData)
            assert answer.leases
            (batch,) = answer.leases[0].each()
            slots.append(plan.number(*batch))
        steps = tuple((name, version) for name in tasks)
        machine.handle(Contributed(ps, steps, version, tuple(slots)))
        machine.handle(Applied())
        yield 2 * workers + 1


def gate(workers: int, rounds: int) -> Iterator[int]:
    """Updates at one ps; workers ask for the next step before this one is decided."""
    machine = SyncGate(version=0)
    for version in range(rounds):
        for name in range(workers):
            step = (str(name), version)
            machine.handle(sync_gate.StepAsked(step))
            machine.handle(sync_gate.ContributionCame(step, name))
            machine.handle(sync_gate.StepAsked((str(name), -version - 1)))
        machine.handle(sync_gate.Decided(()))
        machine.handle(sync_gate.UpdateApplied())
        yield 3 * workers + 2


def dispatch(workers: int, rounds: int) -> Iterator[int]:
    """Asks of all workers, each of which has done what it was dealt before."""
    batches = 2 * BATCHES * rounds * workers
    plan = SlotPlan([Part("data", batches)], batch_size=1, seed=0)
    machine = Dispatch(plan, budget=batches, workers=workers)
    for turn in range(rounds):
        for name in range(workers):
            machine.handle(Asked(str(name), turn * BATCHES, BATCHES), now=0.0)
        yield workers


MACHINES: Final[Mapping[str, Callable[[int, int], Iterator[int]]]] = {
    "arbiter": arbiter,
    "gate": gate,
    "dispatch": dispatch,
}


def cost_us(machine: Callable[[int, int], Iterator[int]], workers: int) -> float:
    """Returns the microseconds of CPU that an event takes, at least."""
    best = math.inf
    before = time.process_time()
    for events in machine(workers, 4):
        now = time.process_time()
        best, before = min(best, (now - before) / events), time.process_time()
    return 1e6 * best


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1_000, 10_000])
    counts = sorted(parser.parse_args(args).workers)
    grown = []
    for name, machine in MACHINES.items():
        costs = {count: cost_us(machine, count) for count in counts}
        fewest = counts[0]
        for count, cost in costs.items():
            ratio = cost / costs[fewest]
            limit = 2 * math.log(count) / math.log(fewest)
            if ratio > limit:
                grown.append(f"{name} with {count} workers: {ratio:.1f} > {limit:.1f}")
            measure.emit(
                "machines",
                machine=name,
                workers=count,
                us_per_event=round(cost, 2),
                ratio=round(ratio, 2),
            )
    if grown:
        sys.exit(f"an event costs more with more workers: {'; '.join(grown)}")


if __name__ == "__main__":
    main()
