"""Placement: chooses the task of every live operation.

Stamped operations are fixed; those on a variable, and those that compute its new value
from its old one, whatever they compute, go to its task: anywhere else, an update made
meanwhile by another step would be lost. The others follow what they feed (a
gradient goes to its variable), else what they take, and then move while that lowers the
bytes on the wire, counting a value once per destination. A conversion to another dtype
may do so against its stamp: a float32 parameter that a worker computes with as bfloat16
is cast where it lives, and its bfloat16 gradient is widened there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph import _compat
from jgraph._compat import Literal, Var
from jgraph.errors import PlacementError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.plan.analysis.flow import Flow, Op
from jgraph.plan.partition.updates import not_code, ways_of_updates
from jgraph.plan.placement.tasks import Tasks
from jgraph.plan.program.types import value_type

_MAX_PASSES = 50


def place(
    flow: Flow, tasks: Tasks, variable_tasks: Sequence[TaskName]
) -> dict[int, TaskName]:
    """Returns the task of every live op but the free ones, which go with their users.

    Args:
      flow: the analyzed graph.
      tasks: the cluster.
      variable_tasks: one task per variable of the graph.

    Raises:
      UnknownDeviceError: a stamp names a job or task that is not there.
      PlacementError: a stamp disagrees with the task of a variable it works on.
    """
    placer = _Placer(flow, tasks, variable_tasks)
    placer.fix()
    placer.follow_consumers()
    placer.follow_inputs()
    placer.improve()
    return placer.task


@final
@dataclass(slots=True)
class _Placer:
    flow: Flow
    tasks: Tasks
    variable_tasks: Sequence[TaskName]
    task: dict[int, TaskName] = field(default_factory=dict)
    _allowed: dict[int, tuple[TaskName, ...]] = field(default_factory=dict)
    _casts: set[int] = field(default_factory=set)
    _inputs: dict[int, list[Var]] = field(default_factory=dict)
    _consumers: dict[Var, list[int]] = field(default_factory=dict)
    _nbytes: dict[Var, int] = field(default_factory=dict)
    _fetched: frozenset[Var] = frozenset()
    # Of each op that moves rows its route, which goes where its ids are.
    _beside: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self._placeable():
            self._inputs[op.index] = self.flow.sources(self.flow.inputs(op))
            for var in self._inputs[op.index]:
                self._consumers.setdefault(var, []).append(op.index)
        fetched = [a for a in self.flow.fetches if not isinstance(a, Literal)]
        self._fetched = frozenset(self.flow.sources(fetched))

    def fix(self) -> None:
        """Places what has no choice, and finds what the others may choose from."""
        stamped = {
            op.index: stamped_tasks(self.flow, self.tasks, op)
            for op in self._placeable()
        }
        updating = self._updating(stamped)
        for op in self._placeable():
            allowed = stamped[op.index]
            home = {self.variable_tasks[v] for v in _variables(op)}
            if home:
                (task,) = home
                self._check_state(op, task, allowed)
                self.task[op.index] = task
            elif op.index in updating:
                self.task[op.index] = updating[op.index]
            elif len(allowed) == 1:
                self.task[op.index] = allowed[0]
                if self._is_movable_cast(op):
                    self._casts.add(op.index)
            elif self.flow.moves_rows(op):
                self._beside[op.index] = self._route_of(op)
            else:
                self._allowed[op.index] = allowed

    def _updating(
        self, stamped: Mapping[int, tuple[TaskName, ...]]
    ) -> dict[int, TaskName]:
        """Returns the tasks of what computes new values of variables from old ones.

        What does so for variables of several tasks is on no task for all of them, and
        has a choice.
        """
        on = dict.fromkeys(self.tasks.names, 0)
        for variable, task in enumerate(self.variable_tasks):
            on[task] |= 1 << variable
        may_lead = not_code(self.flow)
        for index, allowed in stamped.items():
            op = self.flow.ops[index]
            near = {self.variable_tasks[v] for v in _variables(op)} or allowed
            if index in may_lead:
                continue
            if near or self.flow.graph.stamps[index] != DeviceSpec():
                may_lead[index] = sum(on[task] for task in near)
        ways = ways_of_updates(self.flow, may_lead)
        homes = {i: [t for t in on if found & on[t]] for i, found in ways.items()}
        contested = [i for i, found in homes.items() if len(found) > 1]
        if contested:
            may_lead |= dict.fromkeys(contested, 0)
            homes = {i: homes[i] for i in ways_of_updates(self.flow, may_lead)}
        return {i: found[0] for i, found in homes.items()}

    def follow_consumers(self) -> None:
        """Places an op with all its consumers where these agree."""
        for index in sorted(self._allowed, reverse=True):
            wanted = {
                self.task.get(c)
                for v in self.flow.ops[index].equation.outvars
                for c in self._consumers.get(v, ())
            }
            if len(wanted) == 1:
                self._put(index, wanted.pop())

    def follow_inputs(self) -> None:
        """Places the rest where most bytes of their inputs are."""
        for index in sorted([*self._allowed, *self._beside]):
            if index in self.task:
                continue
            if self._beside.get(index, index) != index:
                self.task[index] = self.task[self._beside[index]]
                continue
            near: Counter[TaskName] = Counter()
            for var in self._inputs[index]:
                source = self._source(var)
                may = index in self._beside or self._may(index, source)
                if source is not None and may:
                    near[source] += self._bytes(var)
            if near:
                self.task[index] = max(near, key=lambda t: (near[t], _order(self, t)))
            else:
                self.task[index] = self._fallback(index)

    def _route_of(self, op: Op) -> int:
        """Returns the op that routed the ids by which ``op`` moves rows."""
        if self.flow.moves_rows(op) in {"route", "check"}:
            return op.index
        routed = [v for v in self.flow.inputs(op) if v in self.flow.ragged]
        makers = (self.flow.ops[self.flow.producer[v]] for v in routed)
        names = ((m.equation.primitive.name, m.index) for m in makers)
        return next(index for name, index in names if name == "route_rows")

    def improve(self) -> None:
        """Moves ops, alone or all that use one value, while bytes shrink."""
        for _ in range(_MAX_PASSES):
            moved = False
            for group, to in self._moves():
                if self._gain(group, to) > 0:
                    self.task.update(dict.fromkeys(group, to))
                    moved = True
            if not moved:
                return

    def _placeable(self) -> Iterator[Op]:
        for op in self.flow.ops.values():
            if op.index not in self.flow.free:
                yield op

    def _check_state(
        self, op: Op, home: TaskName, allowed: tuple[TaskName, ...]
    ) -> None:
        simple = op.equation.primitive.name in {"get", "swap", "addupdate"}
        if simple or not allowed or home in allowed:
            return
        name = self.flow.graph.variables[_variables(op)[0]].name
        line = _compat.user_line(op.equation)
        raise PlacementError(
            f"'{op.equation.primitive}' at {line} is put on {' or '.join(allowed)} but "
            f"uses variable '{name}', which lives on {home}; read the variable before "
            f"it (value = {name}[...]), or put it on {home}",
            variable=name,
            home=home,
            device=list(allowed),
        )

    def _is_movable_cast(self, op: Op) -> bool:
        """Whether a stamped op converts a value that is then computed with.

        One that is stored as it is belongs to those that sent it.
        """
        if op.equation.primitive.name != "convert_element_type":
            return False
        users = self._consumers.get(op.equation.outvars[0], ())
        stored = any(self.flow.ops[user].is_whole_write for user in users)
        return self.flow.graph.stamps[op.index].device_type is None and not stored

    def _may(self, index: int, task: TaskName | None) -> bool:
        if index in self._casts:
            return task is not None
        if task is None or index not in self._allowed:
            return False
        return not self._allowed[index] or task in self._allowed[index]

    def _put(self, index: int, task: TaskName | None) -> None:
        if task is not None and self._may(index, task):
            self.task[index] = task

    def _fallback(self, index: int) -> TaskName:
        options = self._allowed.get(index) or self.tasks.default_tasks()
        return self.tasks.driver if self.tasks.driver in options else options[0]

    def _source(self, var: Var) -> TaskName | None:
        """Returns where a value is made; None if it costs nothing anywhere."""
        if var in self.flow.feeds:
            return self.tasks.driver
        producer = self.flow.producer.get(var)
        return None if producer is None else self.task.get(producer)

    def _bytes(self, var: Var) -> int:
        if var not in self._nbytes:
            self._nbytes[var] = value_type(var.aval).nbytes
        return self._nbytes[var]

    def _moves(self) -> Iterator[tuple[list[int], TaskName]]:
        for index in [*self._allowed, *sorted(self._casts)]:
            for to in self._neighbours(index):
                if to != self.task[index] and self._may(index, to):
                    yield [index], to
        for var, consumers in self._consumers.items():
            source = self._source(var)
            by_task: dict[TaskName, list[int]] = {}
            for c in consumers:
                by_task.setdefault(self.task[c], []).append(c)
            for task, group in by_task.items():
                if source not in {None, task} and len(group) > 1:
                    assert source is not None
                    if all(self._may(c, source) for c in group):
                        yield group, source

    def _neighbours(self, index: int) -> list[TaskName]:
        near = [self._source(v) for v in self._inputs[index]]
        for var in self.flow.ops[index].equation.outvars:
            near += [self.task[c] for c in self._consumers.get(var, ())]
            near += [self.tasks.driver] if var in self._fetched else []
        return [t for t in dict.fromkeys(near) if t is not None]

    def _gain(self, group: list[int], to: TaskName) -> int:
        values: dict[Var, None] = {}
        for index in group:
            values.update(dict.fromkeys(self._inputs[index]))
            values.update(dict.fromkeys(self.flow.ops[index].equation.outvars))
        before = {i: self.task[i] for i in group}
        cost = self._cost(values)
        self.task.update(dict.fromkeys(group, to))
        gain = cost - self._cost(values)
        self.task.update(before)
        return gain

    def _cost(self, values: Iterable[Var]) -> int:
        total = 0
        for var in values:
            source = self._source(var)
            if source is not None:
                users = {self.task[c] for c in self._consumers.get(var, ())}
                if var in self._fetched:
                    users.add(self.tasks.driver)
                total += self._bytes(var) * len(users - {source})
        return total


def _variables(op: Op) -> list[int]:
    return [v for v, _ in op.reads] + list(op.writes)


def _order(placer: _Placer, task: TaskName) -> int:
    return -placer.tasks.names.index(task)


def stamped_tasks(flow: Flow, tasks: Tasks, op: Op) -> tuple[TaskName, ...]:
    """Returns the tasks that the device scopes of an op leave open; none: any.

    Raises:
      UnknownDeviceError: a stamp names a job or task that is not there.
    """
    stamp = flow.graph.stamps[op.index]
    if stamp.job is None and stamp.task is None:
        return ()
    line = _compat.user_line(op.equation)
    return tasks.matching(stamp, f"'{op.equation.primitive}' at {line}")


def state_groups(flow: Flow) -> list[set[int]]:
    """Returns the sets of variables that one operation uses at once."""
    return [set(_variables(op)) for op in flow.ops.values() if op.reads or op.writes]
