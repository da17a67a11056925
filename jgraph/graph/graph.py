"""Graph: a traced function over variables, with its text and picture."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from jgraph.graph.ir import Dataflow
from jgraph.graph.show import graph_picture
from jgraph.graph.text import graph_text
from jgraph.view.svg import Picture


@final
@dataclass(frozen=True, slots=True)
class Graph(Dataflow):
    """A traced function over variables, flat and immutable.

    ``jaxpr.invars`` are the Refs of ``variables`` followed by the ``feeds``;
    ``jaxpr.constvars`` hold ``consts`` (arrays that the function closed over);
    ``jaxpr.outvars`` are the ``fetches``. No equation is a call any more (calls are
    inlined) unless its body is wholly of one device. ``stamps[i]`` is the merged
    device scope of equation ``i``, possibly partial or empty.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.function import function
      >>> graph = function(lambda x: {"mean": x.mean()}).graph(jnp.ones(3))
      >>> [feed.name for feed in graph.feeds], graph.fetches
      (['x'], ("['mean']",))
    """

    def __repr__(self) -> str:
        return (
            f"<graph {self.name}: {len(self.equations)} equations, "
            f"{len(self.variables)} variables; print it to see them>"
        )

    def __str__(self) -> str:
        return graph_text(self)

    def show(self, path: str | pathlib.Path | None = None) -> Picture:
        """Returns a picture of the graph: equations by device, values between them.

        Args:
          path: also write it there; ends in ``.html`` or ``.svg``.

        Example:
          >>> from jgraph.graph.tracing.function import function
          >>> step = function(lambda x: x + 1)
          >>> step.graph(1.0).show().title
          'graph <lambda>'
        """
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
