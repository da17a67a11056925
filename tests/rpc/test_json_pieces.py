"""Large JSON in pieces is read and written as ``json`` does it in one call."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.rpc import json_pieces
from jgraph.rpc.json_pieces import PieceDecoder, written, written_in_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=9)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=30,
)


@pytest.fixture(autouse=True, scope="module")
def tiny_pieces() -> Any:
    """So that texts of a few characters are read and written in many pieces."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("PIECE", 8), ("VALUES", 3), ("ELEMENTS", 2)):
            patch.setattr(json_pieces, name, size)
        yield


def read(text: str, decoder: Any) -> tuple[str, Any]:
    try:
        return "value", repr(decoder.decode(text))
    except ValueError as error:
        return "error", str(error)


@given(VALUES, st.sampled_from([None, 1]))
def test_a_text_means_the_same_in_pieces(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    whole = json.JSONDecoder()
    assert read(text, PieceDecoder(whole)) == read(text, whole)


@given(st.text('[]{},:"1-.e tn\\', max_size=40))
def test_a_text_that_is_no_json_is_none_in_pieces(text: str) -> None:
    whole = json.JSONDecoder()
    kind, _ = read(text, whole)
    assert read(text, PieceDecoder(whole))[0] == kind


@given(VALUES, st.data())
def test_a_text_of_which_a_character_is_missing_is_refused_alike(
    value: Any, data: st.DataObject
) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    broken = text[:at] + text[at + 1 :]
    whole = json.JSONDecoder()
    assert read(broken, PieceDecoder(whole))[0] == read(broken, whole)[0]


@pytest.mark.parametrize("broken", ["1,,2", "1,2,", ",1,2", "1 2", "1,02", "1,]", "1,"])
@pytest.mark.parametrize("before", ["", "1,2,3,4,5,", "1234567,1234567,"])
def test_lists_of_numbers_end_and_go_on_as_they_must(before: str, broken: str) -> None:
    whole = json.JSONDecoder()
    for text in (f"[{before}{broken}]", f'{{"a": [{before}{broken}', f"[{before}"):
        with pytest.raises(json.JSONDecodeError) as refused:
            whole.decode(text)
        with pytest.raises(json.JSONDecodeError) as in_pieces:
            PieceDecoder(whole).decode(text)
        assert in_pieces.value.doc == text
        assert abs(in_pieces.value.pos - refused.value.pos) <= 2


def test_hooks_are_asked_in_pieces_too() -> None:
    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no number")

    whole = json.JSONDecoder(object_pairs_hook=list, parse_constant=no_number)
    text = '{"a": [1, 2, 3, 4, {"b": 1, "b": 2}], "a": 7}'
    assert read(text, PieceDecoder(whole)) == read(text, whole)
    with pytest.raises(ValueError, match="NaN is no number"):
        PieceDecoder(whole).decode("[1, 2, 3, 4, 5, 6, NaN]")


@pytest.mark.parametrize("shape", [(), (0,), (3,), (10,), (5, 2), (2, 7), (2, 3, 5)])
def test_arrays_are_written_alike(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 3
    tree = {"a": [{"data": array, 'b"': None}, [1, 2, 3, 4, 5]], "é": [], "n": {}}
    plain = {**tree, "a": [{"data": array.tolist(), 'b"': None}, [1, 2, 3, 4, 5]]}
    assert written(tree) == json.dumps(plain).encode()
    assert written_in_pieces(tree) == json.dumps(plain).encode()
