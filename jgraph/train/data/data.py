"""Dataset: user data, checked once, cut into batches and shards."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final

import jax
import numpy as np
from flax.errors import FlaxError, TraceContextError

from jgraph.client.state.sources import SourceFacts
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.errors import DataError, JGError, OuterStateError
from jgraph.graph.graph import Graph
from jgraph.graph.tracing.concrete import as_graph_error, failure
from jgraph.runtime.data.batches import (
    Array,
    ArrayReader,
    Reader,
    check_batch_size,
    check_lengths,
)
from jgraph.train.data.fields import as_array, as_table, check_keys
from jgraph.train.data.forms import (
    BATCH_SIZE,
    Indexed,
    Stream,
    first_by_number,
    first_element,
    length_of,
    may_be_batches,
    whole_batches,
)
from jgraph.train.privacy.private_update import SampledBatch


class Elements(Protocol):
    """What gives an example, or a batch, by number, and has a length."""

    def __getitem__(self, index: int, /) -> Any: ...


Data: TypeAlias = (
    Mapping[str, Any]
    | Sequence[Any]
    | np.ndarray[Any, Any]
    | jax.Array
    | Iterable[Any]
    | Callable[[], Iterable[Any]]
    | Elements
)
"""A dict of arrays, a tuple of arrays such as ``(x, y)``, or one array. Or what gives
examples by number, or yields batches; see the page on data."""

Batch: TypeAlias = Any
"""The same structure as the data, with the examples of one batch."""


_SAMPLED: Final = 64  # examples, of however large arrays
_SAMPLED_BYTES: Final = 2 << 20
_DEALT: Final = (
    "the data is read in this process and sent to the workers as they need it: "
    "arrays, or a jg.Source that workers read themselves, are faster"
)
_ENDLESS: Final = (
    "the data can only be iterated: what a lost worker held is left out, and so may be "
    "a few batches that were read ahead; a checkpoint does not know the position in it"
)


@final
@dataclass(frozen=True, slots=True)
class Dataset:
    """Arrays of equal length and the structure in which the user gave them.

    ``fields`` go by the user's names: ``data['image']``, ``data[0]``, ``data``.
    """

    fields: dict[str, Array]
    tree: Any
    # Of what is read elsewhere, or element by element, `fields` show the types and hold
    # nothing.
    facts: SourceFacts | None = None
    local: Reader | None = None
    source: str = ""
    fed: Indexed | Stream | None = None
    """What only this process can read, and workers get from it."""
    of: "Dataset | None" = None
    """What clients have, where an example is a round on that."""
    written_first: str = ""
    """Of a dict of arrays the field that the user wrote first; others are sorted."""
    samplers: int = 0
    """Who draw each batch as a Poisson sample, so many workers; 0: batches are cut."""

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    @property
    def of_examples(self) -> "Dataset":
        """The data whose batches a loss is given."""
        return self.of or self

    def batch(self, fields: Sequence[Any]) -> Batch:
        """Returns ``fields``, in order, in the structure of the data."""
        return jax.tree.unflatten(self.tree, fields)

    def avals(self, batch_size: int) -> Batch:
        """Returns shapes and dtypes of a batch."""
        return self.batch(
            [
                jax.ShapeDtypeStruct((batch_size, *a.shape[1:]), a.dtype)
                for a in self.fields.values()
            ]
        )

    def step_avals(self, batch_size: int) -> Batch:
        """Returns shapes and dtypes of what a step is fed."""
        if not self.samplers:
            return self.avals(batch_size)
        room = self.plan(batch_size, 0).capacity
        sampled = jax.ShapeDtypeStruct((room,), np.bool_)
        return SampledBatch(self.avals(room), sampled, batch_size * self.samplers)

    @property
    def first(self) -> str:
        """The name of the first field."""
        return self.written_first or next(iter(self.fields))

    def sample(self) -> Batch:
        """Returns the first example, as a batch of one."""
        return self.batch([array[:1] for array in self.fields.values()])

    def plan(self, batch_size: int, seed: int) -> SlotPlan:
        """Returns how the data is cut into slots and shuffled.

        Raises:
          DataError: less than 1, or more than there are examples.
        """
        if self._whole_batches:
            return SlotPlan(self.parts, 1, seed, shuffle=self.reader().shuffle)
        check_batch_size(batch_size, len(self), self._other_reading(batch_size))
        if self.samplers:
            self._check_samples(batch_size)
            data = self._sample_digest() if self.facts is None else ""
            workers = self.samplers
            return SlotPlan(self.parts, batch_size, seed, data=data, workers=workers)
        if self.facts is None:
            return SlotPlan(self.parts, batch_size, seed, data=self._sample_digest())
        return SlotPlan(self.parts, batch_size, seed, shuffle=self.facts.shuffle)

    def _check_samples(self, batch_size: int) -> None:
        most = len(self) // self.samplers
        if batch_size > most:
            raise DataError(
                f"batch_size is {batch_size}, and {self.samplers} workers that draw so "
                f"many of {len(self)} examples, each of its own, need more examples; "
                f"choose batch_size={max(most, 1)} or less",
                batch_size=batch_size,
                examples=len(self),
            )

    @property
    def _whole_batches(self) -> bool:
        """Whether a row is a batch."""
        return isinstance(self.fed, Stream) or bool(self.fed and self.fed.element.size)

    def batch_size(self, request: int | None) -> int:
        """Returns the examples of a batch.

        Args:
          request: what the user said; None: nothing.

        Raises:
          DataError: the data comes in batches of another size.
        """
        size = self.fed.size if isinstance(self.fed, Stream) else 0
        if isinstance(self.fed, Indexed):
            size = self.fed.element.size
        if size and request not in {None, size}:
            raise DataError(
                f"batch_size is {request}, and the data comes in batches of {size} "
                "examples; leave batch_size out"
            )
        return int(size or request or BATCH_SIZE)

    def batches_per_epoch(self, batch_size: int) -> int:
        """Returns the batches of one pass over the data.

        Raises:
          DataError: nobody knows how many there are.
        """
        if not isinstance(self.fed, Stream):
            return self.plan(batch_size, 0).batches_per_epoch
        count = whole_batches(self.fed.iterable)
        if not count:
            raise DataError(
                f"the data, a {type(self.fed.iterable).__name__}, does not tell how "
                "many batches it has, so epochs cannot be counted; give steps=1000"
            )
        return count if self.fed.element.size else max(1, count // batch_size)

    @property
    def note(self) -> str:
        """What is weaker than with arrays; empty: nothing."""
        if self.fed is None:
            return ""
        if not isinstance(self.fed, Stream):
            return _DEALT
        together = self.put_together(self.fed.size)
        return f"{_ENDLESS}; {together}" if together else _ENDLESS

    def _other_reading(self, batch_size: int) -> str:
        """Returns what elements by number are taken for, and what they may be."""
        if not (together := self.put_together(batch_size)):
            return ""
        return (
            f". Here {together}. If the elements are batches, give a list of them; if "
            "they are fields of the examples, give a tuple of them"
        )

    def put_together(self, batch_size: int) -> str:
        """Returns what is told of elements that are examples; empty: they are not."""
        if self.fed is None or self.fed.element.size:
            return ""
        return (
            f"an element of the data is taken as one example, and {batch_size} of them "
            "make a batch"
        )

    def noted(self, graph: Graph) -> Graph:
        """Returns the graph of a step with what its plan says of the data."""
        note = f"data: {self.note}"
        return replace(graph, notes=(*graph.notes, note)) if self.note else graph

    @property
    def is_here(self) -> bool:
        """Whether its batches can be read in this process."""
        return self.local is not None or not self.source

    @property
    def parts(self) -> tuple[Part, ...]:
        """What there is: all arrays together, or files."""
        if self.fed is not None:
            return self.fed.parts
        whole = (Part("the data", len(self)),)
        return whole if self.facts is None else self.facts.parts

    def reader(self) -> Reader:
        """Returns what reads batches in this process."""
        if self.fed is not None:
            return self.fed
        return ArrayReader(self.fields) if self.local is None else self.local

    def reading(self) -> AbstractContextManager[None]:
        """Reads ahead of need meanwhile, where that is done here."""
        return self.fed.reading() if isinstance(self.fed, Stream) else nullcontext()

    @property
    def has_ended(self) -> bool:
        """Whether it was an iterator, and gives no more."""
        return isinstance(self.fed, Stream) and self.fed.has_ended

    def in_memory(self) -> "Dataset":
        """Returns the data as arrays, where only this process can read it."""
        if self.fed is None:
            return self
        parts = zip(*self.fed.once(BATCH_SIZE), strict=True)
        columns = [np.concatenate(arrays) for arrays in parts]
        return Dataset(dict(zip(self.fields, columns, strict=True)), self.tree)

    def describe(self, examples: int | None = None) -> str:
        """Returns names and types of the fields, for messages."""
        count = "…" if examples is None else str(examples)
        return ", ".join(
            f"{name} {a.dtype}[{','.join(map(str, (count, *a.shape[1:])))}]"
            for name, a in self.fields.items()
        )

    def digest(self) -> str:
        """Returns the SHA-256 of the fields: names, types and values."""
        if self.source:
            return self.source
        digest = hashlib.sha256()
        for name, array in self.fields.items():
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()

    def _sample_digest(self) -> str:
        """Returns a digest of names, types, and examples; of much data not of all.

        It tells other data of the same sizes apart: a run on that does not go on in the
        middle of an epoch of this.
        """
        digest = hashlib.sha256()
        for name, array in self.fields.items():
            each = max(1, array.nbytes // len(array))
            count = min(len(array), max(_SAMPLED, _SAMPLED_BYTES // each))
            rows = np.linspace(0, len(array) - 1, count).astype(np.int64)
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array[rows]).view(np.uint8).data)
        return digest.hexdigest()[:16]

    def batches(self, batch_size: int) -> Iterator[tuple[int, Batch]]:
        """Yields (examples, batch) once, in order; the last of a part is smaller."""
        if self.fed is not None:
            for arrays in self.fed.once(batch_size):
                yield len(arrays[0]), self.batch(arrays)
            return
        reader = self.reader()
        names = list(self.fields) if self.local is None else sorted(reader.fields)
        for number, part in enumerate(self.parts):
            for first in range(0, part.examples, batch_size):
                rows = np.arange(first, min(first + batch_size, part.examples))
                fields = reader.read(number, rows)
                yield len(rows), self.batch([fields[name] for name in names])


def as_dataset(
    data: "Data | Dataset",
    name: str = "data",
    *,
    finite: bool = False,
    batch_size: int | None = None,
) -> Dataset:
    """Checks what the user gave and returns it as a ``Dataset``.

    Types become what JAX makes of them: with 64-bit types off (JAX's default) float64
    becomes float32 and int64 becomes int32.

    Args:
      data: a dict or tuple of arrays with examples along axis 0, or one array.
      name: the caller's argument, for messages.
      finite: also refuse NaN and infinity.
      batch_size: examples of a batch, if the user said so.

    Raises:
      DataError: no data, no examples, lengths that differ, an object or string
        dtype, integers too large for JAX's type, or NaN where it is forbidden.

    Example:
      >>> data = as_dataset({"x": np.zeros((4, 2)), "y": np.arange(4)})
      >>> len(data), data.avals(2)["x"]
      (4, ShapeDtypeStruct(shape=(2, 2), dtype=float32))
    """
    if isinstance(data, Dataset):
        return data
    data = as_table(data, name)
    if not _is_structure(data):
        return _fed(data, name, batch_size, finite=finite)
    check_keys(data, name)
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        dict(data) if isinstance(data, Mapping) else data,
        is_leaf=lambda v: not isinstance(v, dict | tuple | None) and v is not data,
    )
    fields = {}
    for path, value in leaves:
        field = name + jax.tree_util.keystr(path)
        fields[field] = as_array(value, field, finite=finite)
    check_lengths({field: len(array) for field, array in fields.items()})
    top = f"{name}[{next(iter(data))!r}]" if isinstance(data, Mapping) else name
    first = next((field for field in fields if field.startswith(top)), "")
    return Dataset(fields, tree, written_first=first)


def _is_structure(data: Any) -> bool:
    """Whether data is arrays, and no row of elements; a list may be either."""
    if isinstance(data, list):
        return not (data and isinstance(data[0], tuple | Mapping))
    return isinstance(data, Mapping | tuple) or hasattr(data, "shape")


def _fed(data: Any, name: str, batch_size: int | None, *, finite: bool) -> Dataset:
    """Returns data of which only this process can read elements."""
    reader: Indexed | Stream
    if isinstance(data, str | bytes | Path):
        raise DataError(
            f"{name} is the text {str(data)!r:.60}; files are data as "
            "jg.Source.npz(path), .parquet(path), .tfrecord(path, features), "
            ".array_record(path, features)"
        )
    if (first := first_by_number(data)) is not None:
        examples = not may_be_batches(data)
        like = first_element(
            first[0], name, batch_size, examples=examples, finite=finite
        )
        reader = Indexed(data, like)
    elif hasattr(data, "__iter__") or callable(data):
        reader = Stream(data, name, batch_size, finite=finite)
    elif hasattr(data, "__getitem__") and length_of(data) == 0:
        raise DataError(f"{name}, a {type(data).__name__}, has no examples")
    else:
        raise DataError(
            f"{name} is a {type(data).__name__}; give arrays, (x, y) or "
            "{'image': x, 'label': y}; a jg.Source of files; an object with examples "
            "by number (__len__ and __getitem__); or an iterable of batches"
        )
    element = reader.element
    size = reader.size if isinstance(reader, Stream) else element.size
    rows = sum(part.examples for part in reader.parts) * (size or 1)
    fields = {
        name: np.broadcast_to(np.zeros((), field.dtype), (rows, *field.shape))
        for name, field in reader.fields.items()
    }
    return Dataset(fields, element.tree, fed=reader)


def check_alike(reference: Dataset, dataset: Dataset, what: str) -> None:
    """Refuses data whose examples are of another kind than those known.

    Raises:
      DataError: other fields, or a field of another shape or dtype.
    """
    reference, dataset = reference.of_examples, dataset.of_examples
    if reference.tree != dataset.tree:
        raise DataError(
            f"the data has {dataset.describe()}, and {what} {reference.describe()}; "
            "give the same structure"
        )
    pairs = zip(dataset.fields.items(), reference.fields.values(), strict=True)
    for (name, array), other in pairs:
        if array.shape[1:] != other.shape[1:] or array.dtype != other.dtype:
            raise DataError(
                f"{name} is {_example(array)} per example, and {what} "
                f"{_example(other)}; make them the same",
                field=name,
            )


@contextmanager
def naming_data(dataset: Dataset, batch_size: int) -> Iterator[None]:
    """Describes the batch where a user's loss cannot be traced with it.

    Raises:
      OuterStateError: the loss changes a module that it was not given.
      GraphError: the loss asks for the values of traced arrays.
      DataError: the loss raised an error of types, shapes, keys, or of Flax.
    """
    try:
        yield
    except TraceContextError as error:
        what = str(error).partition(" from ")[0].removeprefix("Cannot mutate ")
        raise OuterStateError(
            f"the loss changes {what} of a module that it did not get as an argument; "
            "use the one that it is given, def loss(model, batch): …, and draw random "
            "numbers from a third argument: def loss(model, batch, rngs): …"
        ) from error
    except (TypeError, ValueError, LookupError, FlaxError) as error:
        if isinstance(error, JGError):
            raise
        if (graph_error := as_graph_error(error, "the loss")) is not None:
            raise graph_error from error
        instead = _instead(dataset, batch_size)
        raise DataError(
            f"the loss failed on a batch of {dataset.describe(batch_size)}"
            f"{failure(error)}; check the data against what the model and the loss "
            f"take{instead}"
        ) from error


def _instead(dataset: Dataset, batch_size: int) -> str:
    """Returns what else the user may have meant; empty: nothing."""
    if not (together := dataset.put_together(batch_size)):
        return ""
    return f". Here {together}; of one that is a batch all fields need one length"


def _example(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape[1:]))}]"
