"""How workers stand, and what a cell shows of it."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jgraph.clock import Clock
from jgraph.graph.ir import TaskName
from jgraph.train.run.history import History
from jgraph.train.run.notebook import CellDisplay, CellView
from jgraph.train.run.report import Report
from jgraph.train.run.standings import Curve, Standings, WorkerStanding, bars
from jgraph.train.run.watch import Watch
from jgraph.train.state.runner import Chunk, Staleness
from tests.support.shown_html import EVIL, Tags

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:1")


class SetClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def chunk(replica: int, seconds: list[float], **times: float) -> Chunk:
    count = len(seconds)
    loss = {"loss": np.linspace(1.0, 0.0, count, dtype=np.float32)}
    return Chunk(replica, np.arange(count), np.array(seconds), loss, times)


def test_a_report_has_step_rate_and_time_of_each_worker() -> None:
    watch = Watch(
        History(), 10, 4, SetClock(), standings=Standings(["first", "second"])
    )
    watch.take(chunk(0, [0.5, 1.0], compute=0.75, wait=0.25))
    report = watch.take(chunk(1, [0.1, 0.2], compute=0.2))
    first, second = report.workers
    assert (first.name, first.steps, first.steps_per_s) == ("first", 2, 2.0)
    assert first.shares == {"wait": 0.25, "compute": 0.75}
    assert list(first.shares) == ["wait", "compute"]
    assert (second.steps, second.steps_per_s) == (2, 10.0)
    assert report.curve == (0.5, 0.5)


def test_workers_in_step_have_a_row_each_and_say_how_often_they_were_late() -> None:
    standings = Standings([WORKER, "second"])
    watch = Watch(History(), 10, 4, SetClock(), standings=standings)
    each = [chunk(0, [0.5, 1.0], compute=1.0), chunk(1, [0.1, 0.2], wait=0.2)]
    step = chunk(0, [0.5, 0.6])
    report = watch.take(replace(step, of_workers=each, dropped={WORKER: 3}))
    assert report.steps_per_s == pytest.approx(2 / 0.6)  # of the updates
    first, second = report.workers
    assert (first.steps_per_s, first.late, second.late) == (2.0, 3, 0)
    assert second.shares == {"wait": 1.0}
    assert str(first).endswith("late 3")
    assert "<td>3</td>" in CellView(report)._repr_html_()


def test_staleness_is_asked_once_a_second_and_summed_over_the_ps() -> None:
    answered = threading.Event()

    def ask() -> Staleness:
        answered.set()
        return {WORKER: {PS: {0: 1, 2: 5}, TaskName("/job:ps/task:1"): {2: 6, 3: 1}}}

    clock = SetClock()
    watch = Watch(History(), 99, 1, clock, standings=Standings(["w", WORKER], ask))
    report = watch.take(chunk(1, [0.5]))
    for clock.time in (1.0, 1.5):
        assert report.workers[0].staleness_text() == ""
        report = watch.take(chunk(1, [clock.time]))
    assert answered.wait(20)
    deadline = threading.Event()
    for turn in range(400):
        clock.time = 2.0 + turn
        watch.take(chunk(1, [clock.time]))
        report = watch.take(chunk(1, [clock.time]))
        if report.workers[0].staleness:
            break
        deadline.wait(0.01)
    assert report.workers[0].staleness == {0: 1, 2: 11, 3: 1}
    assert report.workers[0].staleness_text() == "2 (up to 3)"


def test_a_ps_that_does_not_say_how_old_updates_were_ends_nothing() -> None:
    def ask() -> Staleness:
        raise ConnectionError

    standings = Standings([WORKER], ask)
    standings.add(chunk(0, [1.0]))
    for _ in range(3):
        standings.read_staleness()
    assert standings.workers()[0].staleness == {}


def test_a_curve_keeps_few_points_of_many_values_and_none_that_is_no_number() -> None:
    curve = Curve(limit=8)
    for value in [float("nan"), *range(1000), float("inf")]:
        curve.add(value)
    assert 4 <= len(curve.points) <= 8
    assert list(curve.points) == sorted(curve.points)
    assert bars(curve.points)[0] == "▁"


REPORT = Report(
    *(30, 100, 1.0, 10.0, 320.0, {EVIL: 0.25}),
    curve=(3.0, 2.0, 1.5),
    workers=[
        WorkerStanding(EVIL, 15, 5.0, {"compute": 0.6, "push": 0.4}, {0: 3, 1: 9})
    ],
)


def test_a_cell_shows_curve_workers_and_logs_and_runs_nothing_of_them() -> None:
    view = CellView(REPORT, EVIL, [(WORKER, EVIL)])
    page = Tags(view._repr_html_())
    assert page.open == []
    assert {"progress", "svg", "polyline", "table", "pre"} <= set(page.seen)
    assert "alert" not in page.runs
    text = repr(view)
    assert "compute 60% push 40%" in text
    assert "stale 1 (up to 1)" in text
    assert "█" in text


@pytest.fixture
def shown() -> Any:
    class Shown:
        def __init__(self) -> None:
            self.views: list[str] = []
            self.changed = threading.Condition()

        def __call__(self, view: CellView) -> None:
            with self.changed:
                self.views.append(repr(view))
                self.changed.notify_all()

        def wait_for(self, text: str) -> None:
            with self.changed:
                found = lambda: any(text in view for view in self.views)
                assert self.changed.wait_for(found, 20), self.views

    return Shown()


def test_a_run_that_does_not_report_says_what_it_does_every_second(shown: Any) -> None:
    clock = SetClock()
    given: Clock = clock
    with CellDisplay(shown, clock=given) as display:
        display.say("compiling")
        clock.time = 7.0
        shown.wait_for("compiling … 7 s")
        display.notice("interrupted")
        display.show(REPORT)
        assert "compiling" not in shown.views[-1]
        assert "interrupted" in shown.views[-1]
    assert "interrupted" not in shown.views[-1]
    assert "step 30/100" in shown.views[-1]


def test_what_tasks_log_meanwhile_is_shown(shown: Any) -> None:
    lines = iter([[(WORKER, "first line")]])
    with CellDisplay(shown, lambda: next(lines, [])):
        shown.wait_for(f"{WORKER}: first line")
