"""What a dashboard with three viewers costs a run: it comes and goes while that trains.

One long run of a ps and a worker that keep two cores busy. Windows of some seconds
follow each other in blocks of three, in a random order: dashboards, each a process with
a journal, are attached to the cluster, and three read the stream of each; nothing is;
nothing is once more. The first third of each window counts for nothing: a dashboard
that comes is told of the whole run. What belongs to one block is compared, and the
medians of all blocks have the interval in which they are 95 times of 100 (the
bootstrap). The two windows without a dashboard, compared in the same way, say how much
of that is noise (``control``).

One dashboard takes less of a run than neighbouring windows differ by, however many
there are. So several are attached, which know nothing of each other: what all take,
divided by how many they are, is what one takes, and is found as many times more
exactly. Where they hinder each other, that is too much and not too little.

A dashboard is a process beside the tasks, as on the host of the master, and what it
takes of the cores is part of what is found; it is told by itself too. Who reads is on
another machine in reality, and so is niced here; those processes are told by
themselves.
"""

import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import truediv
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, Self, final

import numpy as np
import optax
import psutil
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.dashboard_beside import VIEWERS

STATES: Final = ("on", "off", "control")
_DROPPED: Final = 1 / 3
"""Of each window."""
_BEFORE_END_S: Final = 0.1
"""Steps are dated to some hundredths of a second of our clock."""
_WIDTH, _BATCH, _EXAMPLES = 64, 64, 8192
_FOR_EVER: Final = 10**9
_AT_REST: Final = 3
"""Blocks without steps."""


