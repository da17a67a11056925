"""A request may only pass the machine by where the machine would run it as it is."""

from hypothesis import given, strategies as st

from jgraph.coordination.serving.batching import (
    Batching,
    Came,
    Event,
    Execute,
    Freed,
    Limits,
)

LIMITS = st.builds(
    Limits,
    max_rows=st.just(4),
    buckets=st.sampled_from([(1, 4), (1, 2, 4), (4,)]),
    max_delay_s=st.sampled_from([0.0, 0.0, 1.0]),
    slots=st.integers(1, 2),
    max_queued_rows=st.just(6),
    merges=st.booleans(),
)
EVENTS = st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=6)


@given(
    limits=LIMITS,
    events=EVENTS,
    rows=st.integers(1, 8),
    deadline=st.sampled_from([0.0, 99.0]),
)
def test_what_runs_at_once_is_the_next_execution_without_padding(
    limits: Limits, events: list[tuple[int, bool]], rows: int, deadline: float
) -> None:
    machine, now = Batching(limits), 0.0
    under_way: list[int] = []
    for number, (count, frees) in enumerate(events):
        now += 0.1
        event: Event = Came(number, count, 50.0, now)
        if frees and under_way:
            event = Freed(under_way.pop(), now)
        done = machine.handle(event)
        under_way += [one.slot for one in done if isinstance(one, Execute)]
    now += 0.1
    at_once = machine.runs_at_once(rows, deadline, now)
    nothing_waits = not machine.queued_rows
    done = machine.handle(Came(99, rows, deadline, now))
    runs = [one for one in done if isinstance(one, Execute)]
    alone = [
        one
        for one in runs
        if [(p.request, p.rows) for p in one.pieces] == [(99, rows)]
        and one.bucket == rows
    ]
    # Behind what waits it might run at once too, in another slot; it is not let by.
    assert at_once == (nothing_waits and bool(alone))
