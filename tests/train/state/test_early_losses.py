"""Work before the first step of a run that fails as by a loss, again and again."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jgraph.errors import ConfigError, InvalidProgramError, JGError, TaskLostError
from jgraph.train.state.early_losses import EarlyLosses


def outlived(errors: list[JGError], wait_s: float) -> tuple[str, int]:
    """Does work that fails by these errors, where all tasks answer."""
    cluster = SimpleNamespace(starts_again=True, wait_for_tasks=lambda *_, stop: True)
    lock, forgotten = threading.RLock(), []
    state: Any = SimpleNamespace(cluster=cluster, lock=lock, lost_values=list)
    order: Any = SimpleNamespace(wait_s=wait_s, stop=threading.Event())
    losses = EarlyLosses(state, order, lambda: forgotten.append(True), lambda: False)

    def work() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return losses.outlive(work), len(forgotten)


def test_it_is_done_again_after_each_loss() -> None:
    assert outlived([TaskLostError("a"), TaskLostError("b")], 60.0) == ("done", 2)


def test_a_task_that_has_no_program_any_more_was_lost_before_it_had_values() -> None:
    gone = InvalidProgramError(
        "it has no program 'initialize-1'", handle="initialize-1"
    )
    assert outlived([gone], 60.0) == ("done", 1)


def test_a_program_that_no_task_takes_ends_it_at_once() -> None:
    with pytest.raises(InvalidProgramError, match="do not parse"):
        outlived([InvalidProgramError("bytes of a segment do not parse")], 60.0)


def test_a_loss_that_comes_again_and_again_ends_it_within_the_wait() -> None:
    with pytest.raises(TaskLostError, match="away"):
        outlived([TaskLostError("away")] * 10_000, 0.3)


def test_another_error_ends_it_at_once() -> None:
    with pytest.raises(ConfigError):
        outlived([ConfigError("no")], 60.0)
