"""Copies of parameters are taken from the start to the end of a server."""

from collections.abc import Mapping
from typing import final

from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.serving.live.parameters import DenseCopy, FoundRows
from jgraph.serving.live.refreshing import Refreshing
from jgraph.serving.signature import Array
from tests.support.waiting import wait_until


@final
class Counted:
    """Parameters of which it is known how often they were copied."""

    copy = DenseCopy({}, 1, 0.0)
    lost: Mapping[TaskName, JGError] = {}
    copies = 0

    async def refresh(self) -> None:
        self.copies += 1

    async def rows(self, wanted: Mapping[str, Array]) -> FoundRows:
        raise AssertionError("nobody asks for rows")

    def close(self) -> None:
        """There is nothing to drop."""


def test_the_first_copy_is_taken_as_a_server_begins_to_answer() -> None:
    """The one of before may be as old as compiling took."""
    parameters = Counted()
    refreshing = Refreshing("ctr", parameters, refresh_s=3600)
    wait_until(lambda: parameters.copies == 1)
    refreshing.stop()
