"""Experiment trackers as callbacks of ``Trainer.fit``: TensorBoard, MLflow, W&B.

All get the same values: training metrics under their names (means since the last
report), evaluations as ``eval_…``, ``steps_per_s``, and of each worker its steps per
second and the staleness of most of its updates.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from socket import gethostname
from typing import Any, Final, Literal, final

from jgraph.clock import WallClock
from jgraph.errors import ConfigError
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run
from jgraph.view import markup

_LOG = logging.getLogger("jgraph.trackers")
_REFUSED: Final = re.compile(r"[^-/\w. ]")
"""What some tracker takes in no name, and refuses the whole report for."""
_FILES: Final = count()


def scalars(report: Report) -> list[tuple[int, dict[str, float]]]:
    """Returns the values of a report, by name, each with the step that they are of.

    Names have the characters that all trackers take: ``job_worker/task_0/steps_per_s``,
    and ``acc_1`` of a metric ``acc@1``.
    """
    values = {**report.metrics, "steps_per_s": report.steps_per_s}
    for worker in report.workers:
        values[f"{worker.name}/steps_per_s"] = worker.steps_per_s
        if worker.staleness:
            ages = worker.staleness
            values[f"{worker.name}/staleness"] = max(ages, key=lambda a: ages[a])
    evaluated = {f"eval_{n}": v for n, v in (report.evaluation or {}).items()}
    found = [(report.step, _named(values))]
    if evaluated:
        found.append((report.evaluation_step, _named(evaluated)))
    return found


def _named(values: Mapping[str, float]) -> dict[str, float]:
    return {_REFUSED.sub("_", name.lstrip("/")): v for name, v in values.items()}


@final
class TensorBoard:
    """Writes the metrics of a run as event files: ``tensorboard --logdir DIR``.

    Values are those of ``scalars``. Needs tensorboardX, and no TensorFlow:
    ``pip install 'jgraph[tensorboard]'``. A directory that cannot be written when the
    run begins ends it; a disk that is full later does not: a warning says so, and
    another file begins with the first report for which there is room.

    Args:
      directory: made if it is not there; another run may write to it too.

    Raises:
      ConfigError: tensorboardX is not installed, or a file is where the directory is to
        be.

    Example:
      ``trainer.fit(data, steps=1000, callbacks=[jg.TensorBoard("runs/mlp")])``

      >>> TensorBoard("runs/mlp")
      TensorBoard('runs/mlp')
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto.event_pb2 import Event
        except ImportError as error:
            raise ConfigError(
                "TensorBoard needs tensorboardX to write event files; "
                "pip install 'jgraph[tensorboard]'"
            ) from error
        # Not its SummaryWriter, whose thread writes: once that is dead, because the
        # disk was full, whoever gives it a value waits for ever.
        self._records: Any = record_writer
        self._event: Any = Event
        self._scalar: Any = summary.scalar
        self._directory = os.fspath(directory)
        path = Path(self._directory).absolute()
        for there in (path, *path.parents):
            if there.is_file():
                raise ConfigError(
                    f"TensorBoard cannot write to {self._directory}: {there} is a "
                    "file; give a directory"
                )
        self._writer: Any = None
        self._path = ""
        self._is_used = True
        self._tolerant = _Tolerant("TensorBoard")

    def __call__(self, run: Run, report: Report) -> None:
        """Writes a report."""
        if not self._path:
            self._begin()
        self._tolerant.do(partial(self._write, report))

    def close(self) -> None:
        """Ends the file; a later run begins another."""
        if self._writer is not None:
            ended, self._writer = self._writer, None
            self._tolerant.do(ended.close)

    def _begin(self) -> None:
        """Begins another file, or anew the one that nothing could be written to."""
        self._records.directory_check(self._directory)
        began_s = WallClock().now()
        path = self._path
        if self._is_used:  # one of the same name would be written over
            name = f"{int(began_s)}.{gethostname()}.{os.getpid()}.{next(_FILES)}"
            path = os.path.join(self._directory, f"events.out.tfevents.{name}")
        self._writer = self._records.RecordWriter(path)
        self._path, self._is_used = path, False
        self._put(wall_time=began_s, file_version="brain.Event:2")

    def _put(self, **event: Any) -> None:
        self._writer.write(self._event(**event).SerializeToString())

    def _write(self, report: Report) -> None:
        if self._writer is None:
            self._begin()
        try:
            for step, values in scalars(report):
                for name, value in values.items():
                    summary, now = self._scalar(name, value), WallClock().now()
                    self._put(wall_time=now, step=step, summary=summary)
            self._writer.flush()
            self._is_used = True
        except OSError:  # a reader gets no further than half an event
            ended, self._writer = self._writer, None
            with suppress(OSError):
                ended.close()
            raise

    def __repr__(self) -> str:
        return f"TensorBoard('{self._directory}')"

    def _repr_html_(self) -> str:
        return markup.lines(repr(self))


