"""Rearrangement of variables over parameter servers that join and leave.

What moves is a group: a parameter, or a shard of one, with its optimizer state. For
each number of tasks there is one arrangement. That of one task more is that of before,
less what the new one takes: as many bytes as make it even, and no more. So joining and
leaving move the same groups, and who comes back gets what it had.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.graph.ir import TaskName
from jgraph.plan.placement.spread import assign_largest_first

Homes: TypeAlias = Mapping[str, TaskName]
"""The task of each group, by name."""


@final
@dataclass(frozen=True, slots=True)
class Move:
    """A group goes from one task to another.

    Attributes:
      name: of the group.
      src: who has it.
      dst: who gets it.
      nbytes: of its variables.
    """

    name: str
    src: TaskName
    dst: TaskName
    nbytes: int


def arrangements(
    sizes: Mapping[str, int],
    tasks: Sequence[TaskName],
    least: int,
    pinned: Collection[str] = (),
) -> dict[int, dict[str, TaskName]]:
    """Returns where each group is, by the number of tasks that there are.

    Args:
      sizes: bytes of each group.
      tasks: as many as there are at most; of fewer it is the first ones.
      least: how many there are at least.
      pinned: groups that stay on the first task.

    Example:
      >>> tasks = [TaskName(f"/job:ps/task:{n}") for n in range(2)]
      >>> found = arrangements({"a": 3, "b": 2, "c": 1, "n": 0}, tasks, 1, ["n"])
      >>> found[1]["b"], found[2]["b"], found[2]["a"]
      ('/job:ps/task:0', '/job:ps/task:0', '/job:ps/task:1')
    """
    first = list(tasks[:least])
    load = dict.fromkeys(first, 0)
    homes = {name: first[0] for name in sizes if name in set(pinned)}
    for name, task in homes.items():
        load[task] += sizes[name]
    free = {name: size for name, size in sizes.items() if name not in homes}
    homes |= assign_largest_first(free, first, load)
    found = {least: homes}
    for count in range(least + 1, len(tasks) + 1):
        homes = _joined(sizes, homes, tasks[:count], set(homes) - set(free))
        found[count] = homes
    return found


def _joined(
    sizes: Mapping[str, int],
    homes: Homes,
    tasks: Sequence[TaskName],
    pinned: Collection[str],
) -> dict[str, TaskName]:
    """Returns the arrangement when the last of these tasks has joined the others."""
    new, found = tasks[-1], dict(homes)
    load = dict.fromkeys(tasks, 0)
    for name, task in homes.items():
        load[task] += sizes[name]
    even = sum(sizes.values()) / len(tasks)
    while True:
        taken = _next_of(sizes, found, load, new, even, pinned)
        if taken is None:
            return found
        load[found[taken]] -= sizes[taken]
        load[new] += sizes[taken]
        found[taken] = new


def _next_of(
    sizes: Mapping[str, int],
    homes: Homes,
    load: Mapping[TaskName, int],
    new: TaskName,
    even: float,
    pinned: Collection[str],
) -> str | None:
    """Returns what the new task takes next: the most that makes it even."""
    for giver in sorted(load, key=lambda task: (-load[task], task)):
        if giver == new or load[giver] <= even:
            continue
        room = even - load[new]
        own = [n for n, task in homes.items() if task == giver and n not in pinned]
        # One that is larger than the room helps if the fullest is the less for it.
        fits = [n for n in own if 0 < sizes[n] <= room] or [
            n for n in own if sizes[n] > 0 and load[new] + sizes[n] < load[giver]
        ][:1]
        if fits and room > 0:
            return max(fits, key=lambda n: (sizes[n], n))
    return None


def moves(old: Homes, new: Homes, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """Returns what has to move from one arrangement to another, by name.

    Args:
      old: where each group is.
      new: where it is to be.
      sizes: bytes of each.

    Example:
      >>> old, new = {"a": "ps 0", "b": "ps 0"}, {"a": "ps 0", "b": "ps 1"}
      >>> moves(old, new, {"a": 4, "b": 2})
      (Move(name='b', src='ps 0', dst='ps 1', nbytes=2),)
    """
    return tuple(
        Move(name, old[name], new[name], sizes[name])
        for name in sorted(old)
        if old[name] != new[name]
    )
