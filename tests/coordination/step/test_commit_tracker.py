"""No step is told of before what it changed is kept a second time."""

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.step.commit_tracker import CommitTracker

Act = tuple[str, int]


@pytest.mark.row(16)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("made"), st.integers(0, 3)),
            st.tuples(st.just("over"), st.integers(0, 3)),
            st.tuples(st.just("kept"), st.integers(0, 40)),
            st.tuples(st.just("forget"), st.integers(0, 3)),
        ),
        max_size=40,
    )
)
def test_each_step_is_told_of_once_and_when_its_last_record_is_kept(
    acts: list[Act],
) -> None:
    updates = CommitTracker[tuple[int, int]]()
    round_of, last, kept = [0] * 4, dict[tuple[int, int], int](), 0
    waiting, told = set[tuple[int, int]](), list[tuple[int, int]]()
    for act, number in acts:
        step = number, round_of[number % 4]
        match act:
            case "made":
                last[step] = updates.append(step)
            case "over":
                if updates.finish(step):
                    told.append(step)
                    assert last.get(step, 0) <= kept
                else:
                    waiting.add(step)
                round_of[number] += 1  # no step is over twice
            case "kept":
                kept = max(kept, min(number, updates.count))
                done = updates.commit(kept)
                assert set(done) == {s for s in waiting if last[s] <= kept}
                waiting -= set(done)
                told += done
            case "forget":
                updates.forget(step)
                round_of[number] += 1
    assert updates.count == sum(act == "made" for act, _ in acts)
    assert set(updates.commit(updates.count)) == waiting
    assert len(told) == len(set(told))
