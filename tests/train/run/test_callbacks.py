"""What callbacks of ours do with a run."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tensorboardX.proto.event_pb2 import Event

from jgraph.errors import ConfigError, NonFiniteError
from jgraph.train.run.callbacks import EarlyStopping, NanGuard, StopAtStep
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.run.standings import WorkerStanding
from jgraph.train.run.trackers import TensorBoard
from jgraph.train.trainer import Trainer
from tests.support.models import BATCH, NnxMLP, data, nnx_loss


def fit(*callbacks: Any, loss: Any = nnx_loss, lr: float = 0.1, **options: Any) -> Run:
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), loss, optax.sgd(lr))
    wanted = {"steps": 100_000, "batch_size": BATCH, "progress": False, **options}
    return trainer.fit(data(), callbacks=callbacks, **wanted)


class Stoppable:
    """As much of a run as a callback stops."""

    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


def report(step: int, **evaluation: float) -> Report:
    metrics = {"loss": 1.0 / step}
    return Report(step, 100, 1.0, 1.0, 1.0, metrics, evaluation or None, step)


def fed(callback: Any, *reports: Report) -> Any:
    """How many reports a callback took until it stopped the run."""
    run: Any = Stoppable()
    for count, one in enumerate(reports, 1):
        callback(run, one)
        if run.stopped:
            return count
    return None


def test_a_run_stops_at_the_first_report_after_a_step() -> None:
    assert fed(StopAtStep(5), report(3), report(6), report(9)) == 2
    run = fit(StopAtStep(1))
    assert run.state == "stopped"


def test_a_run_stops_when_an_evaluation_has_not_improved_for_a_while() -> None:
    stopping = EarlyStopping("eval_accuracy", patience=2, higher_is_better=True)
    values = (0.5, 0.7, 0.6, 0.7, 0.9)
    reports = [report(n, accuracy=value) for n, value in enumerate(values, 1)]
    assert fed(stopping, *reports) == 4
    assert (stopping.best, stopping.best_step) == (0.7, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: EarlyStopping(patience="3"),  # type: ignore[arg-type]
        lambda: EarlyStopping(patience=math.nan),  # type: ignore[arg-type]
        lambda: EarlyStopping(min_delta=math.nan),
        lambda: EarlyStopping(None),  # type: ignore[arg-type]
        lambda: StopAtStep("100"),  # type: ignore[arg-type]
    ],
)
def test_what_could_never_stop_a_run_is_refused_before_it_begins(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"is ('3'|nan|None|'100'); give"):
        wrong()


def test_reports_without_an_evaluation_are_not_waited_for() -> None:
    stopping = EarlyStopping(patience=1)
    assert fed(stopping, *map(report, range(1, 9)), report(9, loss=1.0)) is None
    assert fed(stopping, report(10, loss=1.0)) == 1


def test_a_better_value_by_less_than_min_delta_is_none() -> None:
    stopping = EarlyStopping("loss", patience=2, min_delta=0.3)
    assert fed(stopping, *map(report, range(1, 9))) == 4


def test_any_value_is_better_than_nan() -> None:
    stopping = EarlyStopping(patience=2)
    values = (math.nan, 3.0, math.nan, 2.0, 1.0)
    assert fed(stopping, *(report(n, loss=v) for n, v in enumerate(values, 1))) is None
    assert (stopping.best, stopping.best_step) == (1.0, 5)


def test_each_run_has_a_best_value_of_its_own() -> None:
    stopping = EarlyStopping(patience=1)
    options = {"eval_data": data(), "eval_every": 5, "batch_size": BATCH}
    best: list[float] = []
    for lr in (0.1, 1e-4):  # the second learns hardly anything
        assert fit(stopping, lr=lr, steps=20, **options).steps == 20
        best.append(stopping.best or 0.0)
    assert best[1] > best[0]


def test_early_stopping_ends_a_run_that_learns_nothing_more() -> None:
    run = fit(
        EarlyStopping(patience=3, min_delta=0.05), eval_data=data(), eval_every=20
    )
    assert run.state == "stopped"
    assert len(run.metrics("eval_loss")["value"]) >= 4


def test_a_metric_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="'eval_acc', and the run has eval_loss"):
        fit(EarlyStopping("eval_acc"), eval_data=data(), eval_every=5)


@pytest.mark.parametrize(
    ("metric", "instead"),
    [("val_loss", "write 'eval_loss', a metric of eval_data"), ("los", "write 'loss'")],
)
def test_a_metric_by_the_name_of_another_library_is_told_by_ours(
    metric: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{metric}', and the run has .*; {instead}"):
        fed(EarlyStopping(metric), report(1, eval_loss=1.0))


def test_a_callback_that_waits_for_its_own_run_is_told_that_it_would_for_ever() -> None:
    with pytest.raises(ConfigError, match=r"run\.wait\(\) would wait for itself"):
        fit(lambda run, report: run.wait(timeout_s=60))


def bad_loss(model: Any, batch: Any) -> Any:
    return jnp.log(nnx_loss(model, batch) - 1e3)


def test_a_loss_that_is_no_number_ends_the_run_and_is_named() -> None:
    with pytest.raises(NonFiniteError, match="'loss' is NaN or infinite before step"):
        fit(NanGuard(), loss=bad_loss)
    run = fit(NanGuard(fail=False), loss=bad_loss)
    assert run.state == "stopped"
    assert fit(NanGuard(), steps=20).state == "done"


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would read."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in events(path.read_bytes()):
            for value in event.summary.value:
                point = event.step, value.simple_value
                found.setdefault(value.tag, []).append(point)
    return found


def events(content: bytes) -> Iterator[Any]:
    """Records: their length and its checksum, their bytes and theirs."""
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += 16 + length


def test_tensorboard_gets_what_was_reported(tmp_path: Path) -> None:
    seen: list[Report] = []
    note = lambda run, report: seen.append(report)
    run = fit(TensorBoard(tmp_path), note, steps=30, eval_data=data(), eval_every=10)
    found = scalars(tmp_path)
    assert found["loss"] == pytest.approx(
        np.array([(r.step, r.metrics["loss"]) for r in seen]), rel=1e-6
    )
    evaluated = run.metrics("eval_loss")
    last = (evaluated["step"][-1], evaluated["value"][-1])
    assert found["eval_loss"][-1] == pytest.approx(last, rel=1e-6)
    assert {"steps_per_s"} < found.keys()


def test_tensorboard_gets_a_curve_of_each_worker(tmp_path: Path) -> None:
    task = "/job:worker/task:1"
    board, run = TensorBoard(tmp_path), Stoppable()
    given: Any = run
    workers = [WorkerStanding(task, 9, 3.0, {}, {0: 1, 2: 8})]
    board(given, Report(9, 100, 1.0, 3.0, 1.0, {"loss": 0.5}, workers=workers))
    board.close()
    found = scalars(tmp_path)
    assert found["job_worker/task_1/steps_per_s"] == [(9, 3.0)]
    assert found["job_worker/task_1/staleness"] == [(9, 2.0)]


def test_a_callback_is_closed_when_its_run_ends_however_it_ends() -> None:
    class Closed:
        count = 0

        def __call__(self, run: Run, report: Report) -> None:
            raise ZeroDivisionError

        def close(self) -> None:
            self.count += 1

    callback = Closed()
    with pytest.raises(ZeroDivisionError):
        fit(callback)
    assert callback.count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"'eval_loss', .* evaluates never; give eval_data=\(x, y\) and eval_ev"),
        ({"eval_data": data()}, "at its end only; give eval_every=100, or wait for"),
    ],
)
def test_early_stopping_that_would_wait_in_vain_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(EarlyStopping(), **options)
