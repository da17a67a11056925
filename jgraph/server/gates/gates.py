"""All gates of one task, and their messages to the gates of other tasks."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from jgraph.clock import Clock, SystemClock
from jgraph.coordination.data.sync_data import MANY
from jgraph.coordination.sync.admission import Admission, LetIn, StepAsked, StepEnded
from jgraph.coordination.sync.aggregation import Contributed
from jgraph.coordination.sync.read_line import ReadLine
from jgraph.coordination.sync.roster import Roster
from jgraph.coordination.sync.sync_gate import Tell
from jgraph.errors import JGError, MalformedMessageError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.status import from_status, to_status
from jgraph.rpc.transport import Tensor, Transport
from jgraph.runtime.gate import Gate
from jgraph.runtime.rendezvous import StepKey
from jgraph.server.gates.group_host import GroupHost
from jgraph.server.gates.stale_gate import StaleGate
from jgraph.server.gates.step_columns import (
    check_lengths,
    columns_of,
    slots_in,
    slots_of,
    steps_of,
)
from jgraph.server.gates.sync_gate import SyncGateShell
from jgraph.server.gates.timers import AGAIN_S, CallLater, Timer
from jgraph.server.gates.waits import Waits

if TYPE_CHECKING:
    from jgraph.server.gates.group_sums import GroupSums
    from jgraph.server.gates.host_sums import HostSums, Submit

OnContributed: TypeAlias = Callable[[Contributed], None]
_TRIES: Final = 20
"""So often a gate is told again that it is closed."""
_OLDEST: Final = 64
"""Updates that are older are told as if of this age: a status has an end."""


class Decides(NamedTuple):
    """Who decides: what it does with contributions, and when a ps lost its messages."""

    take: OnContributed
    lost: Callable[[TaskName], None]


@final
class Gates:
    """Opens the gates of a task, and carries their messages.

    Args:
      task: the task's name.
      transport: to the other tasks.
      opened: where the task's runtime looks gates up.
      call_later: waits; by default the event loop does.
      clock: tells how long steps wait at the gates.
      groups: of the task; None: it is in none.
      submit: runs work in a thread; None: here, at once.
      many: of so many replicas a synchronous gate takes what comes in a turn at once.
    """

    def __init__(
        self,
        task: TaskName,
        transport: Transport,
        opened: dict[str, Gate],
        call_later: CallLater | None = None,
        clock: Clock | None = None,
        groups: GroupHost | None = None,
        submit: "Submit | None" = None,
        many: int = MANY,
    ) -> None:
        self._groups = groups
        self._many = many
        self._submit = submit or (lambda work, done, cost: done(work()))
        self._clock = clock or SystemClock()
        self._task = task
        self._transport = transport
        self._opened = opened
        self._call_later = call_later or _by_the_event_loop
        self._admissions: dict[str, Admission] = {}
        self._bounds: dict[str, int] = {}
        self._shards: dict[str, list[TaskName]] = {}
        self._openings: dict[str, str] = {}
        self._rosters: dict[str, Roster] = {}
        self._driver_of: dict[str, TaskName] = {}
        self._arbiters: dict[str, Decides] = {}
        self._unheard: defaultdict[str, list[Contributed]] = defaultdict(list)
        self._closings: dict[str, tuple[JGError, int]] = {}

    # ------------------------------------------------------------ calls

    def open(self, order: pb.OpenGate) -> None:
        """Opens a gate, in place of an earlier one, if this task is one of its.

        Raises:
          MalformedMessageError: it has no name.
          JGError: it is of a group that there must not be; see ``GroupHost.check``.
        """
        shards = [TaskName(shard) for shard in order.shards]
        if self._task not in shards:
            return
        name = order.gate
        if not name:
            raise MalformedMessageError("a gate without a name would be that of all")
        sums = self._sums(order)
        self.drop([name])
        self._shards[name] = shards
        self._openings[name] = order.opening
        self._rosters[name] = Roster(order.handles)
        if order.synchronous:
            tell = partial(self._contributed, name)
            self._opened[name] = SyncGateShell(
                *(order.version, tell, self._call_later, Waits(self._clock), sums),
                self._host_sums(order),
                ReadLine(order.readers, order.handles) if order.readers else None,
                self._transport.when_sent if order.readers else None,
                many=len(order.handles) >= self._many,
            )
            if sums is not None:
                sums.begin()
            return
        if not order.HasField("max_staleness"):
            self._opened[name] = StaleGate()
            return
        if self._task == shards[0]:
            bound = order.max_staleness
            self._admissions[name] = Admission(shards, bound=bound)
        self._bounds[name] = order.max_staleness
        self._opened[name] = StaleGate(
            ask=lambda step: self._asked(name, step),
            end=lambda step: self._ended(name, step, self._task),
            waits=Waits(self._clock),
        )

    def _sums(self, order: pb.OpenGate) -> "GroupSums | None":
        """Returns the part of this task in the sums of a gate; None: it has none."""
        members = [part.task for part in order.group.parts]
        if self._groups is None or self._task not in members:
            return None
        # Not with the server: 8 ms of its start, for what few runs need.
        from jgraph.server.gates.group_sums import GroupSums

        name = order.gate

        def post(dst: TaskName, news: pb.GroupNews, tensors: Sequence[Tensor]) -> None:
            self._post(dst, pb.GateEvent(gate=name, group=news), tensors)

        def give() -> None:
            gate = self._opened.get(name)
            if isinstance(gate, SyncGateShell):
                gate.summed()

        return GroupSums(
            *(self._groups, order.group, name, order.version),
            *(post, give, self._call_later),
        )

    def _host_sums(self, order: pb.OpenGate) -> "HostSums | None":
        """Returns the part of this task in the sums of hosts; None: there are none."""
        if not order.HasField("host_sums"):
            return None
        from jgraph.server.gates.host_sums import HostSums

        name = order.gate

        def post(dst: TaskName, news: pb.HostSum, tensors: Sequence[Tensor]) -> None:
            self._post(dst, pb.GateEvent(gate=name, host_sum=news), tensors)

        return HostSums(
            *(order.host_sums, self._task, name, order.version, self._rosters[name]),
            *(post, self._submit, self._call_later),
        )

    def drop_all(self) -> None:
        """Forgets all gates: the task ends."""
        self.drop(list(self._opened))

    def drop(self, names: Iterable[str]) -> None:
        """Forgets gates."""
        for name in names:
            gate = self._opened.pop(name, None)
            if isinstance(gate, SyncGateShell):
                gate.drop()
            self._admissions.pop(name, None)
            self._bounds.pop(name, None)
            self._shards.pop(name, None)
            self._openings.pop(name, None)
            self._rosters.pop(name, None)
            self._unheard.pop(name, None)
            self._closings.pop(name, None)
        if not self._opened:
            self._driver_of.clear()

    def staleness(self, name: str) -> list[pb.StalenessRow]:
        """Returns what a gate of this task has counted."""
        gate = self._opened.get(name)
        if not isinstance(gate, StaleGate):
            return []
        return [
            pb.StalenessRow(
                task=self._task, handle=handle, staleness=age, updates=updates
            )
            for handle, ages in gate.updates.items()
            for age, updates in sorted(ages.items())
        ]

    def statuses(self) -> list[pb.GateStatus]:
        """Returns how each gate of this task stands."""
        return [
            pb.GateStatus(
                gate=name,
                max_staleness=self._bounds.get(name),
                waiting=gate.waits.waiting,
                oldest_s=gate.waits.oldest_s,
                waits=gate.waits.over,
                wait_s=gate.waits.seconds,
                senders=self._senders(gate) if isinstance(gate, StaleGate) else (),
            )
            for name, gate in sorted(self._opened.items())
            if isinstance(gate, StaleGate | SyncGateShell)
        ]

    def _senders(self, gate: StaleGate) -> list[pb.SenderStaleness]:
        rows: dict[str, pb.SenderStaleness] = {}
        for handle, ages in gate.updates.items():
            task = self._driver_of.get(handle, handle)
            row = rows.setdefault(task, pb.SenderStaleness(task=task))
            for age, updates in ages.items():
                row.updates[min(age, _OLDEST)] += updates
        return [rows[task] for task in sorted(rows)]

    # ------------------------------------------------------------ frames and peers

    def step_started(self, driver: TaskName, handle: str) -> None:
        """Learns which task drives the steps of a program, while gates are open."""
        if self._opened:
            self._driver_of[handle] = driver

    def peer_lost(self, peer: TaskName) -> None:
        """Lets nobody wait for the steps of a task that went away."""
        for handle in [h for h, task in self._driver_of.items() if task == peer]:
            for gate in list(self._opened.values()):
                if isinstance(gate, StaleGate):
                    gate.replica_lost(handle)
        for name in self._closings:
            if peer in self._shards.get(name, ()):
                opening = self._openings.get(name, "")
                again = partial(self._close_again, name, peer, opening)
                self._call_later(AGAIN_S, again)
        for name, gate in list(self._opened.items()):
            if isinstance(gate, SyncGateShell) and gate.host_sums is not None:
                gate.host_sums.link_lost(peer)
            if not isinstance(gate, SyncGateShell) or self._shards[name][0] != peer:
                continue
            if not gate.is_closed:
                # What it was told, or decided, may be lost: nobody waits for it.
                error = TaskLostError(f"{peer}, which decides, was lost", task=peer)
                gate.closed(error)
                # It may have noticed nothing, or before this gate was open.
                self._post(peer, pb.GateEvent(gate=name, closed=to_status(error)))

    def received(
        self, src: TaskName, event: pb.GateEvent, tensors: Sequence[Tensor] = ()
    ) -> None:
        """Takes a message from a gate, or from the arbiter of this one.

        Raises:
          MalformedMessageError: its columns have different lengths.
        """
        # A gate is opened by calls of a master, which may overtake these messages.
        if event.opening != self._openings.get(event.gate):
            return
        self._take(src, event, tensors)

    def _take(
        self, src: TaskName, event: pb.GateEvent, tensors: Sequence[Tensor] = ()
    ) -> None:
        name, gate = event.gate, self._opened.get(event.gate)
        match event.WhichOneof("kind"), gate:
            case "contributed", _:
                body = event.contributed
                steps = steps_of(self._roster(name), body.steps)
                slots = slots_of(body.slots)
                check_lengths(steps, slots)
                self._hear(name, Contributed(src, steps, body.version, slots))
            case "ended", _:
                self._ended(name, _step(event.ended), src)
            case "decided", SyncGateShell():
                gate.decided(tuple(steps_of(self._roster(name), event.decided)))
            case "voided", SyncGateShell():
                gate.voided(_step(event.voided))
            case "closed", SyncGateShell() if src == self._shards[name][0]:
                gate.closed(from_status(event.closed))
            case "closed", SyncGateShell():
                if name in self._arbiters:
                    self._arbiters[name].lost(src)
            case "let_in", StaleGate():
                gate.let_in(_step(event.let_in))
            case "group" | "host_sum", SyncGateShell():
                gate.sums_said(src, event, tensors)

    # ------------------------------------------------------------ synchronous

    def when_settled(self, step: StepKey, callback: Callable[[], None]) -> None:
        """Calls back when what a step contributed was applied or forgotten.

        At once if it contributed nothing that waits for a decision here. Said then, the
        end of a step needs no message of its own: it travels with the next values.
        """
        for gate in self._opened.values():
            if isinstance(gate, SyncGateShell) and gate.keeps(step):
                gate.when_settled(step, callback)
                return
        callback()

    def listen(self, name: str, arbiter: Decides) -> None:
        """Makes ``arbiter`` the arbiter; it also hears what came before."""
        self._arbiters[name] = arbiter
        for contributed in self._unheard.pop(name, ()):
            arbiter.take(contributed)

    def _roster(self, name: str) -> Roster:
        return self._rosters.get(name) or Roster(())

    def decide(self, name: str, steps: Sequence[StepKey]) -> None:
        """Tells every gate what is averaged next."""
        event = pb.GateEvent(gate=name, decided=columns_of(self._roster(name), steps))
        self._tell_all(name, event)

    def void(self, name: str, step: StepKey) -> None:
        """Tells every gate that a contribution cannot be used."""
        self._tell_all(name, pb.GateEvent(gate=name, voided=_step_id(step)))

    def close(self, name: str, error: JGError) -> None:
        """Tells every gate that nothing more is decided."""
        self._arbiters.pop(name, None)
        self._closings[name] = error, _TRIES
        self._tell_all(name, pb.GateEvent(gate=name, closed=to_status(error)))

    def _close_again(self, name: str, peer: TaskName, opening: str) -> None:
        """Tells a gate again that nothing more is decided: it may not have heard."""
        if name not in self._closings or self._openings.get(name) != opening:
            return
        error, tries = self._closings[name]
        if tries:
            self._closings[name] = error, tries - 1
            self._post(peer, pb.GateEvent(gate=name, closed=to_status(error)))

    def _contributed(self, name: str, news: Tell) -> None:
        arbiter_task = self._shards[name][0]
        if arbiter_task == self._task:
            own = Contributed(self._task, news.steps, news.version, news.slots)
            self._hear(name, own)
            return
        body = pb.Contributions(
            steps=columns_of(self._roster(name), news.steps),
            version=news.version,
            slots=slots_in(news.slots),
        )
        self._post(arbiter_task, pb.GateEvent(gate=name, contributed=body))

    def _hear(self, name: str, event: Contributed) -> None:
        if name in self._arbiters:
            self._arbiters[name].take(event)
        else:
            self._unheard[name].append(event)

    # ------------------------------------------------------------ bounded staleness

    def _asked(self, name: str, step: StepKey) -> None:
        if name in self._admissions:
            self._let_in(name, self._admissions[name].handle(StepAsked(step)))

    def _ended(self, name: str, step: StepKey, shard: TaskName) -> None:
        if name in self._admissions:
            self._let_in(name, self._admissions[name].handle(StepEnded(shard, step)))
        elif shard == self._task and name in self._shards:
            event = pb.GateEvent(gate=name, ended=_step_id(step))
            self._post(self._shards[name][0], event)

    def _let_in(self, name: str, instructions: list[LetIn]) -> None:
        for step in (instruction.step for instruction in instructions):
            self._tell_all(name, pb.GateEvent(gate=name, let_in=_step_id(step)))

    # ------------------------------------------------------------ sending

    def _tell_all(self, name: str, event: pb.GateEvent) -> None:
        shards = self._shards.get(name, [])
        for shard in shards:
            if shard != self._task:
                self._post(shard, event)
        if self._task in shards:
            self._take(self._task, event)

    def _post(
        self, dst: TaskName, event: pb.GateEvent, tensors: Sequence[Tensor] = ()
    ) -> None:
        event.opening = self._openings.get(event.gate, "")
        self._transport.post(dst, frame(gate_event=event, tensors=tensors))


def _by_the_event_loop(seconds: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, callback)


def _step(message: pb.StepId) -> StepKey:
    return message.handle, message.step_id


def _step_id(step: StepKey) -> pb.StepId:
    return pb.StepId(handle=step[0], step_id=step[1])
