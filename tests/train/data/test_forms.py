"""Data as other libraries give it: what is an example, what a batch, and what comes."""

import math
import threading
from collections import UserDict, deque, namedtuple
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import DataError
from jgraph.train.data.data import Dataset, as_dataset
from jgraph.train.data.forms import Stream, whole_batches
from jgraph.train.data.source import as_source_or_dataset
from jgraph.train.trainer import Trainer
from tests.support.data_forms import Examples, Loader, batch, batches

grain = pytest.importorskip("grain", reason="needs jgraph[data]")
Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024  # as users write them


class IterableExamples(Examples):
    """As a torch ``IterableDataset``: it inherits what it cannot do."""

    def __getitem__(self, row: int) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for row in range(10):
            yield {"x": np.full(2, row, np.float32), "y": row}


class TensorFlow:
    """As a ``tf.data.Dataset``: an unknown length, and a way to numpy."""

    def __len__(self) -> int:
        raise TypeError("unknown cardinality")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("as numpy, please")

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter([{"x": x, "y": y} for x, y in batches()])


class Rows:
    """As a ``datasets.Dataset``: rows of Python lists; several rows at once."""

    column_names = ("ids", "y")

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"ids": [row, row, row], "y": [row, row, row]}

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.asked.append(rows)
        return [self[row] for row in rows]


def grain_examples() -> Any:
    rows = [{"x": np.full(2, row, np.float32), "y": row} for row in range(10)]
    return grain.MapDataset.source(rows)


def grain_loader() -> Any:
    return grain.DataLoader(
        data_source=grain_examples(),
        sampler=grain.samplers.IndexSampler(10, num_epochs=1, seed=0),
        operations=[grain.transforms.Batch(4, drop_remainder=True)],
    )


INDEXED = {
    "an object with examples by number": (Examples, 4, 10),
    "a list of batches": (lambda: [*batches()], None, 3),
    "a list of batches, the last of them smaller": (lambda: [*batches(3, 2)], 4, 2),
    "a list of rows": (lambda: [{"x": float(row)} for row in range(10)], 4, 10),
    "rows of a table": (Rows, 4, 10),
    "a grain MapDataset": (grain_examples, 4, 10),
    "a grain MapDataset of batches": (lambda: grain_examples().batch(4), None, 2),
}
ITERABLE = {
    "a generator": (batches, None),
    "an iterator": (lambda: iter([*batches()]), 4),
    "a function that makes a generator": (lambda: batches, None),
    "a generator of dicts": (lambda: ({"x": x} for x, _ in batches()), None),
    "a generator of arrays": (lambda: (x for x, _ in batches()), None),
    "a generator of mappings": (lambda: (UserDict(x=x) for x, _ in batches()), None),
    "a generator of named tuples": (lambda: (Pair(*b) for b in batches()), None),
    "a generator of examples": (lambda: iter(map(Examples().__getitem__, range(9))), 4),
    "a torch DataLoader": (Loader, None),
    "a torch IterableDataset": (IterableExamples, 4),
    "a tf.data.Dataset": (TensorFlow, None),
    "a grain IterDataset": (lambda: grain_examples().to_iter_dataset().batch(4), None),
    "a grain IterDataset of examples": (lambda: grain_examples().to_iter_dataset(), 4),
    "a grain DataLoader": (grain_loader, None),
}


def first_batch(data: Dataset, size: int) -> Any:
    plan = data.plan(size, seed=0)
    fields = data.reader().read(0, plan.rows(0, 0)[: plan.batch_size])
    return data.batch([*fields.values()])


@pytest.mark.parametrize("form", INDEXED)
def test_what_gives_elements_by_number_is_dealt_like_arrays(form: str) -> None:
    make, wanted, rows = INDEXED[form]
    data = as_dataset(make(), batch_size=wanted)
    assert data.batch_size(wanted) == 4
    plan = data.plan(4, seed=0)
    assert (plan.shuffle, plan.parts[0].examples) == ("examples", rows)
    given = jax.tree.map(lambda a: (a.dtype, a.shape), first_batch(data, 4))
    assert given == jax.tree.map(lambda a: (a.dtype, a.shape), data.avals(4))


@pytest.mark.parametrize("form", ITERABLE)
def test_what_can_only_be_iterated_gives_batches_in_its_order(form: str) -> None:
    make: Any
    make, wanted = ITERABLE[form]
    data = as_dataset(make(), batch_size=wanted)
    assert isinstance(data.fed, Stream)
    assert data.batch_size(wanted) == 4
    given = jax.tree.map(lambda a: (a.dtype, a.shape), first_batch(data, 4))
    assert given == jax.tree.map(lambda a: (a.dtype, a.shape), data.avals(4))
    assert "can only be iterated" in data.note


