"""Run journal on the master: a run's request and all reports of its loops.

It is the run's journal as well: all that made the run, and all that its loops told, one
frame after the other. The standby of the master keeps a record of its own from that.
"""

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.clock import Clock
from jgraph.cluster.drain import told_to_end
from jgraph.cluster.methods import reading
from jgraph.coordination.run.privacy_account import POSITION_KEY, PrivacyAccount
from jgraph.errors import ConfigError, FencedError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.status import from_status, to_status
from jgraph.rpc.transport import Frame
from jgraph.server.frame_log import FrameLog

_MOST_BYTES: Final = 1 << 30
"""What is kept of one run, of four million reports; beyond, the oldest go."""
_Arrays: TypeAlias = Sequence[np.ndarray[Any, Any]]
_NOTHING: Final = (np.empty(0, np.int64), np.empty(0))


@final
class Journal:
    """The reports of one run, whether or not somebody watches.

    Args:
      task: this one, the master.
      order: what the client says of it.
      clock: dates it.

    Attributes:
      data_run: under which its data is dealt out.
      term: of the masters that it had.
      position: where in the data it is, as JSON; None: who deals that out knows.
      account: of the privacy that it has spent, when it went back last; None: nobody
        keeps one.
      is_told_all: no master before was told of more updates.
      error: what it failed with.
    """

    def __init__(self, task: TaskName, order: pb.OpenRun, clock: Clock) -> None:
        self.data_run, self.term = "", order.term or 1
        self.position: str | None = None
        self.error: JGError | None = None
        self.account = _account_of(order)
        self.is_told_all = True
        self._task = task
        self._order = order
        self._clock = clock
        self._began = clock.now() - order.age_s
        self._seconds = 0.0
        self._steps = 0
        self._state = "running"
        self._log = FrameLog(_MOST_BYTES)
        self._helpers: set[str] = set()  # contribute; another loop tells of the steps
        # Came too late: of all loops of a replica, and of its last one.
        self._dropped: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._late: defaultdict[int, Counter[str]] = defaultdict(Counter)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._state != "running"

    @property
    def is_whole(self) -> bool:
        """Whether its journal is: nothing is left out."""
        return self._log.is_whole

    @property
    def frames(self) -> int:
        """How many its journal has had."""
        return self._log.count

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock.now() - self._began

    def row(self) -> pb.RunRow:
        """Returns how it stands."""
        age_s = self.seconds
        return pb.RunRow(
            run=self._order.run,
            task=self._task,
            state=self._state,
            info=self._order.info,
            steps=self._steps,
            seconds=self._seconds if self.is_over else age_s,
            data_run=self.data_run,
            age_s=age_s,
            term=self.term,
        )

    @property
    def news(self) -> Awaitable[None]:
        """Done as soon as something happens after this."""
        return self._log.news

    def note(self, entry: Frame) -> None:
        """Keeps a frame that made the run what it is; nobody who watches sees it."""
        self._log.append(entry)

    def begins(self, order: pb.RunLoop, began_s: float | None = None) -> None:
        """Takes note of a loop of it, and tells of it.

        Args:
          order: of the loop.
          began_s: when that was, in seconds since the run began; None: now.
        """
        if order.HasField("sync"):
            self.position = order.sync.data_position
        elif order.batch_feed:
            self._helpers.add(order.loop)
        self.data_run, self.term = order.data_run, max(self.term, order.term)
        self._dropped[order.replica] += self._late.pop(order.replica, Counter())
        entry = frame(run_loop=order)
        body_of(entry).began_s = self.seconds if began_s is None else began_s
        self._log.append(entry)

    def keep(self, order: pb.RunLoop, report: Frame, began_s: float) -> None:
        """Keeps what a loop tells.

        Args:
          order: of the loop.
          report: its seconds are those since the loop began.
          began_s: when that was, in seconds since the run began.
        """
        body: pb.LoopReport = body_of(report)
        steps, seconds, *fetches = report.tensors
        body.loop, body.replica = order.loop, order.replica
        if body.dropped:
            self._late[order.replica] = Counter(body.dropped)
        for task, count in self._dropped[order.replica].items():
            body.dropped[task] += count
        self._take(body, [steps, seconds + began_s, *fetches])

    def ask(self, question: pb.RunQuestion) -> None:
        """Keeps what the client of the run is asked, in its place among the reports."""
        body = pb.LoopReport(state="asks", question=question)
        self._log.append(frame(loop_report=body, tensors=_NOTHING))

    def again(self, report: Frame) -> None:
        """Keeps a report as another record kept it."""
        body: pb.LoopReport = body_of(report)
        if body.HasField("question"):
            self._log.append(report)
            return
        if body.dropped:
            before = self._dropped[body.replica]
            self._late[body.replica] = Counter(body.dropped) - before
        self._take(body, report.tensors)

    def _take(self, body: pb.LoopReport, tensors: _Arrays) -> None:
        if body.loop not in self._helpers:
            self._steps += len(tensors[0])
            self.position = body.data_position or self.position
        self._log.append(frame(loop_report=body, tensors=tensors))

    def lost(self, order: pb.RunLoop, error: JGError) -> None:
        """Takes note that the worker of a loop is gone."""
        body = pb.LoopReport(
            state="lost",
            loop=order.loop,
            task=order.task,
            replica=order.replica,
            error=to_status(error),
            seconds=self.seconds,
        )
        self._log.append(frame(loop_report=body, tensors=_NOTHING))

    def go_back(self, restored: pb.RunRestored, steps: int, position: str) -> None:
        """Takes note that the run goes on from a checkpoint.

        Args:
          restored: says so.
          steps: updates since it began that the model has now.
          position: where in the data it is, as JSON; empty: where it was.
        """
        body = pb.LoopReport(
            state="restored", data_position=position, restored=restored
        )
        self.again(frame(loop_report=body, tensors=_NOTHING))
        if (account := self.account) is not None:
            first, is_known = account.first, not restored.untold
            step = first + self._steps
            self.account = account.went_back(step, first + steps, is_known=is_known)
        self._steps, self.is_told_all = steps, True
        if restored.HasField("data"):  # who deals that out knows
            self.data_run, self.position = restored.data.run, None

    def may_do(self, updates: int) -> int:
        """Returns how many of so many updates the target of its privacy allows."""
        allowance = None if self.account is None else self.account.allowance
        return updates if allowance is None else min(updates, allowance)

    def privacy(self, updates: int) -> Mapping[str, Any]:
        """Returns the account for the position of a checkpoint; empty: it has none.

        Args:
          updates: of the checkpoint.
        """
        account = self.account
        if account is None or not account.is_whole:
            return {}
        account = account.reached(account.first + self._steps)
        return {POSITION_KEY: account.reached(updates).plain()}

    def rescale(self, switch: pb.RunRescaled) -> None:
        """Takes note that the variables of the run lie on other ps now."""
        self._order.holders.clear()
        self._order.holders.update(switch.holders)
        body = pb.LoopReport(state="rescaled", rescaled=switch, seconds=self.seconds)
        self.again(frame(loop_report=body, tensors=_NOTHING))
        order = pb.OpenRun()
        order.CopyFrom(self._order)
        self.note(frame(open_run=order))

    def give_up_rescale(self, given_up: pb.RunRescaled) -> None:
        """Takes note that the variables of the run stay on the ps where they are."""
        body = pb.LoopReport(state="rescaled", rescaled=given_up, seconds=self.seconds)
        self.again(frame(loop_report=body, tensors=_NOTHING))

    def moved(self, homes: pb.RunHomes) -> None:
        """Takes note that parts of the variables lie on other tasks now."""
        body = pb.LoopReport(state="moved", homes=homes, seconds=self.seconds)
        self._log.append(frame(loop_report=body, tensors=_NOTHING))

    def end(self, state: str, error: JGError | None) -> None:
        """Ends it: "done", "stopped" or "failed"."""
        self._seconds = self.seconds
        self._state, self.error = state, error
        if isinstance(error, FencedError):  # it goes on elsewhere
            self._log.end()
            return
        row = self.row()
        if error is not None:
            row.error.CopyFrom(to_status(error))
        # A standby that has read this does not go on with it.
        self._log.append(frame(run_table=pb.RunTable(runs=[row])))
        self._log.end()

    def end_as(self, row: pb.RunRow) -> None:
        """Ends it as another record says."""
        self._seconds, self._state = row.seconds, row.state
        self.error = from_status(row.error) if row.HasField("error") else None
        self._log.append(frame(run_table=pb.RunTable(runs=[row])))
        self._log.end()

    async def reports(
        self, asks: Callable[[int], bool] = lambda number: False
    ) -> AsyncIterator[Frame]:
        """Yields what is kept of all reports, and those to come, to the end.

        Args:
          asks: whether a question of this number waits for who is told.

        Raises:
          TaskLeavingError: this task is told to end, and the run goes on elsewhere.
          JGError: the run failed.
        """
        async for _, entry in self._log.follow(0):
            match kind_of(entry):
                case "loop_report":
                    body = body_of(entry)
                    if not body.HasField("question") or asks(body.question.number):
                        yield entry
                case "run_loop":
                    yield frame(loop_report=_begun(body_of(entry)), tensors=_NOTHING)
        if self.error is not None:
            raise self.error
        if not self.is_over:
            raise told_to_end(self._task)

    async def journal(self, after: int, until: int = 0) -> AsyncIterator[Frame]:
        """Yields all frames after the first ``after``, and those to come, to the end.

        Args:
          after: so many are known.
          until: no more than so many in all; 0: all to the end.

        Raises:
          ConfigError: some of them are not kept any more, or there are not so many.
        """
        if after > self.frames:
            raise ConfigError(
                f"the journal of run '{self._order.run}' on {self._task} has "
                f"{self.frames} entries and none after number {after}"
            )
        async for at, entry in self._log.follow(after):
            if at > after:
                raise ConfigError(
                    f"{self._task} does not keep all of run '{self._order.run}' any "
                    "more: it is too long to have another master"
                )
            after += 1
            yield entry
            if after == until:
                return

    def leave(self) -> None:
        """Tells those who watch that this task ends."""
        self._log.end()


def _account_of(order: pb.OpenRun) -> PrivacyAccount | None:
    """Returns the account of the privacy that a run spends; None: nobody keeps one."""
    with reading("what is said of a run"):
        info = dict(json.loads(order.info)) if order.info else {}
        plain = info.get("privacy")
        return None if plain is None else PrivacyAccount.opened(plain)


def _begun(order: pb.RunLoop) -> pb.LoopReport:
    return pb.LoopReport(
        state="running",
        loop=order.loop,
        replica=order.replica,
        task=order.task,
        handle=order.handle,
        seconds=order.began_s,
    )


def note_report(order: pb.RunLoop, report: Frame) -> None:
    """Learns from a report of a loop where the next one is to begin."""
    body, steps = body_of(report), report.tensors[0]
    if order.HasField("sync"):
        order.steps -= len(steps)
        order.sync.version += len(steps)
        position = body.data_position or order.sync.data_position
        order.sync.data_position = position
    elif len(steps):
        order.first_step = int(steps[-1]) + 1
