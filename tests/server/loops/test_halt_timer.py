"""A loop that nobody tells to go on does so, whatever comes late of the halt before."""

import asyncio
import logging

import pytest

from jgraph.server.loops.halt_timer import HaltTimer


@pytest.mark.parametrize("stood", [True, False])
def test_a_late_end_of_the_halt_before_leaves_the_limit_of_this_one(
    caplog: pytest.LogCaptureFixture, *, stood: bool
) -> None:
    async def halt() -> int:
        over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def go_on(number: int) -> bool:
            over.set_result(number)
            return stood

        timer = HaltTimer("loop-0", go_on)
        timer.begin(1, 60.0)
        timer.begin(2, 0.0)
        timer.end(1)
        return await asyncio.wait_for(over, 10)

    with caplog.at_level(logging.WARNING, logger="jgraph.loops"):
        assert asyncio.run(halt()) == 2
    assert ("goes on after 0 s" in caplog.text) == stood
