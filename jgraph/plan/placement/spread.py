"""Spreading variables over tasks by their bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName, VariableSpec
from jgraph.plan.program.types import value_type
from jgraph.view import markup


def nbytes_of(variable: VariableSpec) -> int:
    """Returns the bytes that a variable takes on its task."""
    return value_type(variable.aval).nbytes


def assign_largest_first(
    sizes: dict[str, int], tasks: Sequence[TaskName], load: dict[TaskName, int]
) -> dict[str, TaskName]:
    """Returns a task for each name, and adds the sizes to ``load``.

    The largest goes first, to the least loaded task. Equal sizes go in name order and
    equal loads in task order, so that every client finds the same answer.

    Example:
      >>> sizes, tasks = {"a": 10, "b": 6, "c": 5}, ["/job:ps/task:0", "/job:ps/task:1"]
      >>> assign_largest_first(sizes, tasks, dict.fromkeys(tasks, 0))
      {'a': '/job:ps/task:0', 'b': '/job:ps/task:1', 'c': '/job:ps/task:1'}
    """
    found: dict[str, TaskName] = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        task = min(tasks, key=lambda t: (load[t], tasks.index(t)))
        load[task] += sizes[name]
        found[name] = task
    return found


PlacementFunction: TypeAlias = Callable[
    [Mapping[str, int], Sequence[TaskName]], Mapping[str, TaskName]
]
"""Chooses a task for each name, given the bytes of each and the tasks."""


@final
@dataclass(frozen=True, slots=True)
class GreedyLoadBalancing:
    """Places variables on the least loaded task, in the order they are made.

    Without such a strategy jgraph places the largest variable first, which spreads
    better.

    Args:
      load: of a variable, given its bytes; the bytes themselves if unset.

    Source: tensorflow/contrib/training/python/training/device_setter.py.

    Example:
      >>> tasks = ["/job:ps/task:0", "/job:ps/task:1"]
      >>> GreedyLoadBalancing()({"a": 4, "b": 6, "c": 8}, tasks)
      {'a': '/job:ps/task:0', 'b': '/job:ps/task:1', 'c': '/job:ps/task:0'}
    """

    load: Callable[[int], float] | None = None

    def __call__(
        self, sizes: Mapping[str, int], tasks: Sequence[TaskName]
    ) -> dict[str, TaskName]:
        """Returns the task of each name."""
        loads = dict.fromkeys(tasks, 0.0)
        found = {}
        for name, nbytes in sizes.items():
            task = min(tasks, key=lambda t: (loads[t], tasks.index(t)))
            loads[task] += nbytes if self.load is None else self.load(nbytes)
            found[name] = task
        return found

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Places variables on one task after the other, in the order they are made.

    Source: tensorflow/python/training/device_setter.py.

    Example:
      >>> tasks = ["/job:ps/task:0", "/job:ps/task:1"]
      >>> RoundRobin()({"a": 4, "b": 6, "c": 8}, tasks)
      {'a': '/job:ps/task:0', 'b': '/job:ps/task:1', 'c': '/job:ps/task:0'}
    """

    def __call__(
        self, sizes: Mapping[str, int], tasks: Sequence[TaskName]
    ) -> dict[str, TaskName]:
        """Returns the task of each name."""
        return {name: tasks[n % len(tasks)] for n, name in enumerate(sizes)}

    def _repr_html_(self) -> str:
        return markup.data(self)


def spread(
    sizes: Mapping[str, int],
    tasks: Sequence[TaskName],
    placement: PlacementFunction | None = None,
) -> dict[str, TaskName]:
    """Returns the task of each name: by ``placement``, else largest first.

    Raises:
      ConfigError: ``placement`` leaves out a name, or names a task that is not there.
    """
    if placement is None:
        return assign_largest_first(dict(sizes), tasks, dict.fromkeys(tasks, 0))
    found = dict(placement(sizes, tasks))
    for name in sizes:
        if found.get(name) not in tasks:
            raise ConfigError(
                f"placement gives '{name}' the task {found.get(name)!r}; it is called "
                "with (bytes by name, tasks) and returns a task for each name, one of "
                f"{', '.join(tasks)}"
            )
    return found
