"""From chunks to reports, history and the lines on the screen."""

import io
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jgraph.clock import Clock
from jgraph.cluster import wait_message
from jgraph.coordination.step.finite import FiniteCheck
from jgraph.errors import NonFiniteError
from jgraph.graph.ir import TaskName
from jgraph.train.evaluation.evaluations import Evaluation, Evaluations
from jgraph.train.hash_tables.hash_state import TableEvent
from jgraph.train.model.checks import FINITE
from jgraph.train.run.history import History
from jgraph.train.run.notebook import CellDisplay, CellView
from jgraph.train.run.progress import LineDisplay, make_display
from jgraph.train.run.report import Report
from jgraph.train.run.watch import Watch
from jgraph.train.state.runner import Chunk, Events
from jgraph.train.step.applied import split


class StoppedClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


CLOCK: Clock = StoppedClock()


def chunk(replica: int, seconds: list[float], **metrics: Any) -> Chunk:
    count = len(seconds)
    loss = {"loss": np.arange(count, dtype=np.float32), **metrics}
    return Chunk(replica, np.arange(count), np.array(seconds), loss)


def test_the_rate_of_a_worker_that_came_back_is_of_its_new_loop() -> None:
    watch = Watch(History(), 100, 32, CLOCK)
    watch.take(chunk(0, [5.0, 10.0]))
    assert watch.take(chunk(0, [0.5, 1.0])).steps_per_s == 2.0


def test_rates_are_summed_over_replicas_by_their_own_clocks() -> None:
    watch = Watch(History(), 100, 32, CLOCK)
    assert watch.take(chunk(0, [0.5, 1.0])).steps_per_s == 2.0
    report = watch.take(chunk(1, [0.25, 0.5]))
    assert report.steps_per_s == 6.0
    assert report.examples_per_s == 192.0
    assert report.step == 4
    assert report.metrics == {"loss": 0.5}


def test_a_synchronous_step_counts_the_examples_of_all_workers() -> None:
    watch = Watch(History(), 100, 32, CLOCK)
    steps = replace(chunk(0, [0.5, 1.0]), batches=5)
    assert watch.take(steps).examples_per_s == 2.0 * 2.5 * 32


def test_hash_tables_are_asked_once_a_second_and_at_the_end() -> None:
    asked: list[int] = []

    def events() -> Events:
        asked.append(1)
        first = TableEvent("t", TaskName("/job:ps/task:0"), 5, *[len(asked)] * 8)
        return first, replace(first, task=TaskName("/job:ps/task:1"), rows=3)

    clock, history = StoppedClock(), History()
    watch = Watch(history, 100, 32, clock, events=events)
    for now in (100.5, 101.0, 101.5):
        clock.time = now
        watch.take(chunk(0, [now - 100]))
    # All that is known if the cluster ends the run, and nobody can be asked any more.
    assert [event.evicted for event in history.events] == [1, 1]
    assert watch.finish(lambda: 3) == []
    found = history.metrics("table_rows")
    assert found["step"].tolist() == [2, 3]
    assert found["seconds"].tolist() == [1.0, 1.5]
    assert found["value"].tolist() == [8, 8]
    assert history.metrics("table_evicted")["value"].tolist() == [2, 4]


def test_evaluation_happens_at_multiples_and_once_at_the_end() -> None:
    made: list[int] = []
    history = History()

    def evaluate() -> Evaluation:
        made.append(history.steps)
        return Evaluation(history.steps, {"accuracy": 0.5})

    watch = Watch(history, 8, 1, CLOCK, evaluations=Evaluations(evaluate), every=3)
    reports = [watch.take(chunk(0, [i + 1.0] * 2)) for i in range(4)]
    assert [r.evaluation is not None for r in reports] == [False, True, True, False]
    (last,) = watch.finish(lambda: 8)
    assert last is not None
    assert last.evaluation_step == 8
    assert watch.finish(lambda: 8) == []  # what came out was evaluated
    assert last.evaluation == {"accuracy": 0.5}
    assert made == [4, 6, 8]
    assert history.metrics("eval_accuracy")["step"].tolist() == [4, 6, 8]


