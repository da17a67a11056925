"""What a run that rests for one of its ps asks of them."""

import asyncio
from typing import Any, cast

import pytest

from jgraph.errors import TaskLostError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.server.runs.peers import Peers
from jgraph.server.runs.ps_setup import version_if_known, version_of

COUNTS, OTHER, WORKER = "/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0"


class Asked:
    """A door to two ps; the first has the variable that counts the updates."""

    def __init__(self, silent: str = "") -> None:
        self.silent = silent

    def tasks(self) -> list[str]:
        """Returns those of the cluster."""
        return [COUNTS, OTHER, WORKER]

    async def call(self, task: str, method: str, request: Frame, **_: Any) -> Frame:
        """Answers unless it is the one that is silent."""
        if task == self.silent:
            raise TaskLostError(f"{task} does not answer")
        row = pb.VariableInfo(name="global_step" if task == COUNTS else "w", version=7)
        return frame(variable_table=pb.VariableTable(variables=[row]))


@pytest.mark.parametrize("silent", [COUNTS, OTHER])
def test_ps_that_does_not_answer_is_an_error_and_not_a_run_without_updates(
    silent: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        order = pb.OpenRun(run="r", info='{"container": "c"}')
        assert await version_of(cast("Peers", Asked()), order) == 7
        door = cast("Peers", Asked(silent))
        with pytest.raises(TaskLostError, match=f"{silent} does not answer"):
            await version_of(door, order)
        assert await version_if_known(door, order) == 0

    asyncio.run(main())
    assert f"run 'r' cannot say which batches it repeats: {silent}" in caplog.text
