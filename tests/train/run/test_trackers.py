"""Trackers of experiments: what MLflow and W&B read back, without a network."""

import errno
import json
import logging
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlflow
import numpy as np
import optax
import pandas as pd
import pytest
import wandb
from flax import nnx
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

import jgraph as jg
from jgraph.errors import ConfigError
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.train.run.standings import WorkerStanding
from jgraph.train.run.trackers import scalars
from tests.support.models import BATCH, NnxMLP, data, nnx_loss
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries of the trackers


def fit(*callbacks: Any, **options: Any) -> tuple[Run, list[Report]]:
    seen: list[Report] = []
    note = lambda run, report: seen.append(report)
    trainer = jg.Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    wanted = {"steps": 30, "batch_size": BATCH, "progress": False, **options}
    return trainer.fit(data(), callbacks=[*callbacks, note], **wanted), seen


def test_values_have_names_that_all_trackers_take() -> None:
    workers = [WorkerStanding("/job:worker/task:1", 9, 3.0, {}, {0: 1, 2: 8})]
    report = Report(9, 100, 1.0, 3.0, 1.0, {"loss": 0.5}, workers=workers)
    values = {
        "loss": 0.5,
        "steps_per_s": 3.0,
        "job_worker/task_1/steps_per_s": 3.0,
        "job_worker/task_1/staleness": 2,
    }
    assert scalars(report) == [(9, values)]


def test_characters_that_a_tracker_refuses_are_replaced_in_names() -> None:
    report = Report(9, 100, 1.0, 3.0, 1.0, {"acc@1": 0.5}, {"f(x)": 2.0}, 9)
    trained, evaluated = scalars(report)
    assert trained == (9, {"acc_1": 0.5, "steps_per_s": 3.0})
    assert evaluated == (9, {"eval_f_x_": 2.0})


def test_two_runs_of_one_second_have_an_event_file_each(tmp_path: Path) -> None:
    board, run = jg.TensorBoard(tmp_path), cast(Any, None)
    for step in (1, 2):
        board(run, Report(step, 100, 1.0, 3.0, 1.0, {"loss": 0.5}))
        board.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2


def test_a_disk_that_is_full_ends_no_training_and_leaves_no_crowd_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board, full = jg.TensorBoard(tmp_path), [False]

    def fsync(file: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    run = cast(Any, None)
    for step in range(1, 31):
        full[0] = 1 < step < 30
        board(run, Report(step, 100, 1.0, 3.0, 1.0, {"loss": 0.5}))
    assert caplog.text.count("TensorBoard did not take a report") == 1
    assert len(list(tmp_path.iterdir())) == 2, "one without a report begins anew"


def test_a_directory_below_a_file_is_refused_before_the_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(ConfigError, match="notes is a file; give a directory"):
        jg.TensorBoard(tmp_path / "notes" / "board")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without a run: its tables take MLflow seconds."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(empty, tmp_path)}"


@pytest.mark.slow
def test_mlflow_has_what_was_reported(store: str) -> None:
    logs = jg.MLflow("digits", run_name="first", tracking_uri=store, params={"lr": 0.1})
    assert repr(logs) == "MLflow('digits')"
    _, seen = fit(logs, eval_data=data(), eval_every=10)
    client = mlflow.MlflowClient(store)
    kept = client.get_run(logs.run_id)
    assert (kept.info.run_name, kept.info.status) == ("first", "FINISHED")
    assert kept.data.params == {"lr": "0.1"}
    losses = client.get_metric_history(logs.run_id, "loss")
    assert [(m.step, m.value) for m in losses] == pytest.approx(
        np.array([(r.step, r.metrics["loss"]) for r in seen])
    )
    assert {m.step for m in client.get_metric_history(logs.run_id, "eval_loss")} <= {
        10,
        20,
        30,
    }
    first = logs.run_id
    fit(logs)
    assert logs.run_id != first, "one run there for each here"


@pytest.mark.slow
def test_mlflow_knows_that_a_run_failed(store: str) -> None:
    logs = jg.MLflow(tracking_uri=store)

    def breaks(run: Run, report: Report) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(logs, breaks)
    assert mlflow.MlflowClient(store).get_run(logs.run_id).info.status == "FAILED"


@pytest.mark.slow
def test_a_tracker_that_goes_away_ends_no_training(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs = jg.MLflow(tracking_uri=store)

    def deletes(run: Run, report: Report) -> None:
        mlflow.MlflowClient(store).delete_run(logs.run_id)

    with caplog.at_level(logging.WARNING, "jgraph.trackers"):
        run, _ = fit(logs, deletes, steps=30)
    assert run.state == "done"
    assert caplog.text.count("MLflow did not take a report") == 1


def records(content: bytes) -> Iterator[bytes]:
    """Records of a log as LevelDB has it: in blocks of 32 KiB, after a head of 7 B."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):
            return  # is being written
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def rows(path: Path) -> list[dict[str, float]]:
    """What W&B wrote for a later `wandb sync`, once it has written that the run ended.

    Its process writes that a little after `finish` returns, if cores are busy.
    """
    (file,) = path.glob("wandb/offline-run-*/*.wandb")
    written: list[Any] = []

    def is_whole() -> bool:
        written[:] = [Record.FromString(c) for c in records(file.read_bytes())]
        return any(record.HasField("exit") for record in written)

    wait_until(is_whole)
    return [
        {
            i.key or i.nested_key[0]: json.loads(i.value_json)
            for i in record.history.item
        }
        for record in written
        if record.HasField("history")
    ]


@pytest.mark.slow
def test_wandb_has_what_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    logs = jg.WandB("digits", mode="offline", directory=tmp_path, config={"lr": 0.1})
    assert repr(logs) == "WandB('digits')"
    _, seen = fit(logs)
    found = [(row["update"], row["loss"]) for row in rows(tmp_path) if "loss" in row]
    wanted = [(r.step, r.metrics["loss"]) for r in seen]
    assert np.array(found) == pytest.approx(np.array(wanted))
    assert wandb.run is None, "a run of the user is not taken"


def test_a_mode_that_wandb_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="give 'online' or 'offline'"):
        jg.WandB("digits", mode="off")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["mlflow", "wandb", "pandas"])
def test_what_is_not_installed_is_named(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = fit()
    monkeypatch.setitem(sys.modules, module, None)
    calls: dict[str, Any] = {
        "mlflow": jg.MLflow,
        "wandb": lambda: jg.WandB("x"),
        "pandas": run.to_frame,
    }
    with pytest.raises(ConfigError, match="pip install"):
        calls[module]()


def test_a_frame_has_a_row_for_each_step() -> None:
    run, _ = fit(eval_data=data(), eval_every=10)
    frame = run.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert frame["step"].tolist() == list(range(1, 31))
    loss = run.metrics("loss")
    assert frame["loss"].tolist() == loss["value"].tolist()
    assert frame["seconds"].tolist() == loss["seconds"].tolist()
    evaluated = frame.dropna(subset="eval_loss")
    wanted = run.metrics("eval_loss")
    assert evaluated["step"].tolist() == sorted(set(wanted["step"].tolist()))
    assert evaluated["eval_loss"].iloc[-1] == wanted["value"][-1]
