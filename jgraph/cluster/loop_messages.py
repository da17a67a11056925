"""Messages of replica loops: requests and reports, as plain data and as protos."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.coordination.data.batch_order import BatchOrder, Leases
from jgraph.coordination.data.dispatch import LEASE_S
from jgraph.coordination.data.shares import Cut
from jgraph.coordination.data.slots import Lease, SlotPlan
from jgraph.coordination.run.recovery import Recovery
from jgraph.coordination.run.supervisor import WAIT_S
from jgraph.coordination.step.finite import FiniteCheck
from jgraph.coordination.sync.rounds import RoundRecord, RoundRule
from jgraph.coordination.sync.secure_rounds import SumRule
from jgraph.errors import JGError, MalformedMessageError, SourceError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Frame
from jgraph.runtime.data.batches import DataFacts, Field
from jgraph.view.units import bytes_text

ARBITER: Final = 1 << 20
"""Stands in place of a replica for the loop that decides in synchronous training."""


JOINS: Final = "-join."
"""In the handle of the program of a worker that joined a run."""


Homes: TypeAlias = tuple[int, Mapping[TaskName, TaskName]]
"""How often parts of owners have moved, and who has the part of each that is away."""


@final
@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the master must know of a run that it looks after.

    Attributes:
      about: what whoever attaches to the run must know.
      saves: what the master saves; None: nothing.
      source: JSON of what workers open; empty: they were given arrays.
      source_info: what they find there; without parts: each has its own.
      copies: what is kept of the ps; None: nothing.
      programs: of workers and ps, and what is run before; see ``Master.KeepProgram``.
      wait_s: how long it waits for tasks that it cannot go on without.
      client: that it ends with; None: it is detached.
      elastic: how many workers it may have; None: those that it begins with.
      owners: workers that hold variables of it.
      ps: where its variables lie, by the number of ps; None: that is fixed.
    """

    about: Mapping[str, Any]
    saves: pb.RunSaves | None = None
    source: str = ""
    source_info: pb.SourceInfo | None = None
    copies: pb.RunCopies | None = None
    programs: Sequence[Frame] = ()
    wait_s: float = WAIT_S
    client: pb.RunClient | None = None
    elastic: pb.RunElastic | None = None
    owners: Sequence[TaskName] = ()
    ps: pb.RunPs | None = None


@final
@dataclass(frozen=True, slots=True)
class Rescaled:
    """The variables of a run have moved to more ps, or to fewer, or could not.

    Attributes:
      before: ps that it had.
      ps: that it has, or was to have.
      nbytes: that were copied.
      took_s: since it was asked.
      paused_s: so long of that no loop ran.
      why: it was given up, and the run has the ps that it had; empty: it was not.

    Example:
      >>> print(Rescaled(1, 2, 3 << 20, 1.9, 0.21))
      1 to 2 ps: 3.0 MiB moved in 1.9 s, training paused for 0.21 s
      >>> print(Rescaled(1, 2, 0, 0.5, 0.0, "it does not answer"))
      1 to 2 ps: given up after 0.5 s, training paused for 0.00 s: it does not answer
    """

    before: int
    ps: int
    nbytes: int
    took_s: float
    paused_s: float
    why: str = ""

    def __str__(self) -> str:
        how = f"{bytes_text(self.nbytes)} moved in"
        if self.why:
            how = "given up after"
        return (
            f"{self.before} to {self.ps} ps: {how} {self.took_s:.1f} s, training "
            f"paused for {self.paused_s:.2f} s{': ' if self.why else ''}{self.why}"
        )


@final
@dataclass(frozen=True, slots=True)
class DealtData:
    """Data that the master deals out to all loops of a run.

    Attributes:
      plan: its slots; every worker has the data under the same name.
      batches: how many to deal, all loops together.
      workers: how many loops there are.
      position: where to begin; see ``Dispatch``.
      lease_s: a worker that holds data and is silent for so long is lost.
    """

    plan: SlotPlan
    batches: int
    workers: int
    position: Mapping[str, Any] | None = None
    lease_s: float = LEASE_S


