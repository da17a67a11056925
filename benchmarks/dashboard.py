"""What a dashboard costs, and how fast it is: ``python -m benchmarks dashboard``.

``--part cost``: steps/s of one long run with a dashboard, its journal and three that
read its stream, of those without, as a part of what ``--dashboards`` of them cost at
the same time, in ``--alternations`` blocks of three windows of ``--window`` seconds in
a random order; CPU of a step likewise, of the master in cores, and of the dashboard's
process, and its memory. Each with the interval in which it is 95 times of 100, and with
the same of two windows without a dashboard, which is noise. Then
CPU alone, without steps, which says most exactly what watching takes of a task; see
``benchmarks/dashboard_cost.py``. ``--part board``: what a board of
64 tasks and a run has taken of memory after so many simulated seconds, halfway and at
the end, and the time of a fact. ``--part page``, in the Chromium of this machine: from
the address to the first sentence, the bytes of all files, and from a fact to the text
on the screen. ``--part trace``: a trace of 2 ps and 4 workers under null steps: how far
its clocks may be off, by what a task says of its clock and by round trips and messages
alone; its size and time. ``--part flight``: steps/s and CPU of a scalar null step with
the recorder of node times and without, in short turns of one cluster; and the account:
the CPU of noting a step, of both tasks in one thread where nothing else runs, times the
share of steps that were noted, of the CPU of a step. Prints a JSON line for each.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, final

import jax.numpy as jnp
import numpy as np
import psutil

import jgraph as jg
from benchmarks import measure, null_graphs as graphs
from benchmarks.dashboard_cost import cost
from benchmarks.null_step import NullStep
from benchmarks.rows import Row, each, print_rows
from jgraph.client.timeline.collecting import FlightCollector
from jgraph.cluster import event_loop
from jgraph.coordination.timeline.cluster_trace import assemble
from jgraph.coordination.watch.board import Board
from jgraph.dashboard.app import page_files
from jgraph.graph.device import DeviceSpec, TaskName
from jgraph.graph.tracing.trace import trace as trace_graph
from jgraph.plan.plan import plan
from tests.support.board_facts import PS, START, WORKERS, report, run, status, task
from tests.support.chromium import CHROMIUM
from tests.support.dashboards import Imagined, scene, serving
from tests.support.tasks import Tasks

PARTS = ("cost", "board", "page", "trace", "flight")
ROWS = (
    Row(["dashboard --part cost"], each("ratio")),
    Row(["dashboard --part cost"], each("master_cores_more"), "cores"),
    Row(["dashboard --part page"], each("fact_to_pixel_s"), "s"),
    Row(["dashboard --part page"], each("load_s"), "s"),
    Row(["dashboard --part page"], each("page_kb"), "kB"),
    Row(["dashboard --part cost"], each("rss_mb"), "MB"),
    Row(["dashboard --part board"], each("board_mb"), "MB"),
    Row(["dashboard --part trace"], each("clock_error_us"), "us"),
    Row(["dashboard --part flight"], each("ratio")),
)


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--rows", action="store_true", help="print a table's rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round")
    parser.add_argument("--alternations", type=int, default=12)
    parser.add_argument("--window", type=float, default=5.0, help="seconds")
    parser.add_argument("--dashboards", type=int, default=8, help="at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the order of windows")
    parser.add_argument("--simulated", type=int, default=3600, help="seconds")
    parser.add_argument("--tasks", type=int, default=64)
    a = parser.parse_args(args)
    if a.rows:
        print_rows(ROWS)
        return
    if "cost" in a.part:
        cost(a.alternations, a.window, a.dashboards, a.seed)
    if "board" in a.part:
        board(a.simulated, a.tasks)
    if "page" in a.part:
        page(min(a.rounds, 5))
    if "trace" in a.part:
        trace(2 * a.seconds)
    if "flight" in a.part:
        flight(a.rounds, a.seconds)


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Some steps one after the other.

    Attributes:
      steps_per_s: of the worker.
      cpu_us: CPU of a step, by task.
    """

    steps_per_s: float
    cpu_us: Mapping[str, float]

    @property
    def all_us(self) -> float:
        """CPU of a step, all tasks together."""
        return sum(self.cpu_us.values())


def block(work: NullStep, steps: int) -> Block:
    """Runs steps, and looks at what they took."""
    before, began = work.cpu_seconds(), time.perf_counter()
    work.run(1, steps)
    took, after = time.perf_counter() - began, work.cpu_seconds()
    used = {task: 1e6 * (after[task] - before[task]) / steps for task in after}
    return Block(steps / took, used)


