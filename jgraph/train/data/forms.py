"""Readers of other libraries' data: indexed data sets, and iterables.

Nothing of these libraries is imported. An object with ``__len__`` and ``__getitem__``
gives an element by number: ``torch.utils.data.Dataset``, grain's ``MapDataset``, a
``datasets.Dataset``, a list of batches. All else that can be iterated gives elements in
an order of its own: generators, a torch ``DataLoader``, ``tf.data``, grain's
``IterDataset`` and ``DataLoader``. Both stay in the process of the client.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import numpy as np

from jgraph.coordination.data.slots import Part, Rows, Shuffle
from jgraph.errors import DataError, JGError
from jgraph.runtime.data.batches import Array, Field
from jgraph.train.data.fields import as_array, check_keys

BATCH_SIZE: Final = 128
"""Examples of a batch where nobody says how many."""

_AHEAD: Final = 4
"""Batches of an iterable that are read ahead, over all workers."""
_ROUND: Final = 16
"""Batches of an iterable that are dealt as if they were an epoch."""
_MOST: Final = 1 << 48  # a length beyond this is that of data without an end


@final
@dataclass(frozen=True, slots=True)
class Element:
    """What the first element shows of all of them.

    Attributes:
      name: of the data, for messages.
      tree: how the fields of an element hang together.
      fields: an example of each field.
      size: examples of an element that is a batch; 0: it is one example.
      finite: refuse NaN and infinity.
    """

    name: str
    tree: Any
    fields: Mapping[str, Field]
    size: int
    finite: bool

    def arrays(self, element: Any, number: int) -> list[Array]:
        """Returns copies of the fields; of a batch the examples may be fewer.

        Raises:
          DataError: another structure, type or shape than that of the first one.
        """
        leaves, tree = jax.tree.flatten(_plain(element), is_leaf=_is_leaf)
        if tree != self.tree:
            raise DataError(
                f"element {number} of {self.name} is {_shown(element)}, and the first "
                f"one had the fields {', '.join(self.fields)}; make them alike"
            )
        finite = self.finite
        arrays = [
            as_array(leaf, f"{name} of element {number}", finite=finite, single=True)
            for leaf, name in zip(leaves, self.fields, strict=True)
        ]
        for array, (name, field) in zip(arrays, self.fields.items(), strict=True):
            one = Field(array.dtype, array.shape[1:] if self.size else array.shape)
            if one != field or (self.size and array.ndim == 0):
                raise DataError(
                    f"{name} is {one} in element {number} of {self.name}, and {field} "
                    "in the first one; XLA compiles for one shape and one type: pad to "
                    "one length, or convert it",
                    field=name,
                )
        if self.size and len({len(array) for array in arrays}) > 1:
            raise DataError(
                f"the fields of element {number} of {self.name} have different "
                "lengths; all must have the same length along axis 0"
            )
        # The owner may put the next element into the same memory.
        return [array.copy() for array in arrays]


def first_element(
    element: Any,
    name: str,
    batch_size: int | None,
    *,
    examples: bool,
    finite: bool,
) -> Element:
    """Looks at the first element of data.

    Its fields are arrays of one length along axis 0: a batch, unless told otherwise.

    Args:
      element: the first one.
      name: of the data, for messages.
      batch_size: examples of a batch, if the user said so.
      examples: an element is one example, whatever it looks like.
      finite: refuse NaN and infinity.

    Raises:
      DataError: no arrays; or it may be a batch or an example.
    """
    check_keys(element, name)
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        _plain(element), is_leaf=_is_leaf
    )
    by_name = {f"{name}{jax.tree_util.keystr(p)}": leaf for p, leaf in leaves}
    if not by_name:
        raise DataError(f"the first element of {name} is {_shown(element)}, not arrays")
    arrays = {
        field: as_array(leaf, field, finite=finite, single=True)
        for field, leaf in by_name.items()
    }
    size = 0 if examples else _length(arrays, name, batch_size)
    fields = {
        field: Field(a.dtype, a.shape[1:] if size else a.shape)
        for field, a in arrays.items()
    }
    return Element(name, tree, fields, size, finite)


def _length(arrays: Mapping[str, Array], name: str, batch_size: int | None) -> int:
    """Returns the length of a batch; 0 if these are fields of one example."""
    lengths = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    length = lengths.pop()
    if lengths or not length or batch_size in {None, length}:
        return 0 if lengths else length
    raise DataError(
        f"every field of an element of {name} has length {length}, and batch_size is "
        f"{batch_size}: if the elements are batches, leave batch_size out; if they are "
        "examples, put them together to batches first"
    )


def _plain(element: Any) -> Any:
    """Returns an element as a tuple, a dict or an array: torch collates to lists."""
    if isinstance(element, list) and any(hasattr(value, "shape") for value in element):
        return tuple(element)
    if isinstance(element, Mapping) and not isinstance(element, dict):
        return dict(element)
    return element


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | tuple | None)


def _shown(element: Any) -> str:
    if isinstance(element, Mapping):
        return f"a dict of {', '.join(map(str, element))}"
    if isinstance(element, tuple | list):
        return f"a {type(element).__name__} of {len(element)}"
    return "None" if element is None else f"a {type(element).__name__}"


def length_of(data: Any) -> int | None:
    """Returns how many elements there are, if that is known and they have an end."""
    try:
        length = len(data)
    except (TypeError, NotImplementedError):
        return None
    return length if 0 <= length < _MOST else None


def whole_batches(data: Any) -> int | None:
    """Returns how many batches of one size there are, if that is known.

    A torch ``DataLoader`` also counts a last one that is smaller, which is left out.
    """
    length, size = length_of(data), getattr(data, "batch_size", None)
    examples = length_of(getattr(data, "sampler", None))
    if length and isinstance(size, int) and size > 0 and examples:
        return min(length, max(1, examples // size))
    return length


def first_by_number(data: Any) -> tuple[Any] | None:
    """Returns the first element, boxed, of what gives its elements by number.

    One that can be iterated may have numbers for other things. Of one that cannot, what
    its first element raises is its owner's own error, and comes out as it is.
    """
    if not hasattr(data, "__getitem__") or not length_of(data):
        return None
    try:
        return (data[0],)
    except (TypeError, NotImplementedError, KeyError):
        if not hasattr(data, "__iter__"):
            raise
        return None


def may_be_batches(data: Any) -> bool:
    """Whether elements by number may be batches: of lists, of grain, of Keras."""
    return isinstance(data, list) or any(
        hasattr(data, name) for name in ("to_iter_dataset", "on_epoch_end")
    )


@final
class Indexed:
    """A ``Reader`` of an object that gives its elements by number.

    A row is an element: an example, or a whole batch, of which one is read at a time.

    Args:
      data: the object.
      element: what the elements are.

    Example:
      >>> rows = [(1.0, 2), (3.0, 4)]
      >>> first = first_element(rows[0], "data", None, examples=True, finite=False)
      >>> Indexed(rows, first).read(0, np.array([1, 0]))["data[1]"].tolist()
      [4, 2]
    """

    shuffle: Shuffle = "examples"

    def __init__(self, data: Any, element: Element) -> None:
        self._data = data
        self.element = element
        self.fields: Mapping[str, Field] = element.fields
        count = length_of(data) or 0
        if element.size and count > 1:
            # The last batch may have fewer examples; it is not trained on.
            count -= len(self._arrays(count - 1)[0]) != element.size
        self.parts: tuple[Part, ...] = (Part(element.name, count),)
        self._lock = threading.Lock()

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``."""
        with self._lock:  # of several workers
            each = self._many(rows.tolist())
        for arrays, row in zip(each, rows.tolist(), strict=True):
            if self.element.size and len(arrays[0]) != self.element.size:
                raise _uneven(row, self.element)
        arrays = each[0] if self.element.size else _stacked(each)
        return dict(zip(self.fields, arrays, strict=True))

    def once(self, batch_size: int) -> Iterator[list[Array]]:
        """Yields the fields of all batches once, in order; the last may be smaller."""
        count = length_of(self._data) or 0
        step = 1 if self.element.size else batch_size
        for first in range(0, count, step):
            each = self._many(range(first, min(first + step, count)))
            yield each[0] if self.element.size else _stacked(each)

    def _many(self, rows: Sequence[int]) -> list[list[Array]]:
        fetch = getattr(self._data, "__getitems__", None)  # of torch and datasets
        with _naming(self.element.name):
            elements = fetch([*rows]) if fetch else (self._data[row] for row in rows)
            pairs = zip(elements, rows, strict=True)
            return [self.element.arrays(element, row) for element, row in pairs]

    def _arrays(self, row: int) -> list[Array]:
        return self._many([row])[0]


