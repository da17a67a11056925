"""Collective group of XLA: epochs of child processes, at the task that leads them.

Each member's server has a child process that takes part in collectives with those of
the others. One that dies, or stands still, breaks all: so they are ended together, and
others begin, of the next epoch. ``group_member`` is what each member does.

    down --all are open--> starting --all are ready--> up
    starting, up --one failed, or is late--> broken: starting, of the next epoch
    broken, for the third time without a sum between --> given up: sums go by messages

A version is summed in an epoch from the first one on that any member still needs: who
has a sum already takes part again, and who needs none of it is asked for none.

Source: live_devices of JAX's multi-process runtime: "a collective may succeed on some
hosts and fail on others", so that a step counts only when all of its members say so.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.graph.ir import TaskName

ATTEMPTS: Final = 3
"""Epochs that break, one after the other without a sum, before the group gives up."""


@final
@dataclass(frozen=True, slots=True)
class MemberOpened:
    """A member's gate is open: it can be told."""

    member: TaskName


@final
@dataclass(frozen=True, slots=True)
class MemberReady:
    """A member's child has met the others; ``needs``: the first version not summed."""

    member: TaskName
    epoch: int
    needs: int


@final
@dataclass(frozen=True, slots=True)
class MemberFailed:
    """A member's child of this epoch is of no use any more."""

    member: TaskName
    epoch: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class StartIsLate:
    """The children of this epoch have had their time to begin."""

    epoch: int


@final
@dataclass(frozen=True, slots=True)
class VersionSummed:
    """A sum of this epoch is there."""

    epoch: int


Event: TypeAlias = (
    MemberOpened | MemberReady | MemberFailed | StartIsLate | VersionSummed
)


@final
@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Let every member end its child, and begin one of this epoch.

    Attributes:
      epoch: which.
      why: the epoch before broke; empty: this one is the first.
    """

    epoch: int
    why: str = ""


@final
@dataclass(frozen=True, slots=True)
class EpochUp:
    """Let every member sum from this version on."""

    epoch: int
    first: int


@final
@dataclass(frozen=True, slots=True)
class GiveUp:
    """Let every member end its child, and send what is summed as messages."""

    why: str


Instruction: TypeAlias = BeginEpoch | EpochUp | GiveUp


@final
class Group:
    """State machine of the group, at its leader.

    Args:
      members: who has a child.

    Example:
      >>> one, two = TaskName("/job:worker/task:0"), TaskName("/job:worker/task:1")
      >>> group = Group([one, two])
      >>> group.handle(MemberOpened(one)), group.handle(MemberOpened(two))
      ([], [BeginEpoch(epoch=1, why='')])
      >>> group.handle(MemberReady(one, 1, needs=5))
      []
      >>> group.handle(MemberReady(two, 1, needs=6))
      [EpochUp(epoch=1, first=5)]
    """

    def __init__(self, members: Iterable[TaskName]) -> None:
        self._members = tuple(members)
        self._opened: set[TaskName] = set()
        self._epoch = 0
        self._ready: dict[TaskName, int] = {}
        self._broken = 0  # epochs, since the last sum
        self._given_up = False

    @property
    def state(self) -> str:
        """``"down"``, ``"starting"``, ``"up"`` or ``"given up"``."""
        if self._given_up:
            return "given up"
        if not self._epoch:
            return "down"
        return "up" if len(self._ready) == len(self._members) else "starting"

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        if isinstance(event, MemberOpened):
            self._opened.add(event.member)
            if self._epoch or not self._opened.issuperset(self._members):
                return []
            return self._begin()
        if self._given_up or event.epoch != self._epoch:
            return []  # its children are ended
        return self._of_epoch(event)

    def _of_epoch(
        self, event: MemberReady | MemberFailed | StartIsLate | VersionSummed
    ) -> list[Instruction]:
        match event:
            case MemberReady(member, epoch, needs):
                self._ready[member] = needs
                if self.state == "starting":
                    return []
                return [EpochUp(epoch, min(self._ready.values()))]
            case MemberFailed(member, _, why):
                return self._break(f"{member}: {why}")
            case StartIsLate():
                missing = [m for m in self._members if m not in self._ready]
                if not missing:
                    return []
                return self._break(f"{', '.join(missing)} did not begin in time")
            case VersionSummed():
                self._broken = 0
                return []

    def _begin(self, why: str = "") -> list[Instruction]:
        self._epoch += 1
        self._ready = {}
        return [BeginEpoch(self._epoch, why)]

    def _break(self, why: str) -> list[Instruction]:
        self._broken += 1
        if self._broken < ATTEMPTS:
            return self._begin(why)
        self._given_up = True
        return [GiveUp(why)]
