"""Workers that read the next parameters while their gradients travel."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, NonFiniteError, RowIdError
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.loaded import load_partition
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.counting import BATCH, IDS, Ledger, trainer
from tests.support.models import NnxMLP, cross_entropy, data
from tests.support.servers import connected
from tests.support.stopping import once_both_took_part

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Cluster]:
    with connected(ps=1, worker=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[Cluster]:
    with connected(ps=2, worker=2) as cluster:
        yield cluster


def fit(there: Trainer, steps: int, **options: Any) -> Any:
    return there.fit(IDS, steps=steps, batch_size=BATCH, progress=False, **options)


def global_step(there: Trainer) -> int:
    values = dict(zip(there.names, there.current_values(), strict=True))
    return int(values["global_step"])


def test_a_gradient_is_one_update_older_and_counted_as_that(
    one_worker: Cluster,
) -> None:
    there = trainer(one_worker, AsyncPS(prefetch=1))
    run = fit(there, 200)
    ((ages,),) = (by_ps.values() for by_ps in run.staleness().values())
    assert set(ages) == {0, 1}
    assert sum(ages.values()) == 200
    there.close()


@pytest.mark.parametrize(
    "detached",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["fit", "detached"],
)
def test_a_run_makes_so_many_updates_and_each_batch_counts_once(
    two_by_two: Cluster, *, detached: bool
) -> None:
    there, ledger = trainer(two_by_two, AsyncPS(prefetch=1)), Ledger()
    for steps in (1, 2, 3, 160):
        run = fit(there, steps, detached=detached).wait()
        assert (run.state, len(run.metrics("loss")["value"])) == ("done", steps)
        ledger.add(run)
        assert ledger.check(there) == 0
    assert global_step(there) == 166
    assert set(ledger.told % 1) == {0.0}
    there.close()


def test_a_run_that_is_stopped_loses_no_update_and_makes_none_twice(
    two_by_two: Cluster,
) -> None:
    there, ledger = trainer(two_by_two, AsyncPS(prefetch=1)), Ledger()
    for _ in range(3):
        run = fit(there, 10**6, callbacks=[once_both_took_part(steps=30)])
        assert run.state == "stopped"
        ledger.add(run)
        assert ledger.check(there) == 0
    there.close()


@pytest.mark.parametrize("bound", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_no_gradient_that_was_read_ahead_is_older_than_the_bound(
    two_by_two: Cluster, bound: int
) -> None:
    strategy = AsyncPS(max_staleness=bound, prefetch=1)
    there, ledger = trainer(two_by_two, strategy), Ledger()
    run = fit(there, 10**6, callbacks=[once_both_took_part(steps=60)])
    ledger.add(run)
    assert ledger.check(there) == 0
    for shard in two_by_two.tasks("ps"):
        ages = [by_ps[shard] for by_ps in run.staleness().values()]
        assert sum(sum(counts.values()) for counts in ages) == run.steps
        assert max(max(counts) for counts in ages) <= bound
    there.close()


def test_left_overs_of_rounding_go_from_step_to_step(one_worker: Cluster) -> None:
    """They are the worker's own: it computes one step after the other."""
    exact, rounded = (
        trainer(one_worker, AsyncPS(prefetch=1, gradient_dtype=dtype))
        for dtype in (None, "int8")
    )
    for there in (exact, rounded):
        fit(there, 64)
    for a, b in zip(exact.current_values(), rounded.current_values(), strict=True):
        np.testing.assert_allclose(a, b, atol=0.1)
    for there in (exact, rounded):
        there.close()


class Embeds(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(16, 2, rngs=rngs)


def sum_of_rows(model: Any, batch: Any) -> Any:
    return model.table(batch).sum()


def test_rows_of_a_table_are_looked_up_ahead(one_worker: Cluster) -> None:
    strategy = AsyncPS(prefetch=1)
    there = Trainer(
        Embeds(nnx.Rngs(0)),
        sum_of_rows,
        optax.sgd(0.125),
        cluster=one_worker,
        strategy=strategy,
        sparse="lazy",
    )
    program = there.plan(np.arange(4), batch_size=4).program
    ahead = {}
    for partition in program.partitions:
        loaded = load_partition(partition, program.segments, CompileCache())
        kinds = zip(partition.nodes, loaded.in_turn, strict=True)
        ahead[partition.task] = {type(n).__name__ for n, waits in kinds if not waits}
    ps, worker = (one_worker.tasks(job)[0] for job in ("ps", "worker"))
    assert {"RouteNode", "SendNode", "MergeNode"} <= ahead[worker]
    assert ahead[ps] == {"RecvNode", "LookupNode", "SendNode"}
    there.close()


def test_rows_of_a_table_are_trained_as_without(one_worker: Cluster) -> None:
    """Each batch has the same ids, so that a step looks up what the last one wrote."""
    found: list[Any] = []
    for prefetch in (0, 1):
        there = Trainer(
            Embeds(nnx.Rngs(0)),
            sum_of_rows,
            optax.sgd(0.125),
            cluster=one_worker,
            strategy=AsyncPS(prefetch=prefetch),
            sparse="lazy",
        )
        there.fit(np.arange(4), steps=50, batch_size=4, progress=False)
        found.append(there.model().table.embedding[...])
        there.close()
    without, ahead = found
    np.testing.assert_allclose(without, ahead, rtol=1e-5)


def test_step_that_is_not_finite_ends_the_run_and_is_not_applied(
    one_worker: Cluster,
) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch[0]), batch[1]) / (batch[1].min() * 0.0)

    there = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        loss,
        optax.adam(1e-2),
        cluster=one_worker,
        strategy=AsyncPS(prefetch=1),
        check_finite=True,
    )
    before = there.current_values()
    with pytest.raises(NonFiniteError, match="at step 0 of replica 0"):
        there.fit(data(), steps=50, batch_size=8, progress=False)
    for a, b in zip(before, there.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)
    there.close()


@pytest.mark.parametrize(
    "sparse", ["lazy", pytest.param("exact", marks=pytest.mark.nightly)]
)
def test_a_batch_that_is_refused_ends_a_run_of_which_a_step_ahead_waits_for_data(
    two_by_two: Cluster, sparse: Any
) -> None:
    """No other batch comes: each worker has one, and neither is done with it."""
    there = Trainer(
        Embeds(nnx.Rngs(0)),
        sum_of_rows,
        optax.sgd(0.125),
        cluster=two_by_two,
        strategy=AsyncPS(prefetch=1),
        sparse=sparse,
    )
    there.fit(np.arange(16), steps=8, batch_size=4, progress=False)
    for _ in range(3):
        with pytest.raises(RowIdError, match="has the id 16"):
            there.fit(np.full(16, 16), steps=2, batch_size=4, progress=False)
    there.close()


@pytest.mark.parametrize("wrong", [-1, 2, True, 0.5, "1", None])
def test_what_is_no_number_of_steps_ahead_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"prefetch is {wrong!r}; give 1 to read"):
        AsyncPS(prefetch=wrong)


def test_a_step_ahead_that_the_bound_never_allows_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staleness=0 allows none"):
        AsyncPS(prefetch=1, max_staleness=0)
    assert AsyncPS(prefetch=np.int64(1), max_staleness=1).prefetch == 1  # type: ignore[arg-type]


def test_synchronous_training_has_no_steps_ahead() -> None:
    with pytest.raises(ConfigError, match=r"SyncPS has no argument 'prefetch': write"):
        SyncPS(prefetch=1)  # type: ignore[call-arg]
