"""Cluster in virtual time: workers, and groups of ps that have equal shares of a step.

Ps that send and store as many bytes as each other do the same at the same time, so a
group of them is simulated once: a message to a group stands for one to each. A step
whose plan has pieces is simulated in them: each begins when its bytes are there, and
what it made travels while the next one computes.
"""

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

from jgraph.coordination.data.stock import Stock
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.plan.partition.buckets import LEAST_OF_ONE
from jgraph.plan.placement.spread import assign_largest_first
from jgraph.plan.sharding.partitioner import LEAST_SHARD
from jgraph.plan.traffic import StepTraffic
from jgraph.testing.scale.computing import Computing
from jgraph.testing.scale.costs import Costs
from jgraph.testing.scale.queues import (
    Act,
    Flow,
    MessageCost,
    OwnHost,
    Pipe,
    Processor,
    SharedHost,
    nothing,
)
from jgraph.testing.virtual_time import Simulation

_PART_BYTES: Final = 32_000_000
_MOST_PARTS: Final = 8


@final
@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one ps: read from it by a step, written to it, and stored there."""

    read: int
    written: int
    stored: int


def shares_of(step: StepTraffic, ps: int, *, sharded: bool = False) -> list[Share]:
    """Returns what each of so many ps has of a step; those that have nothing left out.

    As many as in the plan have what the plan says. Else its variables are spread anew,
    the largest first, and each brings its part of the bytes that are read and written.
    If ``sharded`` the large ones are cut first, into as many as there are ps.

    Example:
      >>> from jgraph.plan.traffic import Held, Message
      >>> one, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
      >>> held = Held("a", one, 30), Held("b", one, 10)
      >>> sent = Message(one, worker, 40), Message(worker, one, 80)
      >>> shares_of(StepTraffic("step", worker, held, sent, {}), ps=2)
      [Share(read=30, written=60, stored=30), Share(read=10, written=20, stored=10)]
      >>> len(shares_of(StepTraffic("step", worker, held, sent, {}), 9, sharded=True))
      2
    """
    tasks = sorted({v.task for v in step.on_ps})
    read, written, stored = (Counter[str]() for _ in range(3))
    if len(tasks) == ps and not sharded:
        for variable in step.on_ps:
            stored[variable.task] += variable.nbytes
        for m in step.messages:
            if is_ps(m.src) != is_ps(m.dst):
                (read if is_ps(m.src) else written)[
                    m.src if is_ps(m.src) else m.dst
                ] += m.nbytes
    else:
        tasks = [TaskName(f"/job:ps/task:{n}") for n in range(ps)]
        sizes = {
            f"{n}/{shard}": nbytes
            for n, v in enumerate(step.on_ps)
            for shard, nbytes in enumerate(_shards(v.nbytes, ps if sharded else 1))
        }
        load = dict.fromkeys(tasks, 0)
        assign_largest_first(sizes, tasks, load)
        total = max(1, sum(load.values()))
        for task, nbytes in load.items():
            stored[task] = nbytes
            read[task] = round(step.read * nbytes / total)
            written[task] = round(step.written * nbytes / total)
    return [Share(read[t], written[t], stored[t]) for t in tasks if stored[t]]


def _shards(nbytes: int, most: int) -> list[int]:
    """Returns the bytes of the shards of a variable of many rows."""
    count = max(1, min(most, math.ceil(nbytes / LEAST_SHARD)))
    return [nbytes * (n + 1) // count - nbytes * n // count for n in range(count)]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Shares of a piece: of what a step reads, of its computing, of what it sends."""

    read: float = 1.0
    computing: float = 1.0
    written: float = 1.0


def parts_of(step: StepTraffic, costs: Costs, ps: int) -> tuple[Part, ...]:
    """Returns the shares of the pieces of a worker's step; of a whole one if none.

    Of so many ps that a message would be too small, several pieces share one: bytes
    come with those before them, and leave with those after them.

    Example:
      >>> from jgraph.plan.auto.work import Work
      >>> from jgraph.plan.traffic import Piece
      >>> from jgraph.testing.scale.costs import load_costs
      >>> one, work = TaskName("/job:worker/task:0"), Work(flops=1e9)
      >>> pieces = Piece(2 << 20, work, 3 << 20), Piece(2 << 20, work, 1 << 20)
      >>> step = StepTraffic("step", one, (), (), {}, pieces)
      >>> parts_of(step, load_costs(), ps=1)[0]
      Part(read=0.5, computing=0.5, written=0.75)
      >>> parts_of(step, load_costs(), ps=64)[0]
      Part(read=1.0, computing=0.5, written=0.0)
    """
    seconds = [costs.speed.seconds(piece.work) for piece in step.pieces]
    if not sum(seconds):
        return (Part(),)
    least = LEAST_OF_ONE * ps
    written = _together([p.written for p in step.pieces], least)
    read = _together([p.read for p in reversed(step.pieces)], least)[::-1]
    return tuple(
        Part(r / (sum(read) or 1), s / sum(seconds), w / (sum(written) or 1))
        for r, s, w in zip(read, seconds, written, strict=True)
    )


