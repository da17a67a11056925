"""The child of a server, as its event loop begins and ends it."""

import asyncio
import os

import psutil
import pytest

from jgraph.server.gates import group_child
from jgraph.server.gates.group_child import GroupChild


@pytest.mark.procs
def test_who_ends_a_child_waits_for_nobody_who_holds_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop has others to serve while a child is on its way out."""
    monkeypatch.setattr(group_child, "MODULE", "tests.support.child_with_heir")

    async def run() -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        over: list[str] = []
        memory = os.open(os.devnull, os.O_RDONLY)
        child = GroupChild({"memory": memory}, heard.put_nowait, over.append)
        os.close(memory)
        heir = psutil.Process(int(await asyncio.wait_for(heard.get(), 30)))
        process = psutil.Process(child.pid)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        child.end()
        waited_s = loop.time() - began_s
        heir.kill()
        _, alive = psutil.wait_procs([process], timeout=10)
        assert not alive
        assert waited_s < 2
        await asyncio.sleep(0)
        assert not over

    asyncio.run(run())
