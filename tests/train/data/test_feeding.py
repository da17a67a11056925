"""Data that this process reads, and workers get from it as they need it."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ConfigError, DataError
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.data_forms import Examples, batch, batches
from tests.support.servers import Servers, connected

EXAMPLES = 12


def loss(model: Any, batch: Any) -> Any:
    x, y = batch
    # How often each example has been seen: of a synchronous step the mean.
    return jnp.mean(model(x) ** 2), {"seen": jax.nn.one_hot(y, EXAMPLES).sum(0)}


def trainer(cluster: Cluster | None, strategy: Strategy | None = None) -> Trainer:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return Trainer(model, loss, optax.sgd(1e-3), cluster=cluster, strategy=strategy)


def seen(run: Any, times: float = 1) -> list[int]:
    found: list[int] = (times * run.metrics("seen")["value"].sum(0)).tolist()
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=2) as cluster:
        yield cluster


def test_examples_by_number_come_once_per_epoch_and_positions_are_kept(
    cluster: Cluster,
) -> None:
    given = trainer(cluster)
    run = given.fit(Examples(), steps=5, batch_size=2, progress=False)
    assert seen(run) == [1] * 10 + [0, 0]
    assert "sent to the workers as they need it" in str(given.plan())
    run = given.fit(Examples(), steps=3, batch_size=2, progress=False)
    position = given.current_position()
    assert position is not None
    assert (position["epoch"], position["done"]) == (1, 8)
    assert sum(seen(run)) == 6


def test_batches_of_a_generator_come_once_and_the_run_ends_with_them(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    given, data = trainer(cluster), batches(3)
    with caplog.at_level(logging.INFO, "jgraph.data"):
        first = given.fit(data, steps=1, progress=False)
        run = given.fit(data, steps=9, progress=False)
    assert (first.state, run.state, run.steps) == ("done", "stopped", 3)
    assert (np.array(seen(first)) + seen(run)).tolist() == [1] * 12
    told = [record.message for record in caplog.records if record.name == "jgraph.data"]
    assert "does not know the position" in told[0]
    assert "the run stops at step 3 of 10" in told[-1]


def test_workers_in_step_share_an_iterable_and_end_with_it(cluster: Cluster) -> None:
    given = trainer(cluster, SyncPS())
    # Two passes over three batches: each of them counts twice.
    run = given.fit(lambda: batches(3), steps=3, progress=False)
    assert (run.state, seen(run, times=2)) == ("done", [2] * 12)
    # Seven updates of two batches; the last of the fifteen has no other one.
    some = (pair for n in range(15) for pair in [batch(n % 3)])
    run = given.fit(some, steps=99, progress=False)
    assert (run.state, run.steps) == ("stopped", 3 + 7)
    assert seen(run, times=2) == [5] * 8 + [4] * 4


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 17])
def test_an_update_of_workers_in_step_is_of_neighbours_in_an_iterable(
    cluster: Cluster, count: int
) -> None:
    # The seen examples of each update are those of the next two batches.
    some = (pair for n in range(count) for pair in [batch(n % 3)])
    run = trainer(cluster, SyncPS()).fit(some, steps=99, progress=False)
    found = 2 * run.metrics("seen")["value"]
    due = np.repeat(np.eye(3)[np.arange(count) % 3], 4, axis=1)
    updates = count // 2
    assert found.tolist() == (due[: 2 * updates : 2] + due[1::2][:updates]).tolist()


def failing() -> Iterator[Any]:
    yield from batches(2)
    raise OSError("disk is gone")


@pytest.mark.parametrize("there", [True, False])
def test_error_of_a_generator_ends_the_run_and_keeps_what_was_trained(
    cluster: Cluster, *, there: bool
) -> None:
    given = trainer(cluster if there else None)
    with pytest.raises(DataError, match="OSError: disk is gone") as caught:
        given.fit(failing(), steps=9, progress=False)
    assert isinstance(caught.value.__cause__, OSError)
    assert given.run is not None
    assert given.run.state == "failed"


@pytest.mark.parametrize("strategy", [None, SyncPS()], ids=["async", "sync"])
def test_run_that_waits_for_data_can_be_stopped(
    cluster: Cluster, strategy: Strategy | None
) -> None:
    asked, more = threading.Event(), threading.Event()

    def stuck() -> Iterator[Any]:
        yield from batches(2)
        asked.set()
        more.wait()

    run = trainer(cluster, strategy).fit(stuck(), steps=9, progress=False, block=False)
    asked.wait()
    run.stop()
    try:
        assert run.wait(60).state == "stopped"
    finally:
        more.set()


@pytest.mark.parametrize("strategy", [None, SyncPS()], ids=["async", "sync"])
def test_batches_that_a_lost_worker_held_are_replaced_by_others(
    strategy: Strategy | None,
) -> None:
    begun = threading.Event()

    def endless() -> Iterator[Any]:
        number = 0
        while True:
            if number == 20:
                begun.set()
            yield batch(number % 3)
            number += 1

    servers = Servers(ps=1, worker=2)
    try:
        with connect(servers.servers[0].target, timeout_s=20) as cluster:
            given = trainer(cluster, strategy)
            run = given.fit(endless(), steps=60, progress=False, block=False)
            begun.wait()
            servers.lose("/job:worker/task:1")
            assert run.wait(120).state == "done"
            assert run.steps >= 60
    finally:
        servers.stop()


def test_detached_run_refuses_what_this_process_reads(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="goes on without it; give arrays"):
        trainer(cluster).fit(Examples(), steps=5, batch_size=2, detached=True)


FORMS: list[Callable[[], Any]] = [Examples, lambda: batches(3), lambda: [*batches(3)]]


@pytest.mark.parametrize("form", FORMS)
def test_data_of_every_form_is_evaluated_and_predicted_from(form: Any) -> None:
    given = trainer(None)
    given.fit(batch(0), steps=1, batch_size=4, progress=False)
    count = 10 if form is Examples else 12
    assert set(given.evaluate(form(), 5)) == {"loss"}
    outputs = given.predict(form(), 5, fn=lambda model, batch: model(batch[0]))
    assert outputs.shape == (count, 1)
