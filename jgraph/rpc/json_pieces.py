"""Large JSON, read and written in pieces, between which other threads have a turn.

``json`` reads or writes a text in one call, and while it does no other thread of the
process runs Python: a text of 24 MB takes a second or more. Here it does so for
one piece after the other, and what comes out is the same.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

import numpy as np

PIECE: Final = 64 << 10
"""Characters that are read in one call: about a millisecond."""
VALUES: Final = 2048
"""Numbers that are written in one call."""
ELEMENTS: Final = 16
"""Of a list that are written in one call, where there are more."""
_BRACKETS: Final = re.compile(r"[\[\]{}]")
_MOST_BRACKETS: Final = 256
"""Of a value that is read in one call, unless it is a list of numbers."""
_NO_NUMBER: Final = re.compile(r'[\[\]{}"]')
_NO_NUMBERS: Final = frozenset({*'[]{}"', ""})
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_ENCODER: Final = json.JSONEncoder(default=lambda array: array.tolist())


@final
class PieceDecoder:
    """Reads JSON as ``json.JSONDecoder`` does, in pieces.

    Args:
      whole: reads a piece; with its hooks.

    Example:
      >>> PieceDecoder(json.JSONDecoder()).decode('{"a": [1, 2.5]}')
      {'a': [1, 2.5]}
    """

    def __init__(self, whole: json.JSONDecoder) -> None:
        self._whole: Any = whole
        self._memo: dict[str, str] = {}
        """One string for each name of objects, however often it comes."""

    def decode(self, text: str) -> Any:
        """Returns what a text says.

        Raises:
          ValueError, RecursionError: it is no JSON, as ``json`` says it.
        """
        value, at = self._value(text, _after_space(text, 0))
        at = _after_space(text, at)
        if at != len(text):
            raise json.JSONDecodeError("Extra data", text, at)
        return value

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        char = text[at : at + 1]
        if char == "{" and not _is_short(text, at):
            return self._object(text, at)
        if char == "[" and not _is_short(text, at):
            return self._array(text, at)
        try:
            value_end: tuple[Any, int] = self._whole.scan_once(text, at)
        except StopIteration as error:
            raise json.JSONDecodeError("Expecting value", text, error.value) from None
        return value_end

    def _object(self, text: str, at: int) -> tuple[Any, int]:
        whole = self._whole
        read: Any = vars(json.decoder)["JSONObject"]  # its part that is in Python
        value_end: tuple[Any, int] = read(
            (text, at + 1),
            whole.strict,
            self._value,
            whole.object_hook,
            whole.object_pairs_hook,
            self._memo,
        )
        return value_end

    def _array(self, text: str, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = _after_space(text, at + 1)
        if text[at : at + 1] == "]":
            return values, at + 1
        while True:
            at = _after_space(text, self._elements(text, at, values))
            char = text[at : at + 1]
            if char == "]":
                return values, at + 1
            if char != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _after_space(text, at + 1)

    def _elements(self, text: str, at: int, values: list[Any]) -> int:
        """Reads one or more elements of an array; returns where they end."""
        end = at
        if text[at : at + 1] not in _NO_NUMBERS:
            other = _NO_NUMBER.search(text, at, at + PIECE)
            if other is not None and other[0] == "]":
                end = other.start()
            else:
                stop = at + PIECE if other is None else other.start()
                end = text.rfind(",", at, stop)
        if end <= at:
            value, end = self._value(text, at)
            values.append(value)
            return end
        try:
            values += self._whole.decode(f"[{text[at:end]}]")
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, text, at + error.pos - 1) from None
        return end


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _is_short(text: str, at: int) -> bool:
    """Whether an array or object ends within a piece.

    Brackets in strings count too: they do no harm, as only the way to read differs.
    """
    depth = 0
    for count, bracket in enumerate(_BRACKETS.finditer(text, at, at + PIECE)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth == 0:
            return True
        if count == _MOST_BRACKETS:
            break
    return False


def written(value: Any) -> bytes:
    """Returns JSON of a value whose arrays are few numbers, in one call.

    Args:
      value: of dicts with strings as keys, lists, arrays, and what ``json`` writes.

    Example:
      >>> written({"a": np.arange(3)})
      b'{"a": [0, 1, 2]}'
    """
    return _ENCODER.encode(value).encode()


def written_in_pieces(value: Any) -> bytes:
    """Returns the same as ``written``, in pieces.

    Example:
      >>> written_in_pieces({"a": np.arange(3)})
      b'{"a": [0, 1, 2]}'
    """
    return "".join(_pieces(value)).encode()


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield "{"
        for count, (name, one) in enumerate(value.items()):
            yield f"{', ' if count else ''}{json.dumps(name)}: "
            yield from _pieces(one)
        yield "}"
    elif isinstance(value, list) and len(value) <= ELEMENTS:
        yield from _in_brackets(map(_pieces, value))
    elif isinstance(value, list):
        yield from _in_brackets(_parts(value, ELEMENTS))
    elif isinstance(value, np.ndarray) and value.size > VALUES and len(value):
        if rows := VALUES // (value.size // len(value)):
            yield from _in_brackets(_parts(value, rows))
        else:
            yield from _in_brackets(map(_pieces, value))
    else:
        yield _ENCODER.encode(value)


def _parts(value: Any, count: int) -> Iterator[list[str]]:
    for first in range(0, len(value), count):
        yield [_ENCODER.encode(value[first : first + count])[1:-1]]


def _in_brackets(parts: Iterable[Iterable[str]]) -> Iterator[str]:
    yield "["
    for count, part in enumerate(parts):
        if count:
            yield ", "
        yield from part
    yield "]"