def _together(nbytes: Sequence[int], least: int) -> list[int]:
    """Moves bytes to later places, until so many are together or none come after."""
    found, waiting = [], 0
    for number, more in enumerate(nbytes):
        waiting += more
        is_last = number + 1 == len(nbytes)
        found.append(
            waiting if is_last or waiting >= least <= sum(nbytes[number + 1 :]) else 0
        )
        waiting -= found[-1]
    return found


@final
@dataclass(eq=False, slots=True)
class PsGroup:
    """Ps with equal shares; ``into`` and ``out`` are the network of each of them."""

    members: tuple[TaskName, ...]
    share: Share
    processor: Processor
    into: Pipe
    out: Pipe

    @property
    def weight(self) -> int:
        """How many there are."""
        return len(self.members)


@final
@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """A worker: how far it is.

    Attributes:
      name: handle of its program.
      task: its name.
      stock: how many batches it holds ahead.
      ready: numbers of the batches that it holds and has not begun.
      step: number of the step under way, or next.
      arrived: how many groups have sent what each piece of its step reads.
      computed: pieces of its step that have run.
      is_computing: a piece runs.
      seconds: of computing of its step.
      queues: messages to each group that wait for those before them, or are sent.
      ended: seconds of the ends of its steps.
    """

    number: int
    name: str
    task: TaskName
    processor: Processor
    chance: random.Random
    stock: Stock
    ready: deque[int] = field(default_factory=deque)
    step: int = 0
    arrived: Counter[int] = field(default_factory=Counter)
    computed: int = 0
    is_computing: bool = False
    seconds: float = 0.0
    queues: dict[PsGroup, deque[Act]] = field(default_factory=dict)
    is_asking: bool = False
    is_idle: bool = True
    is_over: bool = False
    is_dry: bool = False
    done: int = 0
    ended: list[float] = field(default_factory=list)

    def wanted(self, now: float) -> int:
        """Returns how many batches to ask for now, as the data feed of a loop does."""
        held = len(self.ready)
        if self.is_asking or self.is_over or held >= self.stock.least:
            return 0
        if self.is_dry and not (self.is_idle and not held):
            return 0  # asking again at once would give nothing either
        self.is_asking = True
        self.stock.learn(self.step, now)
        return max(1, self.stock.enough - held)


