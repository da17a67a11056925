"""When asynchronous loops stand still for a save, and that all of them go on."""

from hypothesis import given, strategies as st

from jgraph.coordination.run.cuts import (
    Cuts,
    GoOn,
    Halt,
    LoopBegan,
    LoopHalted,
    LoopOver,
    Save,
    Saved,
    Told,
)

LOOPS = st.sampled_from("abc")
EVENTS = st.one_of(
    st.builds(LoopBegan, LOOPS),
    st.builds(Told, LOOPS, st.integers(0, 60)),
    st.builds(LoopHalted, LOOPS, st.integers(1, 4), st.integers(0, 2)),
    st.builds(LoopOver, LOOPS),
    st.builds(Saved, st.integers(1, 4)),
)


@given(st.lists(EVENTS, max_size=60))
def test_whoever_halts_is_told_to_go_on(events: list[object]) -> None:
    machine, asked = Cuts(every=10, first=0, end=1000), set[tuple[int, str]]()
    for event in [LoopBegan("a"), *events, *map(LoopOver, "abc")]:
        saving = False
        match event:
            case LoopOver(over):
                asked = {(n, loop) for n, loop in asked if loop != over}
        for told in machine.handle(event):  # type: ignore[arg-type]  # of EVENTS
            each = {(told.number, loop) for loop in told.loops}
            match told:
                case Halt():
                    assert not asked, "one after the other"
                    asked = each
                case Save():
                    assert each <= asked
                    assert not saving
                    saving = True
                case GoOn():
                    asked -= each
    assert not asked
    machine.handle(LoopBegan("a"))
    assert any(isinstance(told, Halt) for told in machine.handle(Told("a", 700)))
