"""Gradients summed by XLA's collectives in children of the workers' servers."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, InsecureError
from jgraph.server.gates import group_child, group_host
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import NnxNorm, NnxWide, data, nnx_loss
from tests.support.servers import connected

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("nothing_is_left")]

STEPS, BATCH = 8, 8
rng = np.random.default_rng(0)
LOOKED_UP = {
    "ids": rng.integers(2900, 3000, (64, 3)).astype(np.int32),
    "y": rng.normal(size=64).astype(np.float32),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=2) as cluster:
        yield cluster


class Deep(nnx.Module):
    """A table of which rows travel, a dense part, and one in another precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(3000, 4, rngs=rngs)
        self.dense = nnx.Linear(4, 256, rngs=rngs)
        self.half = nnx.Param(jnp.ones(256, jnp.bfloat16))
        self.last = nnx.Linear(256, 1, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        hidden = nnx.relu(self.dense(self.table(ids).mean(1))) * self.half[...]
        return self.last(hidden)[:, 0]


def squares(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)


def trainer(
    cluster: Cluster | None,
    strategy: Any,
    model: Any = NnxWide,
    loss: Any = nnx_loss,
) -> Trainer:
    made = model(rngs=nnx.Rngs(0))
    # Adam divides what two sums of near zero differ by.
    tx = optax.sgd(0.1, momentum=0.9)
    return Trainer(made, loss, tx, cluster=cluster, strategy=strategy)


def fit(there: Trainer, of: Any = None, batch_size: int = BATCH) -> Any:
    given = data() if of is None else of
    return there.fit(given, steps=STEPS, batch_size=batch_size, progress=False)


def trained(cluster: Cluster | None, strategy: Any, of: Any = None, **what: Any) -> Any:
    """Returns all values after training, and the losses."""
    there = trainer(cluster, strategy, **what)
    losses = fit(there, of).metrics("loss")["value"]
    values = there.current_values()
    there.close()
    return [losses, *jax.tree.leaves(values)]


def assert_close(one: Any, other: Any, atol: float = 1e-6) -> None:
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(mine, np.float32), np.asarray(its, np.float32)),
            rtol=1e-6,
            atol=atol,
        )


def test_three_workers_compute_what_plain_jax_does() -> None:
    even = data(3 * BATCH * 2)  # each epoch has whole batches of all three
    with connected(worker=3) as without_ps:
        got = trained(without_ps, SyncPS(dense="xla"), even)
    # One process on the batches of all three.
    alone = trainer(None, jg.Local())
    losses = fit(alone, even, 3 * BATCH).metrics("loss")["value"]
    assert_close(got, [losses, *jax.tree.leaves(alone.current_values())])


@pytest.mark.nightly
def test_tables_stay_on_the_ps_and_other_precisions_travel_as_messages(
    cluster: Cluster,
) -> None:
    given = {"model": Deep, "loss": squares}
    wanted = trained(cluster, SyncPS(), LOOKED_UP, **given)
    there = trainer(cluster, SyncPS(dense="xla"), **given)
    losses = fit(there, LOOKED_UP).metrics("loss")["value"]
    assert_close([losses, *jax.tree.leaves(there.current_values())], wanted)
    planned = str(there.plan(LOOKED_UP, BATCH))
    # Kernel and bias of two layers.
    assert "gradients of 4 parameters, 6.0 KiB, are summed by XLA's" in planned
    assert "params/table/embedding travels by rows" in planned
    there.close()


@pytest.mark.nightly
def test_model_state_is_averaged_and_the_next_fit_has_children_of_its_own(
    cluster: Cluster,
) -> None:
    there = trainer(cluster, SyncPS(dense="xla"), model=NnxNorm)
    other = trainer(cluster, SyncPS(), model=NnxNorm)
    for _ in range(2):
        losses = [fit(one).metrics("loss")["value"] for one in (there, other)]
        assert_close(losses[:1], losses[1:])
    assert_close(there.current_values(), other.current_values())
    there.close()
    other.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (jg.LocalSGD, {"sync_every": 2}),
        (jg.LocalSGD, {"sync_every": 2, "inner_state": "average"}),
        (SyncPS, {"batch_share": "measured"}),
    ],
    ids=["apart", "and averages of the inner state", "shares of a batch"],
)
def test_weighted_contributions_are_summed_likewise(
    cluster: Cluster, strategy: Any, options: Any
) -> None:
    wanted = trained(cluster, strategy(dense="workers", **options))
    assert_close(trained(cluster, strategy(dense="xla", **options)), wanted)


@pytest.mark.nightly
def test_another_client_attaches_to_a_run_whose_children_sum(cluster: Cluster) -> None:
    there = trainer(cluster, SyncPS(dense="xla"))
    there.fit(data(), steps=STEPS, batch_size=BATCH, progress=False, detached=True)
    found = trainer(cluster, SyncPS(dense="xla"))
    found.attach(cluster.runs()[-1].name).wait(60)
    assert_close(found.current_values(), there.current_values(), atol=0)
    there.close()
    found.close()


@pytest.mark.row(52)
def test_children_that_never_begin_leave_the_sums_to_messages(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_child, "MODULE", "jgraph.nothing")
    got = trained(cluster, SyncPS(dense="xla"))
    assert_close(got, trained(cluster, SyncPS(dense="workers")))
    (told,) = [event for event in cluster.events() if event.kind == "fell back"]
    assert told.subject == "/job:worker/task:0"
    assert "its child ended (exit code 1); from now on gradients go" in told.text


@pytest.mark.bad_input_row(28)
@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("backup_workers", 1, "is of all workers"),
        ("replicas_to_aggregate", 1, "is of all workers"),
        ("gradient_dtype", "int8", "sum float32"),
        ("durability", "replica", "would go on without it"),
        ("elastic", jg.Elastic(), "none may join or leave"),
    ],
)
def test_what_collectives_cannot_do_is_refused_in_words(
    option: str, value: Any, why: str
) -> None:
    given: Any = {option: value}
    with pytest.raises(ConfigError, match=f"{option}=.*{why}.*leave out {option}="):
        SyncPS(dense="xla", **given)


@pytest.mark.bad_input_row(28)
def test_a_fit_whose_children_would_listen_beyond_this_machine_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_host, "is_loopback", lambda host: False)
    there = trainer(cluster, SyncPS(dense="xla"))
    there.plan(data(), BATCH)
    values = there.current_values()
    with pytest.raises(InsecureError, match=r"JG-116 .*write dense='workers'"):
        fit(there)
    assert_close(there.current_values(), values, atol=0)
    there.close()


@pytest.mark.bad_input_row(28)
def test_a_model_too_small_for_a_part_on_each_worker_is_refused() -> None:
    class Small(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(4, 2, use_bias=False, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dense(x)

    with connected(worker=2) as cluster:
        there = trainer(cluster, SyncPS(dense="xla"), model=Small)
        with pytest.raises(ConfigError, match=r"would own no parameter .* train on"):
            fit(there)
        there.close()
