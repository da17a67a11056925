"""Batch readers: check data, and cut batches from the leases of a data set."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np

from jgraph.coordination.data.poisson import population
from jgraph.coordination.data.slots import Lease, Part, Piece, Rows, Shuffle, SlotPlan
from jgraph.errors import DataError

Array: TypeAlias = np.ndarray[Any, Any]

SAMPLED: Final = "batch.sampled"
"""Field of a batch that is a sample: bool[capacity], which of its rows are examples."""


def check_lengths(lengths: Mapping[str, int]) -> int:
    """Returns the number of examples that all fields have.

    Raises:
      DataError: there is no field or no example, or two fields differ in length.
    """
    if not lengths:
        raise DataError("the data has no field; give arrays, for example (x, y)")
    (first, length), *others = lengths.items()
    for name, other in others:
        if other != length:
            raise DataError(
                f"data field '{name}' has {other} examples and '{first}' has {length}; "
                "all fields must have the same length along axis 0",
                field=name,
            )
    if not length:
        raise DataError(f"data field '{first}' has no examples", field=first)
    return length


def check_batch_size(batch_size: int, length: int, note: str = "") -> None:
    """Refuses a batch size that ``length`` examples cannot fill.

    Args:
      batch_size: examples of a batch.
      length: how many examples there are.
      note: ends the message where there are too few.

    Raises:
      DataError: less than 1, or more than there are examples.
    """
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}; it must be at least 1")
    if batch_size > length:
        raise DataError(
            f"batch_size is {batch_size}, but the data has only "
            f"{length} example{'s' * (length > 1)}; "
            f"choose batch_size={length} or less{note}",
            batch_size=batch_size,
            examples=length,
        )


@final
@dataclass(frozen=True, slots=True)
class Field:
    """One example of a field: dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class DataFacts(Protocol):
    """What data has."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What there is."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """What an example has, in the order of the batches."""

    @property
    def shuffle(self) -> Shuffle:
        """How it is read best."""


class Reader(DataFacts, Protocol):
    """Data that can be read by row, in any thread but one call at a time."""

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """Returns these examples of a part, in this order; fresh arrays."""


@final
class ArrayReader:
    """Arrays in memory.

    Args:
      arrays: fields by name, all of one length, examples along axis 0.

    Raises:
      DataError: no field, no example, or lengths that differ.

    Example:
      >>> ArrayReader({"x": np.arange(4)}).read(0, np.array([2, 0]))["x"].tolist()
      [2, 0]
    """

    shuffle: Shuffle = "examples"

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays: Mapping[str, Array] = dict(arrays)
        length = check_lengths({name: len(a) for name, a in self.arrays.items()})
        self.parts: tuple[Part, ...] = (Part("the arrays", length),)
        self.fields: Mapping[str, Field] = {
            name: Field(a.dtype, a.shape[1:]) for name, a in self.arrays.items()
        }

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``."""
        return {name: a.take(rows, axis=0) for name, a in self.arrays.items()}


@final
class LeasedBatches:
    """Reads the batches of leases.

    What is shuffled by slots is read a lease at a time, else batch by batch. Where each
    batch is a sample, it is drawn anew each time: by the operating system's generator,
    of which no seed and no earlier sample tells anything. It is padded with zeros to
    the capacity of the plan, and has the field ``SAMPLED``.

    Args:
      reader: the data.
      plan: its slots.
      replica: whose batches they are.
      generator: draws samples, in tests.

    Example:
      >>> reader = ArrayReader({"x": np.arange(8)})
      >>> plan = SlotPlan(reader.parts, 2, seed=0, shuffle="none")
      >>> LeasedBatches(reader, plan).read(Lease(0, 0, 1, 2), 2)["x"].tolist()
      [4, 5]
    """

    def __init__(
        self,
        reader: Reader,
        plan: SlotPlan,
        replica: int = 0,
        generator: np.random.Generator | None = None,
    ) -> None:
        self._replica = replica
        if plan.workers and generator is None:
            key = secrets.randbits(128)
            generator = np.random.Generator(np.random.Philox(key=key))
        self._generator = generator if plan.workers else None
        self._reader = reader
        self._plan = plan
        self._leases: dict[Lease, dict[str, Array]] = {}

    @property
    def by_lease(self) -> bool:
        """Whether all batches of a lease are read together."""
        return self._plan.shuffle == "slots" and self._generator is None

    def has_read(self, lease: Lease) -> bool:
        """Whether the batches of a lease are in memory, and need only be cut out."""
        return lease in self._leases

    def fetch(self, lease: Lease) -> None:
        """Reads all batches of a lease, which are in memory until the last is taken.

        In any thread, also while batches of another lease are taken.
        """
        pieces = self._plan.where(lease, lease.first, lease.batches)
        self._leases[lease] = self._joined(pieces)

    def read(self, lease: Lease, index: int) -> dict[str, Array]:
        """Returns batch ``index`` of the lease's slot; the caller owns its arrays.

        No two batches share a byte, so what is read together needs no copy.
        """
        size = self._plan.batch_size
        if self._generator is not None:
            return self._sample(self._generator)
        if not self.by_lease:
            return self._joined(self._plan.where(lease, index))
        if lease not in self._leases:
            self.fetch(lease)
        first, arrays = (index - lease.first) * size, self._leases[lease]
        if index == lease.first + lease.batches - 1:
            del self._leases[lease]
        return {n: a[first : first + size] for n, a in arrays.items()}

    def read_together(self, leases: Sequence[Lease], most: int) -> dict[str, Array]:
        """Returns all batches of the leases in arrays that ``most`` would fill.

        What they do not fill are copies of the first.
        """
        size, filled = self._plan.batch_size, 0
        together: dict[str, Array] = {}
        for lease in leases:
            for index in range(lease.first, lease.first + lease.batches):
                for name, batch in self.read(lease, index).items():
                    if name not in together:
                        shape = most * size, *batch.shape[1:]
                        together[name] = np.resize(batch, shape)
                    together[name][filled : filled + size] = batch
                filled += size
        return together

    def _sample(self, generator: np.random.Generator) -> dict[str, Array]:
        plan, room = self._plan, self._plan.capacity
        most = population(plan.examples, plan.workers, self._replica)
        count = min(room, int(generator.binomial(most, plan.rate)))
        chosen = generator.choice(most, count, replace=False, shuffle=False)
        rows = self._replica + plan.workers * chosen.astype(np.int64)
        read = self._joined(plan.pieces(rows)) if count else {}
        sample: dict[str, Array] = {}
        for name, field in self._reader.fields.items():
            sample[name] = np.zeros((room, *field.shape), field.dtype)
            if count:
                sample[name][:count] = read[name]
        sample[SAMPLED] = np.arange(room) < count
        return sample

    def _joined(self, pieces: Sequence[Piece]) -> dict[str, Array]:
        read = [self._reader.read(piece.part, piece.rows) for piece in pieces]
        if len(pieces) == 1:
            return read[0]
        count = sum(len(piece.rows) for piece in pieces)
        joined = {
            name: np.empty((count, *array.shape[1:]), array.dtype)
            for name, array in read[0].items()
        }
        for piece, arrays in zip(pieces, read, strict=True):
            for name, array in arrays.items():
                joined[name][piece.places] = array
        return joined
