"""Client-fed data: a worker requests batches that only the client can read."""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.coordination.data.slots import Part, Rows, Shuffle
from jgraph.errors import DataError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import from_status
from jgraph.rpc.transport import Frame
from jgraph.runtime.data.batches import Array, Field

WAIT_S: Final = 5.0
"""A client has an answer after this long, if only that nothing is wanted."""

Came: TypeAlias = Callable[[dict[str, Array] | BaseException | None], None]
"""Called with the fields of the wanted rows, an error, or None: there are no more."""


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch that a worker requests.

    Attributes:
      number: of the request; 0: nothing is wanted.
      part: of the data in which the batch lies.
      rows: of that part.
      batch: number of the batch in the order of the run.
    """

    number: int
    part: int
    rows: Rows
    batch: int


@final
class FedReader:
    """A data set of a worker whose rows come from the client.

    Unlike a ``Reader`` it does not wait: what is wanted is noted, and told when the
    client asks. All calls are made on the event loop.

    Args:
      fields: an example of each field.
      parts: what there is.
      shuffle: how it is read best.
    """

    def __init__(
        self, fields: Mapping[str, Field], parts: tuple[Part, ...], shuffle: Shuffle
    ) -> None:
        self.fields = fields
        self.parts = parts
        self.shuffle: Shuffle = shuffle
        self._number = 0
        self._requests: dict[int, tuple[Wanted, Came]] = {}
        self._changed = asyncio.Event()

    @classmethod
    def from_json(cls, text: str) -> "FedReader":
        """Makes the reader that ``about`` described."""
        plain = json.loads(text)
        return cls(
            {
                str(name): Field(np.dtype(dtype), tuple(map(int, shape)))
                for name, dtype, shape in plain["fields"]
            },
            tuple(Part(str(name), int(rows)) for name, rows in plain["parts"]),
            plain["shuffle"],
        )

    def want(self, part: int, rows: Rows, batch: int, then: Came) -> None:
        """Wants the rows of this batch; calls ``then`` once they have come."""
        self._number += 1
        self._requests[self._number] = Wanted(self._number, part, rows, batch), then
        self._changed.set()

    def withdraw(self) -> None:
        """Wants nothing of all that has not come."""
        self._requests.clear()

    def take(self, order: pb.FeedData, tensors: tuple[Array, ...]) -> None:
        """Takes what the client sends; what nobody wants any more is dropped.

        Raises:
          DataError: these are not the fields of the data set.
        """
        if order.number not in self._requests:
            return
        if order.over or order.HasField("error"):
            _, then = self._requests.pop(order.number)
            then(None if order.over else from_status(order.error))
            return
        sent = [Field(t.dtype, t.shape[1:]) for t in tensors]
        if sent != [*self.fields.values()]:
            raise DataError(
                f"the client sent {', '.join(map(str, sent))} for a data set of "
                f"{', '.join(map(str, self.fields.values()))}"
            )
        _, then = self._requests.pop(order.number)
        then(dict(zip(self.fields, tensors, strict=True)))

    async def next_request(self) -> Frame:
        """Returns what is wanted first, as soon as there is something."""
        if not self._requests:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), WAIT_S)
        for request, _ in self._requests.values():
            data = pb.WantedData(
                number=request.number, part=request.part, batch=request.batch
            )
            return frame(wanted_data=data, tensors=[np.asarray(request.rows, np.int64)])
        return frame(wanted_data=pb.WantedData())


def about(
    fields: Mapping[str, Field], parts: tuple[Part, ...], shuffle: Shuffle
) -> str:
    """Returns what ``FedReader.from_json`` makes a data set of."""
    plain: dict[str, Any] = {
        "fields": [[n, f.dtype.name, list(f.shape)] for n, f in fields.items()],
        "parts": [[part.name, part.examples] for part in parts],
        "shuffle": shuffle,
    }
    return json.dumps(plain)


def wanted_in(reply: Frame) -> Wanted:
    """Returns what an answer says is wanted."""
    body = body_of(reply)
    rows = reply.tensors[0] if body.number else np.empty(0, np.int64)
    return Wanted(body.number, body.part, rows, body.batch)
