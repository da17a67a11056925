"""A run in a notebook, and the kernel interrupted: what its user sees and gets."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat.v4
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.slow, pytest.mark.procs, pytest.mark.timeout(300)]

SETUP = """
import threading
import numpy as np, jax.numpy as jnp, optax
from flax import nnx
import jgraph as jg

x = np.ones((64, 4), np.float32)
loss = lambda model, batch: jnp.mean((model(batch) - 1) ** 2)
cluster = jg.LocalCluster(ps=1, workers=2)
trainer = jg.Trainer(
    nnx.Linear(4, 1, rngs=nnx.Rngs(0)), loss, optax.sgd(0.1), cluster=cluster
)
"""
ENDLESS = 'trainer.fit(x, steps=10**9, batch_size=8, checkpoint=jg.Checkpoints("c"))'
BLOCKED = """
go_on = threading.Event()
trainer.fit(x, steps=10**9, batch_size=8, callbacks=[lambda *_: go_on.wait(100)])
"""


class Client(NotebookClient):  # type: ignore[misc, unused-ignore]
    """Notes what is shown, and when, as the kernel tells."""

    def __init__(self, directory: Path) -> None:
        notebook = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
        resources = {"metadata": {"path": str(directory)}}
        super().__init__(notebook, timeout=200, resources=resources)
        self.seen: list[tuple[float, str]] = []

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        data = msg["content"].get("data", {})
        if "text/plain" in data:
            when = msg["header"]["date"].timestamp()
            self.seen.append((when, data["text/plain"] + data.get("text/html", "")))
        return super().process_message(msg, cell, cell_index)


class Kernel:
    """A kernel and its user, who sees what a cell shows while it runs."""

    def __init__(self, directory: Path) -> None:
        self.client = Client(directory)

    @property
    def seen(self) -> list[tuple[float, str]]:
        return self.client.seen

    async def run(self, source: str, *interrupts: str) -> Any:
        """Runs a cell; interrupts the kernel whenever a text is shown, in order."""
        cell = nbformat.v4.new_code_cell(source)  # type: ignore[no-untyped-call]
        cells = self.client.nb.cells
        cells.append(cell)
        self.seen.clear()
        running = asyncio.ensure_future(
            self.client.async_execute_cell(cell, len(cells) - 1)
        )
        for text in interrupts:
            await self.wait_for(text, running)
            manager: Any = self.client.km
            await manager.interrupt_kernel()
        return await running

    async def wait_for(self, text: str, running: Any) -> None:
        while not any(text in shown for _, shown in self.seen):
            assert not running.done(), f"the cell ended and never showed {text}"
            await asyncio.sleep(0.05)


async def used(directory: Path, story: Callable[[Kernel], Any]) -> None:
    kernel = Kernel(directory)
    async with kernel.client.async_setup_kernel():
        await story(kernel)


def text_of(cell: Any) -> str:
    return "".join(str(o.get("text", "")) for o in cell.outputs)


async def interrupted_once(kernel: Kernel) -> None:
    await kernel.run(SETUP)
    # Shown once there are losses, both workers, and how old their gradients were.
    cell = await kernel.run("run = " + ENDLESS, "stale ")
    times = [when for when, _ in kernel.seen]
    assert len(times) >= (times[-1] - times[0]) / 2, "it was silent"
    shown = [text for _, text in kernel.seen]
    assert any("tracing and placing" in text for text in shown)
    assert any("interrupted: ends after this step" in text for text in shown)
    last = shown[-1]
    assert re.search(r"step \d+/1000000000  [\d.]+ steps/s", last)
    assert re.search(r"loss [▁-█]+", last)
    for worker in ("/job:worker/task:0", "/job:worker/task:1"):
        assert re.search(rf"{worker}  step \d+ .*compute \d+%.*  stale \d", last)
    assert "<svg" in last
    assert all(o.output_type == "display_data" for o in cell.outputs)
    # Not by !ls: what a terminal shows of a command that ends at once may be lost.
    told = await kernel.run("import os\nprint(run.state, run.steps, *os.listdir('c'))")
    found = re.search(r"stopped (\d+)", text_of(told))
    assert found
    assert found[1] in text_of(told).split()[2:], text_of(told)


async def interrupted_twice(kernel: Kernel) -> None:
    kernel.client.allow_errors = True
    await kernel.run(SETUP.replace("cluster=cluster", "").replace("cluster =", "#"))
    cell = await kernel.run(BLOCKED, "step ", "interrupt again to leave it")
    assert cell.outputs[-1].ename == "KeyboardInterrupt"
    told = await kernel.run(
        "print(trainer.run.state); go_on.set(); print(trainer.run.wait(60).state)"
    )
    assert text_of(told).split() == ["running", "stopped"]


@pytest.mark.parametrize(
    "story",
    [interrupted_once, pytest.param(interrupted_twice, marks=pytest.mark.nightly)],
)
def test_a_run_in_a_cell_shows_how_it_stands_and_ends_as_its_user_wants(
    story: Callable[[Kernel], Any], tmp_path: Path
) -> None:
    asyncio.run(used(tmp_path, story))