@final
@dataclass(frozen=True, slots=True)
class SyncRequest:
    """What the ps that decides in synchronous training must know.

    Attributes:
      gate: name of the gates.
      version: updates applied so far.
      wanted: contributions of an update.
      replicas: worker of each replica, by the handle of its program.
      shards: the tasks with gates; the first one decides.
      plan: slots of the data that it deals out to the replicas.
      position: where in the data to begin; see ``Dispatch``.
      halt_every: stand still at the multiples of each of these, in updates, until told
        to go on.
      halt_s: or until so long.
      cut: how batches are cut into pieces; None: a step of a replica is of one batch.
      entropy: shape of the feed of random bits that each update gets; empty: none.
      rule: how many replicas are invited to an update; None: all take part.
      sums: how their contributions are summed; None: the ps see each.
      group: what children of the workers' servers sum; None: nothing.
      host_sums: what is summed on each host before it leaves that; None: nothing.
      readers: how many steps read from a ps at a time; 0: all that may.
    """

    gate: str
    version: int
    wanted: int
    replicas: Mapping[str, TaskName]
    shards: Sequence[TaskName]
    plan: SlotPlan
    position: Mapping[str, Any] | None = None
    halt_every: Sequence[int] = ()
    halt_s: float = 0.0
    cut: Cut | None = None
    entropy: Sequence[int] = ()
    rule: RoundRule | None = None
    sums: SumRule | None = None
    group: pb.CollectiveGroup | None = None
    host_sums: pb.HostSums | None = None
    readers: int = 0


@final
@dataclass(frozen=True, slots=True)
class LoopRequest:
    """Run ``steps`` steps of a program on the worker that drives it.

    Attributes:
      task: the worker; the driver of the program.
      handle: the registered program.
      data: name of a data set put on that worker; its fields are feeds.
      data_feeds: where its fields have other names: the feeds, in the order of those.
      steps: how many steps; at most, where data is dealt.
      batch_size: examples per step.
      seed: decides the order of the examples.
      replica: number of this replica.
      first_step: number of the first step.
      step_feed: int32 feed that gets the number of the step; empty: none.
      replica_feed: int32 feed that gets the number of the replica; empty: none.
      batch_feed: int32 feed that gets the number of the batch; empty: none.
      step_timeout_s: limit for one step.
      report_every_s: least time between reports.
      sync: set: decide and apply updates of synchronous training; ``handle`` applies.
      compute_wait_s: for benchmarks: emulated computing in each step, or piece.
      plan: the slots, where the task has data of its own and all of it once, in order,
        is not shuffled by ``seed``.
      finite: says which results of a step are finite: one that is not ends the loop,
        and that fetch is not reported.
      tell_every: say how many batches are done after so many steps; 0: with reports.
      prefetch: steps that are begun while the one before is computed.
      pace_feed: int32 feed that gets how many steps a worker takes alone in a round;
        empty: none.
      pace_s: as many as take so long.
      pace_most: and no more than these.
      pieces: a step is of all batches of one answer of the dealer, of so many at most;
        0: of one batch.
      pieces_feed: int32 feed that gets how many there are.
      sums: what it contributes gets masks, by the feed ``mask``; None: it does not.
    """

    task: TaskName
    handle: str
    data: str
    steps: int
    batch_size: int
    seed: int = 0
    replica: int = 0
    first_step: int = 0
    step_feed: str = ""
    replica_feed: str = ""
    batch_feed: str = ""
    step_timeout_s: float = 60.0
    report_every_s: float = 0.25
    sync: SyncRequest | None = None
    compute_wait_s: float = 0.0
    data_feeds: tuple[str, ...] = ()
    plan: SlotPlan | None = None
    finite: FiniteCheck | None = None
    tell_every: int = 0
    prefetch: int = 0
    pace_feed: str = ""
    pace_s: float = 0.0
    pace_most: int = 0
    pieces: int = 0
    pieces_feed: str = ""
    sums: SumRule | None = None


