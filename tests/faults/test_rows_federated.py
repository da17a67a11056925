"""Faults of federated runs: who is lost in a round costs that round's time at most."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.client.cluster import connect
from jgraph.coordination.data.slots import epoch_order
from jgraph.failpoints import ONCE, VARIABLE
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.files.step_files import steps_in
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.strategies.federated import Federated
from tests.support.clients import (
    EXAMPLES,
    client_trainer,
    mean_of_clients,
    named,
    tallied,
    written,
)
from tests.support.fault import Fault
from tests.support.models import parameters

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]

CLIENTS, ROUNDS = 4, 6


def crash(point: str, time: int, once: Path) -> dict[str, str]:
    """Variables with which the first task crashes that is so often at a point."""
    return {VARIABLE: f"{point}=crash@{time}", ONCE: str(once)}


@pytest.mark.row(47, 48)
@pytest.mark.parametrize(
    "point",
    [
        "sum.masks_made",
        pytest.param("sum.keys_made", marks=pytest.mark.chaos),
        pytest.param("sum.shares_made", marks=pytest.mark.chaos),
        pytest.param("sum.asked", marks=pytest.mark.chaos),
    ],
)
def test_a_client_that_is_killed_in_a_secure_round_is_left_out_of_the_sum(
    fault: Fault, tmp_path: Path, point: str
) -> None:
    once = tmp_path / "crashed"
    cluster = fault.cluster(ps=1, workers=CLIENTS, env=crash(point, 2, once))
    strategy = Federated(min_clients=3, secure_sum=SecureSum(threshold=2))
    there = client_trainer(cluster, strategy)
    source = written(tmp_path / "own", CLIENTS)
    run = there.fit(source, steps=ROUNDS, batch_size=EXAMPLES, progress=False)
    assert once.exists(), f"nobody came to {point} twice"
    rounds = run.rounds()
    assert [(r.number, r.void) for r in rounds] == [
        (n, "") for n in range(1, ROUNDS + 1)
    ]
    sizes = [len(r.members) for r in rounds]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {4, 3}
    due = mean_of_clients(CLIENTS, [r.members for r in rounds])
    for value, wanted in zip(parameters(run.model()), due, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-4)
    fault.names += [" was lost"]
    there.close()


@pytest.mark.nightly
@pytest.mark.row(47, 48)
def test_with_too_few_a_secure_round_is_given_up_and_begun_again_with_others(
    fault: Fault, tmp_path: Path
) -> None:
    cluster = fault.cluster(ps=1, workers=CLIENTS)
    strategy = Federated(
        fraction=0.75, min_clients=3, secure_sum=SecureSum(threshold=2)
    )
    there = client_trainer(cluster, strategy)
    source = written(tmp_path / "own", CLIENTS)
    there.plan(source, EXAMPLES)
    runner: Any = there._parts.build()[1]
    runner.compute_wait_s = dict.fromkeys(range(CLIENTS), 0.5)
    invited = epoch_order(CLIENTS, 0, 1).tolist()[:3]  # to the second round
    lost = next(f"/job:worker/task:{n}" for n in invited if n)  # not the master

    killed: list[str] = []

    def kill(run: Any, report: Any) -> None:
        if not killed:
            killed.append(lost)
            cluster.kill(lost)

    options: Any = {"callbacks": [kill], "progress": False}
    run = there.fit(source, steps=ROUNDS, batch_size=EXAMPLES, **options)
    (given_up,) = [r for r in run.rounds() if r.void]
    assert given_up.number == 2
    assert given_up.void.startswith("the round is void: 2 members have")
    assert given_up.dropped == {lost: "lost"}
    assert given_up.void in str(run.rounds())
    counted = [r for r in run.rounds() if not r.void]
    assert [r.number for r in counted] == [*range(1, ROUNDS + 1)]
    assert {len(r.members) for r in counted} == {3}
    due = mean_of_clients(CLIENTS, [r.members for r in counted])
    for value, wanted in zip(parameters(run.model()), due, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-4)
    fault.names += [f"{lost} was lost; the other workers go on"]
    there.close()


def due(run: Any) -> None:
    """The rounds are whole, each there once, and the model is what they come to."""
    rounds = [r for r in run.rounds() if not r.void]
    assert [r.number for r in rounds] == [*range(1, run.steps + 1)]
    means = mean_of_clients(CLIENTS, [r.members for r in rounds])
    for value, wanted in zip(parameters(run.model()), means, strict=True):
        # Secure sums round each round, and there may be a thousand.
        np.testing.assert_allclose(value, wanted, atol=2e-3)


class Kill:
    """Kills a task once, as the first rounds are over, and ends the run some later."""

    def __init__(self, cluster: LocalCluster, task: str, saved_in: Path | None) -> None:
        self._cluster, self._task, self._saved_in = cluster, task, saved_in
        self._killed_at = 0
        self.has_happened: Callable[[Any], bool] = lambda run: True

    def __call__(self, run: Any, report: Any) -> None:
        if not self._killed_at:
            is_saved = self._saved_in is None or len(steps_in(self._saved_in)) > 1
            if report.step >= 3 and is_saved:
                self._killed_at = report.step
                self._cluster.kill(self._task)
        elif report.step > self._killed_at + 20 and self.has_happened(run):
            run.stop()


def trained(there: Any, source: Any, kill: Kill, **options: Any) -> Any:
    run = there.fit(
        source,
        steps=10**6,
        batch_size=EXAMPLES,
        callbacks=[kill],
        progress=False,
        **options,
    )
    assert run.state == "stopped"
    return run


PS, MASTER, CLIENT = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:2"


@pytest.mark.row(48)
@pytest.mark.parametrize(
    "secure_sum",
    [
        pytest.param(None, marks=pytest.mark.nightly),
        pytest.param(SecureSum(threshold=2), marks=pytest.mark.chaos),
    ],
)
def test_a_client_that_was_killed_takes_part_again(
    fault: Fault, tmp_path: Path, secure_sum: Any
) -> None:
    cluster = fault.cluster(ps=1, workers=CLIENTS, restarts=3)
    there = client_trainer(cluster, Federated(min_clients=2, secure_sum=secure_sum))
    kill = Kill(cluster, CLIENT, None)

    def is_back(run: Any) -> bool:
        rounds = run.rounds()
        without = [r.number for r in rounds if CLIENT not in r.members]
        return bool(without) and CLIENT in rounds[-1].members

    kill.has_happened = is_back
    run = trained(there, written(tmp_path / "own", CLIENTS), kill)
    due(run)
    fault.names += [f"{CLIENT} was lost", f"{CLIENT} answers again"]
    there.close()


@pytest.mark.row(49)
@pytest.mark.parametrize(
    ("durability", "secure_sum"),
    [
        pytest.param("checkpoint", None, marks=pytest.mark.nightly),
        pytest.param("replica", None, marks=pytest.mark.chaos),
        pytest.param("checkpoint", SecureSum(threshold=2), marks=pytest.mark.chaos),
    ],
)
def test_a_federated_run_goes_on_when_a_ps_is_killed(
    fault: Fault, tmp_path: Path, durability: Any, secure_sum: Any
) -> None:
    cluster = fault.cluster(ps=2, workers=CLIENTS, restarts=3)
    strategy = Federated(durability=durability, secure_sum=secure_sum)
    there = client_trainer(cluster, strategy)
    saves = durability == "checkpoint"
    kill = Kill(cluster, PS, fault.path if saves else None)
    kill.has_happened = lambda run: len(run.recoveries()) == 1
    options = {"checkpoint": Checkpoints(fault.path, every=2)} if saves else {}
    run = trained(there, written(tmp_path / "own", CLIENTS), kill, **options)
    (recovery,) = run.recoveries()
    assert recovery.lost == (PS,)
    due(run)
    fault.names += [PS, "SIGKILL"]
    there.close()


@pytest.mark.row(49)
@pytest.mark.parametrize(
    ("detached", "secure_sum"),
    [
        pytest.param(False, None, marks=pytest.mark.nightly),
        pytest.param(True, None, marks=pytest.mark.chaos),
        pytest.param(False, SecureSum(threshold=2), marks=pytest.mark.chaos),
    ],
)
def test_a_federated_run_goes_on_when_its_master_is_killed(
    fault: Fault, tmp_path: Path, detached: bool, secure_sum: Any
) -> None:
    """The master is a client, too, and takes part again when it is back."""
    cluster = fault.cluster(ps=2, workers=CLIENTS, restarts=3)
    with connect(cluster.target, timeout_s=20) as of_others:
        there = client_trainer(
            of_others if detached else cluster,
            Federated(min_clients=2, secure_sum=secure_sum),
        )
        kill = Kill(cluster, MASTER, None)
        options: dict[str, Any] = {}
        if detached:
            saves = Checkpoints(fault.path, every=50)
            options = {"detached": True, "checkpoint": saves}
        run = trained(there, written(tmp_path / "own", CLIENTS), kill, **options)
        assert run.recoveries() == []
        due(run)
        there.close()
    fault.names += [f"{MASTER}, the master, was lost", "is the master from here on"]


def check_tally(run: Any, bound: int, apart: int = 0) -> None:
    """Each contribution was applied once, by each client, and none too late.

    Args:
      run: has ended.
      bound: of the staleness.
      apart: updates that were under way when a ps was lost: another may have them.
    """
    (counts,) = parameters(run.model())
    assert abs(counts.sum() - run.steps) <= apart
    assert min(counts) > 0
    ages = [ages for of_ps in run.staleness().values() for ages in of_ps.values()]
    assert max(max(each) for each in ages) <= bound
    rounds = run.rounds()
    assert [r.number for r in rounds] == [*range(1, len(rounds) + 1)]
    assert {len(r.members) for r in rounds} == {1}


@pytest.mark.nightly
@pytest.mark.row(48)
def test_a_client_that_is_killed_costs_its_own_round_where_nobody_waits(
    fault: Fault, tmp_path: Path
) -> None:
    cluster = fault.cluster(ps=1, workers=CLIENTS, restarts=3)
    there = tallied(cluster, Federated(max_staleness=2), CLIENTS)
    kill = Kill(cluster, CLIENT, None)
    was_lost = False

    def is_back(run: Any) -> bool:
        nonlocal was_lost
        states = [m.state for m in run.members() if m.task == CLIENT]
        was_lost |= "lost" in states
        return was_lost and states[-1] == "takes part"

    kill.has_happened = is_back
    run = trained(there, named(tmp_path / "own", CLIENTS), kill)
    check_tally(run, bound=2)
    fault.names += [f"{CLIENT} was lost", f"{CLIENT} answers again"]
    there.close()


@pytest.mark.row(49)
@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["replica", "checkpoint"])
def test_rounds_that_wait_for_nobody_go_on_when_a_ps_is_killed(
    fault: Fault, tmp_path: Path, durability: Any
) -> None:
    cluster = fault.cluster(ps=2, workers=CLIENTS, restarts=3)
    strategy = Federated(max_staleness=CLIENTS, durability=durability)
    there = tallied(cluster, strategy, CLIENTS)
    saves = durability == "checkpoint"
    kill = Kill(cluster, PS, fault.path if saves else None)
    kill.has_happened = lambda run: len(run.recoveries()) == 1
    options = {"checkpoint": Checkpoints(fault.path, every=2)} if saves else {}
    run = trained(there, named(tmp_path / "own", CLIENTS), kill, **options)
    (recovery,) = run.recoveries()
    assert recovery.lost == (PS,)
    check_tally(run, bound=CLIENTS, apart=0 if saves else 2 * CLIENTS)
    fault.names += [PS, "SIGKILL"]
    there.close()
