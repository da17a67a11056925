"""Data slots: how a data set is cut into units of dealing, and their order.

The parts of the data, such as files, follow each other: their examples are numbered
through. A slot is some batches that are neighbours there, of as many parts as these lie
in, so that only the last partial batch of all is left out. What lies where is a pure
function of (parts, batch size, seed, epoch), so that every task knows it without being
told, and any position is reached without walking.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

from jgraph.coordination.data.poisson import capacity, sampling_rate
from jgraph.errors import DataError, DataSlotError

Shuffle: TypeAlias = Literal["examples", "slots", "none"]
"""Over the whole of the data; slots and the examples of each, as files are read best;
not at all."""

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_SLOT_BATCHES = 16
DEATHS: Final = 3
"""A batch that ended so many workers, one after the other, ends the run."""
_NAMED = 8


def epoch_order(length: int, seed: int, *epoch: int) -> Rows:
    """Returns the order of ``length`` examples in one epoch (int64 permutation).

    Args:
      length: how many.
      seed: any whole number.
      *epoch: number of the epoch, and of a piece in it where it has several.

    Example:
      >>> bool((epoch_order(5, 7, 0) == epoch_order(5, 7, 0)).all())
      True
    """
    entropy = np.random.SeedSequence([seed & (2**64 - 1), *epoch])
    return np.random.Generator(np.random.PCG64(entropy)).permutation(length)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the data with a name for messages: a file, or all there is.

    ``first`` is the row of its first example; those before it are left out.
    """

    name: str
    examples: int
    first: int = 0


@final
@dataclass(frozen=True, slots=True)
class Span:
    """Where a slot lies: batches ``[first, first + batches)`` of an epoch in order."""

    first: int
    batches: int


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one part; of some examples those at ``places``."""

    part: int
    rows: Rows
    places: Rows


@final
@dataclass(frozen=True, slots=True)
class Lease:
    """Batches ``[first, first + batches)`` of one slot in one epoch."""

    epoch: int
    slot: int
    first: int
    batches: int

    def cut(self, batches: int) -> tuple["Lease", "Lease | None"]:
        """Returns the first ``batches`` batches, and the rest if there is one."""
        if batches >= self.batches:
            return self, None
        rest = Lease(
            self.epoch, self.slot, self.first + batches, self.batches - batches
        )
        return Lease(self.epoch, self.slot, self.first, batches), rest

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Yields its batches: (epoch, slot, index)."""
        for index in range(self.first, self.first + self.batches):
            yield self.epoch, self.slot, index