def pairs_of(
    work: NullStep, rounds: int, steps: int, switch: Callable[[str], None]
) -> dict[str, list[Block]]:
    """Runs blocks of steps of one cluster with something on and off, in turns.

    Blocks are short, and neighbours are compared: what the machine does beside then
    hits both, and what differs from one cluster to another none.
    """

    def run(state: str) -> Block:
        switch(state)
        return block(work, steps)

    run("on")
    ways = {state: partial(run, state) for state in ("on", "off")}
    return measure.take_turns(ways, rounds)


def compared(found: Mapping[str, Sequence[Block]]) -> dict[str, float]:
    """Returns steps/s with it of those without, and CPU of a step likewise."""
    pairs = list(zip(found["on"], found["off"], strict=True))
    return {
        **measure.interval("ratio", [a.steps_per_s / b.steps_per_s for a, b in pairs]),
        **measure.interval("cpu_ratio", [a.all_us / b.all_us for a, b in pairs], 4),
        "cpu_us_on": round(median(one.all_us for one in found["on"]), 1),
        "cpu_us_off": round(median(one.all_us for one in found["off"]), 1),
        "steps_per_s": round(median(one.steps_per_s for one in found["off"])),
    }


def board(seconds: int, count: int) -> None:
    """A long time of a large cluster, in one process."""
    seen, facts = Board(), 0
    before = rss_mb(psutil.Process())
    names = [PS, *(f"/job:worker/task:{index}" for index in range(count - 1))]
    halfway, began = 0.0, time.perf_counter()
    for second in range(seconds):
        busy = {"process": 0.7 * second, "compute": 0.6 * second}
        calls = {"RunStep": {"buckets": [second] * 13, "errors": 0, "seconds": 1.0}}
        traffic = {PS: {"frames_sent": second, "bytes_sent": 1e6 * second}}
        told = task(busy_s=busy, calls=calls, traffic=traffic)
        seen.take(status(second, dict.fromkeys(names, told)))
        seen.take(run(second, 40 * second))
        for worker in range(len(WORKERS)):
            seen.take(report(second, worker))
        facts += 2 + len(WORKERS)
        if second == seconds // 2:
            halfway = rss_mb(psutil.Process()) - before
    took = time.perf_counter() - began
    measure.emit(
        "dashboard",
        part="board",
        tasks=count,
        facts=facts,
        fact_us=round(took / facts * 1e6, 1),
        view_kb=round(len(json.dumps(seen.view())) / 1e3, 1),
        halfway_mb=round(halfway, 1),
        board_mb=round(rss_mb(psutil.Process()) - before, 1),
    )


def trace(seconds: float) -> None:
    """All tasks of six on one clock."""
    with (
        NullStep("scalar", ps=2, workers=4) as work,
        tempfile.TemporaryDirectory() as d,
    ):
        cluster, ended = work.cluster, threading.Event()

        def go_on() -> None:
            while not ended.is_set():
                work.run(4, 200)

        running = threading.Thread(target=go_on)
        running.start()
        tasks = {task: cluster.spec.address(task) for task in cluster.tasks()}
        collector = FlightCollector(cluster.transport, tasks)
        found = event_loop.run(collector.next(seconds))
        began = time.perf_counter()
        found.save(path := Path(d) / "cluster.pftrace")
        took = time.perf_counter() - began
        ended.set()
        running.join()
        nbytes = path.stat().st_size
    for one in collector.flights.values():
        one.clock = ""  # as if each were on a machine of its own
    apart = assemble(collector.flights, "another")
    truth = {(p.task, p.handle, p.step): p.over_s for p in found.parts}
    off = [
        abs(part.over_s - truth[key])
        for part in apart.parts
        if (key := (part.task, part.handle, part.step)) in truth
    ]
    zero = median(off)  # where time 0 is, is the same for all
    measure.emit(
        "dashboard",
        part="trace",
        tasks=len(tasks),
        seconds=round(found.seconds, 1),
        steps=found.steps,
        spans=len(found.spans()),
        clock_error_us=round(1e6 * max(found.clock_error_s.values()), 1),
        estimated_error_us=round(1e6 * max(apart.clock_error_s.values()), 1),
        estimate_is_off_us=round(1e6 * max(abs(o - zero) for o in off), 1),
        save_s=round(took, 2),
        mb=round(nbytes / 1e6, 2),
    )


SWITCH: Final = """
import gc, signal, sys


recorders = []


def switch(number, frame):
    flight = sys.modules.get("jgraph.runtime.flight")
    if flight is not None and not recorders:  # a look takes as long as many steps
        recorders.extend(
            one for one in gc.get_objects() if isinstance(one, flight.FlightRecorder)
        )
    for one in recorders:
        one.is_on = number == signal.SIGUSR1


for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, switch)
"""
"""Python runs this at the start of a server: a signal switches its recorder."""


