"""Layout of a mesh segment's values on the devices of its task.

The user's constraints say it of some values. What is computed from such a value element
by element lies like it, and what it is computed from too: the moments of Adam like
their parameter, and a new value of a variable like the old one. All else is whole on
every device, and so is what does not divide among them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jgraph._compat import Atom, Jaxpr, Literal, Var
from jgraph.plan.analysis.affinity import is_elementwise
from jgraph.plan.program.types import is_key


def whole(mesh: AbstractMesh) -> NamedSharding:
    """Returns what puts a value whole on each device."""
    return NamedSharding(mesh, PartitionSpec())


def laid_out(
    values: "Sequence[Atom | None]",
    jaxpr: Jaxpr,
    mesh: AbstractMesh,
    alike: Iterable[tuple[Atom, Atom]],
) -> list[NamedSharding]:
    """Returns how values of a segment lie.

    Args:
      values: arguments and results; None for what is to be whole.
      jaxpr: of the segment.
      mesh: that it is compiled for.
      alike: pairs that are to lie alike.
    """
    said = dict(_constraints(jaxpr, mesh))
    near: dict[Var, list[Var]] = {}
    for a, b in (*alike, *_elementwise(jaxpr)):
        if not (isinstance(a, Literal) or isinstance(b, Literal)):
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
    # Nearest first: a constraint reaches what is close to it before others do.
    todo = list(said)
    for var in todo:
        for other in near.get(var, ()):
            if other not in said:
                said[other] = said[var]
                todo.append(other)
    found = []
    for value in values:
        spec = None if value is None or isinstance(value, Literal) else said.get(value)
        fitting = PartitionSpec() if spec is None else _fitting(value, spec, mesh)
        found.append(NamedSharding(mesh, fitting))
    return found


def _constraints(
    jaxpr: Jaxpr, mesh: AbstractMesh
) -> Iterator[tuple[Var, PartitionSpec]]:
    for equation in reversed(jaxpr.eqns):  # of several for one value the first holds
        params = equation.params
        if equation.primitive.name == "sharding_constraint":
            one = params["sharding"]
            if isinstance(one, NamedSharding) and one.mesh.abstract_mesh == mesh:
                (value,), (result,) = equation.invars, equation.outvars
                yield result, one.spec
                if not isinstance(value, Literal):
                    yield value, one.spec
        elif equation.primitive.name == "shard_map" and params.get("mesh") == mesh:
            specs = (*params["in_specs"], *params["out_specs"])
            values = (*equation.invars, *equation.outvars)
            for value, spec in zip(values, specs, strict=True):
                if not isinstance(value, Literal):
                    yield value, spec


def _elementwise(jaxpr: Jaxpr) -> Iterator[tuple[Atom, Atom]]:
    for equation in jaxpr.eqns:
        if is_elementwise(equation) and len(equation.outvars) == 1:
            (result,) = equation.outvars
            for value in equation.invars:
                if _shape(value) == _shape(result):
                    yield value, result


def _shape(value: Atom) -> tuple[object, ...]:
    return tuple(getattr(value.aval, "shape", ()))


def _fitting(
    value: "Atom | None", spec: PartitionSpec, mesh: AbstractMesh
) -> PartitionSpec:
    """Returns the part of a spec that divides the value evenly."""
    if value is None or is_key(value.aval):
        return PartitionSpec()
    parts = []
    for size, names in zip(_shape(value), spec, strict=False):
        axes = names if isinstance(names, tuple) else (names,)
        known = [mesh.shape[name] for name in axes if isinstance(name, str)]
        even = isinstance(size, int) and size % math.prod(known) == 0
        parts.append(names if even and len(known) == len(axes) else None)
    return PartitionSpec(*parts)
