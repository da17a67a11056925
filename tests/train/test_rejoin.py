"""A worker that dies during a run and is started again takes part in it once more.

As ``tests/faults/test_rows.py`` has it, with gradients that carry an error on.
"""

import threading

import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.cluster.local import LocalCluster
from jgraph.train.async_ps import AsyncPS
from jgraph.train.progress import Report
from jgraph.train.run import Run
from jgraph.train.trainer import Trainer
from tests.train.models import NnxMLP, data, nnx_loss

WORKER = "/job:worker/task:1"


@pytest.mark.procs
@pytest.mark.nightly
def test_rows_1_and_3_killed_worker_is_back_in_the_same_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    back = threading.Event()

    def kill_once_and_stop_when_it_is_back(run: Run, report: Report) -> None:
        said = [r.getMessage() for r in caplog.records if r.name == "jgraph.recover"]
        if not killed:
            killed.append(run.steps)
            cluster.kill(WORKER)
        elif any(f"{WORKER} answers again" in line for line in said):
            by = run.metrics("loss")["replica"]
            steps_back.append(int((by == 1).sum()))
            if steps_back[-1] > steps_back[0]:
                back.set()
                run.stop()

    killed: list[int] = []
    steps_back: list[int] = []
    with LocalCluster(ps=1, workers=2, restarts=3) as cluster:
        strategy = AsyncPS(max_staleness=4, gradient_dtype="int8")
        model, tx = NnxMLP(rngs=nnx.Rngs(0)), optax.adam(1e-2)
        trainer = Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy)
        run = trainer.fit(
            data(),
            steps=10**6,
            batch_size=8,
            callbacks=[kill_once_and_stop_when_it_is_back],
            progress=False,
        )
        assert back.is_set()
        assert run.state == "stopped"
        assert run.recoveries() == []  # nothing was done again
        loss = run.metrics("loss")
        assert len(np.unique(loss["step"])) == len(loss["step"])
        assert WORKER in run.staleness()
        run = trainer.fit(data(), steps=20, batch_size=8, progress=False)
        assert run.state == "done"
        trainer.close()
