"""Synchronous training in virtual time, decided by the arbiter and gates that ship."""

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Final, final

from jgraph.coordination.data.slots import Lease, Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData, rounds_for
from jgraph.coordination.sync import aggregation, sync_gate
from jgraph.coordination.sync.aggregation import Arbiter, Contributed, DataAsked
from jgraph.coordination.sync.read_line import ReadLine
from jgraph.coordination.sync.sync_gate import SyncGate, Tell
from jgraph.errors import RunOverError
from jgraph.testing.scale.cluster import (
    PsGroup,
    SimulatedCluster,
    SimulatedWorker,
)
from jgraph.testing.scale.queues import Act, nothing

_ASK_AGAIN_S: Final = 0.05


@final
class SynchronousRun:
    """A run with ``SyncPS``.

    Args:
      cluster: where.
      updates: how many.
      wanted: contributions of an update.
      readers: how many workers read from a ps at a time; 0: all.

    Attributes:
      ended: when updates were applied everywhere.
      cpu_s: CPU time of the machines themselves, as measured here, by machine.
      contributions: contributions that updates are the means of.
      frames: in which the first ps was told of contributions.
    """

    def __init__(
        self, cluster: SimulatedCluster, updates: int, wanted: int, readers: int = 0
    ) -> None:
        self._cluster, self._costs = cluster, cluster.costs
        self._workers = {w.name: w for w in cluster.workers}
        # So many that nobody's share of them bounds what it holds ahead.
        batches = 2 * (updates + 1) * len(self._workers)
        self._plan = SlotPlan([Part("data", batches)], batch_size=1, seed=0)
        rounds = rounds_for(len(self._workers))
        data = SyncData(self._plan, self._workers, rounds=rounds)
        shards = [name for g in cluster.groups for name in g.members]
        tasks = {w.name: w.task for w in cluster.workers}
        self._arbiter = Arbiter(
            shards, tasks, data, wanted=wanted, version=0, steps=updates
        )
        self._gates = {
            group: SyncGate(
                version=0, line=ReadLine(readers, self._workers) if readers else None
            )
            for group in cluster.groups
        }
        self._readers, self._last_s = readers, 0.0
        self._slots: dict[aggregation.Step, int] = {}
        self._applying = self.frames = 0
        self.ended: list[float] = []
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.contributions: list[int] = []

    def run(self) -> None:
        """Runs to the end."""
        for worker in self._cluster.workers:
            self._ask(worker)
        self._cluster.sim.run()

    @property
    def seconds(self) -> float:
        """Of virtual time, without what is looked at later and changes nothing."""
        return self._last_s if self._readers else self._cluster.sim.now

    @property
    def dropped(self) -> int:
        """Contributions that came too late."""
        return self._arbiter.dropped.total()

    # ------------------------------------------------------------ data

    def _ask(self, worker: SimulatedWorker) -> None:
        wanted = worker.wanted(self._cluster.sim.now)
        if not wanted:
            return
        idle = worker.is_idle and not worker.ready
        asked = DataAsked(worker.name, wanted, idle=idle)
        self._at_leader(2, 1, partial(self._deal, worker, asked))

    def _deal(self, worker: SimulatedWorker, asked: DataAsked) -> None:
        self._decide(asked)
        post, each = self._cluster.post, self._costs.frame_s
        post(worker.processor, each, partial(self._dealt, worker, self._answer))

    def _dealt(self, worker: SimulatedWorker, leases: Sequence[Lease] | None) -> None:
        worker.is_asking = False
        if leases is None:
            worker.is_over = True
            return
        worker.is_dry = not leases
        number = self._plan.number
        worker.ready += [number(*batch) for lease in leases for batch in lease.each()]
        if not worker.ready:
            self._cluster.sim.later(_ASK_AGAIN_S, partial(self._ask, worker))
        elif worker.is_idle:
            step = self._begin(worker)
            for group in self._cluster.groups:
                asked = partial(self._gate, group, sync_gate.StepAsked(step))
                self._cluster.post(group.processor, self._costs.frame_s, asked)

    def _begin(self, worker: SimulatedWorker) -> aggregation.Step:
        """Takes a batch for the next step."""
        step = worker.name, worker.step
        worker.step += 1
        self._slots[step] = worker.ready.popleft()
        worker.is_idle = False
        self._ask(worker)
        return step

    # ------------------------------------------------------------ steps

    def _let_in(self, group: PsGroup, step: aggregation.Step) -> None:
        worker = self._workers[step[0]]
        computed = partial(self._computed, worker, step)
        sent = nothing
        if self._readers:
            sent = partial(self._gate, group, sync_gate.ReadSent(step))
        self._cluster.send_values(group, worker, computed, sent)

    def _computed(self, worker: SimulatedWorker, step: aggregation.Step) -> None:
        worker.done += 1
        worker.ended.append(self._cluster.sim.now)
        slot = self._slots.pop(step)
        events: list[sync_gate.Event] = [sync_gate.ContributionCame(step, slot)]
        worker.is_idle = True
        if worker.ready:  # the next step's start travels with this one's values
            events.append(sync_gate.StepAsked(self._begin(worker)))
        else:
            self._ask(worker)
        groups = self._cluster.groups
        came = {group: partial(self._gate, group, *events) for group in groups}
        self._cluster.push(worker, came)

    # ------------------------------------------------------------ gates

    def _gate(self, group: PsGroup, *events: sync_gate.Event) -> None:
        gate = self._gates[group]
        if not isinstance(events[0], sync_gate.TurnDue):
            self._last_s = self._cluster.sim.now
        began = time.process_time() if group is self._cluster.leader else 0.0
        said = [i for event in events for i in gate.handle(event)]
        if group is self._cluster.leader:
            self.cpu_s["gate"] += time.process_time() - began
        sets = [one for one in said if isinstance(one, Tell)]
        for instruction in said:
            self._perform(group, instruction)
        for one in sets:
            self._tell(group, one)

    def _perform(self, group: PsGroup, instruction: sync_gate.Instruction) -> None:
        match instruction:
            case sync_gate.LetIn(steps):
                for step in steps:
                    self._let_in(group, step)
            case sync_gate.TellLater(after_s):
                due = partial(self._gate, group, sync_gate.TellDue())
                self._cluster.sim.later(after_s, due)
            case sync_gate.TurnLater(after_s):
                over = partial(self._gate, group, sync_gate.TurnDue())
                self._cluster.sim.later(after_s, over)
            case sync_gate.Refuse(step):
                self._workers[step[0]].is_over = True
            case sync_gate.Choose():
                self._apply(group)
            case _:
                pass

    def _tell(self, group: PsGroup, news: Tell) -> None:
        events = [
            Contributed(member, news.steps, news.version, news.slots)
            for member in group.members
        ]
        is_leader = group is self._cluster.leader
        frames = 0 if is_leader else group.weight
        self.frames += frames
        decision = partial(self._decide, *events)
        # What those of the first ps itself cost there is in the cost of a contribution.
        self._at_leader(frames, 0, decision, ids=frames * len(news.steps))

    def _apply(self, group: PsGroup) -> None:
        costs = self._costs
        seconds = costs.update_s + group.share.stored * costs.update_byte_s
        applied = partial(self._applied, group)
        group.processor.run(seconds, applied)

    def _applied(self, group: PsGroup) -> None:
        self._gate(group, sync_gate.UpdateApplied())
        frames = 0 if group is self._cluster.leader else group.weight
        self._at_leader(frames, 0, self._group_applied)

    # ------------------------------------------------------------ the arbiter

    def _at_leader(self, frames: int, events: int, then: Act, ids: int = 0) -> None:
        costs, leader = self._costs, self._cluster.leader
        seconds = frames * costs.frame_s + ids * costs.step_id_s
        seconds += events * costs.arbiter_event_s
        if frames:
            self._cluster.post(leader.processor, seconds, then)
        else:
            leader.processor.run(seconds, then)

    def _group_applied(self) -> None:
        self._applying -= 1
        if not self._applying:
            self.ended.append(self._cluster.sim.now)
            self._decide(aggregation.Applied())

    def _decide(self, *events: aggregation.Event) -> None:
        began, handle = time.process_time(), self._arbiter.handle
        said = [i for event in events for i in handle(event)]
        kind = "data" if isinstance(events[0], DataAsked) else "arbiter"
        self.cpu_s[kind] += time.process_time() - began
        for instruction in said:
            match instruction:
                case aggregation.DealData():
                    self._answer = instruction.leases
                case aggregation.Decide(_, steps):
                    self.contributions.append(len(steps))
                    self._applying = len(self._cluster.groups)
                    self._tell_all(sync_gate.Decided(steps), len(steps))
                case aggregation.Void(step):
                    self._tell_all(sync_gate.Voided(step), 1)
                case aggregation.End(state, error):
                    over = error or RunOverError(f"the run is {state}")
                    self._tell_all(sync_gate.Closed(over), 0)
                case aggregation.Halt():
                    pass

    def _tell_all(self, event: sync_gate.Event, ids: int) -> None:
        """Tells every gate, as ``Gates`` does: a frame to each ps, the names in it."""
        cluster, costs = self._cluster, self._costs
        others = cluster.ps - 1
        sending = others * costs.frame_s + ids * costs.step_id_s
        cluster.leader.processor.run(sending, lambda: None)
        hearing = costs.frame_s + ids * costs.step_id_s
        for group in cluster.groups[1:]:
            arrival = partial(self._gate, group, event)
            sent = partial(cluster.post, group.processor, hearing, arrival)
            cluster.leader.processor.run(0.0, sent)
        here = partial(self._gate, cluster.leader, event)
        cluster.leader.processor.run(costs.gate_event_s, here)