@final
class Stream:
    """A ``Reader`` of what can only be iterated; each read gives the next batch.

    A batch is given once. Of an iterable that begins anew each time the first element
    follows the last one; an iterator, or a generator, ends. The last batch of a pass
    is left out if it has fewer examples than the others.

    Args:
      iterable: the iterable, or a function that returns one.
      name: what to call it in messages.
      batch_size: examples of a batch; None: as many as the first element has.
      finite: refuse NaN and infinity.

    Raises:
      DataError: it has no element, or one of no arrays.

    Example:
      >>> stream = Stream(iter([(np.zeros((2, 3)), np.arange(2))]), "data")
      >>> stream.read(0, np.arange(1))["data[1]"].tolist()
      [0, 1]
      >>> stream.read(0, np.arange(1))
      Traceback (most recent call last):
      EOFError: data ended after 1 batch
    """

    shuffle: Shuffle = "none"

    def __init__(
        self,
        iterable: Any,
        name: str,
        batch_size: int | None = None,
        *,
        finite: bool = False,
    ) -> None:
        self.iterable = iterable
        self._name = name
        self._pass = self._begin()
        first = self._peek(None)
        if first is None:
            raise DataError(
                f"{name} is a {type(iterable).__name__} without an element; give one "
                "that yields batches, such as (x, y)"
            )
        self.element = first_element(
            first[0], name, batch_size, examples=False, finite=finite
        )
        self.fields: Mapping[str, Field] = self.element.fields
        self.size = self.element.size or batch_size or BATCH_SIZE
        self.parts: tuple[Part, ...] = (Part(name, _ROUND),)
        self.batches_read = 0
        """Batches that were read."""
        self._batches = self._all(first)
        self._source = threading.Lock()  # held to read from the iterable
        self._change = threading.Condition()
        self._ready: deque[dict[str, Array]] = deque()
        self._end: JGError | EOFError | None = None
        self._filler: threading.Event | None = None  # set: the thread is to end

    @property
    def has_end(self) -> bool:
        """Whether it ends, as an iterator does that cannot begin anew."""
        return not _makes(self.iterable) and hasattr(self.iterable, "__next__")

    @property
    def has_ended(self) -> bool:
        """Whether there is no more to read."""
        return self._end is not None and not self._ready

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``; the next batch, whatever rows are asked for."""
        return self.take()

    def take(self) -> dict[str, Array]:
        """Returns the next batch.

        Raises:
          EOFError: there is none any more.
          DataError: it cannot be used, or iterating raised an error.
        """
        while True:
            with self._change:
                if self._filler is not None:
                    self._change.wait_for(
                        lambda: self._ready or self._end or self._filler is None
                    )
                if self._ready:
                    self.batches_read += 1
                    self._change.notify_all()
                    return self._ready.popleft()
                if self._end is not None:
                    raise self._end
                if self._filler is not None:
                    continue
            self._fill_one()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads ahead in a thread of its own meanwhile, a few batches at most."""
        end = threading.Event()
        with self._change:
            self._filler = end
        threading.Thread(
            target=self._fill, args=(end,), name="jgraph-data", daemon=True
        ).start()
        try:
            yield
        finally:
            end.set()
            with self._change:
                self._filler = None
                self._change.notify_all()

    def once(self, batch_size: int) -> Iterator[list[Array]]:
        """Yields all batches of one pass; the last may be smaller."""
        if self.has_end:
            yield from (list(fields.values()) for fields in self._ready)
            self._ready.clear()
            for arrays, _ in self._batches:
                yield arrays
            return
        for arrays, _ in self._one_pass(self._begin(), None):
            yield arrays

    # ------------------------------------------------------------ reading ahead

    def _fill(self, end: threading.Event) -> None:
        while not end.is_set() and self._end is None:
            with self._change:
                self._change.wait_for(lambda: end.is_set() or len(self._ready) < _AHEAD)
            if not end.is_set():
                self._fill_one()

    def _fill_one(self) -> None:
        """Reads one batch, or finds the end."""
        with self._source:
            end: JGError | None = None
            batch: dict[str, Array] | None = None
            try:
                for arrays, is_whole in self._batches:
                    if is_whole:
                        batch = dict(zip(self.fields, arrays, strict=True))
                        break
            except JGError as error:
                end = error
            with self._change:
                if batch is not None:
                    self._ready.append(batch)
                else:
                    read = self.batches_read + len(self._ready)
                    many = f"{read} batch{'es' * (read != 1)}"
                    eof = EOFError(f"{self._name} ended after {many}")
                    self._end = self._end or end or eof
                self._change.notify_all()

    # ------------------------------------------------------------ iterating

    def _begin(self) -> Iterator[Any]:
        iterable = self.iterable
        with _naming(self._name):
            if _makes(iterable):
                iterable = iterable()
            as_numpy: Callable[[], Any] | None
            as_numpy = getattr(iterable, "as_numpy_iterator", None)  # of tf.data
            return iter(as_numpy() if as_numpy else iterable)

    def _peek(self, ahead: tuple[Any] | None) -> tuple[Any] | None:
        """Returns the next element of the pass, boxed; None: it is over."""
        if ahead is not None:
            return ahead
        with _naming(self._name):
            for element in self._pass:
                return (element,)
        return None

    def _all(self, first: tuple[Any]) -> Iterator[tuple[list[Array], bool]]:
        """Yields batches, pass after pass: their fields, and whether they are whole."""
        ahead: tuple[Any] | None = first
        while True:
            whole = 0
            for arrays, is_whole in self._one_pass(self._pass, ahead):
                whole += is_whole
                yield arrays, is_whole
            if self.has_end:
                return
            if not whole:
                raise DataError(
                    f"a pass over {self._name} has no batch of {self.size} examples; "
                    "choose a smaller batch_size"
                )
            self._pass, ahead = self._begin(), None

    def _one_pass(
        self, elements: Iterator[Any], first: tuple[Any] | None
    ) -> Iterator[tuple[list[Array], bool]]:
        pairs = enumerate(self._elements(elements, first))
        together: list[list[Array]] = []
        smaller: int | None = None
        for number, element in pairs:
            arrays = self.element.arrays(element, number)
            if not self.element.size:
                together.append(arrays)
                if len(together) == self.size:
                    yield _stacked(together), True
                    together = []
                continue
            if smaller is not None or len(arrays[0]) > self.size:
                raise _uneven(number if smaller is None else smaller, self.element)
            if len(arrays[0]) < self.size:
                smaller = number
            yield arrays, smaller is None
        if together:
            yield _stacked(together), False

    def _elements(
        self, elements: Iterator[Any], first: tuple[Any] | None
    ) -> Iterator[Any]:
        if first is not None:
            yield first[0]
        while True:
            with _naming(self._name):
                try:
                    element = next(elements)
                except StopIteration:
                    return
            yield element


def _makes(data: Any) -> bool:
    """Whether a call gives the iterable."""
    return callable(data) and not (
        hasattr(data, "__iter__") and not isinstance(data, type)
    )


def _uneven(number: int, element: Element) -> DataError:
    return DataError(
        f"batch {number} of {element.name} has another number of examples than the "
        f"first one, which has {element.size}; only the last batch of a pass may be "
        "smaller, and it is left out"
    )


def _stacked(examples: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.stack(values) for values in zip(*examples, strict=True)]


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Makes what the user's own code raises while it gives data one error."""
    try:
        yield
    except (JGError, StopIteration, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(
            f"{name} could not be read: {type(error).__name__}: {error}"
        ) from error
