"""Device scopes of equations with bodies: the one place that a whole body names."""

from collections.abc import Iterable, Iterator

from jgraph import _compat
from jgraph._compat import Equation
from jgraph.errors import PlacementError
from jgraph.graph.device import DeviceSpec, stamp_of


def stamp_of_whole(equation: Equation) -> DeviceSpec:
    """Returns the device scope of an equation that is placed as one.

    An equation with bodies (a loop, a conditional) has the scope that the equations
    in its bodies name, merged over its own.

    Raises:
      PlacementError: the bodies name two different tasks.
    """
    own = stamp_of(_compat.name_stack_of(equation))
    if next(_compat.inner_jaxprs(equation), None) is None:
        return own
    stamps = body_stamps(equation)
    place = one_place(stamps)
    if place is None:
        raise _two_places(equation, stamps)
    return place


def body_stamps(equation: Equation) -> list[DeviceSpec]:
    """Returns the distinct scopes of an equation and of all equations in its bodies."""
    own = stamp_of(_compat.name_stack_of(equation))
    return list(dict.fromkeys((own, *_inside(equation, own))))


def one_place(stamps: Iterable[DeviceSpec]) -> DeviceSpec | None:
    """Returns the most specific of the stamps if it agrees with all, else None.

    Agreement is about job, replica and task; a disagreement about the device of one
    task leaves the device open.
    """
    stamps = [s for s in stamps if s]
    best = max(stamps, key=_set_fields, default=DeviceSpec())
    merged = best
    for stamp in stamps:
        merged = merged.merge(stamp)
    if _task_fields(merged) != _task_fields(best):
        return None
    devices = {(s.device_type, s.device_index) for s in stamps if s.device_type}
    kind, index = devices.pop() if len(devices) == 1 else (None, None)
    return DeviceSpec(best.job, best.replica, best.task, kind, index, best.beside)


def _inside(equation: Equation, outer: DeviceSpec) -> Iterator[DeviceSpec]:
    for _, body in _compat.inner_jaxprs(equation):
        for inner in _compat.open_jaxpr(body).eqns:
            stamp = stamp_of(_compat.name_stack_of(inner), outer)
            if next(_compat.inner_jaxprs(inner), None) is None:
                yield stamp
            else:
                yield from _inside(inner, stamp)


def _task_fields(spec: DeviceSpec) -> tuple[object, ...]:
    return spec.job, spec.replica, spec.task, spec.beside


def _set_fields(spec: DeviceSpec) -> int:
    return sum(f is not None for f in _task_fields(spec))


def _two_places(equation: Equation, stamps: list[DeviceSpec]) -> PlacementError:
    names = sorted({str(s) for s in stamps if s})
    listed = ", ".join(f"'{n}'" for n in names)
    advice = {
        "scan": "make it shorter: up to 2,000 operations in all turns together, over "
        "values and not variables (w[...] before the loop), are unrolled by themselves",
        "while": "write jax.lax.fori_loop or scan when the number of turns is known: "
        "short ones are unrolled by themselves",
        "cond": "compute the branches outside and choose with jnp.where",
    }.get(equation.primitive.name, "take it apart into operations of one task each")
    return PlacementError(
        f"'{equation.primitive.name}' at {_compat.user_line(equation)} has operations "
        f"on several tasks: {listed}; it runs whole on one task. Put all of it "
        f"under one jg.device scope, or {advice}",
        primitive=equation.primitive.name,
        devices=names,
    )
