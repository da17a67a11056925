"""The graph: a flat jaxpr, the device stamp of every equation, what its inputs are.

There is no second IR of operations: meaning is what ``jax.core.eval_jaxpr`` gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax

from jgraph._compat import Equation, Jaxpr
from jgraph.graph.device import DeviceSpec, TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.graph.sharding import Sharding

__all__ = ["Dataflow", "Feed", "TaskName", "VariableKey", "VariableSpec"]

VariableKey: TypeAlias = tuple[str, str]
"""(container, name): of two variables with one key there is one value."""


@final
@dataclass(frozen=True, slots=True)
class VariableSpec:
    """What a graph knows of a variable: its name, type and where it may live.

    Two graphs share a variable when their keys are equal. One with ``sharding``
    is logical: a plan replaces it by its ``shards``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    device: DeviceSpec
    container: str = ""
    sharding: Sharding | None = None
    shard_devices: tuple[DeviceSpec, ...] = ()
    table: HashSpec | None = None
    """Of which hash table it is a column; its one row then means nothing."""

    @property
    def key(self) -> VariableKey:
        """What makes two variables the same one."""
        return self.container, self.name

    @property
    def shards(self) -> tuple["VariableSpec", ...]:
        """The variables that hold it: ``<name>/part_<k>``, or itself if it is whole."""
        cut = self.sharding
        if cut is None:
            return (self,)
        devices = self.shard_devices or (self.device,) * cut.shards
        return tuple(
            VariableSpec(
                f"{self.name}/part_{n}",
                cut.part_shape(self.shape, n),
                self.dtype,
                self.device.merge(device),
                self.container,
                table=None if self.table is None else self.table.part(n),
            )
            for n, device in enumerate(devices)
        )

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype as JAX writes them."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@final
@dataclass(frozen=True, slots=True)
class Feed:
    """An input given by the caller of a step; ``name`` is the user's argument path."""

    name: str
    aval: Any


@final
@dataclass(frozen=True, slots=True)
class Gathered:
    """A sharded value that an operation needs whole, on one task.

    Attributes:
      primitive: the operation.
      line: the user's line that made it.
      variable: the sharded variable that the value was computed from.
      nbytes: bytes of the whole value.
    """

    primitive: str
    line: str
    variable: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The data of a ``Graph``, which says what its fields mean."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    variables: tuple[VariableSpec, ...]
    feeds: tuple[Feed, ...]
    fetches: tuple[str, ...]
    stamps: tuple[DeviceSpec, ...]
    out_tree: Any
    name: str = "step"
    logical: tuple[VariableSpec, ...] = ()
    """The sharded variables, where ``variables`` has their shards."""
    gathered: tuple[Gathered, ...] = ()
    """What could not be done shard by shard."""
    notes: tuple[str, ...] = ()
    """What was decided in making it, for people."""

    @property
    def equations(self) -> Sequence[Equation]:
        """The equations in program order."""
        equations: Sequence[Equation] = self.jaxpr.eqns
        return equations
