"""Member of a collective group of XLA: its child process, and the versions it sums.

What all replicas contributed to a version is summed by the children, each of which has
what its own replica contributed. A sum is given on only when it is here; what it is
made of is kept until the update is decided, which needs every member's sum. So a child
that dies, whenever it does, costs a sum that is made again, and no step.

See ``group``, which leads.
"""

from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.coordination.sync.group import EpochUp


@final
@dataclass(frozen=True, slots=True)
class EpochBegun:
    """The leader says: end the child that is there, and begin one of this epoch."""

    epoch: int


@final
@dataclass(frozen=True, slots=True)
class GroupGaveUp:
    """The leader says: from now on what is summed goes by messages."""


@final
@dataclass(frozen=True, slots=True)
class ChildReady:
    """The child of this epoch has met the others."""

    epoch: int


@final
@dataclass(frozen=True, slots=True)
class ChildSummed:
    """The child of this epoch has the sum of a version."""

    epoch: int
    version: int


@final
@dataclass(frozen=True, slots=True)
class ChildFailed:
    """The child of this epoch ended, or says nothing."""

    epoch: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class SumIsLate:
    """The child of this epoch has had its time for the sum of a version."""

    epoch: int
    version: int


@final
@dataclass(frozen=True, slots=True)
class MessagesSummed:
    """The sum of a version is there from messages."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class AllContributed:
    """All replicas have contributed to a version; those of the own one are here."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class UpdateDecided:
    """An update was decided: every member has its sum."""


Event: TypeAlias = (
    EpochBegun
    | EpochUp
    | GroupGaveUp
    | ChildReady
    | ChildSummed
    | ChildFailed
    | SumIsLate
    | MessagesSummed
    | AllContributed
    | UpdateDecided
)


@final
@dataclass(frozen=True, slots=True)
class EndChild:
    """End the child, however it stands."""


@final
@dataclass(frozen=True, slots=True)
class BeginChild:
    """Begin a child of this epoch."""

    epoch: int


@final
@dataclass(frozen=True, slots=True)
class TellReady:
    """Tell the leader; ``needs`` is the first version of which no sum is here."""

    epoch: int
    needs: int


@final
@dataclass(frozen=True, slots=True)
class TellFailed:
    """Tell the leader that this child is of no use."""

    epoch: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class Sum:
    """Let the child of this epoch sum a version."""

    epoch: int
    version: int


@final
@dataclass(frozen=True, slots=True)
class SendParts:
    """Send the owners their parts of what the own replica contributed to a version."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class GiveSum:
    """The sum of a version is here for the first time: give it on."""

    version: int


Instruction: TypeAlias = (
    EndChild | BeginChild | TellReady | TellFailed | Sum | SendParts | GiveSum
)


@final
class GroupMember:
    """State machine of one member.

    Args:
      version: updates applied so far.

    Example:
      >>> member = GroupMember(version=5)
      >>> member.handle(EpochBegun(1))
      [EndChild(), BeginChild(epoch=1)]
      >>> member.handle(ChildReady(1))
      [TellReady(epoch=1, needs=5)]
      >>> member.handle(AllContributed(5))  # until all children are ready
      []
      >>> member.handle(EpochUp(1, first=5))
      [Sum(epoch=1, version=5)]
      >>> member.handle(ChildSummed(1, 5))
      [GiveSum(version=5)]
    """

    def __init__(self, version: int) -> None:
        self._needs = version
        self._version: int | None = None  # version whose contribution is here
        self._epoch = 0
        self._has_child = False
        self._is_up = False
        self._summing: int | None = None
        self._by_messages = False

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        match event:
            case EpochBegun(epoch):
                return self._begin(epoch)
            case GroupGaveUp():
                return self._give_up()
            case AllContributed(version):
                self._version = version
                return self._go_on()
            case UpdateDecided():
                self._version = None
                return []
            case MessagesSummed(version):
                return self._summed(version)
            case _ if event.epoch != self._epoch or not self._has_child:
                return []  # of a child that is ended
            case _:
                return self._of_child(event)

    def _of_child(
        self, event: EpochUp | ChildReady | ChildSummed | ChildFailed | SumIsLate
    ) -> list[Instruction]:
        match event:
            case ChildReady(epoch):
                return [TellReady(epoch, self._needs)]
            case EpochUp(_, first):
                self._is_up = True
                again = self._version is not None and self._version >= first
                return self._go_on() if again else []
            case ChildSummed(_, version):
                self._summing = None
                return self._summed(version)
            case SumIsLate(_, version):
                if self._summing != version:
                    return []
                return self._fail(f"the sum of update {version} does not end")
            case ChildFailed(_, why):
                return self._fail(why)

    def _begin(self, epoch: int) -> list[Instruction]:
        if epoch <= self._epoch or self._by_messages:
            return []
        self._epoch, self._has_child = epoch, True
        self._is_up, self._summing = False, None
        return [EndChild(), BeginChild(epoch)]

    def _give_up(self) -> list[Instruction]:
        if self._by_messages:
            return []
        self._by_messages, self._has_child = True, False
        return [EndChild(), *self._go_on()]

    def _go_on(self) -> list[Instruction]:
        """Sums what is kept, if it can be now."""
        if self._version is None:
            return []
        if self._by_messages:
            return [SendParts(self._version)]
        if not self._is_up:
            return []
        self._summing = self._version
        return [Sum(self._epoch, self._version)]

    def _summed(self, version: int) -> list[Instruction]:
        if version < self._needs:
            return []  # it was made again, for others
        self._needs = version + 1
        return [GiveSum(version)]

    def _fail(self, why: str) -> list[Instruction]:
        self._has_child = self._is_up = False
        self._summing = None
        return [EndChild(), TellFailed(self._epoch, why)]
