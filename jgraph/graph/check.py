"""Graph validation: the invariants of every graph that is planned or shipped.

A finding shows the equation, its neighbours, and the line of the user's code.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final

from jgraph import _compat
from jgraph._compat import Equation, Literal, Var
from jgraph.errors import (
    CallbackError,
    GraphError,
    JGError,
    PlacementError,
    UnknownDeviceError,
)
from jgraph.graph.device import DeviceSpec, did_you_mean
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.text import equation_lines, equation_text, value_names

_NEIGHBOURS = 3


def check(graph: Graph, tasks: Sequence[TaskName] | None = None) -> None:
    """Checks that a graph is well formed and can be placed and shipped.

    Args:
      graph: the graph to check.
      tasks: the tasks of the cluster, when known: devices must name only these.

    Raises:
      CallbackError: an operation calls back into Python (``jax.debug.print``, ...), or
        could: ``checkify.check``.
      UnknownDeviceError: a device names a job or task that is not in ``tasks``.
      PlacementError: one operation uses variables of two tasks, or of another task
        than the one it was put on.
      GraphError: a value used before it is made, or types that do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.device import device
      >>> from jgraph.graph.tracing.function import function
      >>> @function
      ... def step(x):
      ...     with device("/job:worker/task:7"):
      ...         return jnp.sin(x)
      >>> check(step.graph(1.0))
      >>> check(step.graph(1.0), [TaskName("/job:worker/task:0")])
      Traceback (most recent call last):
      jgraph.errors.UnknownDeviceError: JG-221 '/job:worker/task:7' is not in this
      cluster, which has /job:worker/task:0...
      ...
    """
    view = _View(graph)
    _check_inputs(graph)
    _check_definitions(view)
    _check_types(view)
    _check_callbacks(view)
    _check_refs(view)
    if tasks is not None:
        _check_tasks(view, tasks)


@final
@dataclass(frozen=True, slots=True)
class _View:
    graph: Graph

    def fail(
        self, kind: type[JGError], index: int, what: str, todo: str = ""
    ) -> JGError:
        """Returns an error about one equation, with its place in the graph."""
        names = value_names(self.graph)
        lines = list(equation_lines(self.graph, names))
        first = max(0, index - _NEIGHBOURS)
        excerpt = "\n".join(
            f"  {'->' if i == index else '  '} {line}"
            for i, line in enumerate(lines)
            if first <= i <= index + _NEIGHBOURS
        )
        equation = self.graph.equations[index]
        line = _compat.user_line(equation)
        if line == _compat.UNKNOWN_LINE:  # jgraph made it, for a call of the user's
            line = _compat.calling_line()
        end = f"; {todo}" if todo else ""
        return kind(
            f"{what}, at {line}{end}\n  in graph '{self.graph.name}':\n{excerpt}",
            graph=self.graph.name,
            equation=equation_text(equation, names),
            line=line,
        )

    def name(self, var: Var) -> str:
        return value_names(self.graph).get(var, "a value from elsewhere")


def _check_inputs(graph: Graph) -> None:
    """Inputs are the Refs of the variables, then the feeds; counts agree."""
    jaxpr = graph.jaxpr
    expected = [(f"variable '{v.name}'", v.aval, True) for v in graph.variables]
    expected += [(f"feed '{f.name}'", f.aval, False) for f in graph.feeds]
    lengths = [
        ("inputs", len(expected), len(jaxpr.invars)),
        ("constants", len(graph.consts), len(jaxpr.constvars)),
        ("fetches", len(graph.fetches), len(jaxpr.outvars)),
        ("device scopes", len(graph.stamps), len(graph.equations)),
    ]
    for what, want, have in lengths:
        if want != have:
            raise GraphError(
                f"graph '{graph.name}' lists {want} {what} and its jaxpr has {have}"
            )
    for var, (what, aval, ref) in zip(jaxpr.invars, expected, strict=True):
        array = _compat.array_type(var)
        same = (array.shape, array.dtype) == (aval.shape, aval.dtype)
        if not same or _compat.is_ref(var.aval) != ref:
            raise GraphError(
                f"{what} of graph '{graph.name}' is {aval.dtype}{list(aval.shape)} "
                f"and the equations use {var.aval}"
            )


def _check_definitions(view: _View) -> None:
    """Every value is made once, before it is used."""
    jaxpr = view.graph.jaxpr
    defined = {*jaxpr.constvars, *jaxpr.invars}
    for i, equation in enumerate(view.graph.equations):
        for v in equation.invars:
            if not isinstance(v, Literal) and v not in defined:
                raise view.fail(
                    GraphError, i, f"{view.name(v)} is used before it is made"
                )
        for v in equation.outvars:
            if v in defined:
                raise view.fail(GraphError, i, f"{view.name(v)} is made twice")
        defined.update(equation.outvars)
    for path, v in zip(view.graph.fetches, jaxpr.outvars, strict=True):
        if not isinstance(v, Literal) and v not in defined:
            raise GraphError(
                f"fetch '{path}' of graph '{view.graph.name}' is never made"
            )


def _check_types(view: _View) -> None:
    """JAX's own typing rules hold for each equation; of those alike one is checked."""
    if _compat.type_error(_of_each_kind(view.graph.equations)) is None:
        return
    for i, equation in enumerate(view.graph.equations):
        error = _compat.type_error([equation])
        if error is not None:
            reason = error.splitlines()[0]
            raise view.fail(GraphError, i, f"types do not match ({reason})")


