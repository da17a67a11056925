"""When asynchronous loops stand still for a save, and that all of them go on."""

from hypothesis import given, strategies as st

from jgraph.coordination.run.cuts import (
    AllOver,
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


def cuts(*loops: str, every: int = 100) -> Cuts:
    machine = Cuts(every=every, first=0, end=1000)
    for loop in loops:
        machine.handle(LoopBegan(loop))
    return machine


def halting() -> Cuts:
    machine = cuts("a", "b")
    assert not machine.handle(Told("a", 60))
    assert machine.handle(Told("b", 41)) == [Halt(1, ("a", "b"))]
    return machine


def test_the_run_is_saved_when_all_loops_stand_still_and_then_all_go_on() -> None:
    machine = halting()
    assert not machine.handle(LoopHalted("a", 1, 2))
    assert machine.handle(LoopHalted("b", 1, 1)) == [Save(1, ("a", "b"), 3)]
    assert not machine.handle(Told("a", 62))
    assert machine.handle(Saved(1)) == [GoOn(1, ("a", "b"))]
    assert not machine.handle(Told("a", 159 - 41))
    assert machine.handle(Told("a", 159)) == [Halt(2, ("a", "b"))]


def test_a_lost_loop_is_not_waited_for() -> None:
    machine = halting()
    machine.handle(LoopHalted("a", 1, 2))
    assert machine.handle(LoopOver("b")) == [Save(1, ("a",), 4)]
    assert machine.handle(Saved(1)) == [GoOn(1, ("a",))], "nor asked if it stood still"


def test_when_all_are_lost_nothing_is_saved_and_the_next_try_is_soon() -> None:
    machine = halting()
    assert not machine.handle(LoopOver("b"))
    assert not machine.handle(LoopOver("a"))
    assert not machine.is_halting
    machine.handle(LoopBegan("c"))
    assert machine.handle(Told("c", 1)) == [Halt(2, ("c",))]


def test_a_loop_that_begins_meanwhile_ends_the_try() -> None:
    machine = halting()
    assert machine.handle(LoopBegan("c")) == [GoOn(1, ("a", "b"))]
    assert machine.handle(LoopHalted("a", 1, 2)) == [GoOn(1, ("a",))]
    assert machine.handle(Told("c", 1)) == [Halt(2, ("a", "b", "c"))]


def test_a_save_during_which_a_loop_began_is_of_no_one_moment() -> None:
    machine = halting()
    for loop in "ab":
        machine.handle(LoopHalted(loop, 1, 0))
    assert machine.handle(LoopBegan("c")) == [GoOn(1, ("a", "b"))]
    assert not machine.handle(Saved(1)), "whoever saves learns so that they went on"


def test_a_save_that_is_over_late_does_not_end_the_next_halt() -> None:
    machine = halting()
    for loop in "ab":
        machine.handle(LoopHalted(loop, 1, 0))
    machine.handle(LoopBegan("c"))
    assert machine.handle(Told("a", 160)) == [Halt(2, ("a", "b", "c"))]
    assert not machine.handle(Saved(1))
    assert machine.is_halting


def test_a_master_that_is_replaced_ends_the_try() -> None:
    machine = halting()
    assert not machine.handle(AllOver()), "nobody is left who halts"
    assert not machine.is_halting
    machine.handle(LoopBegan("c"))
    assert machine.handle(Told("c", 0)) == [Halt(2, ("c",))]


def test_the_end_of_the_run_is_saved_by_others() -> None:
    machine = cuts("a")
    assert not machine.handle(Told("a", 1000))


def test_a_run_that_begins_at_a_multiple_is_not_saved_there() -> None:
    machine = Cuts(every=10, first=20, end=50)
    machine.handle(LoopBegan("a"))
    assert not machine.handle(Told("a", 9))
    assert machine.handle(Told("a", 10)) == [Halt(1, ("a",))]


LOOPS = st.sampled_from("abc")
EVENTS = st.one_of(
    st.builds(LoopBegan, LOOPS),
    st.builds(Told, LOOPS, st.integers(0, 60)),
    st.builds(LoopHalted, LOOPS, st.integers(1, 4), st.integers(0, 2)),
    st.builds(LoopOver, LOOPS),
    st.builds(AllOver),
    st.builds(Saved, st.integers(1, 4)),
)


@given(st.lists(EVENTS, max_size=60))
def test_whoever_halts_is_told_to_go_on(events: list[object]) -> None:
    machine, asked = cuts("a", every=10), set[tuple[int, str]]()
    for event in [*events, AllOver()]:
        saving = False
        match event:
            case LoopOver(over):
                asked = {(n, loop) for n, loop in asked if loop != over}
            case AllOver():
                asked = set()
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
        assert machine.is_halting == bool(asked)
    assert not asked
