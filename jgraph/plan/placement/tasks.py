"""Resolution of device specs to tasks, and the tasks of variables."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from jgraph.errors import PlacementError, UnknownDeviceError
from jgraph.graph.device import DeviceSpec, did_you_mean
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.plan.placement.colocate import colocated_with, resolved
from jgraph.plan.placement.spread import assign_largest_first, nbytes_of

_TASK = re.compile(r"/job:([a-zA-Z][a-zA-Z0-9_]*)/task:(\d+)\Z")


@final
@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks that a plan may use.

    Attributes:
      names: canonical names.
      driver: where feeds enter and fetches leave.
      default: outermost device scope; completes partial specs.
    """

    names: tuple[TaskName, ...]
    driver: TaskName
    default: DeviceSpec

    def matching(self, spec: DeviceSpec, what: str) -> tuple[TaskName, ...]:
        """Returns the tasks that a spec with a job or a task number may mean.

        A spec of the default's job, or of no job, takes its unset fields from the
        default; a spec of another job takes nothing: its task is still open.

        Args:
          spec: a possibly partial device.
          what: what asks for it, for the error message.

        Raises:
          UnknownDeviceError: no task of the cluster matches.
        """
        if spec.job is None or spec.job == self.default.job:
            spec = self.default.merge(spec)
        found = tuple(t for t in self.names if may_be(t, spec))
        if not found:
            raise self._unknown(spec, what)
        return found

    def default_tasks(self) -> tuple[TaskName, ...]:
        """Returns where things go that nothing else decides, best first."""
        if self.default.job is None and self.default.task is None:
            return (self.driver,)
        return self.matching(self.default, "the plan's default device")

    def of_job(self, job: str) -> tuple[TaskName, ...]:
        """Returns the tasks of a job, possibly none."""
        return tuple(t for t in self.names if may_be(t, DeviceSpec(job=job)))

    def _unknown(self, spec: DeviceSpec, what: str) -> UnknownDeviceError:
        asked = str(DeviceSpec(job=spec.job, task=spec.task))
        return UnknownDeviceError(
            f"{what} asks for '{asked}', which no task of the cluster is; it has "
            f"{', '.join(self.names)}; {did_you_mean(asked, self.names)}change the "
            "device, or start a cluster with that task",
            device=asked,
            tasks=list(self.names),
        )


def may_be(task: TaskName, spec: DeviceSpec) -> bool:
    """Whether a device, possibly partial, leaves a task open.

    Example:
      >>> may_be("/job:ps/task:1", DeviceSpec.from_string("/job:ps"))
      True
    """
    parts = _TASK.match(task)
    if parts is None:
        return False
    job_fits = spec.job is None or spec.job == parts[1]
    return job_fits and (spec.task is None or spec.task == int(parts[2]))


def assign_variables(
    variables: Sequence[VariableSpec],
    tasks: Tasks,
    chosen: Mapping[VariableKey, TaskName],
    together: Sequence[set[int]] = (),
    near: Sequence[set[int]] = (),
) -> list[TaskName]:
    """Returns the task of each variable.

    Those of one exact device, or named in ``chosen``, go there. The others are spread
    by bytes over the tasks that their device leaves open: those of its job, or, where
    nothing is said, those of job ``ps`` if there is one, else the default's.

    Args:
      variables: the graph's variables.
      tasks: the cluster.
      chosen: tasks by key of the variable that win over the variables' own devices.
      together: sets of variables that must be on one task: one operation uses them.
      near: sets of variables that should be on one task where their devices allow it.

    Raises:
      UnknownDeviceError: a variable or ``chosen`` names a task that is not there.
      PlacementError: variables that must be together have different tasks.
    """
    others = [colocated_with(v.device, variables) for v in variables]
    together = [*together, *({n, o} for n, o in enumerate(others) if o is not None)]
    options = [
        _options(v, tasks, chosen, open_=other is not None)
        for v, other in zip(variables, others, strict=True)
    ]
    sizes = [nbytes_of(v) for v in variables]
    for group in _unions(len(variables), together):
        common = _common(group, variables, options)
        for i in group:
            options[i] = common
    for group in _unions(len(variables), near):
        _move_near(group, options, sizes)
    load = dict.fromkeys(tasks.names, 0)
    for i, allowed in enumerate(options):
        load[allowed[0]] += sizes[i] if len(allowed) == 1 else 0
    units = _unions(len(variables), _same_options([*together, *near], options))
    open_units = {str(min(g)): g for g in units if len(options[min(g)]) > 1}
    placed = [allowed[0] for allowed in options]
    bytes_of = {name: sum(sizes[i] for i in g) for name, g in open_units.items()}
    for name in sorted(bytes_of, key=lambda n: (-bytes_of[n], int(n))):
        allowed = options[int(name)]
        task = assign_largest_first({name: bytes_of[name]}, allowed, load)[name]
        for i in open_units[name]:
            placed[i] = task
    return placed