def flight(rounds: int, seconds: float) -> None:
    """Steps whose node times are kept, and such that are not."""
    signals = {"on": signal.SIGUSR1, "off": signal.SIGUSR2}
    with contextlib.ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (where / "sitecustomize.py").write_text(SWITCH)
        cluster = stack.enter_context(
            jg.LocalCluster(ps=1, workers=1, env={"PYTHONPATH": str(where)})
        )
        work = stack.enter_context(NullStep("scalar", ps=1, workers=1, on=cluster))
        steps = measure.steps_for(lambda n: work.run(1, n), seconds / 4, 200)

        def switch(state: str) -> None:
            for task in cluster.tasks():
                os.kill(cluster.pid(task), signals[state])
            work.run(1, 200)  # by then it has found its pace

        for state in ("on", "off"):  # whether that does what it should
            switch(state)
            began = time.time()
            work.run(1, 50)
            trace = cluster.trace(last=0.5)
            since = began - trace.began
            count = sum(part.over_s > since for part in trace.parts)
            assert (count > 10) is (state == "on"), f"{state}, and {count} parts"
        work.run(1, 500)
        found = pairs_of(work, rounds * 4, steps, switch)
        switch("on")
        share = noted_share(work, cluster)
    figures, noting_us = compared(found), noting()
    measure.emit(
        "dashboard",
        part="flight",
        pairs=rounds * 4,
        steps=steps,
        **figures,
        noting_us=round(noting_us, 2),
        noted_share=round(share, 3),
        account=round(noting_us * share / figures["cpu_us_off"], 4),
    )


def noted_share(work: NullStep, cluster: jg.LocalCluster) -> float:
    """Returns the share of steps that are noted, the same on all tasks at the least."""
    work.run(1, 3000)
    began = time.time()
    work.run(1, 3000)
    trace = cluster.trace(last=time.time() - began)
    since = began - trace.began
    noted = Counter(part.task for part in trace.parts if part.over_s > since)
    return sum(noted.values()) / (3000 * len(cluster.tasks()))


class OneThread(Tasks):
    """Tasks in one thread, on the clock of the machine."""

    def now(self) -> float:
        return time.monotonic()


def noting() -> float:
    """Returns the microseconds that noting a null step takes of its tasks together."""
    ps, worker = TaskName(PS), TaskName(WORKERS[0])
    variables = graphs.make_variables("scalar", 0, 0, 1)

    def initialize() -> None:
        for variable in variables:
            variable[...] = jnp.zeros((), jnp.float32)

    tasks, numbers = OneThread(ps, worker), itertools.count()

    def register(handle: str, graph: jg.Graph, driver: TaskName) -> None:
        here = DeviceSpec.from_string(driver)
        planned = plan(graph, tasks=[ps, worker], driver=driver, default=here)
        tasks.register(handle, planned.program)

    register("first", trace_graph(initialize, variables=variables)[0], ps)
    register("step", graphs.trace_whole(variables), worker)
    tasks.run("first", next(numbers), {})
    program = tasks.runtimes[worker].program("step")
    feeds = {name: np.ones(1, np.float32) for name, _ in program.feeds}

    def step() -> None:
        tasks.run("step", next(numbers), feeds)

    def least_us(state: bool) -> float:
        for runtime in tasks.runtimes.values():
            runtime.flight.is_on = state
            runtime.flight.note_all(math.inf)
        return measure.micros(step, 400)

    ways = {str(state): partial(least_us, state) for state in (True, False)}
    found = measure.take_turns(ways, 25)
    return min(found["True"]) - min(found["False"])


def rss_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6


def page(rounds: int) -> None:
    """The page in a browser."""
    from playwright.sync_api import sync_playwright

    loads, seen = [], []
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        for _ in range(rounds):
            source = Imagined(scene(time.time() - START - 120))
            with serving(source) as server:
                opened = browser.new_context().new_page()
                began = time.perf_counter()
                opened.goto(server.url)
                opened.locator("canvas").first.wait_for()
                loads.append(time.perf_counter() - began)
                began = time.perf_counter()
                source.board.take(run(time.time() - START, 4999))
                opened.get_by_text("is at step 4,999").wait_for()
                seen.append(time.perf_counter() - began)
                opened.context.close()
        browser.close()
    measure.emit(
        "dashboard",
        part="page",
        rounds=rounds,
        page_kb=round(sum(map(len, page_files().values())) / 1e3, 1),
        **measure.spread("load_s", loads, 2),
        **measure.spread("fact_to_pixel_s", seen, 2),
    )


if __name__ == "__main__":
    main()
