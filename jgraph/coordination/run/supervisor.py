"""Run supervisor: workers that join, leave and are lost, rounds, pauses, and the end.

In asynchronous training each worker runs a loop. One that was lost gets another loop as
soon as its worker is prepared; the run is over when the data is, or when all were told
to stop and have.

In synchronous training one more loop decides what is averaged, for the workers that it
began with. When a lost one is prepared, that loop pauses after the update under way;
when all loops of its row have ended the next row begins, with everybody who is there.

A worker that joins is prepared beside the others, and nobody hears of it before it is
ready: one that is not within its time is forgotten. Then it is as one that was lost and
is back. One that has left is looked for no more. With fewer workers than the least that
it may have, the run waits, and nothing is lost.

Before a ps ends, all loops do: the run rests, is saved, and goes on when the ps is
there again. After a ps was lost with what it held all loops end too, and the run goes
back to what is kept of its state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import JGError, TaskLostError

WAIT_S: Final = 300.0
"""So long a run waits for a worker when it has none, or for a ps, unless it is told."""

_TELLS_WITHIN_S: Final = 5.0
"""A loop that ended in order is missing if the one that decides goes on for longer."""


@final
@dataclass(frozen=True, slots=True)
class LoopBegan:
    """The loop of a replica began; nobody asked for it here."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class LoopEnded:
    """The loop of a replica ended in order: "done", "stopped" or "left".

    Left: its worker was told to end.
    """

    replica: int
    state: str


@final
@dataclass(frozen=True, slots=True)
class LoopLost:
    """The worker of a replica is gone, and its loop with it."""

    replica: int
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class LoopFailed:
    """A loop ended with an error, though its worker is there.

    None: it was the loop that decides.
    """

    replica: int | None
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A loop ended as its batch cannot be trained on, of which nothing is applied.

    None: it was the loop that decides.
    """

    replica: int | None
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class StateLost:
    """A loop ended because a ps is gone, and what it held.

    None: it was the loop that decides.
    """

    replica: int | None
    error: JGError


@final
@dataclass(frozen=True, slots=True)
class PsGone:
    """A ps that a worker did not reach is gone, though it answered at that moment."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class RoundBegan:
    """A loop that decides began; nobody asked for it here."""


@final
@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The loop that decides ended: "done", "stopped", "paused" or "alone"."""

    state: str


@final
@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """The worker of a lost replica answers."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class WorkerReady:
    """It has all that its loop needs."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class WorkerNotReady:
    """It could not be given that."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class Knocked:
    """A worker that joined the cluster would take part; it answers."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class MemberLeft:
    """The worker of a replica is no task of the cluster any more."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class StopAsked:
    """The loops were told to stop."""


@final
@dataclass(frozen=True, slots=True)
class RestartAsked:
    """A ps is told to end, and needs all loops to end first."""


@final
@dataclass(frozen=True, slots=True)
class Restarted:
    """All ps are there, and hold what they held, or what the run went back to.

    Again: one of them was told to end since. Done: no step is left.
    """

    again: bool = False
    done: bool = False


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """Something happened after which the run cannot go on."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """All ps hold the state; the client, if there is one, has done what it needs."""


@final
@dataclass(frozen=True, slots=True)
class FinishFailed:
    """A ps is gone, and what it held."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class NobodyComes:
    """Nobody starts the missing workers again."""


@final
@dataclass(frozen=True, slots=True)
class MasterLeaves:
    """This master is told to end: its standby goes on from what is begun."""


@final
@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened."""


Event: TypeAlias = (
    LoopBegan
    | LoopEnded
    | LoopLost
    | LoopFailed
    | BatchFailed
    | StateLost
    | PsGone
    | RoundBegan
    | RoundEnded
    | WorkerAnswered
    | WorkerReady
    | WorkerNotReady
    | Knocked
    | MemberLeft
    | StopAsked
    | RestartAsked
    | Restarted
    | Failed
    | Finished
    | FinishFailed
    | NobodyComes
    | MasterLeaves
    | TimePassed
)


@final
@dataclass(frozen=True, slots=True)
class Prepare:
    """Give a worker all that its loop needs; then say whether it is ready.

    ``joins``: the run has not known it, and goes on without if that takes long.
    """

    replica: int
    joins: bool = False


@final
@dataclass(frozen=True, slots=True)
class Forget:
    """Prepare a worker that would join no more: it is not known here."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class Begin:
    """Begin loops of these replicas; in synchronous training one that decides, too."""

    replicas: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """Ask the loop that decides to pause, or in asynchronous training all to end."""


