"""Common version after losses: the newest update that every parameter server can have.

A version is the number of synchronous updates since the records of a run began. Nobody
decides an update before the one before it is made, and kept a second time, on every ps.
So what they hold and keep differs by one update at most: the newest may be on some of
them only. ``Progress`` says which updates are whole on a task, ``HeldBack`` keeps the
newest one out of a copy until it is known to be everywhere, and ``meet`` chooses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, final

from jgraph.errors import CopyLostError
from jgraph.graph.device import TaskName

RecordT = TypeVar("RecordT")


@final
class Progress:
    """State machine of the updates that one task makes: each is of several nodes.

    Attributes:
      version: updates that are whole.
      is_torn: some nodes of an update have changed the state, and others have not.

    Example:
      >>> progress = Progress()
      >>> progress.begins(frozenset({2, 5}))
      1
      >>> progress.ran(2), progress.version, progress.is_torn
      (None, 0, True)
      >>> progress.ran(5), progress.version, progress.is_torn
      (None, 1, False)
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.is_torn = False
        self._due: frozenset[int] = frozenset()
        self._ran: set[int] = set()

    def begins(self, due: frozenset[int]) -> int:
        """Begins an update that is whole when these nodes ran; returns its number.

        One that failed before it changed anything has none.
        """
        # After one that failed half-way there is none.
        self._due, self._ran = frozenset() if self.is_torn else due, set()
        return self.version + 1

    def ran(self, node: int) -> None:
        """Learns that a node has changed the state."""
        if node not in self._due:
            return
        self._ran.add(node)
        self.is_torn = self._ran != self._due
        if not self.is_torn:
            self.version += 1
            self._due = frozenset()


@final
class HeldBack(Generic[RecordT]):
    """State machine of the records of one copy: which of them may be applied.

    Those of the newest update wait for the first of the next: it says that the newest
    was made everywhere.

    Example:
      >>> records = HeldBack[str]()
      >>> due = frozenset({2})
      >>> records.update("a", 1, 2, due), records.versions
      ([], range(0, 2))
      >>> records.update("b", 2, 2, due), records.versions
      (['a'], range(1, 3))
      >>> records.end(1)
      []
    """

    def __init__(self) -> None:
        self._applied = 0
        self._progress = Progress()
        self._newest = 0
        self._waiting: list[RecordT] = []

    @property
    def versions(self) -> range:
        """The versions that ``end`` can make."""
        return range(self._applied, self._progress.version + 1)

    def begin(self, record: RecordT, version: int) -> list[RecordT]:
        """Takes a record of what there was at a version; returns what to apply."""
        if version != self._newest:
            self._applied = self._newest = version
            self._progress = Progress(version)
        return [record]

    def beside(self, record: RecordT) -> list[RecordT]:
        """Takes a record of a change that is of no update; returns what to apply."""
        if not self._waiting:
            return [record]
        self._waiting.append(record)
        return []

    def update(
        self, record: RecordT, number: int, node: int, due: frozenset[int]
    ) -> list[RecordT]:
        """Takes what a node of an update changed; returns what to apply now.

        Args:
          record: of the change.
          number: of the update.
          node: that changed it.
          due: all nodes of an update that change state.

        Raises:
          CopyLostError: an update before is not whole.
        """
        ready: list[RecordT] = []
        if number != self._newest:
            if number != self._progress.version + 1:
                raise CopyLostError(
                    f"update {number} came after {self._progress.version}: what is "
                    "between is lost"
                )
            ready, self._waiting = self._waiting, []
            self._applied, self._newest = self._progress.version, number
            self._progress.begins(due)
        self._waiting.append(record)
        self._progress.ran(node)
        return ready

    def end(self, version: int) -> list[RecordT]:
        """Ends the copy at a version; returns what to apply for that.

        Raises:
          CopyLostError: it cannot be made of the records.
        """
        if version not in self.versions:
            can = self.versions
            raise CopyLostError(
                f"the copy can be of version {can[0]} to {can[-1]}, not {version}"
            )
        ready, self._waiting = self._waiting, []
        newest = version == self._progress.version and version != self._applied
        self._applied, self._progress = version, Progress(version)
        return ready if newest else []


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """Ask which versions what is kept of these tasks can have."""

    tasks: tuple[TaskName, ...]


@final
@dataclass(frozen=True, slots=True)
class GoOn:
    """Go on from a version.

    Attributes:
      version: of all tasks.
      again: of these tasks what is kept is taken, not what they hold.
    """

    version: int
    again: frozenset[TaskName]


@final
@dataclass(frozen=True, slots=True)
class Differ:
    """There is no version that all can have.

    Attributes:
      versions: what each can have.
    """

    versions: Mapping[TaskName, tuple[int, ...]]


Meeting: TypeAlias = Ask | GoOn | Differ


def meet(held: Mapping[TaskName, range], copies: Mapping[TaskName, range]) -> Meeting:
    """Says from which version a run goes on, or what must be known for that.

    Args:
      held: the versions that what each task holds can have; none if it was lost.
      copies: the versions that a copy or a log can have, of tasks that were asked for.

    Example:
      >>> first, second = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
      >>> meet({first: range(0), second: range(7, 8)}, {})
      Ask(tasks=('/job:ps/task:0',))
      >>> meet({first: range(0), second: range(7, 8)}, {first: range(7, 9)})
      GoOn(version=7, again=frozenset({'/job:ps/task:0'}))
    """
    missing = [task for task, there in held.items() if not there and task not in copies]
    if missing:
        return Ask(tuple(missing))
    can = {task: {*there, *copies.get(task, ())} for task, there in held.items()}
    common = set.intersection(*can.values()) if can else {0}
    if common:
        version = max(common)
        again = (task for task, there in held.items() if version not in there)
        return GoOn(version, frozenset(again))
    unasked = [task for task in held if task not in copies]
    if unasked:
        return Ask(tuple(unasked))
    return Differ({task: tuple(sorted(there)) for task, there in can.items()})
