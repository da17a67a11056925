"""Arrangements of variables on ps that join: few bytes move, and the load is even."""

from hypothesis import given, strategies as st

from jgraph.graph.ir import TaskName
from jgraph.plan.placement.rearrange import arrangements, moves

PS = [TaskName(f"/job:ps/task:{n}") for n in range(6)]
SIZES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.integers(0, 1000), max_size=40
)


@given(SIZES, st.integers(1, 3), st.integers(0, 3))
def test_one_ps_more_takes_its_share_and_no_more(
    sizes: dict[str, int], least: int, more: int
) -> None:
    found = arrangements(sizes, PS[: least + more], least)
    largest, total = max(sizes.values(), default=0), sum(sizes.values())
    for count in range(least + 1, least + more + 1):
        moved = moves(found[count - 1], found[count], sizes)
        assert {one.dst for one in moved} <= {PS[count - 1]}
        assert sum(one.nbytes for one in moved) <= total / count + largest


@given(SIZES, st.integers(1, 3), st.integers(0, 3))
def test_no_ps_has_much_more_than_its_share(
    sizes: dict[str, int], least: int, more: int
) -> None:
    largest, total = max(sizes.values(), default=0), sum(sizes.values())
    for count, homes in arrangements(sizes, PS[: least + more], least).items():
        load = dict.fromkeys(PS[:count], 0)
        for name, task in homes.items():
            load[task] += sizes[name]
        assert max(load.values()) <= total / count + largest


@given(SIZES, st.integers(1, 3), st.integers(0, 3))
def test_who_leaves_gives_back_what_it_took(
    sizes: dict[str, int], least: int, more: int
) -> None:
    found = arrangements(sizes, PS[: least + more], least)
    for count in range(least + 1, least + more + 1):
        there = moves(found[count - 1], found[count], sizes)
        back = moves(found[count], found[count - 1], sizes)
        assert [(m.name, m.src, m.dst) for m in there] == [
            (m.name, m.dst, m.src) for m in back
        ]


@given(SIZES, st.integers(1, 5))
def test_what_is_pinned_stays_on_the_first_ps(
    sizes: dict[str, int], count: int
) -> None:
    pinned = sorted(sizes)[: len(sizes) // 2]
    for homes in arrangements(sizes, PS[:count], 1, pinned).values():
        assert set(homes) == set(sizes)
        assert all(homes[name] == PS[0] for name in pinned)
