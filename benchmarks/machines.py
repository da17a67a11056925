"""CPU time of the state machines as the number of workers grows; fails above n log n.

Run: ``python -m benchmarks.machines``. Each machine takes all events of one update, or
one ask of each worker, alone in this process. Prints one JSON line per machine and
number of workers: the least CPU time of the rounds, in microseconds per event, and the
ratio to that with the fewest workers. What the caches of a processor make slower counts
too, so twice the growth of n log n is let through.

A last line has the milliseconds of an update of the first ps of 16, which has all of
them: its arbiter, its gate, and the data that they deal. Contributions come 64 in each
turn of the event loop. What workers make of that data is not counted, nor is reading
frames, or gathering what comes in a turn. Python's collector is off
meanwhile, as what it would look at is the benchmark's own.
"""

import gc
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

from benchmarks import measure
from jgraph.coordination.data.dispatch import Asked, Dispatch
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData, rounds_for
from jgraph.coordination.sync import sync_gate
from jgraph.coordination.sync.aggregation import (
    Applied,
    Arbiter,
    Contributed,
    DataAsked,
    DealData,
    Decide,
    Instruction,
)
from jgraph.coordination.sync.roster import Roster
from jgraph.coordination.sync.sync_gate import SyncGate
from jgraph.graph.ir import TaskName

PS: Final = 16
"""Of the update whose milliseconds are printed."""
TURN: Final = 64
"""So many workers' contributions come in one turn of the event loop of a ps."""
BATCHES: Final = 16
"""Batches that a worker asks ``Dispatch`` for at once."""


@final
class Update:
    """The machines of the first ps, while every update needs all workers.

    Args:
      workers: how many.
      ps: how many tell of contributions.
      updates: how many can be made.
    """

    def __init__(self, workers: int, ps: int, updates: int) -> None:
        self._shards = [TaskName(f"/job:ps/task:{i}") for i in range(ps)]
        tasks = {f"w{i}": TaskName(f"/job:worker/task:{i}") for i in range(workers)}
        self.rounds = rounds_for(workers)
        batches = 2 * (updates + self.rounds) * workers
        self._plan = SlotPlan([Part("data", batches)], batch_size=1, seed=0)
        data = SyncData(self._plan, tasks, rounds=self.rounds)
        options: Any = {"wanted": workers, "version": 0, "steps": updates}
        self._arbiter = Arbiter(self._shards, tasks, data, **options)
        self._gate = SyncGate(version=0)
        self._slots: dict[str, list[int]] = {name: [] for name in tasks}
        self._dealt: dict[str, list[Instruction]] = {}
        self._version = 0
        for name in tasks:
            self._gate.handle(sync_gate.StepAsked((name, 0)))

    def deal(self) -> None:
        """Deals the batches of ``rounds`` updates to all."""
        self._dealt = {
            name: self._arbiter.handle(DataAsked(name, 1, idle=True))
            for name in self._slots
        }

    def read(self) -> None:
        """Reads what was dealt, as each worker does."""
        number = self._plan.number
        for name, (answer,) in self._dealt.items():
            assert isinstance(answer, DealData)
            assert answer.leases
            batches = (b for lease in answer.leases for b in lease.each())
            self._slots[name] += [number(*batch) for batch in batches]

    def contributed(self) -> Sequence[Contributed]:
        """Returns what the ps tell of an update: the others as it comes in frames."""
        version, slots = self._version, [s[self._version] for s in self._slots.values()]
        own = tuple((name, version) for name in self._slots)
        columns = partial(Roster(self._slots).steps, own)
        return [
            Contributed(shard, columns() if place else own, version, array("q", slots))
            for place, shard in enumerate(self._shards)
        ]

    def decide(self, contributed: Sequence[Contributed]) -> None:
        """Decides an update, which is then applied."""
        decided = [i for event in contributed for i in self._arbiter.handle(event)]
        for instruction in decided:
            assert isinstance(instruction, Decide)
            tuple(instruction.steps)  # the gate looks each of them up
        self._arbiter.handle(Applied())
        self._version += 1

    def came(self) -> list[sync_gate.Event]:
        """Returns what a gate is told of an update: the last of it is decided."""
        version, names = self._version, list(self._slots)
        events: list[sync_gate.Event] = []
        for first in range(0, len(names), TURN):
            turn = names[first : first + TURN]
            steps = tuple((name, version) for name in turn)
            slots = tuple(self._slots[name][version] for name in turn)
            asked = tuple((name, version + 1) for name in turn)
            events.append(sync_gate.TurnEnded(steps, slots, asked))
        steps = tuple((name, version) for name in names)
        return [*events, sync_gate.Decided(steps), sync_gate.UpdateApplied()]

    def let_in(self, events: Sequence[sync_gate.Event]) -> None:
        """Lets the gate take them."""
        for event in events:
            self._gate.handle(event)


def update_ms(workers: int, ps: int, updates: int = 8) -> dict[str, float]:
    """Returns the milliseconds of CPU of an update, by machine: the least of some."""
    found: dict[str, float] = {}
    gc.disable()
    try:
        update = Update(workers, ps, updates)
        found["data"] = measured_ms(update.deal) / update.rounds
        update.read()
        for _ in range(updates):
            let_in = partial(update.let_in, update.came())
            decide = partial(update.decide, update.contributed())
            for name, act in (("gate", let_in), ("arbiter", decide)):
                found[name] = min(measured_ms(act), found.get(name, math.inf))
    finally:
        gc.enable()
    return {name: round(ms, 1) for name, ms in found.items()}


def measured_ms(act: Callable[[], None]) -> float:
    """Returns the milliseconds of CPU that something takes."""
    before = time.process_time()
    act()
    return 1e3 * (time.process_time() - before)


def arbiter(workers: int, rounds: int) -> Iterator[int]:
    """Updates of one ps; yields the events of each."""
    update = Update(workers, 1, rounds)
    for version in range(rounds):
        asks = workers if version % update.rounds == 0 else 0
        if asks:
            update.deal()
            update.read()
        update.decide(update.contributed())
        yield asks + workers + 1


def gate(workers: int, rounds: int) -> Iterator[int]:
    """Updates at one ps; workers ask for the next step before this one is decided."""
    machine = SyncGate(version=0)
    for version in range(rounds):
        for name in range(workers):
            step = (str(name), version)
            machine.handle(sync_gate.StepAsked(step))
            machine.handle(sync_gate.ContributionCame(step, name))
            machine.handle(sync_gate.StepEnded(step))
            machine.handle(sync_gate.StepAsked((str(name), -version - 1)))
        machine.handle(sync_gate.Decided(()))
        machine.handle(sync_gate.UpdateApplied())
        yield 4 * workers + 2


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
    update = update_ms(counts[-1], PS)
    total = round(sum(update.values()), 1)
    measure.emit("machines", workers=counts[-1], ps=PS, ms=total, **update)
    if grown:
        sys.exit(f"an event costs more with more workers: {'; '.join(grown)}")


if __name__ == "__main__":
    main()