def test_the_first_element_is_read_once_to_look_at_it() -> None:
    asked: list[int] = []

    class Counted(Examples):
        def __getitem__(self, row: int) -> tuple[Any, int]:
            asked.append(row)
            return super().__getitem__(row)

    as_dataset(Counted(), batch_size=4)
    assert asked == [0]


def test_several_rows_are_fetched_at_once_where_that_is_possible() -> None:
    rows = Rows()
    data = as_dataset(rows)
    found = data.reader().read(0, np.array([7, 2]))
    assert found["data['y']"].tolist() == [[7] * 3, [2] * 3]
    assert rows.asked == [[7, 2]]


@pytest.mark.parametrize(
    "error", [TypeError, KeyError, NotImplementedError, ValueError]
)
def test_what_the_first_example_raises_is_not_hidden(error: type[Exception]) -> None:
    class Broken:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, row: int) -> Any:
            raise error("of the user's own code")

    with pytest.raises(error, match="of the user's own code"):
        as_dataset(Broken(), batch_size=4)


def taken(stream: Any, count: int) -> list[int]:
    """First label of each of so many batches."""
    return [int(stream.read(0, None)["data[1]"][0]) for _ in range(count)]


def test_iterable_begins_anew_and_leaves_smaller_last_batches_out() -> None:
    stream = as_dataset(Loader()).fed
    assert taken(stream, 5) == [0, 4, 0, 4, 0]
    stream = as_dataset(lambda: batches(2)).fed
    assert taken(stream, 3) == [0, 4, 0]


def test_generator_ends_and_goes_on_where_it_is_when_it_is_given_again() -> None:
    given = batches(3)
    first = as_source_or_dataset(given)
    assert taken(first.fed, 1) == [0]
    again = as_source_or_dataset(given, known=first)
    assert taken(again.fed, 2) == [4, 8]
    with pytest.raises(EOFError, match="data ended after 3 batches"):
        taken(again.fed, 1)
    assert again.has_ended


def test_iterable_is_read_ahead_a_few_batches_and_no_more() -> None:
    asked: list[int] = []
    more = threading.Semaphore(0)

    def endless() -> Iterator[Any]:
        while True:
            asked.append(len(asked))
            more.release()
            yield batch(asked[-1])

    data = as_dataset(endless())
    assert isinstance(data.fed, Stream)
    with data.reading():
        assert taken(data.fed, 10) == [4 * n for n in range(10)]
        for _ in range(14):
            more.acquire()
    assert len(asked) in {14, 15}  # ten that were taken, four ahead
    assert taken(data.fed, 6) == [4 * n for n in range(10, 16)]


class OneBuffer:
    """Fills the same memory for each element, as a loader may that saves memory.

    Args:
      shape: of ``x`` in an element: of a batch, or of an example.
      count: elements.
    """

    def __init__(self, shape: tuple[int, ...], count: int = 8) -> None:
        self._x, self._count = np.empty(shape, np.float32), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        self._x[...] = row
        return self._x, np.full(self._x.shape[:-1], row, np.int32)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        return (self[row] for row in range(self._count))


class OneBufferOfKeras(OneBuffer):
    """As a ``keras.utils.Sequence``: its elements are batches."""

    def on_epoch_end(self) -> None:
        pass


@pytest.mark.parametrize("batches_by_itself", [True, False])
@pytest.mark.parametrize("form", ["by number", "iterator", "function", "evaluated"])
def test_elements_may_come_in_the_same_memory(
    form: str, batches_by_itself: bool
) -> None:
    shape = (4, 2) if batches_by_itself else (2,)
    given: Any = (OneBufferOfKeras if batches_by_itself else OneBuffer)(shape)
    if form == "iterator":
        given = given.batches()
    elif form == "function":
        given = given.batches
    data = as_dataset(given, batch_size=None if batches_by_itself else 4)
    if form == "evaluated":
        found = [*data.fed.once(4)]  # type: ignore[union-attr]
    else:
        plan = data.plan(4, seed=0)
        size, reader = plan.batch_size, data.reader()
        with data.reading():
            found = [
                [*reader.read(0, plan.rows(0, 0)[n * size :][:size]).values()]
                for n in range(2)
            ]
    assert len(found) >= 2
    for x, y in found:
        assert x[:, 0].tolist() == y.tolist()


