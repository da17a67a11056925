"""``jgraph show``: draws a function, graph or plan found in a Python file."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ConfigError, FeedError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.function import Function
from jgraph.plan.plan import Plan, plan
from jgraph.view.svg import Picture

_TYPE = re.compile(r"(\w+)\[([\d,\s]*)\]")


def show(
    where: str,
    arguments: Sequence[str] = (),
    *,
    cluster: Path | None = None,
    only_graph: bool = False,
) -> Picture:
    """Returns the picture of a function, a graph or a plan in a file.

    The file is run, as Python would import it; nothing is run on a cluster.

    Args:
      where: ``path/to/file.py:name`` or ``package.module:name``.
      arguments: one for each of the function's: a type such as ``float32[32,784]``, or
        the name of an example in the same file.
      cluster: a cluster file with the tasks to plan for; if unset, the tasks that the
        program names.
      only_graph: show what was traced, before anything is placed.

    Raises:
      ConfigError: no such file or name, or an argument that is no type.
      UserError: what the function does cannot be traced or placed.
    """
    module, found = object_at(where)
    if not isinstance(found, Plan | Graph):
        if not callable(found):
            raise ConfigError(
                f"'{where}' is a {type(found).__name__}; name a function, a Graph or a "
                "Plan"
            )
        found = _traced(found, [_argument(text, module) for text in arguments], where)
    if isinstance(found, Graph) and not only_graph:
        found = _planned(found, cluster)
    return (
        found.graph.show() if isinstance(found, Plan) and only_graph else found.show()
    )


def object_at(where: str) -> tuple[ModuleType, Any]:
    """Returns what ``path/to/file.py:name`` names, and its module.

    Raises:
      ConfigError: no such file or name.
    """
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise ConfigError(
            f"'{where}' names no function; write for example train.py:step"
        )
    module = _module(place)
    try:
        return module, getattr(module, name)
    except AttributeError:
        raise ConfigError(f"'{place}' has no '{name}'") from None


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cannot import '{place}' ({error}); is it a file? write {place}.py"
            ) from error
    file = Path(place)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"there is no file '{place}'")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _argument(text: str, module: ModuleType) -> Any:
    if match := _TYPE.fullmatch(text):
        shape = tuple(int(n) for n in match[2].split(",") if n.strip())
        try:
            return jax.ShapeDtypeStruct(shape, match[1])
        except TypeError:
            raise ConfigError(f"'{match[1]}' of '{text}' is no dtype") from None
    try:
        return getattr(module, text)
    except AttributeError:
        raise ConfigError(
            f"'{text}' is neither a type nor a name in '{module.__name__}'; write for "
            "example float32[32,784]"
        ) from None


def _traced(fn: Callable[..., Any], arguments: Sequence[Any], where: str) -> Graph:
    function = fn if isinstance(fn, Function) else Function(fn)
    try:
        return function.graph(*arguments)
    except FeedError as error:
        raise ConfigError(
            f"cannot show '{where}': {error.args[0]}; give the type of each argument, "
            "for example --arg 'float32[32,784]'"
        ) from error


def _planned(graph: Graph, cluster: Path | None) -> Plan:
    if cluster is not None:
        tasks = list(ClusterSpec.from_toml(cluster).tasks())
    else:
        tasks = _named_tasks(graph)
    workers = [task for task in tasks if task.startswith("/job:worker/")]
    return plan(graph, tasks=tasks, driver=(workers or tasks)[0])


def _named_tasks(graph: Graph) -> list[TaskName]:
    """Returns the tasks that a program names; task 0 of a job that it only names."""
    devices: Iterable[DeviceSpec] = [
        *graph.stamps,
        *(d for v in graph.variables for d in (v.device, *v.shard_devices)),
    ]
    named = {(d.job, d.task or 0) for d in devices if d.job is not None}
    return [
        TaskName(f"/job:{job}/task:{n}") for job, n in sorted(named or {("worker", 0)})
    ]