def _move_near(
    group: set[int], options: list[tuple[TaskName, ...]], sizes: Sequence[int]
) -> None:
    """Takes open variables to the task of the largest settled one among them."""
    settled = [i for i in group if len(options[i]) == 1]
    if settled:
        task = options[max(settled, key=lambda i: (sizes[i], -i))][0]
        for i in group:
            if task in options[i]:
                options[i] = (task,)


def _same_options(
    sets: Sequence[set[int]], options: Sequence[tuple[TaskName, ...]]
) -> list[set[int]]:
    parts: list[set[int]] = []
    for linked in sets:
        by_options: dict[tuple[TaskName, ...], set[int]] = {}
        for i in linked:
            by_options.setdefault(options[i], set()).add(i)
        parts += by_options.values()
    return parts


def asked_tasks(
    variable: VariableSpec, tasks: Tasks, chosen: Mapping[VariableKey, TaskName]
) -> tuple[TaskName, ...]:
    """Returns the tasks that a variable's device, or ``chosen``, asks for; none: any.

    Raises:
      UnknownDeviceError: no such task.
      PlacementError: it is to be beside a variable that nobody knows.
    """
    what = f"variable '{variable.name}'"
    if variable.key in chosen:
        spec = DeviceSpec.from_string(chosen[variable.key])
        return tasks.matching(spec, f"variable_tasks of {what}")
    if variable.device.beside is not None:
        return tasks.matching(resolved(variable.device, chosen, what), what)
    if variable.device.job is not None or variable.device.task is not None:
        return tasks.matching(variable.device, what)
    return ()


def _options(
    variable: VariableSpec,
    tasks: Tasks,
    chosen: Mapping[VariableKey, TaskName],
    *,
    open_: bool,
) -> tuple[TaskName, ...]:
    if open_ and variable.key not in chosen:
        return tasks.names  # it goes where another one goes
    asked = asked_tasks(variable, tasks, chosen)
    return asked or tasks.of_job("ps") or tasks.default_tasks()


def _unions(count: int, sets: Sequence[set[int]]) -> list[set[int]]:
    """Returns the connected groups of 0..count-1, in order of their first member."""
    group_of = {i: {i} for i in range(count)}
    for linked in sets:
        union = set().union(*(group_of[i] for i in linked))
        group_of.update(dict.fromkeys(union, union))
    return list({id(g): g for g in group_of.values()}.values())


def _common(
    group: set[int],
    variables: Sequence[VariableSpec],
    options: Sequence[tuple[TaskName, ...]],
) -> tuple[TaskName, ...]:
    first = options[min(group)]
    common = tuple(t for t in first if all(t in options[i] for i in group))
    if not common:
        names = ", ".join(
            f"'{variables[i].name}' on {' or '.join(options[i])}" for i in sorted(group)
        )
        raise PlacementError(
            f"one loop or conditional uses the variables {names}: it can run on one "
            "task only; give them the same device, or read the values before it",
            variables=[variables[i].name for i in sorted(group)],
        )
    return common
