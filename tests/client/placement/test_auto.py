"""Automatic placement on running clusters."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.errors import ConfigError, MemoryLimitError, UnknownDeviceError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.cost_model import Link
from tests.support.costs import FAST, SLOW, model
from tests.support.servers import connected

X = np.full((300, 300), 0.01, np.float32)


def two_towers(x: Any) -> Any:
    towers = [x, x + 1]
    for _ in range(3):
        towers = [jnp.tanh(t @ t) for t in towers]
    return (towers[0] + towers[1]).sum()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with connected(ps=1, worker=2) as found:
        yield found


def test_a_session_runs_what_was_placed_on_two_tasks(cluster: Any) -> None:
    placement = jg.auto(cluster, model(cluster.tasks(), FAST))
    with cluster.session(placement=placement) as sess:
        planned = sess.plan(two_towers, X)
        assert {s.task for s in planned.segments} == set(cluster.tasks("worker"))
        np.testing.assert_allclose(
            sess.run(two_towers, X), jax.jit(two_towers)(X), rtol=1e-5
        )
        sess.run(two_towers, X)
    (row,) = placement.report().rows
    assert row["name"] == "two_towers"
    assert row["runs"] == 2
    assert row["measured_s"] > 0
    assert row["predicted_s"] < row["alone_s"]
    assert row["predicted_s"] == planned.prediction.seconds
    assert "predicted 162 ms, measured" in str(placement.report())


def test_a_training_step_trains_as_one_process_does(cluster: Any) -> None:
    start = [np.full((300, 300), 0.01 + n / 1e4, np.float32) for n in range(3)]
    weights = [jg.Variable(f"auto/w{n}", jnp.array(w)) for n, w in enumerate(start)]

    def updated(values: list[Any], x: Any) -> tuple[Any, list[Any]]:
        def loss(values: list[Any]) -> Any:
            h = x
            for value in values:
                h = jnp.tanh(h @ value)
            return (h**2).mean()

        found, gradients = jax.value_and_grad(loss)(values)
        return found, [v - g for v, g in zip(values, gradients, strict=True)]

    def step(x: Any) -> Any:
        found, new = updated([w[...] for w in weights], x)
        for w, value in zip(weights, new, strict=True):
            w[...] = value
        return found

    costs = model(cluster.tasks(), Link(1e-4, 1e10))
    placement = jg.auto(cluster, costs, memory_limit=3_400_000)
    values: list[Any] = start
    with cluster.session(placement=placement) as sess:
        for _ in range(3):
            found = sess.run(step, X)
            wanted, values = jax.jit(updated)(values, X)
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        planned = sess.plan(step, X)
        stored = sess.read(weights)
    assert set(planned.variable_tasks.values()) == set(cluster.tasks("worker"))
    for n, value in enumerate(values):
        np.testing.assert_allclose(stored[f"auto/w{n}"], value, rtol=1e-4, atol=1e-6)


def test_variables_stay_where_they_are_when_another_function_uses_them(
    cluster: Any,
) -> None:
    worker = TaskName("/job:worker/task:1")
    w = jg.Variable("auto/here", jnp.ones((300, 300)), device=worker)
    placement = jg.auto(cluster, model(cluster.tasks(), SLOW))
    with cluster.session(placement=placement) as sess:
        assert (
            sess.plan(lambda: jnp.sum(w[...] @ w[...])).task_of("auto/here") == worker
        )


def test_a_step_that_fits_nowhere_is_refused_before_it_is_sent(cluster: Any) -> None:
    limits = dict.fromkeys(cluster.tasks(), 1000)
    placement = jg.auto(cluster, model(cluster.tasks()), memory_limit=limits)
    with (
        cluster.session(placement=placement) as sess,
        pytest.raises(MemoryLimitError, match="'two_towers' does not fit"),
    ):
        sess.run(two_towers, X)
    assert str(placement.report()) == "no step was placed yet"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tasks": []}, ConfigError),
        ({"tasks": ["/job:worker/task:9"]}, UnknownDeviceError),
        ({"memory_limit": {"/job:gpu/task:0": 5}}, UnknownDeviceError),
        ({"memory_limit": 0}, ConfigError),
        ({"memory_limit": "8 GB"}, ConfigError),
        ({"memory_limit": float("nan")}, ConfigError),
        ({"tasks": "/job:worker/task:0"}, ConfigError),
        ({"cost_model": model([TaskName("/job:worker/task:0")])}, ConfigError),
        ({"cost_model": "links.json"}, ConfigError),
    ],
)
def test_options_that_cannot_be_are_refused(
    cluster: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        jg.auto(cluster, **{"cost_model": model(cluster.tasks()), **options})


def test_what_is_no_cluster_and_no_placement_is_refused(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"give what jg\.connect\('jgraph://"):
        jg.auto("jgraph://127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"give what jg\.auto\(cluster\) returns"):
        cluster.session(placement="auto")


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.slow
def test_a_cluster_of_processes_is_measured_once_and_predicts_its_steps() -> None:
    with jg.LocalCluster(ps=0, workers=2) as cluster:
        placement = jg.auto(cluster)
        assert jg.auto(cluster).cost_model is placement.cost_model
        with cluster.session(placement=placement) as sess:
            results = [sess.run(two_towers, X) for _ in range(5)]
        np.testing.assert_allclose(results, jax.jit(two_towers)(X), rtol=1e-5)
        (row,) = placement.report().rows
        # Loosely: other processes of the machine may have been in the way.
        assert 0.05 < row["predicted_s"] / row["measured_s"] < 20
