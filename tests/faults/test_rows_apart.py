"""Faults in rounds of local steps: of a table by rows, and of fragments."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.run.run import Run
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.trainer import Trainer
from tests.support.counting import BATCH, EXAMPLES, IDS, after, counted, trainer
from tests.support.fault import Fault
from tests.support.ledger import examples_counted, examples_due

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

WORKER, PS = "/job:worker/task:1", "/job:ps/task:1"
EVERY = 4


class Table(nnx.Module):
    """An update adds one to the row of each example of its batches."""

    def __init__(self) -> None:
        self.rows = nnx.Param(np.zeros((EXAMPLES, 1), np.float32))


def loss(model: Table, ids: Any) -> Any:
    seen = jnp.zeros(EXAMPLES).at[ids].add(1.0)
    return -jnp.take(model.rows[...], ids, axis=0).sum(), {"seen": seen}


def check_leases(there: Trainer, run: Run, steps: int) -> None:
    """No batch came twice, or was left out; ``seen`` is a mean over the steps."""
    position = there.current_position()
    assert position is not None
    assert position["again"] == 0
    counts = steps * examples_counted(run)
    np.testing.assert_allclose(counts, examples_due(position), atol=0.01)


def is_back(run: Run) -> bool:
    """Whether both workers contribute, after one did alone."""
    counts = run.metrics("contributions")["value"]
    alone = np.flatnonzero(counts == 1)
    return bool(len(alone) and (counts[alone[-1] :] == 2).sum() > 20)


def killing(cluster: Any, task: str) -> list[Any]:
    """Returns callbacks: a task is killed, and the run stops when it is back."""

    def stop(run: Run, report: Any) -> None:
        del report
        if is_back(run):
            run.stop()

    return [after(30, lambda: cluster.kill(task)), stop]


@pytest.mark.nightly
@pytest.mark.row(1, 3)
def test_a_worker_that_is_killed_in_a_round_of_rows_costs_time_alone(
    fault: Fault,
) -> None:
    cluster = fault.cluster(ps=2, workers=2, restarts=2)
    there = Trainer(
        *(Table(), loss, optax.sgd(1.0)),
        cluster=cluster,
        strategy=LocalSGD(sync_every=EVERY),
    )
    options: Any = {"callbacks": killing(cluster, WORKER), "progress": False}
    run = there.fit(IDS, steps=10**6, batch_size=BATCH, **options)
    assert "params/rows travels by rows" in str(there.plan())
    assert run.state == "stopped"
    check_leases(there, run, EVERY)
    due = EVERY * run.metrics("seen")["value"].sum(0)
    np.testing.assert_allclose(there.model().rows[...][:, 0], due, rtol=1e-5)
    fault.names += [f"{WORKER} answers again", "the other workers go on", "SIGKILL"]
    there.close()


@pytest.mark.nightly
@pytest.mark.row(1, 3)
def test_a_worker_that_is_killed_between_fragments_counts_nothing_twice(
    fault: Fault,
) -> None:
    """What it had not contributed of other fragments is lost, and no more."""
    cluster = fault.cluster(ps=2, workers=2, restarts=2)
    there = trainer(cluster, LocalSGD(sync_every=EVERY, fragments=2))
    options: Any = {"callbacks": killing(cluster, WORKER), "progress": False}
    run = there.fit(IDS, steps=10**6, batch_size=BATCH, **options)
    assert run.state == "stopped"
    check_leases(there, run, EVERY // 2)
    due = EVERY // 2 * run.metrics("seen")["value"].sum(0)
    for count in counted(there):
        # Who is left alone contributes the steps before the loss to another fragment
        # as one of one, and not of two.
        more = (count - due).clip(0).sum()
        assert more <= EVERY // 2 * BATCH / 2 + 0.01, "came twice"
        # Of the end, where half of the last round is not contributed, and of the loss.
        assert (due - count).sum() <= 3 * EVERY * BATCH
    fault.names += [f"{WORKER} answers again", "the other workers go on", "SIGKILL"]
    there.close()


@pytest.mark.row(14)
@pytest.mark.nightly
def test_a_ps_that_is_back_from_its_log_between_fragments_loses_none(
    fault: Fault,
) -> None:
    """What rows it changed is in its log; the run goes on from the same update."""
    cluster = fault.cluster(ps=2, workers=2, restarts=2)
    given: Any = {"fragments": 2, "overlap": 1, "durability": "log"}
    there = trainer(cluster, LocalSGD(sync_every=EVERY, **given))

    def stop(run: Run, report: Any) -> None:
        if run.recoveries() and report.step > run.recoveries()[0].back_to + 40:
            run.stop()

    options: Any = {
        "callbacks": [after(60, lambda: cluster.kill(PS)), stop],
        "progress": False,
    }
    run = there.fit(IDS, steps=10**6, batch_size=BATCH, **options)
    assert run.state == "stopped"
    (recovery,) = run.recoveries()
    assert (recovery.lost, recovery.again) == ((PS,), 0)
    check_leases(there, run, EVERY // 2)
    position = there.current_position()
    assert position is not None
    due = examples_due(position)
    for count in counted(there):
        assert (2 * count <= due + 0.01).all(), "came twice"
        assert 2 * count.sum() > due.sum() / 4
    fault.names += [f"{PS}", "SIGKILL"]
    there.close()


@pytest.mark.row(12)
@pytest.mark.nightly
def test_a_ps_that_is_lost_between_fragments_takes_the_run_back(
    fault: Fault,
) -> None:
    """Workers read all again: what they had is of another model."""
    cluster = fault.cluster(ps=2, workers=2, restarts=2)
    there = trainer(cluster, LocalSGD(sync_every=EVERY, fragments=2, overlap=1))

    def stop(run: Run, report: Any) -> None:
        if run.recoveries() and report.step > run.recoveries()[0].back_to + 40:
            run.stop()

    options: Any = {
        "callbacks": [after(60, lambda: cluster.kill(PS), fault.path), stop],
        "checkpoint": Checkpoints(fault.path, every=20),
        "progress": False,
    }
    run = there.fit(IDS, steps=10**6, batch_size=BATCH, **options)
    assert run.state == "stopped"
    position = there.current_position()
    assert position is not None
    due = examples_due(position)
    workers = 2
    for count in counted(there):
        assert (workers * count <= due + 0.01).all(), "came twice"
        assert count.sum() > due.sum() / workers / 4
    fault.names += [f"{PS}", "SIGKILL"]
    there.close()
