"""Stand-ins of lost owners: whoever has the copy of a part has the part meanwhile."""

from collections.abc import Collection, Iterable, Mapping

from jgraph.graph.device import TaskName, is_worker


def stand_ins(
    lost: Collection[TaskName],
    copies: Mapping[TaskName, TaskName],
    now: Mapping[TaskName, TaskName],
    there: Collection[TaskName],
) -> dict[TaskName, TaskName] | None:
    """Returns who has the part of each owner that is away; None: they are waited for.

    Args:
      lost: tasks that hold a part, and are gone.
      copies: who has the copy of what a task holds.
      now: who stands in for the owners that were away already.
      there: tasks that answer.

    Example:
      >>> a, b, c = (TaskName(f"/job:worker/task:{n}") for n in range(3))
      >>> ring = {a: b, b: c, c: a}
      >>> stand_ins([b], ring, {}, [a, c]) == {b: c}
      True
      >>> stand_ins([b, c], ring, {}, [a]) is None  # the copy of b is lost, too
      True
      >>> stand_ins([c], {a: c, c: a}, {b: c}, [a]) == {b: a, c: a}
      True
    """
    heirs = dict[TaskName, TaskName]()
    for task in lost:
        heir = copies.get(task)
        if heir is None or heir in lost or heir not in there or not is_worker(task):
            return None
        heirs[task] = heir
    if not heirs:
        return None
    return {task: heirs.get(by, by) for task, by in now.items()} | heirs


def ring(holders: Iterable[TaskName]) -> dict[TaskName, TaskName]:
    """Returns who keeps the copy of each holder: the next one; nobody for one alone.

    Example:
      >>> ring([TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")])
      {'/job:ps/task:0': '/job:ps/task:1', '/job:ps/task:1': '/job:ps/task:0'}
      >>> ring([TaskName("/job:ps/task:0")])
      {}
    """
    each = list(holders)
    pairs = zip(each, [*each[1:], *each[:1]], strict=True)
    return {task: other for task, other in pairs if task != other}
