"""One task: its variables, its registered programs, and the steps in flight."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.errors import (
    CancelledStepError,
    DeadlineError,
    FeedError,
    InvalidProgramError,
    JGError,
    VariableMismatchError,
)
from jgraph.graph.ir import TaskName
from jgraph.graph.sizes import Sizes
from jgraph.plan.program.nodes import (
    AggregateNode,
    ContributeNode,
    SegmentNode,
    ValueType,
)
from jgraph.plan.program.program import Program
from jgraph.runtime.at_once import SHORT_S, AtOnce, is_plain
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.executor import (
    ExecutorHost,
    Keep,
    Outcome,
    StepPlace,
    StepRun,
    StepTimes,
)
from jgraph.runtime.flight import ROWS, FlightRecorder
from jgraph.runtime.gate import Gate, aggregator
from jgraph.runtime.loaded import LoadedPartition, load_partition
from jgraph.runtime.rendezvous import Rendezvous, StepKey
from jgraph.runtime.store.change_log import Recording
from jgraph.runtime.store.store import VariableStore


def by_name(program: Program, arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns what is fed in the order of a program's feeds, as far as it goes."""
    named = zip(program.feeds, arrays, strict=False)
    return {name: array for (name, _), array in named}


def check_feeds(program: Program, feeds: Mapping[str, Any]) -> None:
    """Refuses feeds that are not those of a program.

    Raises:
      FeedError: one is missing, has another shape or dtype, or another size of a name
        than a feed before it.
    """
    sizes = Sizes(program.name)
    for name, type_ in program.feeds:
        value = feeds.get(name)
        if value is None:
            raise FeedError(
                f"feed '{name}' of '{program.name}' is missing; the program takes "
                f"{', '.join(n for n, _ in program.feeds)}",
                feed=name,
            )
        same = bool(type_.symbols) or value.shape == type_.shape
        if not same or value.dtype != type_.np_dtype:
            actual = ValueType(tuple(value.shape), value.dtype.name)
            raise FeedError(
                f"feed '{name}' of '{program.name}' is {actual}; the program takes "
                f"{type_}",
                feed=name,
            )
        if type_.symbols:
            sizes.fit(name, value.shape, type_.shape, type_.symbols)


MAX_EARLY_BYTES: Final = 8 << 30
"""Of values for steps that have not begun; a server sets what its memory allows."""
OnDone: TypeAlias = Callable[[Outcome, StepTimes], None]


@final
@dataclass(slots=True)
class _Registered:
    program: Program
    loaded: LoadedPartition
    participants: tuple[TaskName, ...]
    # Where no other task has a part in it, and it is simple.
    at_once: AtOnce | None = None
    # Of what its steps change; None: it is kept here only.
    recording: Recording | None = None
    # Is given what its steps take of other tasks.
    keep: Keep | None = None
    # Ordered steps that are not over, oldest first: it is the turn of the first one.
    ordered: deque[StepRun] = field(default_factory=deque)
    advancing: bool = False

    @property
    def gate(self) -> str:
        """Name of the gate of the partition; empty if it has none."""
        return self.loaded.partition.gate

    @property
    def applies(self) -> bool:
        """Whether the steps are the gate's own: updates of what it has chosen."""
        nodes = self.loaded.partition.nodes
        return bool(nodes) and isinstance(nodes[0], AggregateNode)

    def due(self) -> StepRun | None:
        """Returns an ordered step that may begin now."""
        for place, run in enumerate(self.ordered):
            if place <= run.ahead and not run.has_begun:
                return run
        return None


@final
@dataclass(frozen=True, slots=True)
class OverdueComputation:
    """A computation whose step is over.

    Attributes:
      what: the segment and its program.
      seconds: since the end of the step.
      is_late: it ended because its time was up.
    """

    what: str
    seconds: float
    is_late: bool