def test_history_orders_steps_of_replicas_by_time() -> None:
    history = History(first_step=10)
    history.add(chunk(0, [1.0, 4.0], x=np.array([10, 40])))
    history.add(chunk(1, [2.0, 3.0], x=np.array([20, 30])))
    found = history.metrics("x")
    assert found["value"].tolist() == [10, 20, 30, 40]
    assert found["replica"].tolist() == [0, 1, 1, 0]
    assert found["step"].tolist() == [11, 12, 13, 14]
    assert history.names == ["loss", "x"]
    assert history.last("x") == 40.0


def test_history_orders_steps_by_one_clock_whenever_loops_began() -> None:
    history = History()
    # The second loop began 0.3 s later; that is known to be less with its next report.
    history.add(chunk(0, [1.0, 1.2], x=np.array([1, 3])))
    history.add(replace(chunk(1, [0.8, 1.0], x=np.array([2, 4])), began=0.9))
    history.add(chunk(0, [1.4], x=np.array([5])))
    history.add(replace(chunk(1, [1.2], x=np.array([6])), began=0.3))
    found = history.metrics("x")
    assert found["value"].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.allclose(found["seconds"], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5])


def test_first_bad_step_and_leaf_are_named() -> None:
    check = FiniteCheck(1, ("loss", "params/b", "params/w"))
    finite = np.array([[True, True, True], [True, False, False], [True, True, True]])
    applied, error = split(chunk(0, [0.1, 0.2, 0.3], **{FINITE: finite}), check)
    assert isinstance(error, NonFiniteError)
    assert "gradient of 'params/b' (and 1 more) is NaN" in error.message
    assert "step 1 of replica 0" in error.message
    assert applied.steps.tolist() == [0]
    assert list(applied.metrics) == ["loss"]
    applied, error = split(chunk(0, [0.1], **{FINITE: finite[:1]}), check)
    assert (len(applied), error) == (1, None)


def report(step: int, seconds: float, **more: Any) -> Report:
    return Report(step, 100, seconds, 10.0, 320.0, {"loss": 0.25}, **more)


def test_plain_lines_come_now_and_then_and_at_the_end() -> None:
    lines: list[str] = []
    with LineDisplay(lines.append) as display:
        display.show(report(10, 1.0))
        display.show(report(60, 6.0))
        display.show(report(70, 7.0, evaluation={"loss": 0.5}))
        display.show(report(80, 8.0))
    assert lines == [
        "step 60/100  10.0 steps/s  320 ex/s  loss 0.2500",
        "step 70/100  10.0 steps/s  320 ex/s  loss 0.2500  eval_loss 0.5000",
        "step 80/100  10.0 steps/s  320 ex/s  loss 0.2500",
    ]


def test_plain_lines_say_what_the_run_does_until_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_message, "_LINE_QUIET_S", 0.01)
    lines: list[str] = []
    heard = threading.Event()

    def write(text: str) -> None:
        lines.append(text)
        heard.set()

    with LineDisplay(write) as display:
        display.say("compiling")
        assert heard.wait(20)
        display.show(report(10, 6.0))
    assert lines == [
        "compiling … 0 s",
        "step 10/100  10.0 steps/s  320 ex/s  loss 0.2500",
    ]


def test_notebook_shows_a_bar_with_the_last_evaluation() -> None:
    views: list[CellView] = []
    with CellDisplay(views.append) as display:
        display.show(report(30, 1.0, evaluation={"loss": 0.5}))
        display.show(report(60, 2.0))
    page = views[1]._repr_html_()
    assert 'value="60" max="100"' in page
    assert "eval_loss 0.5000" in page
    assert repr(views[1]).startswith("step 60/100")


def test_output_of_a_notebook_is_a_cell() -> None:
    console = Console(file=io.StringIO(), force_jupyter=True)
    assert isinstance(make_display(show=True, console=console), CellDisplay)


@pytest.mark.parametrize(
    ("terminal", "show", "wanted"),
    [(True, True, "30/100"), (False, True, "step 30/100"), (True, False, None)],
)
def test_display_fits_where_the_output_goes(
    terminal: bool, show: bool, wanted: str | None
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with make_display(show=show, console=console) as display:
        display.show(report(30, 1.0, evaluation={"accuracy": 0.5, "loss": 0.5}))
    text = out.getvalue()
    if wanted is None:
        assert text == ""
    else:
        assert wanted in text
        assert "10.0 steps/s  320 ex/s" in text
        assert "loss 0.2500  eval_accuracy 0.5000  eval_loss 0.5000" in text