@final
class MLflow:
    """Logs the metrics of a run to MLflow, as one run there for each run here.

    Needs ``pip install 'jgraph[mlflow]'``. A server that cannot be reached when the run
    begins ends it, with MLflow's error; later only a warning says so, and the values
    of that report are left out.

    Args:
      experiment: name of the experiment; it is made if it is not there.
      run_name: of the run; MLflow invents one if unset.
      tracking_uri: ``http://host:5000`` or ``sqlite:///mlflow.db``; if unset, what
        ``MLFLOW_TRACKING_URI`` says.
      params: what to log beside the metrics: learning rate, size of the model.

    Attributes:
      run_id: of the newest run in MLflow; empty before the first report.

    Raises:
      ConfigError: MLflow is not installed.

    Example:
      ``trainer.fit(data, steps=1000, callbacks=jg.MLflow("ctr", params={"lr": 0.1}))``

      >>> MLflow("ctr")
      MLflow('ctr')
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, object] | None = None,
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError(
                "MLflow is not installed; pip install 'jgraph[mlflow]'"
            ) from error
        self._mlflow = mlflow
        self._experiment = experiment
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._params = {name: str(value) for name, value in (params or {}).items()}
        self._client: Any = None
        self._tolerant = _Tolerant("MLflow")
        self.run_id = ""

    def __call__(self, run: Run, report: Report) -> None:
        """Logs a report."""
        if self._client is None:
            self._begin()
        now = int(WallClock().now() * 1000)
        metrics = [
            self._mlflow.entities.Metric(name, float(value), now, step)
            for step, values in scalars(report)
            for name, value in values.items()
        ]
        self._tolerant.do(lambda: self._client.log_batch(self.run_id, metrics))

    def end(self, run: Run) -> None:
        """Ends the run in MLflow."""
        if self._client is None:
            return
        status = "FINISHED" if run.error is None else "FAILED"
        client, self._client = self._client, None
        self._tolerant.do(lambda: client.set_terminated(self.run_id, status))

    def _begin(self) -> None:
        client = self._mlflow.MlflowClient(self._tracking_uri)
        found = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        self.run_id = client.create_run(number, run_name=self._run_name).info.run_id
        params = [self._mlflow.entities.Param(*pair) for pair in self._params.items()]
        client.log_batch(self.run_id, params=params)
        self._client = client

    def __repr__(self) -> str:
        return f"MLflow('{self._experiment}')"

    def _repr_html_(self) -> str:
        return markup.lines(repr(self))


@final
class WandB:
    """Logs the metrics of a run to Weights & Biases.

    Needs ``pip install 'jgraph[wandb]'``, and ``wandb login`` unless ``mode`` is
    ``"offline"``, which writes to ``directory`` for ``wandb sync``.

    Args:
      project: name of the project.
      name: of the run; W&B invents one if unset.
      mode: ``"online"``, ``"offline"``, or what ``WANDB_MODE`` says if unset.
      directory: where files go; the current one if unset.
      config: what to log beside the metrics: learning rate, size of the model.

    Raises:
      ConfigError: wandb is not installed, or no such ``mode``.

    Example:
      ``trainer.fit(data, steps=1000, callbacks=jg.WandB("ctr", mode="offline"))``

      >>> WandB("ctr")
      WandB('ctr')
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        directory: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        if mode not in ("online", "offline", None):
            raise ConfigError(f"mode={mode!r}: give 'online' or 'offline'")
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "wandb is not installed; pip install 'jgraph[wandb]'"
            ) from error
        self._wandb = wandb
        self._project = project
        self._options: dict[str, Any] = {"name": name, "mode": mode}
        self._config = dict(config or {})
        self._directory = None if directory is None else os.fspath(directory)
        self._run: Any = None
        self._tolerant = _Tolerant("Weights & Biases")

    def __call__(self, run: Run, report: Report) -> None:
        """Logs a report."""
        if self._run is None:
            self._run = self._wandb.init(
                project=self._project,
                dir=self._directory,
                config=self._config,
                # Of its own: another one that the user has goes on.
                reinit="create_new",
                settings=self._wandb.Settings(console="off", silent=True),
                **self._options,
            )
            # Evaluations are of earlier steps, which W&B takes for no "step".
            self._run.define_metric("*", step_metric="update")
        for step, values in scalars(report):
            self._tolerant.do(partial(self._run.log, {**values, "update": step}))

    def end(self, run: Run) -> None:
        """Ends the run in W&B."""
        if self._run is not None:
            ended, self._run = self._run, None
            code = int(run.error is not None)
            self._tolerant.do(lambda: ended.finish(exit_code=code))

    def __repr__(self) -> str:
        return f"WandB('{self._project}')"

    def _repr_html_(self) -> str:
        return markup.lines(repr(self))


@final
class _Tolerant:
    """Calls of a tracker, whose failures end no training: the first one is told.

    Args:
      name: of the tracker.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def do(self, call: Callable[[], object]) -> None:
        """Calls the tracker."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  # each tracker has its own
            if not self._warned:
                _LOG.warning("%s did not take a report: %s", self._name, error)
            self._warned = True
