"""Data slots: how a data set is cut, and in which order the pieces come.

A slot is some batches of one part of the data: a range of examples in memory, or of one
file. What lies where is a pure function of (parts, batch size, seed, epoch), so that
every task knows it without being told, and any position is reached without walking.
"""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

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
    """Where a slot lies: batches ``[first, first + batches)`` of part ``part``."""

    part: int
    first: int
    batches: int


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

    Within a part the examples of a last partial batch are left out.

    Args:
      parts: what there is.
      batch_size: examples per batch.
      seed: with the number of the epoch it decides every order.
      shuffle: what is shuffled; ``"examples"`` only where there is one part.
      slot_batches: batches per slot; the last slot of a part has what is left.

    Raises:
      DataError: no part has a whole batch.

    Example:
      >>> plan = SlotPlan([Part("data", 100)], batch_size=10, seed=0, slot_batches=4)
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
    ) -> None:
        self.parts = tuple(parts)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.slot_batches = slot_batches
        self._whole: tuple[int, Rows] = -1, np.empty(0, np.int64)
        self._batches = [part.examples // batch_size for part in self.parts]
        self.batches_per_epoch = sum(self._batches)
        if not self.batches_per_epoch:
            most = max((part.examples for part in self.parts), default=0)
            what = "the data has" if len(self.parts) < 2 else "no file of the data has"
            raise DataError(
                f"batch_size is {batch_size}, but {what} more than {most} examples; "
                f"choose batch_size={most} or less",
                batch_size=batch_size,
                examples=most,
            )
        slots = [-(-batches // slot_batches) for batches in self._batches]
        # First slot, and first batch, of each part.
        self._slots = [0, *itertools.accumulate(slots)]
        self._firsts = [0, *itertools.accumulate(self._batches)]

    def __len__(self) -> int:
        """Slots per epoch."""
        return self._slots[-1]

    def order(self, epoch: int) -> Rows:
        """Returns the slots in the order in which they are dealt in an epoch."""
        if self.shuffle == "slots":
            return epoch_order(len(self), self.seed, epoch)
        return np.arange(len(self))

    def span(self, slot: int) -> Span:
        """Returns where a slot lies."""
        part = bisect.bisect_right(self._slots, slot) - 1
        first = (int(slot) - self._slots[part]) * self.slot_batches
        return Span(part, first, min(self.slot_batches, self._batches[part] - first))

    def number(self, epoch: int, slot: int, index: int) -> int:
        """Returns the number of a slot's batch, different for each batch ever dealt."""
        span = self.span(slot)
        in_epoch = self._firsts[span.part] + span.first + index
        return epoch * self.batches_per_epoch + in_epoch

    def name(self, slot: int) -> str:
        """Returns what to call a slot in a message."""
        span = self.span(slot)
        part = self.parts[span.part].name
        if self.shuffle == "examples":
            return f"data slot {slot} ({part})"  # other examples in each epoch
        first = span.first * self.batch_size
        last = first + span.batches * self.batch_size
        return f"data slot {slot} ({part}, {first} to {last - 1})"

    def deadly(self, lease: Lease, deaths: int) -> DataSlotError:
        """Returns the error that ends a run whose data ends workers.

        Args:
          lease: the batch, alone.
          deaths: how many workers it ended.
        """
        rows = self.rows(lease.epoch, lease.slot)[lease.first * self.batch_size :]
        examples = rows[: self.batch_size].tolist()
        named = ", ".join(map(str, examples[:_NAMED]))
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

    def rows(self, epoch: int, slot: int) -> Rows:
        """Returns the examples of a slot: rows of its part, batch by batch.

        Shuffled by slots, the last slot of a part chooses also from the examples that
        do not fill a batch.
        """
        span = self.span(slot)
        return self.parts[span.part].first + self._within(epoch, slot, span)

    def where(self, lease: Lease, index: int, batches: int = 1) -> tuple[int, Rows]:
        """Returns the part and the rows of batches of the lease's slot, from one on."""
        rows = self.rows(lease.epoch, lease.slot)
        taken = rows[index * self.batch_size : (index + batches) * self.batch_size]
        return self.span(lease.slot).part, taken

    def _within(self, epoch: int, slot: int, span: Span) -> Rows:
        if self.shuffle == "examples":
            whole = self._epoch_order(epoch)
            return whole[span.first * self.batch_size :][
                : span.batches * self.batch_size
            ]
        first = span.first * self.batch_size
        end = first + span.batches * self.batch_size
        if self.shuffle == "none":
            return np.arange(first, end)
        if span.first + span.batches == self._batches[span.part]:
            end = self.parts[span.part].examples
        mixed = epoch_order(end - first, self.seed, epoch, int(slot))
        return first + mixed[: span.batches * self.batch_size]

    def _epoch_order(self, epoch: int) -> Rows:
        if self._whole[0] != epoch:
            order = epoch_order(self.parts[0].examples, self.seed, epoch)
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
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "SlotPlan":
        """Makes the plan that ``to_dict`` described."""
        return cls(
            [Part(str(name), *map(int, rows)) for name, *rows in plain["parts"]],
            int(plain["batch_size"]),
            int(plain["seed"]),
            shuffle=plain["shuffle"],
            slot_batches=int(plain["slot_batches"]),
        )
