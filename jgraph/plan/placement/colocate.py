"""Colocation: resolves ``colocate_with`` to the task of the named variable."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import unquote

from jgraph import _compat
from jgraph.errors import PlacementError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec


def colocated_with(device: DeviceSpec, variables: Sequence[VariableSpec]) -> int | None:
    """Returns which of these a device is to be beside; None: none, or not one."""
    if device.beside is None:
        return None
    name = unquote(device.beside)
    found = [n for n, other in enumerate(variables) if other.name == name]
    return found[0] if len(found) == 1 else None


def resolved(
    device: DeviceSpec, homes: Mapping[VariableKey, TaskName], what: str
) -> DeviceSpec:
    """Returns a device with the task of the variable that it is to be beside.

    Args:
      device: any; one without such a variable is returned.
      homes: tasks of variables.
      what: what asks for it, for the error.

    Raises:
      PlacementError: nobody knows the variable's task, or there are several.
    """
    if device.beside is None:
        return device
    name = unquote(device.beside)
    found = {task for (_, known), task in homes.items() if known == name}
    if len(found) != 1:
        reason = (
            f"is on {' and '.join(sorted(found))}, in different containers"
            if found
            else "is neither used here nor placed before"
        )
        raise PlacementError(
            f"{what} is colocated with the variable '{name}', which {reason}; use it "
            "in the same function, or make it with a device of its own",
            variable=name,
        )
    return DeviceSpec.from_string(found.pop()).merge(replace(device, beside=None))


def with_resolved_stamps(graph: Graph, homes: Mapping[VariableKey, TaskName]) -> Graph:
    """Returns the graph with tasks in place of ``colocate_with``."""
    if not any(stamp.beside for stamp in graph.stamps):
        return graph
    stamps = tuple(
        resolved(
            stamp, homes, f"'{equation.primitive}' at {_compat.user_line(equation)}"
        )
        if stamp.beside
        else stamp
        for stamp, equation in zip(graph.stamps, graph.equations, strict=True)
    )
    return replace(graph, stamps=stamps)
