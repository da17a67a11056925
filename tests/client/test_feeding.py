"""Values that are fed: taken as they are, converted as JAX would, or refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.feeding import leaf_arrays
from jgraph.errors import FeedError, NonFiniteError
from jgraph.graph.tracing.taps import feed_taps, tap
from jgraph.graph.tracing.trace import trace
from tests.support.dtypes import NARROW

NUMBERS = (True, False, 0, 1, -1, 2, 300, -129, 2**40, 2.0, 2.7, -2.9, 1j)


def _fed(dtype: Any, value: Any, shape: tuple[int, ...] = ()) -> Any:
    graph, _ = trace(lambda x: (x,), jax.ShapeDtypeStruct(shape, dtype), name="step")
    by_name = leaf_arrays(graph, [None], {"x": value}, check_finite=False)
    by_place = leaf_arrays(graph, [value], {}, check_finite=False)
    assert by_name[0].tobytes() == by_place[0].tobytes()
    assert by_name[0].dtype == dtype
    return by_name[0]


def _list(graph: Any, leaves: list[Any], named: dict[str, Any], number: int) -> Any:
    return leaf_arrays(graph, leaves, named, check_finite=False)[number].tolist()


def _jax_keeps(dtype: Any, value: Any) -> bool:
    """Whether JAX would compute with the dtype and this number in the dtype."""
    try:
        if jnp.result_type(dtype, value) != dtype:
            return False
    except jax.dtypes.TypePromotionError:  # narrow ones do not become anything else
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        limits: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return bool(limits.min <= value <= limits.max)
    return True


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_numbers_are_fed_as_jax_would_take_them(name: str) -> None:
    dtype = NARROW[name]
    for number in NUMBERS:
        for value, shape in ((number, ()), ([number, number], (2,))):
            if _jax_keeps(dtype, number):
                fed = _fed(dtype, value, shape)
                due = np.asarray(value).astype(dtype)
                assert fed.tobytes() == due.tobytes()
            else:
                with pytest.raises(FeedError, match=f"this step wants {name}"):
                    _fed(dtype, value, shape)


@pytest.mark.parametrize("name", NARROW)
def test_arrays_are_fed_in_their_own_dtype_only(name: str) -> None:
    given = np.ones(2, NARROW[name])
    for other, dtype in NARROW.items():
        if other == name:
            assert _fed(dtype, given, (2,)).tolist() == given.tolist()
            continue
        with pytest.raises(FeedError, match=rf"is {name}\[2\]; this step wants"):
            _fed(dtype, given, (2,))


@pytest.mark.parametrize(
    ("value", "shape", "hint"),
    [
        (
            np.array([1, 2], np.float32),
            (2,),
            r"Perhaps you forgot \.astype\(np\.int32\)$",
        ),
        (np.array([[1, 2]], np.int32), (2,), r"Perhaps you forgot \.reshape\(2,\)$"),
        (
            np.array([[1, 2]], np.float32),
            (2,),
            r"\.astype\(np\.int32\) and \.reshape\(2,\)$",
        ),
        (np.array([1, 2, 3], np.int32), (2,), r"wants int32\[2\]$"),
    ],
)
def test_what_was_forgotten_is_named_and_nothing_else(
    value: Any, shape: tuple[int, ...], hint: str
) -> None:
    with pytest.raises(FeedError, match=hint):
        _fed(np.dtype(np.int32), value, shape)


def test_64_bit_arrays_are_fed_where_they_fit() -> None:
    assert _fed(np.int32, np.arange(3), (3,)).tolist() == [0, 1, 2]
    assert _fed(np.float32, np.array([0.5, 1]), (2,)).tolist() == [0.5, 1]
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(FeedError, match=rf"has values from .*{value}.* int32"):
            _fed(np.int32, np.array([0, value]), (2,))
    with pytest.raises(FeedError, match="values from 0 to 4294967296"):
        _fed(np.uint32, np.array([0, 2**32], np.uint64), (2,))


def test_arrays_of_the_other_byte_order_are_fed_as_the_same_numbers() -> None:
    for dtype in ("int32", "float32", "complex64"):
        numbers = np.array([1, 2, 300], dtype)
        other = numbers.astype(numbers.dtype.newbyteorder())
        assert _fed(dtype, other, (3,)).tobytes() == numbers.tobytes()


def test_what_is_no_number_is_refused() -> None:
    for value in ("seven", None, object(), {"a": 1}, [1, "a"], [[1], [1, 2]], 1 << 80):
        with pytest.raises(FeedError, match=r"x of 'step' is .* no array of numbers"):
            _fed(np.float32, value)


def test_masked_array_is_refused_also_where_its_values_would_fit() -> None:
    value: Any = np.ma.masked_array(np.ones(2, np.float32), [True, False])
    for given in (value, value.astype(np.float64)):
        with pytest.raises(FeedError, match=r"'x' of step has a mask.*x\.filled\(0\)"):
            _fed(np.float32, given, (2,))


def test_key_is_fed_a_key_of_its_own_kind_and_shape() -> None:
    key = jax.random.key(1)
    graph, _ = trace(jax.random.normal, key, name="draw")

    def fed(value: Any) -> Any:
        return _list(graph, [value], {}, 0)

    assert fed(jax.random.key(2)) == jax.random.key_data(jax.random.key(2)).tolist()
    for value in (
        7,
        jax.random.key_data(key),
        jax.random.split(key),
        jax.random.key(1, impl="rbg"),
    ):
        with pytest.raises(FeedError, match=r"wants key<fry>\[\], as jax.random.key"):
            fed(value)


def test_tapped_value_is_fed_like_an_argument() -> None:
    graph, _ = trace(lambda x: tap("ids", x) * 2, np.zeros(2, np.int32), name="step")
    graph = feed_taps(graph, ["ids"])
    leaves = [np.zeros(2, np.int32)]

    def fed(value: Any) -> Any:
        return leaf_arrays(graph, leaves, {"ids": value}, check_finite=False)[
            1
        ].tolist()

    assert fed([1, 2]) == [1, 2]
    for value in ([1.7, -2.9], np.array([1.0, 2.0]), [1, 2**31]):
        with pytest.raises(FeedError, match="argument ids of 'step'"):
            fed(value)


@pytest.mark.parametrize(
    "bad", [np.complex64(complex(1, np.nan)), jnp.bfloat16(np.inf), np.float16(np.nan)]
)
def test_what_is_not_finite_is_refused_in_every_dtype(bad: Any) -> None:
    graph, _ = trace(lambda x: (x,), jax.ShapeDtypeStruct((), bad.dtype), name="step")
    with pytest.raises(NonFiniteError, match="1 of 1 values"):
        leaf_arrays(graph, [np.asarray(bad)], {}, check_finite=True)
