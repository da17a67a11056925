"""What waits for one task is bounded, and told when it is too much."""

import pytest

from jgraph.errors import NotTakingError
from jgraph.rpc.resumable.backlog import Backlog, default_queue_limit

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


def backlog(max_bytes: int = 100, max_frames: int = 10) -> Backlog[str]:
    return Backlog(WORKER, PS, "host:1", max_bytes, max_frames)


def test_message_says_how_much_waits_for_whom_and_since_when() -> None:
    waiting = backlog()
    waiting.add("a", 60, step=None, now=1.0)
    waiting.add("b", 30, step=None, now=2.0)
    with pytest.raises(NotTakingError) as caught:
        waiting.add("c", 30, step=None, now=4.5)
    assert caught.value.code == "JG-138"
    assert caught.value.message == (
        f"{PS} at host:1 does not take what {WORKER} sends: 2 frames (90 bytes) wait, "
        "none moved for 3.5 s, and 10 frames or 100 bytes is the limit; look at its "
        "log, and at the network between the two"
    )
    assert [waiting.take(now=5.0) for _ in range(len(waiting))] == ["a", "b"]


@pytest.mark.row(28)
def test_first_frame_may_be_over_the_limit_and_the_next_may_not() -> None:
    waiting = backlog()
    waiting.add("a", 1000, step=None, now=0.0)
    with pytest.raises(NotTakingError):
        waiting.add("b", 1, step=None, now=0.0)


def test_frame_that_is_being_sent_still_counts() -> None:
    waiting = backlog()
    waiting.add("a", 90, step=None, now=0.0)
    assert waiting.take(now=0.0) == "a"
    with pytest.raises(NotTakingError, match=r"1 frames \(90 bytes\)"):
        waiting.add("b", 20, step=None, now=1.0)
    waiting.finish_frame()
    waiting.add("b", 20, step=None, now=1.0)
    assert waiting.nbytes == 20


def test_number_of_frames_is_bounded_too() -> None:
    waiting = backlog(max_frames=3)
    for name in "abc":
        waiting.add(name, 0, step=None, now=0.0)
    with pytest.raises(NotTakingError):
        waiting.add("d", 0, step=None, now=0.0)


def test_peer_that_takes_something_is_not_waited_for_since_long() -> None:
    waiting = backlog()
    waiting.add("a", 90, step=None, now=0.0)
    waiting.take(now=1.0)
    waiting.moved(now=8.0)
    with pytest.raises(NotTakingError, match=r"none moved for 2\.0 s"):
        waiting.add("b", 20, step=None, now=10.0)


def test_values_of_a_withdrawn_step_make_room() -> None:
    waiting = backlog()
    waiting.add("a", 50, step=("train", 1), now=0.0)
    waiting.add("b", 40, step=None, now=0.0)
    assert waiting.withdraw(("train", 2)) == 0
    assert waiting.withdraw(("train", 1)) == 1
    waiting.add("c", 60, step=("train", 2), now=0.0)
    assert [waiting.take(now=0.0) for _ in range(len(waiting))] == ["b", "c"]


def test_limit_leaves_room_for_work_on_any_machine() -> None:
    assert default_queue_limit() >= 1 << 30
