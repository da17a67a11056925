"""Rounds of a client on its own data: each is one example of a reader.

What a federated client trains on in a round is a function of its data, the seed and the
number of the round; nobody else needs to know it. The batches of a round lie one after
the other, filled up with zeros to as many as any client has, with the number of those
that count and that of the client's examples.
"""

from collections.abc import Mapping
from typing import Final, final

import numpy as np

from jgraph.coordination.data.slots import Part, Rows, Shuffle, SlotPlan, epoch_order
from jgraph.errors import SourceError
from jgraph.runtime.data.batches import Array, Field, Reader

DATA: Final = "data/"
"""Prefix of the fields of the client's data."""

EXAMPLES, STEPS = "round/examples", "round/steps"

ROUNDS: Final = 1 << 20
"""After so many rounds their orders come again."""


def steps_of(examples: int, epochs: int, batch_size: int) -> int:
    """Returns the batches of a round of so many epochs; what is left is left out.

    Example:
      >>> steps_of(25, epochs=2, batch_size=10)
      5
    """
    return epochs * examples // batch_size


@final
class RoundReader:
    """The rounds of a client; see ``Reader``.

    Args:
      reader: the client's data.
      epochs: of a round.
      batch_size: examples of a step.
      steps: of a round, at most.
      seed: decides the order of the examples.
      each: clients of a round: so many numbers that are dealt are one round.

    Raises:
      SourceError: a round would have no step.

    Example:
      >>> from jgraph.runtime.data.batches import ArrayReader
      >>> own = ArrayReader({"x": np.arange(4)})
      >>> rounds = RoundReader(own, epochs=1, batch_size=2, steps=3, seed=0)
      >>> found = rounds.read(0, np.array([7]))
      >>> found["data/x"].shape, found["round/steps"].tolist()
      ((1, 3, 2), [2])
    """

    shuffle: Shuffle = "none"

    def __init__(
        self,
        reader: Reader,
        *,
        epochs: int,
        batch_size: int,
        steps: int,
        seed: int,
        each: int = 1,
    ) -> None:
        self._reader, self._each = reader, each
        self._epochs, self._seed = epochs, seed
        self._examples = sum(part.examples for part in reader.parts)
        self._size, self._most = batch_size, steps
        self._steps = min(steps_of(self._examples, epochs, batch_size), steps)
        if not self._steps:
            raise SourceError(
                f"the data has {self._examples} examples here, which in {epochs} "
                f"epochs make no batch of {batch_size}; give a smaller batch_size, or "
                "more local_epochs"
            )
        self._plan = SlotPlan(reader.parts, 1, seed, shuffle="none")
        self.parts = (Part("rounds", ROUNDS),)
        self.fields: Mapping[str, Field] = {
            **{
                DATA + name: Field(each.dtype, (steps, batch_size, *each.shape))
                for name, each in reader.fields.items()
            },
            EXAMPLES: Field(np.dtype(np.float32), ()),
            STEPS: Field(np.dtype(np.int32), ()),
        }

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``; one round at a time."""
        found = [self._round(number) for number in rows.tolist()]
        return {name: np.stack([one[name] for one in found]) for name in self.fields}

    def _round(self, number: int) -> dict[str, Array]:
        orders = [
            epoch_order(self._examples, self._seed, number // self._each, epoch)
            for epoch in range(self._epochs)
        ]
        count = self._steps * self._size
        examples = np.concatenate(orders)[:count]
        values: dict[str, Array] = {
            EXAMPLES: np.array(self._examples, np.float32),
            STEPS: np.array(self._steps, np.int32),
        }
        for name, each in self._reader.fields.items():
            shape = self._most * self._size, *each.shape
            values[DATA + name] = np.zeros(shape, each.dtype)
        for piece in self._plan.pieces(examples):
            for name, array in self._reader.read(piece.part, piece.rows).items():
                values[DATA + name][piece.places] = array
        return {n: v.reshape(self.fields[n].shape) for n, v in values.items()}
