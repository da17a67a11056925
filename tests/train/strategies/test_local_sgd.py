"""Training that talks once in many steps, on servers of this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, DataError
from jgraph.train.step.local_steps import LocalRule, LocalSteps
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.models import (
    NnxMLP,
    NnxNorm,
    assert_close,
    batches_of,
    cross_entropy,
    data,
    nnx_loss,
    parameters,
    step_by_hand,
)
from tests.support.servers import connected

pytestmark = pytest.mark.usefixtures("nothing_is_left")

BATCH, WORKERS, ROUNDS, EVERY = 4, 2, 5, 3
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=WORKERS) as cluster:
        yield cluster


def trainer(cluster: Cluster, strategy: Strategy, tx: Any, **options: Any) -> Trainer:
    model = options.pop("model", NnxMLP)(rngs=nnx.Rngs(0))
    return Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy, **options)


def fit(there: Trainer, steps: int = ROUNDS) -> Any:
    return there.fit(data(), steps=steps, batch_size=BATCH, progress=False)


def test_a_round_of_one_step_of_sgd_is_a_synchronous_step(cluster: Cluster) -> None:
    """The law: how far a worker came is its gradient, times the rate of both."""
    apart = trainer(cluster, LocalSGD(outer=optax.sgd(1.0)), optax.sgd(0.1))
    run = fit(apart)
    together = trainer(cluster, SyncPS(), optax.sgd(0.1))
    due = fit(together)
    assert_close(parameters(run.model()), parameters(due.model()))
    losses = [r.metrics("loss")["value"] for r in (run, due)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    apart.close()
    together.close()


def by_hand(
    tx: Any, outer: Any, workers: int, inner_state: str = "keep", first: int = EVERY
) -> list[Any]:
    """One process that does what all workers do, one after the other.

    The first round has ``first`` steps.
    """
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))

    step = step_by_hand(graph, nnx_loss, tx)
    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH * EVERY, 0)
    inner: list[Any] = [tx.init(params) for _ in range(workers)]
    opt = outer.init(params)
    for number in range(ROUNDS):
        ways = []
        for worker in range(workers):
            mine, state, taken = params, inner[worker], next(stream)
            for n in range(EVERY if number else first):
                some = slice(n * BATCH, (n + 1) * BATCH)
                batch = taken["x"][some], taken["y"][some]
                mine, state = step(mine, state, batch)
            inner[worker] = state
            ways.append(jax.tree.map(lambda old, new: old - new, params, mine))
        mean = jax.tree.map(lambda *each: sum(each) / workers, *ways)
        if inner_state == "reset":
            inner = [tx.init(params) for _ in inner]
        if inner_state == "average":
            inner = [jax.tree.map(lambda *each: sum(each) / workers, *inner)] * workers
        updates, opt = outer.update(mean, opt, params)
        params = optax.apply_updates(params, updates)
    leaves = jax.tree.leaves(nnx.to_pure_dict(params))
    return [np.asarray(leaf) for leaf in leaves]


def test_rounds_are_those_of_a_loop_by_hand(cluster: Cluster) -> None:
    """Whichever worker has which batches: its own steps have no state."""
    tx = optax.sgd(0.1)
    there = trainer(cluster, LocalSGD(sync_every=EVERY, outer=NESTEROV), tx)
    run = fit(there)
    assert_close(parameters(run.model()), by_hand(tx, NESTEROV, WORKERS))
    assert (run.state, run.steps) == ("done", ROUNDS)
    assert run.metrics("contributions")["value"].tolist() == [WORKERS] * ROUNDS
    there.close()


def test_the_state_of_a_workers_optimizer_goes_from_round_to_round() -> None:
    """Where it does not begin with zeros, too."""
    with connected(ps=1, worker=1) as cluster:
        for tx in (optax.adam(1e-2), optax.adagrad(0.1)):
            there = trainer(cluster, LocalSGD(sync_every=EVERY), tx)
            found = parameters(fit(there).model())
            assert_close(found, by_hand(tx, optax.sgd(1.0), 1))
            there.close()


def test_the_state_of_a_workers_optimizer_goes_on_in_the_next_fit(
    tmp_path: Path,
) -> None:
    """Until the model is given other values: then it begins anew."""
    with connected(ps=1, worker=1) as cluster:
        tx = optax.adam(1e-2)
        there = trainer(cluster, LocalSGD(sync_every=EVERY), tx)
        fit(there, 2).save(tmp_path / "two")
        found = parameters(fit(there, ROUNDS - 2).model())
        assert_close(found, by_hand(tx, optax.sgd(1.0), 1))
        other = trainer(cluster, LocalSGD(sync_every=EVERY), tx)
        again = [
            parameters(fit(each.restore(tmp_path / "two"), ROUNDS - 2).model())
            for each in (there, other)
        ]
        assert_close(*again)
        moved = [np.abs(a - b).max() for a, b in zip(found, again[0], strict=True)]
        assert max(moved) > 1e-3
        there.close()
        other.close()


def test_the_state_of_workers_optimizers_is_averaged_or_begins_anew() -> None:
    """Then it does not matter which worker has which batches."""
    tx, outer = optax.sgd(0.1, momentum=0.5), optax.sgd(1.0)
    with connected(ps=2, worker=WORKERS) as cluster:
        for state in ("average", "reset"):
            given: Any = state
            strategy = LocalSGD(sync_every=EVERY, inner_state=given)
            there = trainer(cluster, strategy, tx)
            found = parameters(fit(there).model())
            assert_close(found, by_hand(tx, outer, WORKERS, state))
            is_saved = any("opt/inner/0/trace" in name for name in there.names)
            assert is_saved == (state == "average")
            there.close()


def test_a_worker_takes_as_many_steps_as_it_can_in_the_time_of_a_round(
    cluster: Cluster,
) -> None:
    """The first round has one step, which tells how long one takes."""
    tx = optax.sgd(0.1)
    strategy = LocalSGD(sync_every=EVERY, sync_every_s=3600, inner_state="reset")
    there = trainer(cluster, strategy, tx)
    run = fit(there)
    assert_close(parameters(run.model()), by_hand(tx, optax.sgd(1.0), WORKERS, first=1))
    there.close()
    model = NnxNorm(rngs=nnx.Rngs(0))
    strategy = LocalSGD(sync_every=EVERY, sync_every_s=1e-9)
    there = Trainer(model, counting, tx, cluster=cluster, strategy=strategy)
    examples = fit(there).metrics("examples")["value"]
    assert examples.tolist() == [BATCH] * ROUNDS  # never more than one step
    there.close()


def test_a_round_sends_what_a_step_does_and_workers_may_hold_all(
    cluster: Cluster,
) -> None:
    def nbytes(strategy: Strategy) -> int:
        there = trainer(cluster, strategy, optax.adam(1e-2))
        planned = there.plan(data(), BATCH)
        there.close()
        return int(planned.nbytes_per_step)

    step, rounds = (nbytes(s) for s in (SyncPS(), LocalSGD(sync_every=EVERY)))
    assert rounds == step
    assert nbytes(LocalSGD(sync_every=EVERY, dense="workers")) < step
    strategy = LocalSGD(sync_every=EVERY, dense="workers", outer=NESTEROV)
    there = trainer(cluster, strategy, optax.sgd(0.1))
    run = fit(there)
    assert_close(parameters(run.model()), by_hand(optax.sgd(0.1), NESTEROV, WORKERS))
    plan = str(there.plan())
    assert f"{EVERY} steps of each worker's own optimizer make an update" in plan
    there.close()


def counting(model: Any, batch: Any) -> Any:
    x, y = batch
    logits = model(x)
    right = (jnp.argmax(logits, 1) == y).sum()
    return cross_entropy(logits, y), {"examples": jnp.array(len(x)), "right": right}


def test_a_mean_over_the_steps_of_a_round_is_exact_whatever_the_dtype() -> None:
    """As a sum in bfloat16, a thousand losses of 1 are 256."""
    many, params = 1000, {"w": jnp.zeros(())}
    batch = {"x": jnp.zeros(many), "of nothing": jnp.zeros((many, 0))}
    rule = LocalRule(optax.sgd(0.1), many, paced=True, inner_state="reset")

    def loss(params: Any, state: Any, batch: Any, seeds: Any) -> Any:
        value = (1 + 0 * params["w"]).astype(jnp.bfloat16)
        return value, ({"three": 3 * value.astype(jnp.float16)}, state)

    def means(batch: Any, steps: Any) -> Any:
        now = {"params": params, "state": {}}
        alone = LocalSteps(rule, params, "")
        found = alone.computed(loss, lambda rows: now, batch, 0, 0, steps)
        return found.loss, found.metrics["three"]

    value, three = jax.jit(means)(batch, many)
    assert (value.dtype, three.dtype) == (jnp.bfloat16, jnp.float16)
    assert (float(value), float(three)) == (1, 3)


def test_counts_are_of_all_examples_of_a_round_and_state_is_averaged(
    cluster: Cluster,
) -> None:
    strategy = LocalSGD(sync_every=EVERY, gradient_dtype="bfloat16")
    model = NnxNorm(rngs=nnx.Rngs(0))
    there = Trainer(model, counting, optax.sgd(0.1), cluster=cluster, strategy=strategy)
    run = fit(there)
    assert run.metrics("examples")["value"].tolist() == [BATCH * EVERY] * ROUNDS
    position = there.current_position()
    assert position is not None
    assert (position["done"], position["again"]) == (ROUNDS * WORKERS, 0)
    means = jax.tree.leaves(nnx.state(run.model(), nnx.BatchStat))
    assert all(np.abs(np.asarray(mean)).max() > 0 for mean in means)
    there.close()


@pytest.mark.bad_input_row(29)
def test_what_cannot_be_is_refused_in_words(cluster: Cluster) -> None:
    wrong: Any = "sgd"
    for every in (0, 2.5):
        given: Any = every
        with pytest.raises(ConfigError, match=f"sync_every is {every}"):
            LocalSGD(sync_every=given)
    for seconds in (0, "1", True, float("nan")):
        given = seconds
        with pytest.raises(ConfigError, match=f"sync_every_s is {seconds!r}; give the"):
            LocalSGD(sync_every=9, sync_every_s=given)
    with pytest.raises(ConfigError, match="write sync_every=500, sync_every_s=2"):
        LocalSGD(sync_every_s=2)
    with pytest.raises(ConfigError, match="weight is 'sgd'; give 'steps' or 'equal'"):
        LocalSGD(weight=wrong)
    with pytest.raises(ConfigError, match="inner_state is 'sgd'; give 'keep', 'aver"):
        LocalSGD(inner_state=wrong)
    with pytest.raises(ConfigError, match="outer is 'sgd'; give an optax optimizer"):
        LocalSGD(outer=wrong)
    with pytest.raises(ConfigError, match="dense is 'sgd'"):
        LocalSGD(dense=wrong)
    with pytest.raises(ConfigError, match="'sgd' is not what a strategy takes; write"):
        LocalSGD(elastic=wrong)
    with pytest.raises(ConfigError, match="a worker takes batches of its own"):
        LocalSGD(elastic=Elastic(workers=(1, 4), batch="global"))
    unknown: dict[str, str] = {"H": "sync_every=500", "elastc": "elastic=…"}
    for name, instead in unknown.items():
        given = {name: 9}
        words = f"LocalSGD has no argument '{name}': write {instead}"
        with pytest.raises(ConfigError, match=words):
            LocalSGD(**given)
    few = jax.tree.map(lambda a: a[: 7 * BATCH], data())
    for strategy, words in [
        (LocalSGD(500), "takes 500 batches of .* write sync_every=7 or less"),
        (LocalSGD(60, fragments=3), "takes 20 .* write sync_every=21 or less"),
    ]:
        there = trainer(cluster, strategy, optax.sgd(0.1))
        with pytest.raises(DataError, match=words):
            there.fit(few, steps=1, batch_size=BATCH)
        with pytest.raises(DataError, match=f"batch_size is {9 * BATCH}, but the"):
            there.fit(few, steps=1, batch_size=9 * BATCH)
    batches = (data() for _ in range(9))
    there = trainer(cluster, LocalSGD(sync_every=EVERY), optax.sgd(0.1))
    with pytest.raises(ConfigError, match="deals out the batches of a round together"):
        there.fit(batches, steps=1, progress=False)


def test_rounds_of_one_worker_each_are_applied_as_they_come() -> None:
    """With one worker there is nobody to be behind."""
    with connected(ps=1, worker=1) as cluster:
        tx, outer = optax.adam(1e-2), NESTEROV
        strategy = LocalSGD(sync_every=EVERY, outer=outer, max_staleness=0)
        there = trainer(cluster, strategy, tx)
        found = parameters(fit(there).model())
        assert_close(found, by_hand(tx, outer, 1))
        there.close()


def test_no_contribution_is_older_than_the_bound(cluster: Cluster) -> None:
    strategy = LocalSGD(sync_every=EVERY, outer=optax.sgd(0.5), max_staleness=1)
    there = trainer(cluster, strategy, optax.sgd(0.1))
    run = fit(there, steps=12)
    assert (run.state, run.steps) == ("done", 12)
    ages = {
        age
        for servers in run.staleness().values()
        for updates in servers.values()
        for age in updates
    }
    assert ages <= {0, 1}
    assert f"{EVERY} steps of each worker's own optimizer" in str(there.plan())
    there.close()


@pytest.mark.bad_input_row(29)
def test_what_is_of_contributions_of_all_is_refused_where_each_is_alone() -> None:
    with pytest.raises(ConfigError, match="max_staleness is -1; give how many updates"):
        LocalSGD(max_staleness=-1)
    options: list[dict[str, Any]] = [
        {"sync_every": 9, "sync_every_s": 1.0},
        {"inner_state": "average"},
        {"backup_workers": 1},
        {"dense": "workers"},
    ]
    for each in options:
        name = list(each)[-1]
        with pytest.raises(ConfigError, match=f"contributes alone, and {name}"):
            LocalSGD(max_staleness=2, **each)
