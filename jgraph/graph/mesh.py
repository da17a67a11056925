"""A mesh of the devices of one task: tensor parallelism inside a task."""

from collections.abc import Iterable, Iterator
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jgraph import _compat
from jgraph._compat import Equation
from jgraph.errors import ConfigError, PlacementError


def mesh(**axes: int) -> AbstractMesh:
    """Returns a mesh over as many devices of one task as the product of its axes.

    Constraints over it, under a ``jg.device`` of that task, spread what XLA computes
    there: weights by columns, a batch by rows. The mesh has no devices of its own; it
    travels with the program, and a task lays it over the first of its devices.
    Variables of that task stay in pieces there, as constraints on them say, and so do
    variables that are computed with them element by element, as Adam's moments are;
    others have a copy on each device. Initial values, and what is done without a mesh,
    pass the first device, one variable whole at a time.

    Args:
      **axes: sizes by name, in the order of the devices.

    Raises:
      ConfigError: no axis, or a size below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> model = mesh(model=4)
      >>> by_columns = NamedSharding(model, P(None, "model"))
      >>> def hidden(x, w):
      ...     w = jax.lax.with_sharding_constraint(w, by_columns)
      ...     return jnp.tanh(x @ w)
      >>> jax.eval_shape(hidden, jnp.ones((2, 3)), jnp.ones((3, 8))).shape
      (2, 8)
    """
    sizes: list[Any] = list(axes.values())
    if not axes or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ConfigError(
            f"a mesh has axes with sizes from 1 on, not {axes or 'none'}; write for "
            "example jg.mesh(data=2, model=2)"
        )
    auto = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes), tuple(axes), axis_types=auto)


def mesh_of(equations: Iterable[Equation]) -> AbstractMesh | None:
    """Returns the mesh that operations of one segment spread over; None: one device.

    Raises:
      PlacementError: there are meshes of two sizes.
    """
    found: tuple[AbstractMesh, Equation] | None = None
    for equation in equations:
        for one in _meshes(equation):
            if found is not None and one.size != found[0].size:
                raise PlacementError(
                    f"'{equation.primitive}' at {_compat.user_line(equation)} spreads "
                    f"over a mesh of {one.size} devices, and '{found[1].primitive}' at "
                    f"{_compat.user_line(found[1])}, which is compiled with it, over "
                    f"one of {found[0].size}; use one jg.mesh for a task"
                )
            found = found or (one, equation)
    return None if found is None else found[0]


def _meshes(equation: Equation) -> Iterator[AbstractMesh]:
    for value in equation.params.values():
        one = value.mesh if isinstance(value, NamedSharding) else value
        if isinstance(one, Mesh | AbstractMesh) and not one.empty and one.size > 1:
            yield one.abstract_mesh
    for _, body in _compat.inner_jaxprs(equation):
        for inner in _compat.open_jaxpr(body).eqns:
            yield from _meshes(inner)
