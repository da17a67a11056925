"""Succession of masters: picks the standby of a run, and what it has to restart.

The standby knows what made the run and what its loops told. It ends the loops that go
on, which tell in a final report what the old master has not passed on any more; then it
begins their next ones. Tasks that have heard of the standby refuse all orders of the
old master, should it still be there; see ``MasterTerms``.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias, final

from jgraph.coordination.run.supervisor import (
    Event,
    LoopEnded,
    LoopLost,
    RoundEnded,
    StateLost,
    StopAsked,
    WorkerReady,
)
from jgraph.errors import FencedError, JGError
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName

_STANDBYS: Final = 2
Accounts: TypeAlias = Mapping[int, str | JGError]


def standbys_of(
    tasks: Iterable[TaskName], master: TaskName, incumbents: Iterable[TaskName] = ()
) -> list[TaskName]:
    """Returns the standbys of a master, the first of which goes on with its runs.

    The first is a ps, as a run needs all of them anyway. The second one does if that is
    lost as well; it is of another job if one is there, as two tasks of one job are lost
    together rather than two of two.

    Args:
      tasks: that are ready.
      master: of a run.
      incumbents: who is one already, and stays one.

    Example:
      >>> ps = [TaskName(f"/job:ps/task:{n}") for n in range(2)]
      >>> workers = [TaskName(f"/job:worker/task:{n}") for n in range(2)]
      >>> standbys_of([*ps, *workers], workers[0])
      ['/job:ps/task:0', '/job:worker/task:1']
      >>> standbys_of([*ps, *workers], ps[0], incumbents=[workers[1]])
      ['/job:ps/task:1', '/job:worker/task:1']
      >>> standbys_of([*ps, workers[0]], workers[0])
      ['/job:ps/task:0', '/job:ps/task:1']
    """
    chosen = list(incumbents)
    others = {task for task in tasks if task != master} - set(chosen)
    while others and len(chosen) < _STANDBYS:
        jobs = {is_ps(task) for task in chosen}
        chosen.append(min(others, key=lambda t: (is_ps(t) in jobs, not is_ps(t), t)))
        others.remove(chosen[-1])
    return sorted(chosen, key=lambda task: (not is_ps(task), task))


def resume_events(
    accounts: Accounts,
    row: str | JGError | None = None,
    *,
    stopping: bool = False,
) -> Iterator[Event]:
    """Returns what a new ``Supervisor`` is told of loops that a lost master had begun.

    Args:
      accounts: how the last loop of each replica ended, or why nobody can say.
      row: likewise of the loop that decides; None: training is asynchronous.
      stopping: the run was asked to stop.

    Example:
      >>> from jgraph.coordination.run.supervisor import Supervisor
      >>> from jgraph.errors import TaskLostError
      >>> supervisor, lost = Supervisor(together=False), TaskLostError("gone")
      >>> events = resume_events({0: "stopped", 1: lost})
      >>> [supervisor.handle(event, 0.0) for event in events], supervisor.missing
      ([[], [Begin(replicas=(0,))]], [1])
    """
    if row is None:
        return _each_alone(accounts, stopping=stopping)
    return _together(accounts, row, stopping=stopping)


def _each_alone(accounts: Accounts, *, stopping: bool) -> Iterator[Event]:
    go_on: list[int] = []
    for replica, account in accounts.items():
        if isinstance(account, JGError):
            yield LoopLost(replica, account)
        elif account in {"left", "done"}:
            yield LoopEnded(replica, account)
        else:
            go_on.append(replica)
    if stopping:
        yield StopAsked()
    for replica in go_on:
        yield WorkerReady(replica)


def _together(
    accounts: Accounts, row: str | JGError, *, stopping: bool
) -> Iterator[Event]:
    if isinstance(row, JGError):
        yield StateLost(None, row)  # it is on a ps
    for replica, account in accounts.items():
        if isinstance(account, JGError):
            yield LoopLost(replica, account)
        else:  # with its row, and begins with the next
            yield LoopEnded(replica, "left" if account == "left" else "stopped")
    if stopping:
        yield StopAsked()
    if isinstance(row, str):  # it may have ended because its master was gone
        yield RoundEnded("paused" if row == "stopped" and not stopping else row)


_KEPT: Final = 256
"""Runs that a task remembers."""


@final
class MasterTerms:
    """The newest master that a task has heard of, by run.

    Example:
      >>> terms = MasterTerms()
      >>> terms.check("run-1", 1), terms.check("run-1", 2)
      (None, None)
      >>> terms.begin("run-1", 2, "loop-1")
      >>> terms.newest_loop("run-1")
      'loop-1'
      >>> terms.check("run-1", 1)
      Traceback (most recent call last):
      jgraph.errors.FencedError: JG-139 an order of master 1 of run ...
    """

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._loops: dict[str, str] = {}
        self._switches: dict[str, bytes] = {}

    def begin(self, run: str, term: int, loop: str) -> None:
        """Takes note of a loop that a master begins here.

        Args:
          run: empty: one that nobody takes over.
          term: of the master.
          loop: its name.

        Raises:
          FencedError: a later master of that run was here already.
        """
        self.check(run, term)
        if run:
            self._loops[run] = loop

    def newest_loop(self, run: str) -> str:
        """Returns the newest loop of a run here; empty: none is known."""
        return self._loops.get(run, "")

    def switch(self, run: str, term: int, switch: bytes) -> None:
        """Takes note that the variables of a run lie on other ps from now on.

        Args:
          run: its name.
          term: of the master that says so.
          switch: what it says, for a master that has not read it.

        Raises:
          FencedError: a later master of that run was here already.
        """
        self.check(run, term)
        self._switches[run] = switch

    def newest_switch(self, run: str) -> bytes:
        """Returns the newest switch of a run; empty: none was told here."""
        return self._switches.get(run, b"")

    def check(self, run: str, term: int, *, takes_over: bool = False) -> None:
        """Takes note of who gives an order.

        Args:
          run: empty: one that nobody takes over.
          term: of the master.
          takes_over: it is its first order, so another master has no such term.

        Raises:
          FencedError: a later master of that run was here already.
        """
        if not run:
            return
        before = self._newest.pop(run, 0)
        newest = max(term, before)
        self._newest[run] = newest
        if len(self._newest) > _KEPT:
            forgotten, _ = self._newest.popitem(last=False)
            self._loops.pop(forgotten, None)
            self._switches.pop(forgotten, None)
        if term < newest or (takes_over and term == before):
            raise FencedError(
                f"an order of master {term} of run '{run}' came after master {newest} "
                "had taken over; it is not carried out",
                run=run,
                term=newest,
            )