def _of_each_kind(equations: Sequence[Equation]) -> list[Equation]:
    """Returns one equation of those that do the same to values of the same types.

    A model of many layers has few kinds. What cannot be told is a kind of its own.
    """
    found: dict[Hashable, Equation] = {}
    for equation in equations:
        kind: Hashable = (
            equation.primitive,
            getattr(equation, "ctx", None),  # JAX makes equal ones one object
            tuple((name, type(x), x) for name, x in equation.params.items()),
            tuple((type(getattr(v, "val", None)), v.aval) for v in equation.invars),
            tuple(v.aval for v in equation.outvars),
        )
        try:
            found.setdefault(id(equation) if equation.effects else kind, equation)
        except TypeError:
            found[id(equation)] = equation
    return list(found.values())


def _check_callbacks(view: _View) -> None:
    for i, equation in enumerate(view.graph.equations):
        found = _callback(equation)
        if found == "check":
            raise view.fail(
                CallbackError,
                i,
                "'check' raises in Python, and a graph runs on servers",
                "write error, y = checkify.checkify(fn)(x), return both, and call "
                "error.throw() in the client",
            )
        if found is not None:
            raise view.fail(
                CallbackError,
                i,
                f"'{found}' calls back into Python, and a graph runs on servers that "
                "do not have your code",
                "remove it, or return the value and print it in the client",
            )


_IN_PYTHON = {"check", "debug_print"}


def _callback(equation: Equation) -> str | None:
    name: str = equation.primitive.name
    if "callback" in name or "callback" in equation.params or name in _IN_PYTHON:
        return name
    for _, body in _compat.inner_jaxprs(equation):
        for inner in _compat.open_jaxpr(body).eqns:
            if (found := _callback(inner)) is not None:
                return found
    return None


def _check_refs(view: _View) -> None:
    """An equation on a Ref runs where the variable is, so all its Refs share a task."""
    graph = view.graph
    specs = dict(zip(graph.jaxpr.invars, graph.variables, strict=False))
    for i, equation in enumerate(graph.equations):
        refs = [v for v in equation.invars if _compat.is_ref(v.aval)]
        if equation.primitive.name == "new_ref" or any(v not in specs for v in refs):
            raise view.fail(
                GraphError,
                i,
                "a jax.Ref that is not a jg.Variable is used across operations",
                "use it only inside a function under jax.jit, which then stays whole",
            )
        tasks = {specs[v].device.task_name: specs[v].name for v in refs}
        if next(_compat.inner_jaxprs(equation), None) is not None:
            tasks.setdefault(graph.stamps[i].task_name, "the scope")
        tasks.pop(None, None)
        if len(tasks) > 1:
            listed = ", ".join(f"{n}: {t}" for t, n in sorted(tasks.items()))
            raise view.fail(
                PlacementError,
                i,
                f"'{equation.primitive.name}' writes variables and so runs whole on "
                f"their task, but here are several ({listed})",
                "return the new values from the loop, and write them (w[...] = x) "
                "after it",
            )


def _check_tasks(view: _View, tasks: Sequence[TaskName]) -> None:
    known = _Known(tasks)
    for i, stamp in enumerate(view.graph.stamps):
        if not known.has(stamp):
            raise view.fail(
                UnknownDeviceError, i, known.missing(stamp), known.advice(stamp)
            )
    for spec in view.graph.variables:
        if not known.has(spec.device):
            raise UnknownDeviceError(
                f"variable '{spec.name}': {known.missing(spec.device)}; "
                f"{known.advice(spec.device)}",
                variable=spec.name,
            )


def check_device(
    graph: Graph, index: int, task: TaskName, platforms: Sequence[str] | None
) -> None:
    """Checks that an equation's task computes on the device that it asks for.

    A server computes on the first device of its process.

    Args:
      graph: the graph.
      index: number of the equation.
      task: where it was placed.
      platforms: what JAX calls the task's kinds of device, if known.

    Raises:
      UnknownDeviceError: it asks for a GPU or TPU where there is none, or for another
        than the first device.
    """
    stamp = graph.stamps[index]
    if platforms is None or stamp.device_type is None:
        return
    kinds = {"CPU", *(_KINDS.get(p, p.upper()) for p in platforms)}
    if stamp.device_type not in kinds or stamp.device_index not in {None, 0}:
        raise _View(graph).fail(
            UnknownDeviceError,
            index,
            f"'{stamp}' is asked for, and {task} computes on the first of its "
            f"{' and '.join(platforms)} devices",
            f"leave out the device, write '{task}', or open the session with "
            "soft_placement=True",
        )


_KINDS = {"cuda": "GPU", "rocm": "GPU"}


@final
class _Known:
    """The devices that name something in a cluster."""

    def __init__(self, tasks: Sequence[TaskName]) -> None:
        self._tasks = tasks
        self._specs = [DeviceSpec.from_string(t) for t in tasks]

    def has(self, spec: DeviceSpec) -> bool:
        return any(
            spec.job in {None, t.job} and spec.task in {None, t.task}
            for t in self._specs
        )

    def missing(self, spec: DeviceSpec) -> str:
        return f"'{spec}' is not in this cluster, which has {', '.join(self._tasks)}"

    def advice(self, spec: DeviceSpec) -> str:
        count = sum(spec.job == t.job for t in self._specs)
        if count and spec.task is not None and spec.task >= count:
            return (
                f"start a cluster with {spec.task + 1} tasks of that job, or use the "
                f"{count} that it has: other jg.device scopes, fewer stages of a "
                "jg.Pipeline (or its tasks=), or fewer jg.towers"
            )
        return (
            f"{did_you_mean(str(spec), self._tasks)}change the jg.device scope, or "
            "start a cluster with that task"
        )
