"""A covering set: few of many sets that have together what all of them have."""

from collections.abc import Hashable, Sequence, Set as AbstractSet


def covering(sets: Sequence[AbstractSet[Hashable]]) -> set[int]:
    """Returns the places of few sets whose union is that of all, chosen greedily.

    Example:
      >>> every = [{how, copy} for how in ("sync", "async") for copy in (0, 1, 2)]
      >>> sorted(covering(every))
      [0, 2, 4]
    """
    chosen = set[int]()
    missing = set[Hashable]().union(*sets)
    while missing:
        most = max(range(len(sets)), key=lambda place: len(sets[place] & missing))
        chosen.add(most)
        missing -= sets[most]
    return chosen