@final
@dataclass(frozen=True, slots=True)
class LoopReport:
    """What one replica has done since its last report.

    Attributes:
      replica: number of the replica.
      task: its worker.
      state: "running", "done", "stopped", "left": its worker was told to end and has
        handed over, or "lost": its worker is gone; others go on with its data. Of who
        decides in synchronous training also "paused", where it was asked to, "alone":
        no worker is left, and "silent": the master does not reach it, and it is waited
        for. "halted": all loops stand still until ``LoopHandle.go_on``.
      steps: numbers of the steps, int64[n].
      seconds: when each was computed, since the loop began, float64[n].
      fetches: per fetch of the program, its values stacked over the n steps.
      times: seconds by part, summed over the n steps: ``wait`` (for acknowledgements
        of earlier steps), ``input``, ``pull``, ``compute``, ``push``, ``other``.
      dropped: gradients that came too late so far, by worker: contributions that
        did not count, or steps that were refused and computed anew.
      position: of synchronous training: where in the data it is; see ``Dispatch``.
      done: where data is dealt: batches that are done since the last report.
      number: of this report of its loop, from 1.
      loop: of a detached run: the name of the loop.
      handle: of the program of a loop that begins.
      told_s: when that was told, since its loop began; that a loop begins, or is lost,
        since the run began.
      began_s: how much later than its order the loop began, as far as is known: the
        times of its steps are since the order.
      data_done: batches done since the loop began.
      halted: of a loop that stands still: the number of the order, or of updates.
      in_flight: then, steps that may still be applied.
      restored: "restored": what the run lost, and to where it went back; ``number`` is
        that of the time.
      pieces: batches of the steps, where these are of several.
      rounds: of synchronous training to which some are invited: who took part, by task,
        and seconds from the first contribution to the decision.
      rescaled: "rescaled": it has more ps, or fewer, or could not; likewise.
      homes: "moved": who has the parts of owners that are away.
    """

    replica: int
    task: TaskName
    state: str
    steps: np.ndarray[Any, Any]
    seconds: np.ndarray[Any, Any]
    fetches: tuple[np.ndarray[Any, Any], ...]
    times: Mapping[str, float]
    error: JGError | None = None
    dropped: Mapping[TaskName, int] = field(default_factory=dict)
    position: Mapping[str, Any] | None = None
    done: tuple[Lease, ...] = ()
    number: int = 0
    loop: str = ""
    handle: str = ""
    told_s: float = 0.0
    began_s: float = 0.0
    data_done: int = 0
    halted: int = 0
    in_flight: int = 0
    restored: Recovery | None = None
    rescaled: Rescaled | None = None
    homes: Homes | None = None
    pieces: int = 0

    @property
    def batches(self) -> int:
        """How many batches, or pieces of them, the steps were of."""
        return self.pieces or len(self.steps)

    rounds: tuple[tuple[RoundRecord, float], ...] = ()


def report_of(request: LoopRequest, message: Frame) -> LoopReport:
    """Returns a report of a loop as it came."""
    return _report(request.replica, request.task, message)


def report_in(tasks: Mapping[int, TaskName], message: Frame) -> LoopReport:
    """Returns a report of any loop of a run as it came.

    Args:
      tasks: which ran the loop of each replica last.
      message: the report.
    """
    replica = body_of(message).replica
    return _report(replica, tasks.get(replica, TaskName("")), message)


def _report(replica: int, task: TaskName, message: Frame) -> LoopReport:
    body = body_of(message)
    steps, seconds, *fetches = message.tensors
    return LoopReport(
        replica,
        task,
        body.state,
        steps,
        seconds,
        tuple(fetches),
        dict(body.times),
        from_status(body.error) if body.HasField("error") else None,
        dropped={TaskName(task): count for task, count in body.dropped.items()},
        position=json.loads(body.data_position or "null"),
        done=tuple(leases_of(body.done)),
        number=body.restored.number or body.rescaled.number or body.number,
        loop=body.loop,
        handle=body.handle,
        told_s=body.seconds,
        data_done=body.data_done,
        halted=body.halted,
        in_flight=body.in_flight,
        restored=recovery_of(body),
        pieces=body.pieces,
        rounds=tuple(
            (
                RoundRecord(
                    one.number, tuple(one.members), dict(one.dropped), one.void
                ),
                one.wait_s,
            )
            for one in body.rounds
        ),
        rescaled=rescaled_of(body),
        homes=homes_in(body.homes) if body.HasField("homes") else None,
    )


def homes_in(homes: pb.RunHomes) -> Homes:
    """Returns who has the part of each owner that is away, the how many-th time."""
    by = {TaskName(task): TaskName(by) for task, by in homes.homes.items()}
    return homes.number, by


def recovery_of(body: pb.LoopReport) -> Recovery | None:
    """Returns that a run went back, if this is what a report tells."""
    if not body.HasField("restored"):
        return None
    restored = body.restored
    lost = tuple(TaskName(task) for task in restored.lost)
    return Recovery(
        *(lost, restored.step, restored.back_to, restored.seconds, restored.told),
        by=tuple(map(TaskName, restored.by)),
        rest_of=restored.rest_of if restored.HasField("rest_of") else None,
    )


