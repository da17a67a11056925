"""The search for a placement of blocks: a few starting points, each improved by moves.

Every candidate is priced by running its step on paper. How many are priced is bounded
by a number of jobs, so that the time of planning is bounded however large the graph is;
there is no clock and no chance in it.

Sources: list scheduling by earliest finish time, as in HEFT (Topcuoglu et al., 2002);
cutting a chain of modules into parts, as in PipeDream (Narayanan et al., 2019).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

from jgraph.graph.ir import TaskName
from jgraph.plan.auto.blocks import Blocks
from jgraph.plan.auto.cost_model import CostModel
from jgraph.plan.auto.timing import Job, Jobs, timing_of
from jgraph.view.units import bytes_text

Assignment: TypeAlias = tuple[TaskName, ...]
"""A task for each group of blocks."""

MOST_JOBS: Final = 60_000
"""How many jobs are priced in all."""


@final
@dataclass(slots=True)
class Search:
    """Prices assignments of blocks to tasks, and looks for good ones.

    Args:
      blocks: what is placed.
      tasks: where, without preference.
      driver: where feeds enter and fetches leave.
      model: of tasks and links.
      limits: bytes that tasks may use; those not named may use any.
    """

    blocks: Blocks
    tasks: Sequence[TaskName]
    driver: TaskName
    model: CostModel
    limits: Mapping[TaskName, int]
    priced_jobs: int = 0
    _prices: dict[Assignment, tuple[float, float]] = field(default_factory=dict)
    _seconds: dict[tuple[str, int], float] = field(default_factory=dict)

    def alone(self) -> list[Assignment]:
        """Returns everything on one task, for each task, best first."""
        return sorted(dict.fromkeys(map(self._all_on, self.tasks)), key=self.price)

    def found(self, most: int) -> list[Assignment]:
        """Returns the best assignments to several tasks that may be a gain, or fit."""
        if len(self.tasks) < 2:
            return []
        starts = [*self._chains(), self._earliest(), self.near_fixed()]
        for start in sorted(dict.fromkeys(starts), key=self.price)[:2]:
            self._improve(start)
        self._improve(self.alone()[0])
        best = sorted(self._prices, key=self.price)
        if not self.limits:
            best = best[: best.index(self.alone()[0])]
        return [a for a in best if len(set(a)) > 1][:most]

    def price(self, assignment: Assignment) -> tuple[float, float]:
        """Returns (bytes over the limits, seconds) of a step."""
        if assignment not in self._prices:
            jobs = self._jobs(assignment)
            self.priced_jobs += len(jobs.jobs)
            timing = timing_of(jobs, self.model)
            memory = dict.fromkeys(self.tasks, 0)
            for task, held in timing.peaks.items():
                memory[task] = memory.get(task, 0) + held
            for task, nbytes in zip(assignment, self.blocks.stored, strict=True):
                memory[task] = memory.get(task, 0) + nbytes
            excess = nbytes_over(self.limits, memory)
            self._prices[assignment] = excess, timing.seconds
        return self._prices[assignment]

    def _all_on(self, task: TaskName) -> Assignment:
        return tuple(
            task if task in options else options[0] for options in self.blocks.options
        )

    def _chains(self) -> Iterator[Assignment]:
        """Yields the groups in order, cut into parts of equal time, or equal memory."""
        free = [n for n, o in enumerate(self.blocks.options) if len(o) > 1]
        times = [0.0] * len(self.blocks.options)
        for number, block in enumerate(self.blocks.blocks):
            times[block.group] += self._block_s(number, self.tasks[0])
        for parts in range(2, min(len(self.tasks), len(free)) + 1):
            for weights in (times, [float(n) for n in self.blocks.stored]):
                yield self._chain(free, weights, parts)

    def _chain(
        self, free: Sequence[int], weights: Sequence[float], parts: int
    ) -> Assignment:
        total, passed = sum(weights[n] for n in free) or 1.0, 0.0
        assignment = list(self._all_on(self.driver))
        for group in free:
            middle = passed + weights[group] / 2
            passed += weights[group]
            task = self.tasks[min(parts - 1, int(parts * middle / total))]
            if task in self.blocks.options[group]:
                assignment[group] = task
        return tuple(assignment)

    def _earliest(self) -> Assignment:
        """Returns each group where its first block ends earliest."""
        chosen: dict[int, TaskName] = {}
        free_at = dict.fromkeys(self.model.tasks, 0.0)
        done: dict[int, float] = {}
        taken: dict[int, list[tuple[int | None, int]]] = {}
        for passed in self.blocks.passed:
            for user in passed.users:
                taken.setdefault(user, []).append((passed.source, passed.nbytes))
        for number, block in enumerate(self.blocks.blocks):
            ends = {}
            near = chosen.get(block.group)
            for task in self.blocks.options[block.group] if near is None else (near,):
                ready = free_at[task]
                for source, nbytes in taken.get(number, ()):
                    holder, at = self._place_of(source, chosen, done)
                    if holder is not None:
                        link = self.model.link(holder, task)
                        ready = max(ready, at + link.seconds(nbytes))
                ends[task] = ready + self._block_s(number, task)
            task = min(ends, key=lambda t: ends[t])
            chosen[block.group] = task
            done[number] = free_at[task] = ends[task]
        return tuple(chosen.get(n, o[0]) for n, o in enumerate(self.blocks.options))

    def near_fixed(self) -> Assignment:
        """Returns each group where most bytes are that have no choice.

        What an earlier function of a session has placed is where it is, so that a
        function like it is placed like it.
        """
        options, blocks = self.blocks.options, self.blocks.blocks
        near: list[Counter[TaskName]] = [Counter() for _ in options]

        def pull(group: int, towards: int, nbytes: int) -> None:
            if len(options[towards]) == 1 and len(options[group]) > 1:
                near[group][options[towards][0]] += nbytes

        for passed in self.blocks.passed:
            if passed.source is None:
                continue
            own = passed.source < 0
            source = -1 - passed.source if own else blocks[passed.source].group
            for user in passed.users:
                pull(blocks[user].group, source, passed.nbytes)
                pull(source, blocks[user].group, passed.nbytes)
        assignment = list(self.alone()[0])
        for group, pulls in enumerate(near):
            wanted = max(pulls, key=lambda t: pulls[t], default=None)
            if wanted in options[group] and wanted is not None:
                assignment[group] = wanted
        return tuple(assignment)

    def _place_of(
        self, source: int | None, chosen: dict[int, TaskName], done: dict[int, float]
    ) -> tuple[TaskName | None, float]:
        if source is None:
            return self.driver, 0.0
        if source < 0:
            options = self.blocks.options[-1 - source]
            fixed = options[0] if len(options) == 1 else None
            return chosen.get(-1 - source, fixed), 0.0
        return chosen[self.blocks.blocks[source].group], done[source]

    def _improve(self, start: Assignment) -> None:
        """Moves one group at a time while that helps and may still be priced."""
        best, moved = start, True
        while moved:
            moved = False
            for group, options in enumerate(self.blocks.options):
                for task in options if len(options) > 1 else ():
                    if self.priced_jobs >= MOST_JOBS:
                        return
                    other = (*best[:group], task, *best[group + 1 :])
                    if self.price(other) < self.price(best):
                        best, moved = other, True

    def _block_s(self, number: int, task: TaskName) -> float:
        key = task, number
        if key not in self._seconds:
            work = self.blocks.blocks[number].work
            self._seconds[key] = self.model.tasks[task].seconds(work)
        return self._seconds[key]

    def _jobs(self, assignment: Assignment) -> Jobs:
        blocks = self.blocks.blocks
        count = len(assignment)
        # First a job for what the variables of each group hold, then the blocks.
        takes: list[list[int]] = [[] for _ in range(count + len(blocks))]
        makes: list[list[int]] = [[] for _ in takes]
        feeds, fetches = [], []
        for number, passed in enumerate(self.blocks.passed):
            if passed.source is None:
                feeds.append(number)
            elif passed.source < 0:
                makes[-1 - passed.source].append(number)
            else:
                makes[count + passed.source].append(number)
            if passed.fetched:
                fetches.append(number)
            for user in passed.users:
                takes[count + user].append(number)
        jobs = [
            Job(task, 0.0, (), tuple(makes[n])) for n, task in enumerate(assignment)
        ]
        for number, block in enumerate(blocks):
            task = assignment[block.group]
            at = count + number
            seconds = self._block_s(number, task)
            jobs.append(Job(task, seconds, tuple(takes[at]), tuple(makes[at])))
        sizes = {n: passed.nbytes for n, passed in enumerate(self.blocks.passed)}
        # A stored value that is used where it is takes no memory beside itself.
        for number, passed in enumerate(self.blocks.passed):
            if passed.source is not None and passed.source < 0:
                home = assignment[-1 - passed.source]
                if all(assignment[blocks[u].group] == home for u in passed.users):
                    sizes[number] = 0
        return Jobs(tuple(jobs), sizes, tuple(feeds), tuple(fetches), self.driver)


def over_text(limits: Mapping[TaskName, int], used: Mapping[TaskName, int]) -> str:
    """Returns which tasks need more bytes than they may use, for people.

    Example:
      >>> over_text({"/job:worker/task:0": 10}, {"/job:worker/task:0": 12})
      '/job:worker/task:0 needs 12 B of the 10 B that it may use'
    """
    return ", ".join(
        f"{task} needs {bytes_text(nbytes)} of the {bytes_text(limits[task])} that it "
        "may use"
        for task, nbytes in used.items()
        if nbytes > limits.get(task, nbytes)
    )


def nbytes_over(limits: Mapping[TaskName, int], used: Mapping[TaskName, int]) -> int:
    """Returns the bytes beyond the limits, all tasks together.

    Example:
      >>> nbytes_over({"/job:worker/task:0": 10}, {"/job:worker/task:0": 12})
      2
    """
    return sum(
        max(0, nbytes - limits.get(task, nbytes)) for task, nbytes in used.items()
    )