@final
class Beside:
    """A dashboard and its viewers, in two processes that are there all the time.

    Args:
      target: address of the cluster.
      directory: for journals; is made.
    """

    def __init__(self, target: str, directory: Path) -> None:
        directory.mkdir()
        command = [sys.executable, "-m", "benchmarks.dashboard_beside"]
        self._processes = [
            subprocess.Popen(
                [*command, *role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for role in (["dashboard", target, str(directory)], ["viewers"])
        ]
        self.dashboard, self.viewers = (one.pid for one in self._processes)
        self._is_on = False

    def switch(self, state: str) -> Iterator[None]:
        """Attaches a dashboard, or detaches it: in steps, each of which takes a while.

        What is told to do one is waited for with the next, so that those of several
        may go on at the same time.
        """
        if (state == "on") is self._is_on:
            return
        self._is_on = not self._is_on
        self._tell(0, "attach" if self._is_on else "detach")
        yield
        answer = self._answer(0)
        if self._is_on:
            self._tell(1, answer)
            yield
            self._answer(1)

    def _tell(self, process: int, line: str) -> None:
        asked = self._processes[process].stdin
        assert asked is not None
        asked.write(line + "\n")
        asked.flush()

    def _answer(self, process: int) -> str:
        answers = self._processes[process].stdout
        assert answers is not None
        answer = answers.readline().strip()
        if not answer:
            raise RuntimeError("a process beside the run has ended")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@final
@dataclass(frozen=True, slots=True)
class Window:
    """A time in which nothing was switched.

    Attributes:
      began: on the monotonic clock.
      ended: likewise.
      used: CPU seconds, by task.
      beside: CPU seconds of all dashboards, and of their viewers.
      steps: that were done.
    """

    began: float
    ended: float
    used: Mapping[str, float]
    beside: Sequence[float]
    steps: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def cores(self, task: str) -> float:
        """What a task used of a core."""
        return self.used[task] / self.seconds

    @property
    def step_us(self) -> float:
        """CPU of a step, of all tasks together."""
        return 1e6 * sum(self.used.values()) / self.steps

    def with_steps(self, done: Any) -> "Window":
        """Returns it with its steps, of those done at these times in order."""
        first, end = np.searchsorted(done, (self.began, self.ended))
        return Window(self.began, self.ended, self.used, self.beside, int(end - first))


Block = Mapping[str, Window]
"""By state."""


@final
class Watch:
    """Windows of a cluster, with a dashboard and without.

    Args:
      cluster: that is watched.
      beside: all that watches.
      seconds: of a window.
      seed: of the order.
    """

    def __init__(
        self,
        cluster: jg.LocalCluster,
        beside: Sequence[Beside],
        seconds: float,
        seed: int,
    ) -> None:
        self._tasks = {str(task): cluster.pid(task) for task in cluster.tasks()}
        self._beside = beside
        self._seconds = seconds
        self._order = random.Random(seed)  # noqa: S311  # an order, no secret

    def blocks(self, count: int) -> list[Block]:
        """Looks at so many windows of each state."""
        return [self._block() for _ in range(count)]

    def _block(self) -> Block:
        states = self._order.sample(STATES, len(STATES))
        return {state: self._window(state) for state in states}

    def _window(self, state: str) -> Window:
        switch(self._beside, state)
        dropped_s = _DROPPED * self._seconds
        _wait(dropped_s)
        began, before, beside = time.monotonic(), self._used(), self._used_beside()
        _wait(self._seconds - dropped_s - _BEFORE_END_S)
        ended, after = time.monotonic(), self._used()
        took = [b - a for a, b in zip(beside, self._used_beside(), strict=True)]
        _wait(_BEFORE_END_S)
        used = {task: after[task] - before[task] for task in after}
        return Window(began, ended, used, took)

    def _used(self) -> dict[str, float]:
        return {task: measure.cpu_seconds(pid) for task, pid in self._tasks.items()}

    def _used_beside(self) -> list[float]:
        all_of = zip(
            *((one.dashboard, one.viewers) for one in self._beside), strict=True
        )
        return [sum(map(measure.cpu_seconds, pids)) for pids in all_of]


def switch(beside: Sequence[Beside], state: str) -> None:
    """Attaches all dashboards, or detaches them; returns when that is so."""
    for _ in zip_longest(*(one.switch(state) for one in beside)):
        pass


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


class Model(nnx.Module):
    """A network whose steps take about a millisecond."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(_WIDTH, _WIDTH, rngs=rngs) for _ in "ab"])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def _loss(model: Model, batch: Any) -> Any:
    return ((model(batch["x"]) - 1) ** 2).mean()


@contextmanager
def training(cluster: jg.LocalCluster) -> Iterator[Callable[[], Any]]:
    """Trains meanwhile; gives what ends that, and returns when each step was done."""
    x = np.random.default_rng(0).random((_EXAMPLES, _WIDTH), np.float32)
    with jg.Trainer(Model(), _loss, optax.sgd(1e-4), cluster=cluster) as trainer:
        trainer.fit({"x": x}, steps=200, batch_size=_BATCH, progress=False)
        told: list[tuple[float, int]] = []
        run = trainer.fit(
            {"x": x},
            steps=_FOR_EVER,
            batch_size=_BATCH,
            progress=False,
            block=False,
            callbacks=lambda _, report: told.append((time.monotonic(), report.step)),
        )

        def end() -> Any:
            run.stop()
            run.wait(60)
            losses = run.metrics("loss")
            done, steps = losses["seconds"], losses["step"]
            # On our clock: the report that came soonest after its last step.
            last = np.searchsorted(steps, [step for _, step in told])
            soonest = zip(told, last, strict=True)
            return done + min(at - done[n] for (at, _), n in soonest if n < len(done))

        try:
            yield end
        finally:
            run.stop()
            run.wait(60)


def _cores(task: str, window: Window) -> float:
    return window.cores(task)


def without(block: Block, figure: Callable[[Window], float]) -> float:
    """Returns a figure of a block without a dashboard: of both windows the mean."""
    return mean(figure(block[state]) for state in STATES[1:])


def compared(
    name: str,
    blocks: Sequence[Block],
    figure: Callable[[Window], float],
    join: Callable[[float, float], float],
) -> dict[str, float]:
    """Returns a figure with a dashboard beside that without, and the control.

    Args:
      name: of what is returned.
      blocks: whose windows are compared, each with those of its block.
      figure: of a window.
      join: of a figure and that without: their ratio, or what it has more.
    """
    on = [join(figure(block["on"]), without(block, figure)) for block in blocks]
    same = [join(figure(block["control"]), figure(block["off"])) for block in blocks]
    return {
        **measure.interval(name, on, 4),
        **measure.interval(f"{name}_control", same, 4),
    }


def cost(alternations: int, seconds: float, count: int, seed: int = 0) -> None:
    """Prints what watching costs a run, and what it takes of tasks at rest.

    Args:
      alternations: blocks of windows.
      seconds: of a window.
      count: dashboards that are attached at the same time; what is told is of one.
      seed: of the order of the windows.
    """
    ratio_of_one = lambda a, b: 1 + (a / b - 1) / count
    more_of_one = lambda a, b: (a - b) / count
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(jg.LocalCluster(ps=1, workers=1))
        beside = [
            stack.enter_context(Beside(cluster.target, directory / str(number)))
            for number in range(count)
        ]
        watch = Watch(cluster, beside, seconds, seed)
        switch(beside, "on")  # all is loaded by then
        began, load = time.monotonic(), psutil.getloadavg()[0]
        with training(cluster) as end:
            _wait(2.0)
            windows = watch.blocks(alternations)
            done = end()
        blocks = [{s: w.with_steps(done) for s, w in one.items()} for one in windows]
        at_rest = watch.blocks(_AT_REST)
        rss = [psutil.Process(one.dashboard).memory_info().rss / 1e6 for one in beside]
        tasks, master = [str(task) for task in cluster.tasks()], str(cluster.master)
    rate = lambda window: window.steps / window.seconds
    parts = ("board_cores", "viewers_cores")
    measure.emit(
        "dashboard",
        part="cost",
        alternations=alternations,
        dashboards=count,
        viewers=VIEWERS,
        master=master,
        **compared("ratio", blocks, rate, ratio_of_one),
        **compared("cpu_ratio", blocks, lambda window: window.step_us, ratio_of_one),
        **compared("master_cores_more", blocks, partial(_cores, master), more_of_one),
        **compared("ratio_of_all", blocks, rate, truediv),
        steps_per_s=round(median(without(one, rate) for one in blocks)),
        task_cores={
            task: round(median(one["off"].cores(task) for one in blocks), 3)
            for task in tasks
        },
        cores_more_at_rest={
            task: compared("more", at_rest, partial(_cores, task), more_of_one)
            for task in tasks
        },
        **{
            part: round(
                median(one["on"].beside[at] / one["on"].seconds for one in blocks)
                / count,
                4,
            )
            for at, part in enumerate(parts)
        },
        rss_mb=round(max(rss), 1),
        seconds=round(time.monotonic() - began, 1),
        load_before=round(load, 1),
    )