def test_one_pass_for_an_evaluation_has_every_example_once() -> None:
    for given in (Loader(), Loader, batches(3, last=2), [*batches(3, last=2)]):
        data = as_dataset(given)
        found = [(count, b[1].tolist()) for count, b in data.batches(4)]
        assert [count for count, _ in found] == [4, 4, 2]
        assert [y for _, labels in found for y in labels] == list(range(10))
    kept = as_dataset(Examples()).in_memory()
    assert kept.fields["data[1]"].tolist() == list(range(10))


def failing() -> Iterator[Any]:
    yield batch(0)
    raise OSError("disk is gone")


def test_error_of_a_users_generator_is_told_with_its_cause() -> None:
    stream = as_dataset(failing()).fed
    assert taken(stream, 1) == [0]
    with pytest.raises(DataError, match="OSError: disk is gone") as caught:
        taken(stream, 1)
    assert isinstance(caught.value.__cause__, OSError)


X, Y = batch(0)


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([(X, Y), (X, Y, Y)], r"element 1 of data is a tuple of 3, and the first"),
        ([(X, Y), None], r"element 1 of data is None"),
        ([(X, Y), (X[:, :1], Y)], r"data\[0\] is float32\[1\] in element 1 .* pad"),
        ([(X, Y), (X, Y.astype(float))], r"data\[1\] is float32\[\] in element 1"),
        ([(X, Y), (X, Y[:2])], r"element 1 of data have different lengths"),
        ([(X, Y), (X[:2], Y[:2]), (X, Y)], r"batch 1 .* another number of examples"),
        ([("text", Y)], r"data\[0\] has dtype <U4"),
        ([()], r"first element of data is a tuple of 0"),
    ],
)
def test_elements_that_differ_are_named(elements: Any, message: str) -> None:
    def read_all(given: Any) -> None:
        data = as_dataset(given)
        for row in range(len(elements)):
            data.reader().read(0, np.array([row]))

    for given in (iter(elements), elements):
        with pytest.raises(DataError, match=message):
            read_all(given)


def test_elements_that_may_be_batches_or_examples_are_asked_about() -> None:
    with pytest.raises(DataError, match=r"length 4, and batch_size is 8: if the elem"):
        as_dataset(batches(), batch_size=8)
    with pytest.raises(DataError, match="batches of 4 examples; leave batch_size out"):
        as_dataset(batches()).batch_size(8)


def test_list_of_batches_is_not_printed() -> None:
    with pytest.raises(DataError) as caught:
        as_dataset([(X, Y), (X[:, :1], Y)] * 500)
    assert len(str(caught.value)) < 300


class Sampled:
    """As a torch ``DataLoader``: its length counts a last partial batch."""

    batch_size = 4

    def __init__(self, examples: int) -> None:
        self.sampler = range(examples)

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)


def test_a_last_partial_batch_of_a_loader_is_not_counted() -> None:
    found = [whole_batches(Sampled(examples)) for examples in (8, 9, 11, 12, 3)]
    assert found == [2, 2, 2, 3, 1]
    assert whole_batches([1, 2, 3]) == 3
    assert whole_batches(iter(())) is None


def test_a_batch_with_a_single_value_is_told_to_be_taken_as_an_example() -> None:
    def scaled() -> Iterator[Any]:
        return ((x, y, 0.5) for x, y in batches())

    def loss(model: Any, batch: Any) -> Any:
        x, y, scale = batch
        return jnp.mean(scale * (model(x)[:, 0] - y) ** 2)

    trainer = Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), loss, optax.sgd(0.1))
    told = "an element of the data is taken as one example, and 3 of them make a batch"
    with pytest.raises(DataError, match=f"{told}; .* all fields need one length"):
        trainer.fit(scaled, steps=1, batch_size=3)
    assert told in as_dataset(scaled, batch_size=3).note
    assert "one example" not in as_dataset(batches).note


@pytest.mark.parametrize(
    "elements", [[*batches()], [np.zeros((64, 4)), np.zeros((64, 4))]]
)
def test_a_deque_that_may_be_something_else_says_how_to_give_it(elements: Any) -> None:
    data = as_dataset(deque(elements))
    with pytest.raises(DataError) as error:
        data.plan(data.batch_size(None), 0)
    message = str(error.value)
    assert f"has only {len(elements)} examples" in message
    assert "If the elements are batches, give a list of them" in message
    assert "if they are fields of the examples, give a tuple" in message