@final
class SimulatedCluster:
    """Workers, groups of ps, and what passes between them.

    Args:
      sim: time.
      costs: as calibrated.
      shares: of each ps; the first one decides.
      workers: how many.
      computing: their times.
      message: what one of a step costs a ps; those of its other pieces cost a frame.
      seed: of chance.
      shared: all tasks are on one host with so many cores; None: each has its own, and
        a network of its own.
      parts: shares of the pieces of a worker's step.

    Attributes:
      groups: the ps; the first is a group of one, the one that decides.
      master: deals out data, where somebody does.
    """

    def __init__(
        self,
        sim: Simulation,
        costs: Costs,
        shares: Sequence[Share],
        workers: int,
        computing: Computing,
        message: MessageCost,
        seed: int,
        shared: float | None = None,
        parts: Sequence[Part] = (Part(),),
    ) -> None:
        self.sim, self.costs, self.computing = sim, costs, computing
        self._parts, self._message = parts, message
        self._further = MessageCost(costs.frame_s, message.byte_s)
        host = None if shared is None else SharedHost(sim, shared, sim.chance)
        make = partial(OwnHost, sim) if host is None else host.task
        rate = costs.link.bytes_per_s if host is None else float("inf")
        self.read = sum(share.read for share in shares)
        self.written = sum(share.written for share in shares)
        first, *others = shares
        alike = [(first, 1), *Counter(others).items()]
        names = iter(TaskName(f"/job:ps/task:{n}") for n in range(len(shares)))
        self.groups = [
            PsGroup(
                tuple(next(names) for _ in range(count)),
                share,
                make(),
                # What a worker's own network leaves for one of the ps that it talks to.
                Pipe(sim, rate, _part(rate, share.written, self.written)),
                Pipe(sim, rate, _part(rate, share.read, self.read)),
            )
            for share, count in alike
        ]
        self.ps = len(shares)
        self.master: Processor = make()
        self.workers = [
            SimulatedWorker(
                n,
                f"w{n}",
                TaskName(f"/job:worker/task:{n}"),
                make(),
                random.Random(f"{seed}/{n}"),  # noqa: S311
                Stock(sim.now),
            )
            for n in range(workers)
        ]

    @property
    def leader(self) -> PsGroup:
        """The ps that decides."""
        return self.groups[0]

    def post(self, to: Processor, seconds: float, then: Act) -> None:
        """Sends a small frame that costs its receiver so much."""
        self.sim.later(self.costs.link.latency_s, partial(to.run, seconds, then))

    # ------------------------------------------------------------ steps of workers

    def send_values(
        self, group: PsGroup, worker: SimulatedWorker, then: Act, sent: Act = nothing
    ) -> None:
        """Lets a ps send what a step reads.

        Args:
          group: which.
          worker: of the step.
          then: called when the step has computed.
          sent: called when all that it reads here has left.
        """
        self._send_piece(0, group, worker, then, sent)

    def _send_piece(
        self,
        number: int,
        group: PsGroup,
        worker: SimulatedWorker,
        then: Act,
        sent: Act,
    ) -> None:
        """Sends what a piece reads, and then what those after it do."""
        if number == len(self._parts):
            sent()
            return
        costs, share = self.costs, self._parts[number].read
        onward = partial(self._send_piece, number + 1, group, worker, then, sent)
        here = partial(self._group_came, number, worker, then)
        if number and not share:
            worker.processor.run(0.0, here)
            onward()
            return
        each = group.weight * costs.worker_byte_s
        hears = MessageCost(group.weight * costs.worker_ps_s / 2, each)
        says = self._further if number else self._message
        flow = self._flow(group, group.out, group.processor, worker.processor)
        flow.begin(share * group.share.read, says, hears, here, onward)

    def _group_came(self, number: int, worker: SimulatedWorker, then: Act) -> None:
        worker.arrived[number] += 1
        if number or worker.arrived[0] < len(self.groups):
            self._compute(worker, then)
            return
        worker.computed, worker.is_computing = 0, True
        worker.seconds = self.computing.draw(worker.chance, worker.number)
        begin = partial(self._begin, worker, then)
        worker.processor.run(self.costs.worker_step_s / 2, begin)

    def _begin(self, worker: SimulatedWorker, then: Act) -> None:
        worker.is_computing = False
        self._compute(worker, then)

    def _compute(self, worker: SimulatedWorker, then: Act) -> None:
        """Begins the next piece of a step if all that it reads is there."""
        number = worker.computed
        if worker.is_computing or worker.arrived[number] < len(self.groups):
            return
        worker.is_computing = True
        seconds = worker.seconds * self._parts[number].computing
        self.sim.later(seconds, partial(self._piece_computed, worker, then))

    def _piece_computed(self, worker: SimulatedWorker, then: Act) -> None:
        number, worker.computed = worker.computed, worker.computed + 1
        if worker.computed == len(self._parts):
            worker.arrived.clear()
            then()
            return
        if self._parts[number].written:
            came = dict.fromkeys(self.groups, nothing)
            self._push_piece(number, worker, self._further, came)
        worker.is_computing = False
        self._compute(worker, then)

    def push(self, worker: SimulatedWorker, came: Mapping[PsGroup, Act]) -> None:
        """Sends what the last piece computed; each ps takes it, and acts."""
        worker.processor.run(self.costs.worker_step_s / 2, lambda: None)
        self._push_piece(len(self._parts) - 1, worker, self._message, came)

    def _push_piece(
        self,
        number: int,
        worker: SimulatedWorker,
        cost: MessageCost,
        came: Mapping[PsGroup, Act],
    ) -> None:
        """Sends what a piece computed, to each ps after what was sent before."""
        costs, share = self.costs, self._parts[number].written
        for group, act in came.items():
            queue = worker.queues.setdefault(group, deque())
            each = group.weight * costs.worker_byte_s
            says = MessageCost(group.weight * costs.worker_ps_s / 2, each)
            flow = self._flow(group, group.into, worker.processor, group.processor)
            nbytes, onward = share * group.share.written, partial(self._sent, queue)
            queue.append(partial(flow.begin, nbytes, says, cost, act, onward))
            if len(queue) == 1:
                queue[0]()

    def _sent(self, queue: deque[Act]) -> None:
        queue.popleft()
        if queue:
            queue[0]()

    def _flow(
        self, group: PsGroup, pipe: Pipe, sender: Processor, receiver: Processor
    ) -> Flow:
        """Returns a message of a step to or from a group, in parts if it is large."""
        nbytes = group.weight * max(group.share.read, group.share.written)
        parts = min(_MOST_PARTS, 1 + nbytes // _PART_BYTES)
        return Flow(pipe, sender, receiver, parts, self.costs.link.latency_s)

    # ------------------------------------------------------------ sums

    def ledger(self) -> dict[str, float]:
        """Returns bytes sent and arrived, over all ps."""
        found: defaultdict[str, float] = defaultdict(float)
        for group in self.groups:
            for name, pipe in (("to ps", group.into), ("from ps", group.out)):
                found[f"sent {name}"] += group.weight * pipe.sent
                found[f"arrived {name}"] += group.weight * pipe.arrived
        return dict(found)

    def busy(self, seconds: float) -> dict[str, float]:
        """Returns the share of the time that the busiest of each kind was at work."""
        others = [g.processor.busy_s for g in self.groups[1:]]
        pipes = [p.busy_s for g in self.groups for p in (g.into, g.out)]
        return {
            "first ps": self.leader.processor.busy_s / seconds,
            "other ps": max(others, default=0.0) / seconds,
            "worker": max(w.processor.busy_s for w in self.workers) / seconds,
            "network of a ps": max(pipes) / seconds,
        }


def _part(rate: float, nbytes: int, total: int) -> float:
    return rate if not nbytes or rate == float("inf") else rate * nbytes / total