@final
@dataclass(frozen=True, slots=True)
class EndLoops:
    """Ask all loops to end: what they would do is lost."""


@final
@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Tell the loop that decides that the worker of a replica is gone."""

    replica: int


@final
@dataclass(frozen=True, slots=True)
class Rest:
    """No loop runs: save the run, and let the ps go that is told to end."""


@final
@dataclass(frozen=True, slots=True)
class GoBack:
    """No loop runs: wait for all ps, and give them what is kept of the state."""

    error: JGError


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """All steps are done: see that no ps is lost; let the client use them."""


@final
@dataclass(frozen=True, slots=True)
class Over:
    """The run is over: "done", "stopped" or "failed"."""

    state: str
    error: JGError | None = None


Instruction: TypeAlias = (
    Prepare
    | Forget
    | Begin
    | Pause
    | EndLoops
    | LeaveOut
    | Rest
    | GoBack
    | Finish
    | Over
)


@final
class Supervisor:
    """State machine of the workers of one run.

    Args:
      together: training is synchronous.
      wait_s: how long a run without workers, or with too few, waits for one.
      least: with fewer workers it waits.

    Example:
      >>> supervisor = Supervisor(together=False)
      >>> lost = LoopLost(1, TaskLostError("gone"))
      >>> events = LoopBegan(0), LoopBegan(1), lost
      >>> [supervisor.handle(event, 0.0) for event in events]
      [[], [], []]
      >>> supervisor.handle(WorkerAnswered(1), 5.0)
      [Prepare(replica=1, joins=False)]
      >>> supervisor.handle(WorkerReady(1), 6.0)
      [Begin(replicas=(1,))]
      >>> supervisor.handle(LoopEnded(0, "done"), 9.0)
      []
      >>> supervisor.handle(LoopEnded(1, "done"), 9.0)
      [Finish()]
      >>> supervisor.handle(Finished(), 9.0)
      [Over(state='done', error=None)]
    """

    def __init__(
        self, *, together: bool, wait_s: float = WAIT_S, least: int = 1
    ) -> None:
        self._together = together
        self._finishing = False
        self._wait_s = wait_s
        self._least = least
        # running | idle (it ended in order) | lost | preparing | ready | joining | left
        self._standing: dict[int, str] = {}
        self._leavers: set[int] = set()  # they have left, and are not told of yet
        self._short = False  # loops end, as there are too few
        self._is_beginning = False
        self._row = ""  # running, or how it ended
        self._pausing = False
        self._resting = ""  # asked, or begun
        self._state_lost: JGError | None = None
        self._unwell: JGError | None = None  # of a batch
        self._stopping = False
        self._end = ""
        self._over = self._leaves = False
        self._alone_since: float | None = None
        self._idle_since: dict[int, float] = {}  # the last time
        self._lost: JGError = TaskLostError("no worker ever began")

    @property
    def least(self) -> int:
        """With fewer workers the run waits."""
        return self._least

    @property
    def running(self) -> list[int]:
        """Replicas that take part: whose loops run."""
        return self._of("running")

    @property
    def former(self) -> list[int]:
        """Replicas whose workers have left, and are not looked for."""
        return self._of("left")

    @property
    def takes_workers(self) -> bool:
        """Whether a worker that joins is of use now."""
        ends = self._over or self._leaves or bool(self._end)
        return not (ends or self._resting or self._stopping)

    @property
    def is_alone(self) -> bool:
        """Whether the run waits for a worker, as it has none, or too few."""
        waits = self._alone_since is not None and not self._of("preparing")
        return waits and not (self._over or self._leaves)

    @property
    def missing(self) -> list[int]:
        """Replicas whose workers are to be looked for."""
        if self._over or self._leaves or self._end or self._resting:
            return []
        # Beside a row that goes on, one that ended in order was told to leave.
        absent = ["lost", "idle"] if self._row == "running" else ["lost"]
        return [r for r, state in self._standing.items() if state in absent]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes an event at time ``now`` (seconds); returns what to do."""
        if self._over or (self._leaves and not isinstance(event, Failed)):
            return []
        # Its loops begin one after the other.
        self._is_beginning = isinstance(event, LoopBegan | RoundBegan)
        match event:
            case MasterLeaves():
                self._leaves = True
                return []
            case LoopLost() | LoopEnded() | RoundEnded():
                if isinstance(event, LoopEnded):
                    self._idle_since[event.replica] = now
                said = self._loop_over(event)
            case WorkerAnswered(replica) if self._may_tell_yet(replica, now):
                said = []
            case WorkerAnswered() | WorkerReady() | WorkerNotReady():
                said = self._worker(event)
            case Knocked() | MemberLeft():
                said = self._member(event)
            case LoopFailed() | BatchFailed() | StateLost():
                said = self._loop_failed(event)
            case Failed(error):
                said = self._finish("failed", error)
            case _:
                said = self._note(event)
        return said or list(self._go_on(now))

    def _may_tell_yet(self, replica: int, now: float) -> bool:
        """Whether the loop that decides may be about to tell why another one ended.

        All end one after the other where a round does, and nobody is missing then.
        """
        is_idle = self._standing.get(replica) == "idle"
        return is_idle and now - self._idle_since.get(replica, now) < _TELLS_WITHIN_S

    def _loop_over(self, event: Event) -> list[Instruction]:
        match event:
            case LoopLost(replica, error):
                self._lose(replica)
                self._lost = error
                if self._row == "running":
                    return [LeaveOut(replica)]
            case LoopEnded(replica, "left"):
                self._lose(replica)
                if self._row == "running" and not self._pausing:
                    self._pausing = True  # or the others would wait for it
                    return [Pause()]
            case LoopEnded(replica, state):
                self._ended(replica, state)
            case RoundEnded(state):
                self._row_ended(state)
        return []

    def _loop_failed(
        self, event: LoopFailed | BatchFailed | StateLost
    ) -> list[Instruction]:
        error = event.error
        fails = self._state_lost is None and self._unwell is None
        if isinstance(event, LoopFailed) and fails:
            return self._finish("failed", error)
        if event.replica is None:
            self._row, self._pausing = "paused", False
        else:
            self._standing[event.replica] = "idle"
        if isinstance(event, BatchFailed):
            return self._fail_in_order(error)
        return [] if self._unwell else self._lose_state(error)

    def _fail_in_order(self, error: JGError) -> list[Instruction]:
        """The other loops end after their steps in flight, and tell of them."""
        if self._unwell is not None or self._state_lost is not None:
            return []
        self._unwell, self._end = error, "failed"
        return [EndLoops()] if self._is_running else []

    def _note(self, event: Event) -> list[Instruction]:
        match event:
            case LoopBegan(replica):
                self._standing[replica] = "running"
            case RoundBegan():
                self._row = "running"
            case StopAsked():
                self._stopping = True
                # A loop that decides ends by itself, and says how.
                if self._row != "running" or self._resting:
                    self._end = self._end or "stopped"
            case RestartAsked() | Restarted():
                return self._restarts(event)
            case PsGone(error):
                return self._lose_state(error)
            case _:
                return self._answered(event)
        return []

    def _worker(
        self, event: WorkerAnswered | WorkerReady | WorkerNotReady
    ) -> list[Instruction]:
        """Takes what becomes of a worker that is to have a loop."""
        replica = event.replica
        match event:
            case WorkerAnswered() if replica in self.missing:
                self._standing[replica] = "preparing"
                return [Prepare(replica)]
            case WorkerReady() if replica in self._leavers:
                self._lose(replica)
            case WorkerReady():
                self._standing[replica] = "ready"
            case WorkerNotReady() if self._standing.get(replica) == "joining":
                return self._forget(replica)
            case WorkerNotReady():
                self._lose(replica)
        return []

    def _member(self, event: Knocked | MemberLeft) -> list[Instruction]:
        """Takes what becomes of the cluster's members."""
        replica = event.replica
        standing = self._standing.get(replica)
        if isinstance(event, Knocked):
            if standing not in {None, "left"} or not self.takes_workers:
                return []
            self._standing[replica] = "joining"
            return [Prepare(replica, joins=True)]
        if standing == "joining":
            return self._forget(replica)
        if standing in {"running", "preparing"}:
            self._leavers.add(replica)  # how its loop ends is told
        elif standing is not None:
            self._standing[replica] = "left"
        return []

    def _lose(self, replica: int) -> None:
        has_left = replica in self._leavers
        self._standing[replica] = "left" if has_left else "lost"
        self._leavers.discard(replica)

    def _forget(self, replica: int) -> list[Instruction]:
        del self._standing[replica]
        return [Forget(replica)]

    def _answered(self, event: Event) -> list[Instruction]:
        """Takes what the client says."""
        match event:
            case Finished() if self._finishing:
                return self._finish(self._end)
            case FinishFailed(error) if self._finishing:
                self._finishing = False
                return self._lose_state(error)
            case NobodyComes() if self.is_alone:
                return self._finish("failed", self._lost)
        return []

    def _restarts(self, event: RestartAsked | Restarted) -> list[Instruction]:
        match event:
            case RestartAsked() if not (self._end or self._resting):
                self._resting = "asked"
                # A row that has ended pauses no more: its loops end by themselves.
                goes_on = self._row in {"running", ""} and self._of("running")
                if goes_on and not (self._pausing or self._short):
                    self._pausing = self._together
                    return [Pause()]
            case Restarted(again, done):
                self._resting = "asked" if again else ""
                self._state_lost = None
                if self._stopping or done:
                    self._end = self._end or ("done" if done else "stopped")
        return []

    def _lose_state(self, error: JGError) -> list[Instruction]:
        """All that was done since the last copy is lost: no loop is to go on."""
        if self._state_lost is not None:
            return []
        self._state_lost, self._resting = error, "asked"
        self._alone_since = None
        if self._end == "done":
            self._end = ""
        return [EndLoops()] if self._is_running else []

    @property
    def _is_running(self) -> bool:
        return bool(self._of("running")) or self._row == "running"

    def _ended(self, replica: int, state: str) -> None:
        self._standing[replica] = "idle"
        if self._together or self._state_lost is not None:
            return
        if state == "done":
            self._end = "done"
        elif not (self._end or self._resting or self._short):
            self._lose(replica)  # its worker is being stopped

    def _row_ended(self, state: str) -> None:
        self._row, self._pausing = state, False
        if self._state_lost is not None:
            return
        if state in {"done", "stopped"}:
            self._end = state
        if state == "alone":  # so those that ended in order have left
            for replica in self._of("idle"):
                self._lose(replica)

    def _of(self, *states: str) -> list[int]:
        return sorted(r for r, state in self._standing.items() if state in states)

    def _go_on(self, now: float) -> Iterator[Instruction]:
        running = self._of("running")
        if not self.takes_workers:
            for replica in self._of("joining"):
                yield from self._forget(replica)
        if self._together and self._row in {"running", ""}:
            changes = self._of("ready") or self._is_short(running)
            if self._row and changes and not self._pausing:
                self._pausing = True
                yield Pause()
        elif self._state_lost is not None or (self._resting and not self._end):
            yield from self._rest(running)
        elif self._end:
            if not running and not self._finishing:
                yield from self._end_run()
        else:
            yield from self._begin_more(running, now)

    def _begin_more(self, running: list[int], now: float) -> Iterator[Instruction]:
        """Begins loops, or waits for workers."""
        if not (running and (self._together or self._short)):
            # Those who ended when all were asked to are there as well.
            present = self._of("ready", "idle")
            if present and len(present) + len(running) >= self._least:
                yield self._begin(present)
                return
        if self._is_short(running) and not (self._short or self._together):
            self._short = True
            yield Pause()
        if running:
            self._alone_since = None
        elif not self._of("preparing"):  # which may fail again and again
            yield from self._wait(now)

    def _is_short(self, running: list[int]) -> bool:
        return 0 < len(running) < self._least and not self._is_beginning

    def _end_run(self) -> Iterator[Instruction]:
        if self._unwell is not None:
            yield from self._finish("failed", self._unwell)
            return
        self._finishing = True
        yield Finish()

    def _rest(self, running: list[int]) -> Iterator[Instruction]:
        if self._resting == "asked" and not (running or self._of("preparing")):
            self._resting = "begun"
            lost = self._state_lost
            yield Rest() if lost is None else GoBack(lost)

    def _wait(self, now: float) -> Iterator[Instruction]:
        if self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= self._wait_s:
            yield from self._finish("failed", self._too_few())

    def _too_few(self) -> JGError:
        if self._least == 1:
            return self._lost
        there = len(self._of("ready", "idle"))
        return TaskLostError(
            f"the run has {there} worker{'' if there == 1 else 's'}, waited "
            f"{self._wait_s:g} s, and needs {self._least} at least: "
            f"{self._lost.message}",
            **self._lost.details,
        )

    def _begin(self, replicas: list[int]) -> Begin:
        self._standing.update(dict.fromkeys(replicas, "running"))
        self._short = False
        self._row, self._alone_since = "running" if self._together else "", None
        return Begin(tuple(replicas))

    def _finish(self, state: str, error: JGError | None = None) -> list[Instruction]:
        self._over = True
        return [Over(state, error)]
