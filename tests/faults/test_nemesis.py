"""Training while tasks are killed and frozen at random: `make chaos`.

The seed is printed; ``CHAOS_SEED=7 make chaos`` does the same again, as far as the
machine is as fast.
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import optax
import pytest
from flax import nnx

from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import BATCH, IDS, check_recovered, gone_back_to, trainer
from tests.support.fault import Fault
from tests.support.models import NnxMLP, data, nnx_loss

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(400)]

FAULTS = int(os.environ.get("CHAOS_FAULTS", "8"))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))


class Nemesis:
    """Kills and freezes tasks, each time after the run has saved once more.

    Sometimes a second one follows at once, into the recovery from the first.
    """

    def __init__(self, cluster: LocalCluster, directory: Path, seed: int) -> None:
        sys.stdout.write(f"CHAOS_SEED={seed}\n")
        self.log: list[str] = []
        self._cluster = cluster
        self._directory = directory
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        for _ in range(FAULTS):
            seen = self._newest()
            while self._newest() <= seen:
                if self._stop.wait(0.05):
                    return
            if self._stop.wait(self._chance.uniform(0, 2)):
                return
            self._strike()
            if self._chance.random() < 0.3:
                self._stop.wait(self._chance.uniform(0, 2))
                self._strike()

    def _strike(self) -> None:
        task = self._chance.choice(self._cluster.tasks())
        pid = self._cluster.pid(task)
        with suppress(ProcessLookupError):  # it may be dead already
            if self._chance.random() < 0.7:
                self.log.append(f"kill {task}")
                os.kill(pid, signal.SIGKILL)
            else:
                seconds = self._chance.uniform(0.5, 4)
                self.log.append(f"freeze {task} for {seconds:.1f} s")
                os.kill(pid, signal.SIGSTOP)
                self._stop.wait(seconds)
                os.kill(pid, signal.SIGCONT)

    def _newest(self) -> int:
        steps = steps_in(self._directory) if self._directory.exists() else []
        return steps[-1] if steps else -1

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(30)
            sys.stdout.write("\n".join(self.log) + "\n")


def end_after(nemesis: Nemesis) -> partial[None]:
    """Returns a callback that ends a run when the nemesis has done its worst."""

    def watch(ended_at: list[int], run: object, report: object) -> None:
        step = int(report.step)  # type: ignore[attr-defined]
        if nemesis.over and not ended_at:
            ended_at.append(step)
        if ended_at and step >= ended_at[0] + 200:
            run.stop()  # type: ignore[attr-defined]

    return partial(watch, [])


def test_whatever_is_killed_and_frozen_no_batch_is_left_out_and_no_update_is_lost(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=1000)
    there, nemesis = trainer(cluster, AsyncPS()), Nemesis(cluster, fault.path, SEED)
    with nemesis.at_work():
        run = there.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(fault.path, every=50, keep=10_000),
            callbacks=[end_after(nemesis)],
            progress=False,
        )
    assert nemesis.over
    assert run.state == "stopped"  # by us, and by nothing else
    torn = 2 * sum(line.startswith("kill /job:worker/") for line in nemesis.log)
    check_recovered(there, run, gone_back_to(fault.path, run), torn=torn)
    if any(line.startswith("kill") for line in nemesis.log):
        fault.names += ["SIGKILL"]
    assert cluster.wait_for_tasks(60)
    there.close()


@pytest.mark.parametrize("strategy", [AsyncPS(), SyncPS()], ids=["async", "sync"])
def test_whatever_is_killed_and_frozen_the_model_learns_as_it_does_undisturbed(
    fault: Fault, strategy: Strategy
) -> None:
    tx, examples = optax.sgd(0.1), data(400)
    cluster = fault.cluster(ps=2, workers=2, restarts=1000)
    there = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, tx, cluster=cluster, strategy=strategy
    )
    nemesis = Nemesis(cluster, fault.path, SEED)
    with nemesis.at_work():
        run = there.fit(
            examples,
            steps=10**6,
            batch_size=8,
            checkpoint=Checkpoints(fault.path, every=50),
            callbacks=[end_after(nemesis)],
            progress=False,
        )
    calm = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, tx)
    undisturbed = calm.fit(examples, steps=run.steps, batch_size=8, progress=False)
    losses = [r.evaluate(data(200, seed=1))["loss"] for r in (run, undisturbed)]
    sys.stdout.write(f"losses {losses} after {run.steps} steps\n")
    assert losses[0] < losses[1] + 0.05
    fault.names += ["SIGKILL"]
    there.close()