@final
class TaskRuntime:
    """Runs the partitions of one task.

    All methods but ``load`` are called on one thread (the event loop's) and return at
    once; results come through callbacks on the same thread.

    Args:
      task: the task's name.
      shell: runs work elsewhere and sends values.
      cache: executables; shared by all programs of the process.
      max_early_bytes: of values for steps that have not begun.
      flight_rows: how many the flight recorder keeps, see there.
    """

    def __init__(
        self,
        task: TaskName,
        shell: ExecutorHost,
        cache: CompileCache | None = None,
        *,
        max_early_bytes: int = MAX_EARLY_BYTES,
        flight_rows: int = ROWS,
    ) -> None:
        self.task = task
        self.store = VariableStore(task)
        self.cache = cache or CompileCache()
        self._shell = shell
        self._rendezvous = Rendezvous()
        self._place = StepPlace(self.store, self._rendezvous, shell)
        self._programs: dict[str, _Registered] = {}
        self._steps: dict[StepKey, StepRun] = {}
        self.flight = FlightRecorder(task, flight_rows)
        self.gates: dict[str, Gate] = {}
        """By name; the cluster opens them."""
        self.max_early_bytes = max_early_bytes
        self._when_idle: list[Callable[[], None]] = []
        self._left_behind: list[tuple[float, bool, Program, StepRun]] = []

    def now(self) -> float:
        """Returns monotonic time in seconds, the time of ``StepTimes``."""
        return self._shell.now()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once no step is in flight; at once if none is."""
        if self._steps:
            self._when_idle.append(callback)
        else:
            callback()

    def overdue_computations(self) -> list[OverdueComputation]:
        """Returns what computes though its step is over, oldest first."""
        now = self.now()
        return [
            OverdueComputation(what, now - since, is_late)
            for since, is_late, program, run in tuple(self._left_behind)
            for what in _computing(program, run)
        ]

    def computing(self) -> list[str]:
        """Returns what steps in flight compute now; as above, in any thread."""
        return [
            what
            for step, run in self._steps.copy().items()
            if (registered := self._programs.get(step[0])) is not None
            for what in _computing(registered.program, run)
        ]

    @property
    def programs(self) -> list[str]:
        """Handles of the registered programs."""
        return sorted(self._programs)

    def load(self, program: Program, *, all_sizes: bool = False) -> LoadedPartition:
        """Compiles this task's partition of ``program``; may take long.

        Safe to call from any thread.

        Args:
          program: of which this task has a partition.
          all_sizes: compile for each number of rows that may come, too.

        Raises:
          InvalidProgramError: there is no partition for this task, or bad bytes.
          VariableMismatchError: a stored variable has another shape or dtype.
        """
        try:
            partition = program.partition(self.task)
        except KeyError:
            raise InvalidProgramError(
                f"program '{program.name}' has no partition for {self.task}"
            ) from None
        self._check_variables(program)
        return load_partition(
            partition, program.segments, self.cache, all_sizes=all_sizes
        )

    def register(
        self,
        handle: str,
        program: Program,
        loaded: LoadedPartition,
        participants: Sequence[TaskName],
    ) -> None:
        """Makes a loaded partition runnable under ``handle``.

        Args:
          handle: name of the registration.
          program: the program; it may hold this task's partition only.
          loaded: what ``load`` gave.
          participants: every task that has a partition.
        """
        registered = _Registered(program, loaded, tuple(participants))
        if registered.participants == (self.task,) and is_plain(loaded):
            registered.at_once = AtOnce(program, loaded, self.store, self._shell.now)
        self._programs[handle] = registered
        if self.flight.is_on:
            self.flight.registered(handle, program)

    def record(self, handle: str, recording: Recording | None) -> None:
        """Records what the steps of a program change from now on, or no longer."""
        self._registered(handle).recording = recording

    def keep(self, handle: str, keep: Keep) -> None:
        """Gives ``keep`` each message that the steps of a program take from now on."""
        self._registered(handle).keep = keep

    def loaded(self, handle: str) -> LoadedPartition:
        """Returns this task's partition of a program."""
        return self._registered(handle).loaded

    def program(self, handle: str) -> Program:
        """Returns the program of ``handle``."""
        return self._registered(handle).program

    def participants(self, handle: str) -> tuple[TaskName, ...]:
        """Returns every task with a part in the steps of ``handle``."""
        return self._registered(handle).participants

    def check_feeds(self, handle: str, feeds: Mapping[str, Any]) -> None:
        """See ``jgraph.runtime.task``."""
        check_feeds(self.program(handle), feeds)

    def unregister(self, handle: str) -> list[StepRun]:
        """Forgets a program; its steps in flight are cancelled.

        Returns:
          Those of which work goes on, which may change variables yet.
        """
        self._programs.pop(handle, None)
        self.flight.unregistered(handle)
        stopped = CancelledStepError(f"program '{handle}' was removed from {self.task}")
        for step in [key for key in self._steps if key[0] == handle]:
            self.abort(step, stopped)
        self._rendezvous.finish_program(handle)
        self._left_behind = [one for one in self._left_behind if one[3].work.nodes]
        return [one[3] for one in self._left_behind if one[3].step[0] == handle]

    def start_step(
        self,
        step: StepKey,
        on_done: OnDone,
        *,
        feeds: Mapping[str, Any] | None = None,
        ordered: bool = False,
        ahead: int = 0,
        compute_wait_s: float = 0.0,
        trace: bool = False,
    ) -> None:
        """Begins this task's part of a step.

        Args:
          step: (handle, step id); the id is new for this handle.
          on_done: gets the fetches (empty unless this is the driver) or the error,
            and when the stages of this task's part were over.
          feeds: arrays by feed name (driver only).
          ordered: begin only after the handle's earlier steps are over.
          ahead: of an ordered step: read and send while so many of these are under way.
          compute_wait_s: see ``StepRun``.
          trace: note when each node runs, flight recorder or not.

        Raises:
          InvalidProgramError: no such program here (the task may have restarted), or
            the step id is in use.
        """
        registered = self._registered(step[0])
        if step in self._steps:
            raise InvalidProgramError(
                f"step {step[1]} of '{step[0]}' was already started on {self.task}"
            )
        if self._rendezvous.is_finished(step):
            raise self._too_early(step)
        run = StepRun(
            registered.loaded,
            step,
            feeds or {},
            self._place,
            lambda outcome: self._over(registered, step, outcome, on_done),
            gate=self._gate(registered),
            recording=registered.recording,
            compute_wait_s=compute_wait_s,
            # Two steps would seem to compute for that long at the same time.
            ahead=0 if compute_wait_s or not ordered else ahead,
            keep=registered.keep,
            noted=trace or (self.flight.is_on and not step[1] & self.flight.skips),
        )
        self._steps[step] = run
        if ordered:
            registered.ordered.append(run)
            self._advance(registered)
        else:
            self._begin(registered, run)

    def run_at_once(
        self, handle: str, arrays: Sequence[Any], limit_s: float = SHORT_S
    ) -> list[np.ndarray[Any, Any]] | None:
        """Runs a step in the calling thread, whichever that is.

        Args:
          handle: the program.
          arrays: its feeds, in order.
          limit_s: what it may take, as far as is known.

        Returns:
          The fetches; None, and nothing was done, if other tasks have a part in the
          program, it does not only read, compute and write, or may take longer.

        Raises:
          FeedError: the feeds are not the program's.
        """
        registered = self._registered(handle)
        at_once = registered.at_once
        if at_once is None or not at_once.takes_less(limit_s):
            return None
        if not at_once.takes(arrays):
            check_feeds(registered.program, by_name(registered.program, arrays))
        return at_once.run(arrays)

    def deliver(self, step: StepKey, key: str, values: Sequence[Any]) -> None:
        """Takes values that another task sent for a step, early or late.

        Values for no program of this task are dropped. If too many wait for steps that
        do not begin, the oldest such step ends.
        """
        if step[0] not in self._programs:
            return
        self._rendezvous.send(step, key, values)
        while self._rendezvous.nbytes > self.max_early_bytes:
            oldest = self._rendezvous.oldest()
            self.abort(oldest, self._too_early(oldest))

    def _too_early(self, step: StepKey) -> JGError:
        return CancelledStepError(
            f"{self.task} gave up step {step[1]} of '{step[0]}', which had not begun: "
            f"over {self.max_early_bytes:,} bytes of values waited for such steps"
        )

    def abort(self, step: StepKey, error: JGError) -> None:
        """Ends a step here; values still to come for it are dropped."""
        run = self._steps.get(step)
        if run is None:
            self._rendezvous.finish(step)
            self._shell.withdraw(step)
        else:
            run.abort(error)

    @property
    def steps(self) -> Mapping[StepKey, StepRun]:
        """The steps in flight, in the order in which they came."""
        return self._steps

    def waiting_for(self, step: StepKey) -> list[str]:
        """Returns the keys of the values that the step still waits for here."""
        return self._rendezvous.waiting_for(step)

    def reset(self, containers: Sequence[str] = ()) -> None:
        """Forgets the variables of these containers (none: all variables, programs)."""
        self.store.drop(containers)
        if not containers:
            for handle in self.programs:
                self.unregister(handle)

    def _registered(self, handle: str) -> _Registered:
        try:
            return self._programs[handle]
        except KeyError:
            raise InvalidProgramError(
                f"{self.task} has no program '{handle}': it may have been restarted or "
                "reset since the program was registered; run the function again",
                task=self.task,
                handle=handle,
            ) from None

    def _advance(self, registered: _Registered, *, turns: bool = True) -> None:
        # A loop, not recursion: a step may end inside its own start.
        if registered.advancing:
            return
        registered.advancing = True
        try:
            while True:
                # Who reads ahead reads first: an update keeps variables for a while.
                if (run := registered.due()) is not None:
                    self._begin(registered, run)
                elif turns and registered.ordered and registered.ordered[0].is_held:
                    registered.ordered[0].take_turn()
                else:
                    break
        finally:
            registered.advancing = False

    def _begin(self, registered: _Registered, run: StepRun) -> None:
        run.has_begun = True
        gate = self.gates.get(registered.gate)
        if gate is None:
            run.start()
        elif registered.applies:
            aggregator(gate).ask_update(run.start_unless_over, run.abort)
        else:
            gate.ask(run.step, run.start, run.abort)

    def _gate(self, registered: _Registered) -> Gate | None:
        if registered.gate and registered.gate not in self.gates:
            raise InvalidProgramError(
                f"{self.task} has no gate '{registered.gate}': it may have been "
                "restarted or reset; call fit again",
                task=self.task,
            )
        return self.gates.get(registered.gate)

    def _over(
        self,
        registered: _Registered,
        step: StepKey,
        outcome: Outcome,
        on_done: OnDone,
    ) -> None:
        run, recording = self._steps[step], registered.recording
        if run.times.stamps is not None:
            self.flight.step_over(step, run.times.stamps)
        if run in registered.ordered:  # a step that on_done starts begins at once
            registered.ordered.remove(run)
        if not isinstance(outcome, list):
            self._shell.withdraw(step)
            self._left_behind = [one for one in self._left_behind if one[3].work.nodes]
            if run.work.nodes:
                is_late = isinstance(outcome, DeadlineError)
                one = self.now(), is_late, registered.program, run
                self._left_behind.append(one)
        if recording is None:
            self._tell(registered, step, outcome, on_done)
        elif isinstance(outcome, list):
            recording.recorder.when_kept(
                step,
                lambda lost: self._tell(registered, step, lost or outcome, on_done),
            )
        else:
            recording.recorder.forget(step)
            self._tell(registered, step, outcome, on_done)
        self._advance(registered)

    def _tell(
        self,
        registered: _Registered,
        step: StepKey,
        outcome: Outcome,
        on_done: OnDone,
    ) -> None:
        run = self._steps.pop(step)
        self._tell_gate(registered, step, done=isinstance(outcome, list))
        # What waits for it here needs no word of it; a step that read ahead may compute
        # for long, and the one after that is asked for before.
        self._advance(registered, turns=False)
        on_done(outcome, run.times)
        while self._when_idle and not self._steps:
            self._when_idle.pop(0)()

    def _tell_gate(self, registered: _Registered, step: StepKey, *, done: bool) -> None:
        gate = self.gates.get(registered.gate)
        if gate is None:
            return
        if not registered.applies:
            gate.ended(step, done=done)
        elif done:
            aggregator(gate).applied()

    def _check_variables(self, program: Program) -> None:
        stored = {(row.container, row.name): row.type for row in self.store.table()}
        partition = program.partition(self.task)
        nodes = partition.nodes
        # The mean of what is given lies here under the same name, perhaps of more rows.
        contributions = {
            v
            for node in nodes
            if isinstance(node, ContributeNode)
            for v in node.variables
        }
        for number, variable in enumerate(partition.variables):
            if variable.table is not None or number in contributions:
                continue  # of which the store says how many rows it has
            kind = stored.get((variable.container, variable.name), variable.type)
            if kind != variable.type:
                raise VariableMismatchError(
                    f"variable '{variable.name}' is {kind} on {self.task}, and "
                    f"'{program.name}' declares {variable.type}; choose another name, "
                    "or drop the old one with cluster.reset()",
                    variable=variable.name,
                    task=self.task,
                )


def _computing(program: Program, run: StepRun) -> list[str]:
    labels = {code.digest: code.label for code in program.segments}
    nodes = run.nodes
    return [
        f"segment '{labels.get(node.digest, '')}' of '{program.name}'"
        for index in tuple(run.work.nodes)
        if isinstance(node := nodes[index], SegmentNode)
    ]
