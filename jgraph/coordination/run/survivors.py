"""Survivors of a run: workers that have what a lost owner held, as they read it last.

The updates of a round are counted from its beginning. What was told of as made is what
the run goes on from: so all owners that are there must have made as many updates, and a
worker must have read as many times once more, as its first reading is of none.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.graph.device import TaskName

OPTIMIZER: Final = "opt/"
"""How the names begin of what may go back alone."""


@final
@dataclass(frozen=True, slots=True)
class Given:
    """Workers give what was lost.

    Attributes:
      by: the worker for each lost owner.
    """

    by: Mapping[TaskName, TaskName]


@final
@dataclass(frozen=True, slots=True)
class NotGiven:
    """The run goes back, all of it."""

    why: str


Gift: TypeAlias = Given | NotGiven


def made(
    before: Mapping[str, int], now: Mapping[str, int], writings: Mapping[str, int]
) -> int | None:
    """Returns how many updates an owner has made whole; None: one is made in part.

    Args:
      before: how often each variable was written when the round began.
      now: likewise.
      writings: how often an update writes it.

    Example:
      >>> made({"w": 1, "m": 4}, {"w": 7, "m": 16}, {"w": 1, "m": 2})
      6
      >>> made({"w": 1, "m": 4}, {"w": 7, "m": 14}, {"w": 1, "m": 2}) is None
      True
    """
    counts = set[int]()
    for name, each in writings.items():
        if name not in before or name not in now:
            return None
        count, rest = divmod(now[name] - before[name], each)
        if rest:
            return None
        counts.add(count)
    return counts.pop() if len(counts) == 1 else None


def unread(written: Collection[str], read: Collection[str], counter: str) -> str | None:
    """Returns a variable that changes, and that no worker reads; None: there is none.

    Of the optimizer nobody reads anything, and what counts the updates is known.

    Example:
      >>> unread(["params/w", "opt/0/mu/w", "global_step"], ["params/w"], "global_step")
      >>> unread(["params/w", "params/v"], ["params/w"], "global_step")
      'params/v'
    """
    missing = set(written) - set(read) - {counter}
    return min((n for n in missing if not n.startswith(OPTIMIZER)), default=None)


def gift(
    updates: int,
    lost: Collection[TaskName],
    there: Mapping[TaskName, int | None],
    reads: Mapping[TaskName, Mapping[TaskName, int]],
) -> Gift:
    """Says who gives what was lost, if the run can go on from what was told of.

    Args:
      updates: of the round that were told of as made.
      lost: owners.
      there: updates that each other owner has made; None: one of them in part.
      reads: how often each worker has read all of the part of each lost owner.

    Example:
      >>> a, b, c = (TaskName(f"/job:worker/task:{n}") for n in range(3))
      >>> gift(7, [a], {b: 7, c: 7}, {b: {a: 7}, c: {a: 8}}).by[a] == c
      True
      >>> gift(7, [a], {b: 7, c: 8}, {b: {a: 8}}).why
      '/job:worker/task:2 has made another update than the last that was told of'
      >>> gift(7, [a], {b: 7}, {b: {a: 7}}).why
      'no worker has read the newest parameters of /job:worker/task:0'
    """
    for task, count in sorted(there.items()):
        if count is None:
            return NotGiven(f"{task} has made an update in part")
        if count != updates:
            return NotGiven(
                f"{task} has made another update than the last that was told of"
            )
    by = dict[TaskName, TaskName]()
    for owner in sorted(lost):
        # What was read first, of no update, is what everybody began with.
        have = [w for w, read in reads.items() if read.get(owner, 0) == updates + 1]
        if not have:
            return NotGiven(f"no worker has read the newest parameters of {owner}")
        by[owner] = min(have)
    return Given(by)
