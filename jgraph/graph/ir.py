"""The graph: a flat jaxpr, the device stamp of every equation, what its inputs are.

There is no second IR of operations: meaning is what ``jax.core.eval_jaxpr`` gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import jax

from jgraph._compat import Equation, Jaxpr
from jgraph.graph.device import DeviceSpec, TaskName
from jgraph.graph.hash_spec import HashSpec
from jgraph.graph.sharding import Sharding

if TYPE_CHECKING:
    import pathlib

    from jgraph.graph.svg import Picture

__all__ = ["Feed", "Graph", "TaskName", "VariableKey", "VariableSpec", "eval_graph"]

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


@final
@dataclass(frozen=True, slots=True)
class Graph:
    """A traced function over variables, flat and immutable.

    ``jaxpr.invars`` are the Refs of ``variables`` followed by the ``feeds``;
    ``jaxpr.constvars`` hold ``consts`` (arrays that the function closed over);
    ``jaxpr.outvars`` are the ``fetches``. No equation is a call any more (calls are
    inlined) unless its body is wholly of one device. ``stamps[i]`` is the merged
    device scope of equation ``i``, possibly partial or empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.function import function
      >>> graph = function(lambda x: {"mean": x.mean()}).graph(jnp.ones(3))
      >>> [feed.name for feed in graph.feeds], graph.fetches
      (['x'], ("['mean']",))
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    variables: tuple[VariableSpec, ...]
    feeds: tuple[Feed, ...]
    fetches: tuple[str, ...]
    stamps: tuple[DeviceSpec, ...]
    in_tree: Any
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

    def __repr__(self) -> str:
        return (
            f"<graph {self.name}: {len(self.equations)} equations, "
            f"{len(self.variables)} variables; print it to see them>"
        )

    def __str__(self) -> str:
        from jgraph.graph.text import graph_text

        return graph_text(self)

    def show(self, path: "str | pathlib.Path | None" = None) -> "Picture":
        """Returns a picture of the graph: equations by device, values between them.

        Args:
          path: also write it there; ends in ``.html`` or ``.svg``.

        Example:
          >>> from jgraph.graph.function import function
          >>> step = function(lambda x: x + 1)
          >>> step.graph(1.0).show().title
          'graph <lambda>'
        """
        from jgraph.graph.show import graph_picture

        picture = graph_picture(self)
        if path is not None:
            picture.save(path)
        return picture

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


def eval_graph(
    graph: Graph, values: Sequence[Any], feeds: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns (fetches, new variable values): what the graph means.

    Every pass over a graph must keep this equal.

    Args:
      graph: the graph to evaluate, in one process, ignoring placement.
      values: one array per variable, in the order of ``graph.variables``.
      feeds: one array per feed, in the order of ``graph.feeds``.
    """
    refs = [jax.new_ref(v) for v in values]
    outs = jax.core.eval_jaxpr(graph.jaxpr, graph.consts, *refs, *feeds)
    return outs, [jax.freeze(ref) for ref in refs]