def rescaled_of(body: pb.LoopReport) -> Rescaled | None:
    """Returns that a run has other ps, if this is what a report tells."""
    if not body.HasField("rescaled"):
        return None
    switch = body.rescaled
    return Rescaled(
        *(switch.before, switch.ps, switch.nbytes, switch.seconds, switch.paused_s),
        why=switch.why,
    )


def loop_order(request: LoopRequest) -> pb.RunLoop:
    """Returns a request as it travels, without what its run says of it."""
    return pb.RunLoop(
        handle=request.handle,
        data=request.data,
        steps=request.steps,
        batch_size=request.batch_size,
        seed=request.seed,
        replica=request.replica,
        step_timeout_s=request.step_timeout_s,
        report_every_s=request.report_every_s,
        task=request.task,
        first_step=request.first_step,
        step_feed=request.step_feed,
        replica_feed=request.replica_feed,
        batch_feed=request.batch_feed,
        data_plan="" if request.plan is None else plain(request.plan),
        compute_wait_s=request.compute_wait_s,
        sync=_sync_order(request.sync),
        data_feeds=request.data_feeds,
        finite_leaves=() if request.finite is None else request.finite.leaves,
        finite_fetch=0 if request.finite is None else request.finite.fetch,
        tell_every=request.tell_every,
        prefetch=request.prefetch,
        pace_feed=request.pace_feed,
        pace_s=request.pace_s,
        pace_most=request.pace_most,
        pieces=request.pieces,
        pieces_feed=request.pieces_feed,
        secure=_secure_order(request.sums),
    )


def order_in_run(
    request: LoopRequest,
    loop: str,
    *,
    run: str,
    plan: str,
    arbiter: LoopRequest | None,
) -> pb.RunLoop:
    """Returns a request as it travels.

    Args:
      request: of a loop.
      loop: its name.
      run: which it is part of; its data is dealt out under this name.
      plan: JSON of the slots of that.
      arbiter: decides, and deals the data out; None: training is asynchronous.
    """
    order = loop_order(request)
    order.loop, order.run, order.term = loop, run, 1
    order.data_run = run
    if arbiter is not None:
        order.data_run, order.dealer = f"{run}-{arbiter.replica}", arbiter.task
    order.data_plan = order.data_plan or plan
    return order


def finite_check_of(order: pb.RunLoop) -> FiniteCheck | None:
    """Returns what an order says of results that are not finite; None: nothing."""
    leaves = tuple(order.finite_leaves)
    return FiniteCheck(order.finite_fetch, leaves) if leaves else None


def plain(plan: SlotPlan) -> str:
    """Returns a plan as it travels."""
    return json.dumps(plan.to_dict())


def _sync_order(request: SyncRequest | None) -> pb.SyncOrder | None:
    if request is None:
        return None
    rule = request.rule
    return pb.SyncOrder(
        gate=request.gate,
        version=request.version,
        wanted=request.wanted,
        handles=list(request.replicas),
        tasks=list(request.replicas.values()),
        shards=request.shards,
        data_position=json.dumps(request.position),
        halt_every=request.halt_every,
        halt_s=request.halt_s,
        cut=None if request.cut is None else _cut_order(request.cut),
        entropy=request.entropy,
        rounds=rule
        and pb.RoundRule(fraction=rule.fraction, least=rule.least, seed=rule.seed),
        secure=_secure_order(request.sums),
        group=request.group,
        host_sums=request.host_sums,
        readers=request.readers,
    )


def _secure_order(rule: SumRule | None) -> pb.SecureOrder | None:
    if rule is None:
        return None
    return pb.SecureOrder(
        threshold=rule.threshold, neighbours=rule.neighbours, words=rule.words
    )


def _cut_order(cut: Cut) -> pb.BatchCut:
    return pb.BatchCut(
        each=cut.each, total=cut.total, most=cut.most, measured=cut.measured
    )


def cut_of(order: pb.SyncOrder) -> Cut | None:
    """Returns how an order says that batches are cut; None: they are not."""
    if not order.HasField("cut"):
        return None
    cut = order.cut
    return Cut(max(1, cut.each), cut.total, max(1, cut.most), cut.measured)


def rule_of(order: pb.SyncOrder) -> RoundRule | None:
    """Returns how many replicas are invited to an update; None: all take part."""
    if not order.HasField("rounds"):
        return None
    rule = order.rounds
    return RoundRule(rule.fraction, rule.least, rule.seed)


