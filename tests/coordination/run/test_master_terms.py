import pytest

from jgraph.coordination.run.succession import MasterTerms
from jgraph.errors import FencedError


def test_row_20_orders_of_a_master_that_was_replaced_are_refused() -> None:
    epochs = MasterTerms()
    epochs.check("run", 1)
    epochs.check("run", 2)
    with pytest.raises(FencedError, match="master 1 of run 'run' came after master 2"):
        epochs.check("run", 1)
    epochs.check("run", 2)
    epochs.check("another run", 1)


def test_runs_without_a_name_have_no_masters_to_tell_apart() -> None:
    epochs = MasterTerms()
    epochs.check("", 2)
    epochs.check("", 1)


def test_as_many_runs_are_remembered_as_there_is_room_for() -> None:
    epochs = MasterTerms()
    for run in range(257):
        epochs.check(f"run-{run}", 2)
    epochs.check("run-0", 1)  # forgotten
    with pytest.raises(FencedError):
        epochs.check("run-256", 1)