@final
class SlotPlan:
    """The slots of a data set, the same for every epoch, and their order in each.

    The examples of a last partial batch are left out.

    Args:
      parts: what there is.
      batch_size: examples per batch.
      seed: with the number of the epoch it decides every order.
      shuffle: what is shuffled.
      slot_batches: batches per slot; the last slot has what is left.
      data: tells data of equal sizes apart; empty: nothing does.
      workers: who draw each batch as a Poisson sample, so many; 0: batches are cut.

    Raises:
      DataError: there are not as many examples as a batch has.

    Example:
      >>> parts = [Part("a", 60), Part("b", 45)]
      >>> plan = SlotPlan(parts, batch_size=10, seed=0, slot_batches=4)
      >>> [plan.span(slot).batches for slot in plan.order(epoch=0)]
      [4, 4, 2]
    """

    def __init__(
        self,
        parts: Sequence[Part],
        batch_size: int,
        seed: int,
        *,
        shuffle: Shuffle = "examples",
        slot_batches: int = _SLOT_BATCHES,
        data: str = "",
        workers: int = 0,
    ) -> None:
        self.parts = tuple(parts)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.slot_batches = slot_batches
        self.data = data
        self.workers = workers
        self._whole: tuple[int, Rows] = -1, np.empty(0, np.int64)
        # Number of the first example of each part, and of all.
        self._ends = np.cumsum([0, *(part.examples for part in self.parts)])
        self.examples = int(self._ends[-1])
        if not 0 <= workers <= self.examples:
            raise DataError(
                f"{workers} workers cannot draw samples of {self.examples} examples, "
                "each of its own; use fewer workers",
                examples=self.examples,
            )
        self.batches_per_epoch = self.examples // batch_size
        if not self.batches_per_epoch:
            raise DataError(
                f"batch_size is {batch_size}, but the data has only {self.examples} "
                f"example{'s' * (self.examples != 1)}; "
                f"choose batch_size={self.examples} or less",
                batch_size=batch_size,
                examples=self.examples,
            )

    @property
    def rate(self) -> float:
        """Where batches are samples: the probability of an example to be in one."""
        return sampling_rate(self.examples, self.batch_size, self.workers)

    @property
    def capacity(self) -> int:
        """Where batches are samples: the most examples of one."""
        return capacity(self.examples, self.batch_size, self.workers)

    def __len__(self) -> int:
        """Slots per epoch."""
        return len(range(0, self.batches_per_epoch, self.slot_batches))

    def order(self, epoch: int) -> Rows:
        """Returns the slots in the order in which they are dealt in an epoch."""
        if self.shuffle == "slots":
            return epoch_order(len(self), self.seed, epoch)
        return np.arange(len(self))

    def span(self, slot: int) -> Span:
        """Returns where a slot lies."""
        first = int(slot) * self.slot_batches
        return Span(first, min(self.slot_batches, self.batches_per_epoch - first))

    def number(self, epoch: int, slot: int, index: int) -> int:
        """Returns the number of a slot's batch, different for each batch ever dealt."""
        return epoch * self.batches_per_epoch + self.span(slot).first + index

    def name(self, slot: int) -> str:
        """Returns what to call a slot in a message."""
        span = self.span(slot)
        if self.workers or self.shuffle == "examples":  # other examples in each epoch
            return f"data slot {slot} ({self.parts[0].name})"
        first = span.first * self.batch_size
        pieces = self.pieces(np.arange(first, first + span.batches * self.batch_size))
        lies = [
            f"{self.parts[p.part].name}, {p.rows[0]} to {p.rows[-1]}" for p in pieces
        ]
        more = f"; and {len(lies) - 2} more" if len(lies) > 2 else ""
        return f"data slot {slot} ({'; '.join(lies[:2])}{more})"

    def deadly(self, lease: Lease, deaths: int) -> DataSlotError:
        """Returns the error that ends a run whose data ends workers.

        Args:
          lease: the batch, alone.
          deaths: how many workers it ended.
        """
        examples: list[int] = []
        if not self.workers:  # else nobody knows them
            rows = self.rows(lease.epoch, lease.slot)[lease.first * self.batch_size :]
            examples = rows[: self.batch_size].tolist()
        named = ", ".join(self._name_of(row) for row in examples[:_NAMED])
        named = named or "they were drawn there"
        more = len(examples) - _NAMED
        return DataSlotError(
            f"batch {lease.first} of {self.name(lease.slot)} of epoch {lease.epoch} "
            f"ended {deaths} workers, one after the other; look at its examples "
            f"({named}{f' and {more} more' if more > 0 else ''}) and at the logs of "
            "the workers, and take them out or mend them",
            slot=lease.slot,
            epoch=lease.epoch,
            examples=examples,
        )

    def _name_of(self, example: int) -> str:
        (piece,) = self.pieces(np.array([example]))
        row, part = int(piece.rows[0]), self.parts[piece.part]
        return str(row) if len(self.parts) == 1 else f"{row} of {part.name}"

    def rows(self, epoch: int, slot: int) -> Rows:
        """Returns the examples of a slot, batch by batch, by their numbers.

        Shuffled by slots, the last slot chooses also from the examples that do not fill
        a batch.
        """
        span = self.span(slot)
        first = span.first * self.batch_size
        count = span.batches * self.batch_size
        if self.shuffle == "examples":
            return self._epoch_order(epoch)[first : first + count]
        if self.shuffle == "none":
            return np.arange(first, first + count)
        is_last = span.first + span.batches == self.batches_per_epoch
        end = self.examples if is_last else first + count
        mixed = epoch_order(end - first, self.seed, epoch, int(slot))
        return first + mixed[:count]

    def pieces(self, examples: Rows) -> list[Piece]:
        """Returns in which parts examples lie, by their numbers."""
        if len(self.parts) == 1:
            rows = self.parts[0].first + examples
            return [Piece(0, rows, np.arange(len(rows)))]
        ends = [examples.min(), examples.max()] if len(examples) else [0, 0]
        first, last = (np.searchsorted(self._ends, ends, "right") - 1).tolist()
        if first == last:  # as most slots are
            rows = examples + (self.parts[first].first - self._ends[first])
            return [Piece(first, rows, np.arange(len(rows)))]
        part_of = np.searchsorted(self._ends, examples, "right") - 1
        found = []
        for number in np.unique(part_of).tolist():
            places = np.flatnonzero(part_of == number)
            rows = examples[places] - self._ends[number] + self.parts[number].first
            found.append(Piece(number, rows, places))
        return found

    def where(self, lease: Lease, index: int, batches: int = 1) -> list[Piece]:
        """Returns where batches of the lease's slot lie, from one on."""
        rows = self.rows(lease.epoch, lease.slot)
        taken = rows[index * self.batch_size : (index + batches) * self.batch_size]
        return self.pieces(taken)

    def _epoch_order(self, epoch: int) -> Rows:
        if self._whole[0] != epoch:
            order = epoch_order(self.examples, self.seed, epoch)
            self._whole = epoch, order
        return self._whole[1]

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        return {
            "parts": [[p.name, p.examples, p.first] for p in self.parts],
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "slot_batches": self.slot_batches,
            "data": self.data,
            **({"workers": self.workers} if self.workers else {}),
        }

    def is_that_of(self, position: Mapping[str, Any]) -> bool:
        """Whether a position, as in ``BatchBook.position``, is one in these slots."""
        plain, mine = position["plan"], self.to_dict()
        if "data" not in plain:  # written when each part had slots of its own
            del mine["data"]
            return bool(plain == mine and len(self.parts) == 1)
        return bool(plain == mine)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "SlotPlan":
        """Makes the plan that ``to_dict`` described."""
        return cls(
            [Part(str(name), *map(int, rows)) for name, *rows in plain["parts"]],
            int(plain["batch_size"]),
            int(plain["seed"]),
            shuffle=plain["shuffle"],
            slot_batches=int(plain["slot_batches"]),
            data=str(plain.get("data", "")),
            workers=int(plain.get("workers", 0)),
        )
