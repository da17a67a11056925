"""Faults of federated runs: who is lost in a round costs that round's time at most."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.coordination.data.slots import epoch_order
from jgraph.failpoints import ONCE, VARIABLE
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.strategies.federated import Federated
from tests.support.clients import (
    EXAMPLES,
    client_trainer,
    mean_of_clients,
    parameters,
    written,
)
from tests.support.fault import Fault

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
