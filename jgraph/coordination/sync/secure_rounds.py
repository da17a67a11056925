"""Secure rounds: federated rounds of which the ps see sums alone.

Part of the ``Arbiter``. A round is tried as often as it takes: each try has a number of
its own, new secrets, and the members that were invited when it began. They agree on
masks before they train; who is gone by the end is taken out with the help of the
others, and then the update is decided. A try that becomes void has told nothing of
anybody; what was contributed to it is dropped.

    none --(enough invited)--> keys --> exchange --> masked --> reveal --> unmasking
    unmasking --(unmasked)--> known --(decided)--> none     at any step: void --> none
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from jgraph.coordination.secure.sum_round import (
    Came,
    Instruction,
    MemberLost,
    Step,
    SumRound,
    TimeIsUp,
    Unmask,
    Void,
)
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName

Stage: TypeAlias = Literal[Step, "none", "unmasking", "known"]

MOST_VOIDS: Final = 3
"""So many tries of one round in a row that are void end the run."""


@final
@dataclass(frozen=True, slots=True)
class SumRule:
    """How the members of a round are summed.

    Attributes:
      threshold: shares that make a secret of a member.
      neighbours: of each member, at most.
      words: values of a contribution.
    """

    threshold: int
    neighbours: int
    words: int = 0


def sum_rule(threshold: int | None, neighbours: int, members: int) -> SumRule:
    """Returns how rounds of so many members are summed.

    Args:
      threshold: neighbours that put a secret together; None: two thirds of them.
      neighbours: of each member, at most.
      members: of a round, at most.

    Raises:
      ConfigError: that is not secure, or no round would come to a sum.

    Example:
      >>> sum_rule(None, 10, members=50), sum_rule(None, 10, members=4).threshold
      (SumRule(threshold=6, neighbours=10, words=0), 2)
    """
    near = min(neighbours, members - 1)
    if near < 2:
        raise ConfigError(
            f"a secure sum of {members} client{'s' * (members != 1)} hides nothing, or "
            "has no result: each needs two others; give rounds of 3 clients or more"
        )
    fits = max(near // 2 + 1, 2 * near // 3)
    number = fits if threshold is None else threshold
    if number > near:
        raise ConfigError(
            f"SecureSum(threshold={number}) needs as many neighbours of each client, "
            f"and in a round of {members} each has {near}; write threshold={fits}, or "
            "draw more clients"
        )
    if 2 * number <= near:
        raise ConfigError(
            f"SecureSum(threshold={number}) with {near} neighbours of each client: who "
            "sums could ask one half for one secret of a client, and the other half "
            f"for the other; write threshold={near // 2 + 1} or more"
        )
    return SumRule(number, neighbours)


@final
@dataclass(frozen=True, slots=True)
class SumCame:
    """A replica has sent what it sends in a step of the sum of this number."""

    replica: str
    number: int
    step: Step


@final
@dataclass(frozen=True, slots=True)
class SumStepLate:
    """A step of the sum of this number has been waited for too long."""

    number: int
    step: Step


@final
@dataclass(frozen=True, slots=True)
class Unmasked:
    """What takes the masks of the sum of this number away is known."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class SumFailed:
    """It is not: shares are false."""

    number: int
    reason: str


Event: TypeAlias = SumCame | SumStepLate | Unmasked | SumFailed


@final
class SecureRounds:
    """The secure sums of a run, one try after the other.

    Args:
      rule: how members are summed.
      tasks: of each replica, by its program handle; a member is called by its task.
      least: members of a sum, at least.
      draw: returns a random number that nobody knows before; decides neighbours.

    Example:
      >>> tasks = {name: TaskName(name.upper()) for name in "abc"}
      >>> rounds = SecureRounds(SumRule(2, 10), tasks, least=2, draw=lambda: 0)
      >>> rounds.open("abc")
      >>> said = [rounds.handle(SumCame(name, 1, "keys")) for name in "abc"]
      >>> said[-1][0]
      PassKeys(member='A', neighbours=('B', 'C'))
    """

    def __init__(
        self,
        rule: SumRule,
        tasks: Mapping[str, TaskName],
        *,
        least: int,
        draw: Callable[[], int],
    ) -> None:
        self._rule = rule
        self._tasks = tasks
        self._replicas = {task: replica for replica, task in tasks.items()}
        self._draw = draw
        self._sum: SumRound | None = None
        self._members: frozenset[str] = frozenset()
        self._with_keys: set[str] = set()
        self._ends: Literal["unmasking", "known"] = "unmasking"
        self.least = max(least, rule.threshold + 1)
        """Members of a sum, at least."""
        self.number = 0
        """Of the newest try."""
        self.voids = 0
        """Tries of this round that became void."""
        self.inside: tuple[str, ...] = ()
        """Replicas that are in the sum, once that is decided."""

    @property
    def stage(self) -> Stage:
        """What the try waits for."""
        if self._sum is None:
            return "none"
        return self._ends if self._sum.step == "over" else self._sum.step

    @property
    def tasks(self) -> tuple[TaskName, ...]:
        """The members of the newest try."""
        return tuple(sorted(self._tasks[name] for name in self._members))

    def open(self, replicas: Iterable[str]) -> None:
        """A try begins with these."""
        self.number += 1
        self._members, self._with_keys = frozenset(replicas), set()
        self._ends, self.inside = "unmasking", ()
        self._sum = SumRound(
            self.tasks,
            neighbours=self._rule.neighbours,
            threshold=self._rule.threshold,
            least=self.least,
            seed=self._draw(),
        )

    def close(self) -> None:
        """The round is decided, and the next one begins."""
        self._forget()
        self.voids = 0

    def has_begun(self, replica: str) -> bool:
        """Whether a replica has sent its keys."""
        return replica in self._with_keys

    def takes(self, replica: str) -> bool:
        """Whether what a replica contributes now has the masks of this try."""
        is_masked = self.stage in {"masked", "reveal", "unmasking", "known"}
        return is_masked and replica in self._members

    def contributed(self, replica: str) -> Sequence[Instruction]:
        """What a replica contributes is there."""
        return self.handle(SumCame(replica, self.number, "masked"))

    def lost(self, replica: str) -> Sequence[Instruction]:
        """A replica went away, or takes no more part."""
        if self._sum is None or replica not in self._members:
            return []
        return self._say(self._sum.handle(MemberLost(self._tasks[replica])))

    def time_is_up(self) -> Sequence[Instruction]:
        """The round has been waited for too long: those who are there are enough."""
        if self._sum is None:
            return []
        return self._say(self._sum.handle(TimeIsUp(self._sum.step)))

    def handle(self, event: Event) -> Sequence[Instruction]:
        """Takes an event; returns what to do. Of an earlier try nothing counts."""
        if self._sum is None or event.number != self.number:
            return []
        match event:
            case SumCame(replica, _, step):
                if step == "keys":
                    self._with_keys.add(replica)
                return self._say(self._sum.handle(Came(step, self._tasks[replica])))
            case SumStepLate(_, step):
                return self._say(self._sum.handle(TimeIsUp(step)))
            case Unmasked():
                self._ends = "known"
                return []
            case SumFailed(_, reason):
                return self._say([Void(f"the round is void: {reason}")])

    def _say(self, instructions: Sequence[Instruction]) -> Sequence[Instruction]:
        for one in instructions:
            match one:
                case Unmask(inside, _):
                    self.inside = tuple(self._replicas[TaskName(n)] for n in inside)
                case Void():
                    self._forget()
                    self.voids += 1
        return instructions

    def _forget(self) -> None:
        self._sum, self._members, self._with_keys = None, frozenset(), set()