def sums_of(order: pb.SyncOrder | pb.RunLoop) -> SumRule | None:
    """Returns how contributions are summed; None: the ps see each."""
    if not order.HasField("secure"):
        return None
    secure = order.secure
    return SumRule(secure.threshold, secure.neighbours, secure.words)


def source_info(reader: DataFacts) -> pb.SourceInfo:
    """Returns the answer of a task that has opened a source."""
    return pb.SourceInfo(
        fields=[
            pb.SourceField(
                name=name,
                type=pb.TensorType(dtype=field.dtype.name, shape=field.shape),
            )
            for name, field in sorted(reader.fields.items())
        ],
        parts=[part.name for part in reader.parts],
        examples=[part.examples for part in reader.parts],
        shuffle=reader.shuffle,
    )


def source_text(info: pb.SourceInfo) -> str:
    """Returns what a source has, in words.

    Example:
      >>> field = pb.SourceField(name="x", type=pb.TensorType(dtype="int32", shape=[3]))
      >>> source_text(pb.SourceInfo(fields=[field], parts=["a"], examples=[7]))
      '7 examples of x int32[3]'
    """
    fields = (
        f"{one.name} {Field(np.dtype(one.type.dtype), tuple(one.type.shape))}"
        for one in info.fields
    )
    count = f"{sum(info.examples)} examples of " if info.parts else ""
    return count + ", ".join(fields)


def check_source(task: TaskName, here: pb.SourceInfo, wanted: pb.SourceInfo) -> None:
    """Refuses a task whose source is not that of its run.

    Args:
      task: that opened it.
      here: what it found.
      wanted: what the run has; without parts: each task has data of its own.

    Raises:
      SourceError: they differ.
    """
    own = not wanted.parts
    if here == wanted or (own and list(here.fields) == list(wanted.fields)):
        return
    if own:
        here = pb.SourceInfo(fields=here.fields)
    found, known = source_text(here), source_text(wanted)
    if found == known:
        found, known = f"{found} in {here.parts}", f"{known} in {wanted.parts}"
    raise SourceError(
        f"the data source of {task} is not that of the run: {found} there, {known} in "
        "the run; make the files alike",
        task=task,
    )


def deal_of(leases: Sequence[Lease] | None, number: int = 0) -> pb.DataDeal:
    """Returns an answer: leases, or None when all is over.

    Args:
      leases: what is dealt.
      number: of the secure sum that it is for; 0: it is for none.
    """
    if leases is None:
        return pb.DataDeal(over=True)
    places = leases.places if isinstance(leases, Leases) else ()
    if isinstance(places, range) and len(places) > 1 < places.step:
        first, apart = places.start, places.step
        column = pb.DataColumn(first=first, apart=apart, batches=len(places))
        return pb.DataDeal(column=column, sum=number)
    return pb.DataDeal(leases=rows_of(leases), sum=number if leases else 0)


def dealt_of(deal: pb.DataDeal, order: BatchOrder) -> Sequence[Lease]:
    """Returns what an answer deals of the batches of an order.

    Raises:
      MalformedMessageError: it is more than there is.
    """
    if not deal.HasField("column"):
        return leases_of(deal.leases)
    column, batches = deal.column, order.plan.batches_per_epoch
    if not (0 < column.batches <= batches and column.apart):
        raise MalformedMessageError(
            f"{column.batches} batches, {column.apart} apart, were dealt of data with "
            f"{batches}"
        )
    end = column.first + column.batches * column.apart
    return Leases(order, range(column.first, end, column.apart))


def rows_of(leases: Iterable[Lease]) -> list[pb.DataLease]:
    """Returns leases as they travel."""
    return [
        pb.DataLease(
            epoch=lease.epoch, slot=lease.slot, first=lease.first, batches=lease.batches
        )
        for lease in leases
    ]


def leases_of(rows: Iterable[pb.DataLease]) -> list[Lease]:
    """Returns leases that came."""
    return [Lease(d.epoch, d.slot, d.first, d.batches) for d in rows]


def first_handle(handle: str) -> str:
    """Returns which handle a program had first, before other ones took its place.

    Example:
      >>> first_handle("p7~2.1"), first_handle("p7")
      ('p7', 'p7')
    """
    return handle.partition("~")[0]
