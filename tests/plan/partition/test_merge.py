"""Merging clusters keeps an order in which they can run."""

from hypothesis import given, strategies as st

from jgraph.graph.ir import TaskName
from jgraph.plan.partition.merge import Kind, merge, topological

A, B = TaskName("/job:a/task:0"), TaskName("/job:b/task:0")


def merged(
    keys: list[tuple[TaskName, Kind, int]], edges: set[tuple[int, int]]
) -> list[set[int]]:
    successors: list[set[int]] = [set() for _ in keys]
    for source, target in edges:
        successors[source].add(target)
    return [m for _, _, m in merge(keys, [{n} for n in range(len(keys))], successors)]


def test_neighbours_of_one_task_merge() -> None:
    keys: list[tuple[TaskName, Kind, int]] = [(A, "segment", 1), (A, "segment", 0)]
    assert merged(keys, {(0, 1)}) == [{0, 1}]


def test_clusters_with_another_task_between_them_stay_apart() -> None:
    keys: list[tuple[TaskName, Kind, int]] = [
        (A, "segment", 2),
        (B, "segment", 1),
        (A, "segment", 0),
    ]
    assert merged(keys, {(0, 1), (1, 2), (0, 2)}) == [{0}, {1}, {2}]


def test_reads_do_not_merge_with_segments() -> None:
    keys: list[tuple[TaskName, Kind, int]] = [(A, "read", 1), (A, "segment", 0)]
    assert merged(keys, set()) == [{0}, {1}]


def test_two_exchanges_cross_in_one_direction_only() -> None:
    """Both pairs could merge alone; together they would wait for each other."""
    keys: list[tuple[TaskName, Kind, int]] = [
        (A, "segment", 1),
        (B, "segment", 1),
        (A, "segment", 0),
        (B, "segment", 0),
    ]
    assert len(merged(keys, {(0, 3), (1, 2)})) == 3


@given(
    tasks=st.lists(st.sampled_from([A, B]), min_size=1, max_size=12),
    pairs=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
)
def test_what_is_merged_still_has_an_order(
    tasks: list[TaskName], pairs: set[tuple[int, int]]
) -> None:
    count = len(tasks)
    edges = {(a, b) for a, b in pairs if a < b < count}
    keys: list[tuple[TaskName, Kind, int]] = [
        (task, "segment", count - n) for n, task in enumerate(tasks)
    ]
    groups = merged(keys, edges)
    assert sorted(n for g in groups for n in g) == list(range(count))
    assert all(len({tasks[n] for n in g}) == 1 for g in groups)
    home = {n: i for i, g in enumerate(groups) for n in g}
    before: dict[int, set[int]] = {i: set() for i in range(len(groups))}
    for a, b in edges:
        if home[a] != home[b]:
            before[home[b]].add(home[a])
    assert len(topological(before)) == len(groups)
