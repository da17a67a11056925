"""When a poll looks again, and when it is over."""

import threading

from jgraph.cluster.polling import Polling
from tests.support.loop_orders import SetClock
from tests.support.run_async import run_async


def test_last_look_begins_after_the_deadline_at_most_by_one_pause() -> None:
    async def looks() -> list[float]:
        clock = SetClock()
        polling, seen = Polling(0.0, 2.0, clock), [clock.at_s]
        while await polling.again():
            clock.at_s += 1.0
            seen.append(clock.at_s)
        return seen

    assert run_async(looks()) == [0.0, 1.0, 2.0]


def test_stop_ends_the_pause_of_a_thread_and_all_looks_after_it() -> None:
    stop = threading.Event()
    polling = Polling(600.0, 600.0, stop=stop)
    stop.set()
    assert not polling.wait()
