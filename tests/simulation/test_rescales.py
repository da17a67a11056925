"""Runs whose parameter servers join, leave and die, each by its number.

What must hold: a variable has each update of the run once, at one task, that of the
arrangement that the run has at its end; a rescale that cannot be, or whose master dies,
leaves the run in one arrangement or the other.
"""

import pytest

from tests.support.simulation.faulty_run import FIRST, RUNS
from tests.support.simulation.ps_runs import (
    Faults,
    all_die_that_know,
    client_is_away,
    dies_as_it_goes_back,
    dies_as_loops_end,
    dies_unheard,
    dies_when_switched,
    link_is_silent,
    master_leaves,
    nobody_trains,
    rescaled,
)


@pytest.mark.row(45, 46)
def test_no_update_is_lost_or_doubled_whoever_dies_while_variables_move() -> None:
    switches = 0
    for seed in range(FIRST, FIRST + max(3, RUNS // 8)):
        switches += len(rescaled(seed).switches)
    assert switches


def switches_of(faults: Faults, runs: int) -> int:
    """Returns how often variables moved in runs none of which goes back."""
    switches = 0
    for seed in range(FIRST, FIRST + max(3, runs)):
        world = rescaled(seed, faults)
        assert not world.restores
        switches += len(world.switches)
    return switches


@pytest.mark.row(46)
def test_a_master_that_dies_when_ps_were_switched_leaves_an_heir_that_knows() -> None:
    """All ps live, so the run does not go back, whichever arrangement it has."""
    assert switches_of(dies_when_switched, RUNS // 8)


@pytest.mark.row(46)
def test_a_standby_that_never_heard_of_a_switch_learns_of_it_from_the_ps() -> None:
    """Their variables are elsewhere already, and its master is lost."""
    assert switches_of(dies_unheard, RUNS // 16)


@pytest.mark.row(46)
def test_a_run_whose_client_alone_knows_of_a_switch_goes_back_to_the_ps_before() -> (
    None
):
    """The client gives values back, and looks where these are to be."""
    for seed in range(FIRST, FIRST + max(3, RUNS // 16)):
        world = rescaled(seed, all_die_that_know)
        assert (world.restores, world.why()) == (1, "None")


@pytest.mark.row(46, 54)
def test_an_update_that_a_dead_worker_left_is_made_before_variables_move() -> None:
    """A ps computes it for up to a second; all other loops have ended long before."""
    assert switches_of(dies_as_loops_end, RUNS // 16)


@pytest.mark.row(46)
def test_a_run_that_no_worker_trains_stays_where_programs_are_taken() -> None:
    """While workers are lost no program is given to a ps that has joined, and hangs."""
    for seed in range(FIRST, FIRST + max(3, RUNS // 64)):
        world = rescaled(seed, nobody_trains)
        assert (world.switches, world.restores) == ([], 0)


@pytest.mark.row(12, 46)
def test_a_master_that_dies_as_a_run_goes_back_leaves_an_heir_that_goes_back() -> None:
    restores = 0
    for seed in range(FIRST, FIRST + max(3, RUNS // 8)):
        restores += rescaled(seed, dies_as_it_goes_back).restores
    assert restores


@pytest.mark.row(57)
def test_a_client_that_is_away_while_variables_move_finds_them_when_it_is_back() -> (
    None
):
    assert switches_of(client_is_away, RUNS // 16)


@pytest.mark.row(55)
def test_a_rescale_waits_for_a_silent_link_or_is_given_up_and_tried_again() -> None:
    """For 5 s, which the link outlives, and for 20 s."""
    switches = 0
    for seed in range(FIRST, FIRST + max(8, RUNS // 16)):
        switches += len(rescaled(seed, link_is_silent).switches)
    assert switches


@pytest.mark.row(46)
def test_a_master_that_is_a_ps_and_leaves_gives_away_what_it_has_first() -> None:
    """Nobody dies: the run does not go back."""
    for seed in range(FIRST, FIRST + max(3, RUNS // 16)):
        world = rescaled(seed, master_leaves)
        assert not world.restores
        # Its event may end with the master, which leaves as soon as variables moved.
        assert world.client_ps == 1


def test_same_number_is_the_same_run_of_rescales() -> None:
    first, second = rescaled(28), rescaled(28)
    assert first.story == second.story
    assert first.switches
