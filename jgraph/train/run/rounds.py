"""Rounds of a federated run: who took part in each, who was dropped, and why."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final, overload

from jgraph.cluster.loop_messages import LoopReport
from jgraph.coordination.sync.rounds import NOT_FINITE
from jgraph.graph.device import TaskName
from jgraph.view import markup
from jgraph.view.units import bytes_text


@final
@dataclass(frozen=True, slots=True)
class Round:
    """A round of a federated run: of all who were drawn, or of one client.

    Attributes:
      number: updates of the model with this one; the ``step`` of ``Run.metrics``.
      members: clients whose contributions count.
      dropped: other clients that were invited, and why nothing of them counts:
        ``"lost"``, ``"late"``, ``"not finite"``: it has NaN or infinity, or ``"gave
        up"`` its part in a secure sum.
      steps: that the members took, all together.
      nbytes: that parameters and contributions of the members have on the way.
      wait_s: seconds from the first contribution until the round was over.
      epsilon: what all rounds up to this one have spent of privacy, at most: computing
        it takes longer than a round, so it is that of the next round of which it was
        computed; exact of the last one of a run that has ended. None: without
        ``privacy=``, or not computed yet.
      void: why it was given up, with ``secure_sum=``: nothing of it counts, and it was
        begun again under the same number. Empty: it was not.
      not_finite: with ``secure_sum=``: how many members added nothing, as what they had
        is not finite. Nobody sees who.
    """

    number: int
    members: tuple[TaskName, ...]
    dropped: Mapping[TaskName, str]
    steps: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    epsilon: float | None = None
    void: str = ""
    not_finite: int = 0

    def __str__(self) -> str:
        if self.void:
            return f"round {self.number}  {self.void}"
        epsilon = "" if self.epsilon is None else f"  epsilon {self.epsilon:.3g}"
        out = "".join(f"; {text}" for text in self.left_out)
        return (
            f"round {self.number}  {len(self.members)} clients  {self.steps} steps  "
            f"{bytes_text(self.nbytes)}  waited {self.wait_s:.1f} s{epsilon}{out}"
        )

    @property
    def left_out(self) -> list[str]:
        """What was left out, in words, and why."""
        out = [f"{task} {why}" for task, why in self.dropped.items()]
        if count := self.not_finite:
            out.append(f"{count} not finite, and nobody sees who")
        return out


@final
class Rounds(Sequence[Round]):
    """The rounds of a run so far; a table in a notebook.

    Args:
      rounds: in their order.
      alone: of whom each round is one, where rounds wait for nobody; None: they are of
        several.
    """

    def __init__(
        self, rounds: Sequence[Round] = (), alone: "Alone | None" = None
    ) -> None:
        self._rounds, self.alone = tuple(rounds), alone

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Round]: ...
    def __getitem__(self, index: int | slice) -> Round | Sequence[Round]:
        return self._rounds[index]

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds)

    def __repr__(self) -> str:
        return "\n".join(map(str, self._rounds)) or "no round is over"

    def _repr_html_(self) -> str:
        is_private = any(r.epsilon is not None for r in self._rounds)
        columns = [
            *("round", "clients", "dropped", "steps", "bytes", "waited"),
            *(["epsilon"] * is_private),
        ]
        rows = [
            (
                r.number,
                len(r.members),
                r.void or ", ".join(r.left_out),
                r.steps,
                bytes_text(r.nbytes),
                f"{r.wait_s:.1f} s",
                *(("" if r.epsilon is None else f"{r.epsilon:.3g}",) * is_private),
            )
            for r in self._rounds
        ]
        return markup.table(columns, rows)


@final
@dataclass(frozen=True, slots=True)
class Alone:
    """Clients whose rounds wait for nobody.

    Attributes:
      clients: by the number of the replica.
      nbytes: that one has on the way in a round.
    """

    clients: Mapping[int, TaskName]
    nbytes: int

    def rounds(
        self, numbers: Iterable[int], replicas: Iterable[int], steps: Iterable[int]
    ) -> Rounds:
        """Returns rounds of one client each, in this order.

        Args:
          numbers: of the updates.
          replicas: of whom each is.
          steps: of each; none: what its client has is not finite.

        Example:
          >>> alone = Alone({0: TaskName("a"), 1: TaskName("b")}, nbytes=8)
          >>> [(r.members, r.left_out) for r in alone.rounds([1, 2], [1, 0], [5, 0])]
          [(('b',), []), ((), ['a not finite'])]
        """
        found = []
        for number, replica, count in zip(numbers, replicas, steps, strict=True):
            who = self.clients[replica]
            dropped = {} if count else {who: NOT_FINITE}
            nbytes = self.nbytes if count else 0
            members = (who,) if count else ()
            found.append(Round(number, members, dropped, count, nbytes))
        return Rounds(found)


@final
class RoundBook:
    """Learns from the reports of a run who took part in its rounds."""

    def __init__(self) -> None:
        self._rounds: dict[int, Round] = {}
        self._voids: list[Round] = []
        self._clients: dict[int, TaskName] = {}
        self.nbytes = 0
        """That one member has on the way in a round."""

    def note(self, report: LoopReport, *, together: bool = True) -> None:
        """Takes a report of a loop, which trains with others or alone."""
        if not together and len(report.steps):
            self._clients[report.replica] = TaskName(report.task)
        if report.restored is not None:
            last = report.restored.back_to
            self._rounds = {n: r for n, r in self._rounds.items() if n <= last}
            self._voids = [one for one in self._voids if one.number <= last]
        for record, wait_s in report.rounds:
            members = tuple(map(TaskName, record.members))
            dropped = {TaskName(task): why for task, why in record.dropped.items()}
            nbytes, number = len(members) * self.nbytes, record.number + 1
            one = Round(number, members, dropped, 0, nbytes, wait_s, void=record.void)
            if one.void and one not in self._voids:
                self._voids.append(one)
            elif not one.void:
                self._rounds[number] = one

    def rounds(self) -> Rounds:
        """Returns those that are over; one that was given up is before its number."""
        alone = Alone(dict(self._clients), self.nbytes) if self._clients else None
        # Sorting keeps the order of those with one number.
        rounds = sorted([*self._voids, *self._rounds.values()], key=lambda r: r.number)
        return Rounds(rounds, alone)


def with_steps(rounds: Rounds, means: Mapping[int, float]) -> Rounds:
    """Returns rounds with the steps of their members.

    Args:
      rounds: without these.
      means: of the steps of a member, by the number of the round.

    Example:
      >>> rounds = Rounds([Round(1, (TaskName("a"), TaskName("b")), {})])
      >>> with_steps(rounds, {1: 2.5})[0].steps
      5
    """
    return Rounds(
        [
            replace(r, steps=round(means.get(r.number, 0.0) * len(r.members)))
            for r in rounds
        ]
    )


def with_not_finite(rounds: Rounds, counts: Mapping[int, float]) -> Rounds:
    """Returns rounds with how many members added nothing to a secure sum.

    Args:
      rounds: without these.
      counts: by the number of the round.

    Example:
      >>> rounds = Rounds([Round(1, (TaskName("a"), TaskName("b")), {})])
      >>> with_not_finite(rounds, {1: 1.0})[0].left_out
      ['1 not finite, and nobody sees who']
    """
    return Rounds([replace(r, not_finite=int(counts.get(r.number, 0))) for r in rounds])


def with_epsilon(rounds: Rounds, readings: Mapping[int, float]) -> Rounds:
    """Returns rounds with what they have spent of privacy.

    Args:
      rounds: without that.
      readings: of epsilon, by the number of the round after which each was taken.

    Example:
      >>> rounds = Rounds([Round(n, (TaskName("a"),), {}) for n in (1, 2, 3)])
      >>> [r.epsilon for r in with_epsilon(rounds, {2: 1.5})]
      [1.5, 1.5, None]
    """
    later = sorted(readings)
    with_it = []
    for one in rounds:
        place = bisect_left(later, one.number)
        is_over = place < len(later) and not one.void
        epsilon = readings[later[place]] if is_over else None
        with_it.append(replace(one, epsilon=epsilon))
    return Rounds(with_it)
