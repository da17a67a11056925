"""Asynchronous training in virtual time, decided by the dealer that ships."""

import time
from collections import defaultdict
from functools import partial
from typing import final

from jgraph.coordination.data.dispatch import Asked, Deal, Dispatch, Instruction, Over
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.sync.admission import Admission, Event, StepAsked, StepEnded
from jgraph.coordination.sync.aggregation import Step
from jgraph.testing.scale.cluster import (
    PsGroup,
    SimulatedCluster,
    SimulatedWorker,
)


@final
class AsynchronousRun:
    """A run with ``AsyncPS``.

    Args:
      cluster: where.
      steps: of all workers together.
      max_staleness: bound of the staleness; None: there is none.

    Attributes:
      cpu_s: CPU time of the machines themselves, as measured here, by machine.
    """

    def __init__(
        self, cluster: SimulatedCluster, steps: int, max_staleness: int | None
    ) -> None:
        self._cluster, self._costs = cluster, cluster.costs
        self._workers = {w.name: w for w in cluster.workers}
        self._plan = SlotPlan([Part("data", steps)], batch_size=1, seed=0)
        self._dispatch = Dispatch(self._plan, budget=steps, workers=len(self._workers))
        self._admission = None
        if max_staleness is not None:
            shards = [name for group in cluster.groups for name in group.members]
            self._admission = Admission(shards, bound=max_staleness)
        self.cpu_s: defaultdict[str, float] = defaultdict(float)

    @property
    def done(self) -> int:
        """Batches that are done."""
        return self._dispatch.done

    @property
    def again(self) -> int:
        """Batches that were dealt again."""
        return self._dispatch.again

    def run(self) -> None:
        """Runs to the end."""
        for worker in self._cluster.workers:
            self._ask(worker)
        self._cluster.sim.run()

    # ------------------------------------------------------------ data

    def _ask(self, worker: SimulatedWorker) -> None:
        wanted = worker.wanted(self._cluster.sim.now)
        if not wanted:
            return
        idle = worker.is_idle and not worker.ready
        asked = Asked(worker.name, worker.done, wanted, idle=idle)
        seconds = 2 * self._costs.frame_s + self._costs.dispatch_event_s
        self._cluster.post(self._cluster.master, seconds, partial(self._deal, asked))

    def _deal(self, asked: Asked) -> None:
        began = time.process_time()
        said = self._dispatch.handle(asked, self._cluster.sim.now)
        self.cpu_s["dispatch"] += time.process_time() - began
        post = self._cluster.post
        for instruction in said:
            if isinstance(instruction, Deal | Over):
                worker = self._workers[instruction.worker]
                arrival = partial(self._dealt, worker, instruction)
                post(worker.processor, self._costs.frame_s, arrival)

    def _dealt(self, worker: SimulatedWorker, said: Instruction) -> None:
        worker.is_asking = False
        if isinstance(said, Over):
            worker.is_over = True
            return
        assert isinstance(said, Deal)
        worker.is_dry = not said.leases
        number = self._plan.number
        worker.ready += [number(*b) for lease in said.leases for b in lease.each()]
        if not worker.is_idle:
            return
        if worker.ready:
            self._start(worker)
        else:
            self._ask(worker)

    def _begin(self, worker: SimulatedWorker) -> Step:
        step = worker.name, worker.step
        worker.step += 1
        worker.ready.popleft()
        worker.is_idle = False
        return step

    # ------------------------------------------------------------ steps

    def _start(self, worker: SimulatedWorker) -> None:
        """Begins a step that follows none."""
        step = self._begin(worker)
        for group in self._cluster.groups:
            asked = partial(self._asks, group, step)
            self._cluster.post(group.processor, self._costs.frame_s, asked)
        self._ask(worker)

    def _asks(self, group: PsGroup, step: Step) -> None:
        """A step wants to read: at once, or when the first ps lets it in."""
        if self._admission is None:
            self._let_in(group, step)
        elif group is self._cluster.leader:
            self._admit(StepAsked(step))

    def _admit(self, *events: Event) -> None:
        assert self._admission is not None
        began = time.process_time()
        admitted = [i.step for e in events for i in self._admission.handle(e)]
        self.cpu_s["admission"] += time.process_time() - began
        cluster, costs = self._cluster, self._costs
        for step in admitted:
            sending = (cluster.ps - 1) * costs.frame_s
            here = partial(self._let_in, cluster.leader, step)
            cluster.leader.processor.run(sending, here)
            for group in cluster.groups[1:]:
                there = partial(self._let_in, group, step)
                cluster.post(group.processor, costs.frame_s, there)

    def _let_in(self, group: PsGroup, step: Step) -> None:
        worker = self._workers[step[0]]
        computed = partial(self._computed, worker, step)
        self._cluster.send_values(group, worker, computed)

    def _computed(self, worker: SimulatedWorker, step: Step) -> None:
        worker.done += 1
        worker.ended.append(self._cluster.sim.now)
        worker.is_idle = True
        # The next step's start travels with this one's values.
        following = self._begin(worker) if worker.ready else None
        groups = self._cluster.groups
        came = {group: partial(self._came, group, step, following) for group in groups}
        self._cluster.push(worker, came)
        self._ask(worker)

    def _came(self, group: PsGroup, step: Step, following: Step | None) -> None:
        if self._admission is not None:
            ended = [StepEnded(member, step) for member in group.members]
            cluster = self._cluster
            frames = 0 if group is cluster.leader else group.weight
            seconds = frames * self._costs.frame_s
            admit = partial(self._admit, *ended)
            cluster.post(cluster.leader.processor, seconds, admit)
        if following is not None:
            self._asks(group, following)
