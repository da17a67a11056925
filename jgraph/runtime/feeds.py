"""Checks of a step's feeds against those of its program."""

from collections.abc import Mapping, Sequence
from typing import Any

from jgraph.errors import FeedError
from jgraph.graph.sizes import Sizes
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import Program


def by_name(program: Program, arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns what is fed in the order of a program's feeds, as far as it goes."""
    named = zip(program.feeds, arrays, strict=False)
    return {name: array for (name, _), array in named}


def check_feeds(program: Program, feeds: Mapping[str, Any]) -> None:
    """Refuses feeds that are not those of a program.

    Raises:
      FeedError: one is missing, has another shape or dtype, or another size of a name
        than a feed before it.
    """
    sizes = Sizes(program.name)
    for name, wanted in program.feeds:
        value = feeds.get(name)
        if value is None:
            raise FeedError(
                f"feed '{name}' of '{program.name}' is missing; the program takes "
                f"{', '.join(n for n, _ in program.feeds)}",
                feed=name,
            )
        same = bool(wanted.symbols) or value.shape == wanted.shape
        if not same or value.dtype != wanted.np_dtype:
            given = ValueType(tuple(value.shape), value.dtype.name)
            raise FeedError(
                f"feed '{name}' of '{program.name}' is {given}; the program takes "
                f"{wanted}",
                feed=name,
            )
        if wanted.symbols:
            sizes.fit(name, value.shape, wanted.shape, wanted.symbols)
