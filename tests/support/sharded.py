"""What tests of sharding share: a graph over shards against the graph over wholes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jgraph.graph.graph import Graph, eval_graph
from jgraph.plan.sharding.shard import shard
from tests.support.plans import FAST, assert_same


def split_values(graph: Graph, values: Sequence[Any]) -> list[Any]:
    """Returns the values of the shards of a graph's variables."""
    return [
        part
        for spec, value in zip(graph.variables, values, strict=True)
        for part in (spec.sharding.split(value) if spec.sharding else (value,))
    ]


def join_values(graph: Graph, parts: Sequence[Any]) -> list[Any]:
    """Returns the values of a graph's variables, given those of their shards."""
    left = list(parts)
    joined = []
    for spec in graph.variables:
        mine, left = left[: len(spec.shards)], left[len(spec.shards) :]
        joined.append(spec.sharding.join(mine) if spec.sharding else mine[0])
    return joined


def checker(graph: Graph) -> tuple[Graph, Callable[..., None]]:
    """Returns the sharded graph and what runs it against the graph as it was."""
    sharded = shard(graph)

    def both(values: list[Any], feeds: list[Any]) -> Any:
        fetches, after = eval_graph(graph, values, feeds)
        got, parts = eval_graph(sharded, split_values(graph, values), feeds)
        return (fetches, after), (got, join_values(graph, parts))

    run = jax.jit(both, compiler_options=FAST)

    def check(values: Sequence[Any], *feeds: Any) -> None:
        wanted, got = run(list(values), jax.tree.leaves(feeds))
        assert_same(got, wanted, exact=False)

    return sharded, check


def check_shard(graph: Graph, values: Sequence[Any], *feeds: Any) -> Graph:
    """Shards a graph and runs it against the graph as it was, in one jit."""
    sharded, check = checker(graph)
    check(values, *feeds)
    return sharded
