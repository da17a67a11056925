"""Symbolic sizes: a graph traced for ``b`` examples serves any number of them.

A dimension of an array is a number, or an expression of JAX over names, such as ``b``
or ``2*b``. What needs a number before there is one (placing by bytes, pictures) takes
``ASSUMED_SIZE`` for each name.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, final

import jax
import jax.export

from jgraph import _compat
from jgraph._compat import Equation
from jgraph.errors import ConfigError, FeedError
from jgraph.graph.ir import Feed

Symbolic: TypeAlias = str | Mapping[str, str]
"""Shapes of feeds with names in them: of all, or by argument."""

ASSUMED_SIZE: Final = 128
"""What a name counts in estimates."""

_NAMED = re.compile(r"(?:([1-9]\d{0,8})\*)?([A-Za-z_]\w{0,79})\Z")


def assumed_size(size: Any) -> int:
    """Returns a dimension as a number.

    Example:
      >>> assumed_size(3), assumed_size(*jax.export.symbolic_shape("2*b"))
      (3, 256)
    """
    if not _compat.is_symbolic(size):
        return int(size)
    names = _compat.size_names(size)
    return max(0, _compat.size_at(size, dict.fromkeys(names, ASSUMED_SIZE)))


def assumed_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """Returns a shape in numbers."""
    return tuple(map(assumed_size, shape))


def symbols_of(shape: Sequence[Any]) -> tuple[str, ...]:
    """Returns the text of each dimension that has names; ``""`` for numbers.

    Nothing at all for a shape of numbers.

    Example:
      >>> symbols_of((3, 4)), symbols_of(jax.export.symbolic_shape("b, 4"))
      ((), ('b', ''))
    """
    texts = [str(size) if _compat.is_symbolic(size) else "" for size in shape]
    return tuple(texts) if any(texts) else ()


def is_feed_symbol(text: str) -> bool:
    """Whether a dimension of a feed may be this: a name, or a number times a name."""
    return bool(_NAMED.match(text))


def with_names(
    feeds: Sequence[Feed], symbolic: Symbolic, scope: Any, title: str
) -> list[Feed]:
    """Returns feeds with names in their shapes.

    Args:
      feeds: of numbers.
      symbolic: see ``jg.function``.
      scope: of the names; those of two scopes never meet.
      title: name of the function, for errors.

    Raises:
      ConfigError: no argument of that name, or a shape that it cannot have.
    """
    shapes = {"": symbolic} if isinstance(symbolic, str) else dict(symbolic)
    unused = set(shapes) - {""}
    named = []
    for feed in feeds:
        argument = next((n for n in shapes if n and _is_of(feed.name, n)), "")
        unused.discard(argument)
        text = shapes.get(argument)
        if text is None or not feed.aval.shape:
            named.append(feed)
            continue
        shape = _named_shape(text, feed, scope, title)
        named.append(replace(feed, aval=feed.aval.update(shape=shape)))
    if unused:
        raise ConfigError(
            f"symbolic of '{title}' names {', '.join(sorted(unused))}, which is no "
            f"argument; its arguments are {', '.join(f.name for f in feeds) or 'none'}"
        )
    return named


def _is_of(feed: str, argument: str) -> bool:
    return feed == argument or feed.startswith((argument + "[", argument + "."))


def _named_shape(text: str, feed: Feed, scope: Any, title: str) -> tuple[Any, ...]:
    dims = tuple(feed.aval.shape)
    try:
        shape = tuple(jax.export.symbolic_shape(text, scope=scope, like=dims))
    except ValueError as error:
        shape, reason = (), f": {str(error).splitlines()[0]}"
    except IndexError:  # of _ where there is no such dimension
        shape, reason = (), ": it has more dimensions"
    else:
        reason = ""
    fits = len(shape) == len(dims) and all(
        want == have if isinstance(want, int) else is_feed_symbol(str(want))
        for want, have in zip(shape, dims, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"symbolic gives argument {feed.name} of '{title}', which is "
            f"{list(dims)}, the shape '{text}'{reason}; a dimension is a number, _ "
            "for the one it has, a name, or a number times a name, and ... stands for "
            "the rest: 'batch, ...'"
        )
    return shape


@final
@dataclass(slots=True)
class Sizes:
    """The sizes that the names of a step have, found from what is fed.

    Example:
      >>> sizes = Sizes("step")
      >>> sizes.fit("x", (3, 4), (128, 4), ("b", ""))
      >>> sizes.fit("y", (5,), (128,), ("b",))
      Traceback (most recent call last):
      jgraph.errors.FeedError: JG-211 feed 'y' of 'step' has b=5 where 'x' has b=3...
    """

    title: str
    _values: dict[str, tuple[int, str]] = field(default_factory=dict)

    def fit(
        self,
        name: str,
        shape: Sequence[int],
        wanted: Sequence[int],
        symbols: Sequence[str],
    ) -> None:
        """Takes the sizes of one feed.

        Args:
          name: of the feed.
          shape: what came.
          wanted: what is due, any number where there is a symbol.
          symbols: text of each dimension, ``""`` for numbers.

        Raises:
          FeedError: another shape, or another size of a name than a feed before had.
        """
        due = symbols or ("",) * len(wanted)
        if len(shape) != len(due) or any(
            not text and have != want
            for have, want, text in zip(shape, wanted, due, strict=True)
        ):
            raise self._refused(name, shape, wanted, due)
        for have, text in zip(shape, due, strict=True):
            if text and not self._takes(name, have, text):
                raise self._refused(name, shape, wanted, due)

    def _takes(self, name: str, have: int, text: str) -> bool:
        """Notes the size of a name; False if it can be none."""
        match = _NAMED.match(text)
        factor = int(match[1] or 1) if match else 1
        if match is None or have < 1 or have % factor:
            return False
        symbol, size = match[2], have // factor
        known, first = self._values.setdefault(symbol, (size, name))
        if known != size:
            raise FeedError(
                f"feed '{name}' of '{self.title}' has {symbol}={size} where "
                f"'{first}' has {symbol}={known}; give both the same, or trace them "
                "under two names",
                feed=name,
            )
        return True

    def _refused(
        self, name: str, shape: Sequence[int], wanted: Sequence[int], due: Sequence[str]
    ) -> FeedError:
        texts = [t or str(n) for t, n in zip(due, wanted, strict=True)]
        return FeedError(
            f"feed '{name}' of '{self.title}' is {list(shape)}; the program takes "
            f"[{', '.join(texts)}], where a name is any size from 1 on",
            feed=name,
        )


def names_needed(equation: Equation) -> frozenset[str]:
    """Returns the names in an equation that no operand has as a dimension."""
    named = {
        str(size)
        for atom in equation.invars
        for size in getattr(atom.aval, "shape", ())
        if _compat.is_symbolic(size)
    }
    return frozenset(_mentioned(equation) - named)


def _mentioned(equation: Equation) -> set[str]:
    found = set(_names_in(tuple(equation.params.values())))
    for atom in (*equation.invars, *equation.outvars):
        found.update(_names_in(tuple(getattr(atom.aval, "shape", ()))))
    for _, body in _compat.inner_jaxprs(equation):
        for inner in _compat.open_jaxpr(body).eqns:
            found |= _mentioned(inner)
    return found


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _names_in(item)
    elif _compat.is_symbolic(value):
        yield from _compat.size_names(value)
