"""Parameter servers join a run and leave it; what it computes is the same."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.client.runs.follower import RunFollower
from jgraph.errors import ConfigError, RescaleError
from jgraph.failpoints import armed
from jgraph.graph.device import TaskName
from jgraph.runtime.compiled.compile_cache import SizedExecutable
from jgraph.runtime.store.ahead import AheadCopy, Part
from jgraph.server import host_room
from jgraph.server.members.joining import join_cluster
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.trainer import Trainer
from tests.support.counting import (
    BATCH,
    IDS,
    Ledger,
    check_together,
    counted,
    trainer,
)
from tests.support.rescaled import Rescaled, begun
from tests.support.servers import Servers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")

EXAMPLES, WIDTH = 48, 200
X = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
DATA = {"x": X, "y": X.sum(1, keepdims=True)}
ELASTIC = jg.Elastic(ps=(1, 3))


class Model(nnx.Module):
    """Two layers, the first in several pieces of 64 KB."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.first(x)))


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def plain(steps: int, tx: Any) -> Any:
    """Trains one process on all examples, so many steps; returns the parameters."""
    graph, params = nnx.split(Model())
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), DATA))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    servers = Servers(ps=1, worker=2)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()


@pytest.mark.row(45)
@pytest.mark.parametrize("tx", [optax.adam(1e-3)], ids=["adam"])
def test_synchronous_training_that_is_rescaled_is_that_of_plain_jax(
    cluster: Cluster, tx: Any
) -> None:
    there = Trainer(
        Model(), loss, tx, cluster=cluster, strategy=jg.SyncPS(elastic=ELASTIC)
    )
    # An update is of all examples, whatever the order.
    run = begun(cluster, there, DATA, EXAMPLES // 2)
    rescaled = Rescaled(cluster, run)
    for ps in (2, 3, 1, 2):
        rescaled.to(ps)
    rescaled.end()
    rescales = [r for r in run.rescales() if not r.why]
    numbers = [1, *(r.ps for r in rescales)]
    assert numbers[:-1] == [r.before for r in rescales]
    assert numbers in ([1, 2, 3, 1, 2], [1, 2, 3, 2, 1, 2])  # two left at one moment
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(there.current_values()))
    piece = WIDTH * WIDTH * 4 * 3 / 2
    assert all(0 < r.nbytes <= total / 2 + piece for r in rescales[:2])
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(run.model())),
        jax.tree.leaves(plain(run.steps, tx)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    there.close()
    rescaled.stop()


class Table(nnx.Module):
    """A table in several pieces of 1 MB, of which a batch uses some rows."""

    def __init__(self) -> None:
        self.rows = nnx.Embed(1 << 15, 64, rngs=nnx.Rngs(0))

    def __call__(self, ids: Any) -> Any:
        return self.rows(ids).mean(1)


TABLE_BYTES = (1 << 15) * 64 * 4


@pytest.mark.row(45, 58)
def test_rows_are_copied_while_training_goes_on_and_those_written_since_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests, rest = list[int](), AheadCopy.rest

    def summed(self: AheadCopy) -> Iterator[Part]:
        parts = list(rest(self))
        rests.append(sum(part.nbytes for part in parts))
        yield from parts

    monkeypatch.setattr(AheadCopy, "rest", summed)
    ids = np.random.default_rng(1).integers(0, 1 << 15, (32, 16), np.int32)
    there = Trainer(
        Table(),
        lambda model, batch: ((model(batch) - 1.0) ** 2).mean(),
        optax.sgd(1.0),
        cluster=cluster,
        strategy=jg.SyncPS(elastic=jg.Elastic(workers=(1, 2), ps=(1, 2))),
        sparse="lazy",
    )
    run = begun(cluster, there, ids, 16)
    rescaled = Rescaled(cluster, run)
    for ps in (2, 1):
        rescaled.to(ps)
    rescaled.end()
    assert len(rests) == 2
    assert max(rests) < TABLE_BYTES / 8
    assert all(TABLE_BYTES / 3 < r.nbytes < TABLE_BYTES * 2 / 3 for r in run.rescales())
    start = np.asarray(Table().rows.embedding[...])
    used, where = np.unique(ids, return_inverse=True)
    places, rows = where.reshape(ids.shape), jnp.asarray(start[used])

    @jax.jit
    def step(rows: Any) -> Any:
        grads = jax.grad(lambda r: ((r[places].mean(1) - 1.0) ** 2).mean())(rows)
        return rows - grads

    for _ in range(run.steps):
        rows = step(rows)
    ours = np.asarray(jax.tree.leaves(nnx.state(run.model()))[0])
    np.testing.assert_allclose(ours[used], rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.delete(ours, used, 0), np.delete(start, used, 0))
    there.close()
    rescaled.stop()


def test_a_ps_that_joins_has_compiled_for_any_number_of_rows_when_loops_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all would wait for that: half a second, on a busy machine."""
    sizes, compiled = list[tuple[int, ...]](), SizedExecutable._compiled
    at_rest = list[int]()

    def noted(run: SizedExecutable, of: tuple[int, ...]) -> Any:
        sizes.append(of)
        return compiled(run, of)

    monkeypatch.setattr(SizedExecutable, "_compiled", noted)
    ids = np.random.default_rng(1).integers(0, 1 << 15, (64, 16), np.int32)
    there = Trainer(
        Table(),
        lambda model, batch: ((model(batch) - 1.0) ** 2).mean(),
        optax.sgd(1.0),
        cluster=cluster,
        strategy=jg.AsyncPS(elastic=jg.Elastic(ps=(1, 2))),
        sparse="lazy",
    )
    run = begun(cluster, there, ids, 16)
    rescaled = Rescaled(cluster, run)
    with armed("rescale.rested", lambda: at_rest.append(len(sizes))):
        rescaled.to(2)
    rescaled.end()
    assert at_rest == [len(sizes)], sizes[at_rest[0] :]
    there.close()
    rescaled.stop()


def test_training_goes_on_before_a_client_knows_where_the_variables_are(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what lies where it looks is there until it does."""
    looks, seen = RunFollower._look_elsewhere, list[Any]()

    def step() -> int:
        return next(r.step for r in cluster.runs() if r.state == "running")

    def look(follower: RunFollower, *about: Any) -> None:
        until = step() + 20
        wait_until(lambda: step() >= until, 8)
        seen.append(counted(there))
        looks(follower, *about)

    there = trainer(cluster, jg.AsyncPS(elastic=jg.Elastic(ps=(1, 2))))
    ledger = Ledger()
    run = begun(cluster, there, IDS, BATCH)
    rescaled = Rescaled(cluster, run)
    monkeypatch.setattr(RunFollower, "_look_elsewhere", look)
    rescaled.to(2)
    rescaled.end()
    assert len(seen) == 1
    ledger.add(run)
    assert ledger.check(there) == 0
    there.close()
    rescaled.stop()


@pytest.mark.row(45)
@pytest.mark.nightly  # smaller: the one before, and tests/simulation/test_rescales.py
@pytest.mark.parametrize("staleness", [None, 2])
def test_each_batch_of_asynchronous_training_counts_once(
    cluster: Cluster, staleness: int | None
) -> None:
    strategy = jg.AsyncPS(elastic=jg.Elastic(ps=(1, 2)), max_staleness=staleness)
    there, ledger = trainer(cluster, strategy), Ledger()
    run = begun(cluster, there, IDS, BATCH)
    rescaled = Rescaled(cluster, run)
    for ps in (2, 1):
        rescaled.to(ps)
    assert rescaled.now == 1
    rescaled.end()
    ledger.add(run)
    assert ledger.check(there) == 0
    assert run.repeated() == 0
    # The next run begins where the variables are.
    again = there.fit(IDS, steps=30, batch_size=BATCH, progress=False)
    ledger.add(again)
    assert ledger.check(there) == 0
    there.close()
    rescaled.stop()


def test_checkpoints_are_saved_and_restored_whatever_ps_there_are(
    cluster: Cluster, tmp_path: Any
) -> None:
    strategy = jg.SyncPS(elastic=jg.Elastic(ps=(1, 2)))
    there = trainer(cluster, strategy)
    run = there.fit(
        IDS,
        steps=10**6,
        batch_size=BATCH,
        block=False,
        progress=False,
        checkpoint=jg.Checkpoints(tmp_path, every=20),
    )
    wait_until(lambda: run.steps >= 25)
    rescaled = Rescaled(cluster, run)
    rescaled.to(2)
    until = run.steps + 45
    wait_until(lambda: run.steps >= until)
    rescaled.to(1)
    rescaled.end()
    values = there.current_values()
    there.close()
    alone = trainer(cluster, jg.SyncPS())
    alone.restore(tmp_path)
    for ours, theirs in zip(values, alone.current_values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    alone.close()
    rescaled.stop()


@pytest.mark.row(45)
def test_a_ps_that_joined_and_is_told_to_end_gives_away_what_it_has_first(
    cluster: Cluster,
) -> None:
    there = trainer(cluster, jg.SyncPS(elastic=ELASTIC))
    run = begun(cluster, there, IDS, BATCH)
    rescaled = Rescaled(cluster, run)
    rescaled.to(2)
    rescaled.servers.pop().stop(20.0)  # as by SIGTERM: nobody has announced it
    assert rescaled.now == 1
    rescaled.to(1)
    rescaled.end()
    assert run.recoveries() == []
    check_together(there, run)
    there.close()


@pytest.mark.row(45)
@pytest.mark.parametrize(
    "kind", [pytest.param(jg.AsyncPS, marks=pytest.mark.nightly), jg.SyncPS]
)
def test_a_detached_run_is_rescaled_without_a_client(
    cluster: Cluster, kind: Any
) -> None:
    there = trainer(cluster, kind(elastic=ELASTIC))
    first = there.fit(
        IDS, steps=10**6, batch_size=BATCH, block=False, progress=False, detached=True
    )
    wait_until(lambda: first.steps >= 10)
    Rescaled(cluster, first).to(1)
    rescaled = Rescaled(cluster, first)
    rescaled.to(3)
    with connect(cluster.target, timeout_s=20) as other:
        follower = trainer(other, kind(elastic=ELASTIC))
        run = follower.attach()
        wait_until(lambda: run.steps >= first.steps)
        rescaled.to(2)
        wait_until(lambda: [r.ps for r in run.rescales() if not r.why][-2:] == [3, 2])
        rescaled.end()
        run.wait(30)
        assert run.repeated() == 0
        if kind is jg.SyncPS:
            check_together(follower, run)
        else:
            ledger = Ledger()
            ledger.add(run)
            assert ledger.check(follower) == 0
        follower.close()
    there.close()
    rescaled.stop()


@pytest.mark.bad_input_row(27)
def test_a_detached_run_whose_master_saves_keeps_its_ps(
    cluster: Cluster, tmp_path: Any
) -> None:
    there = trainer(cluster, jg.AsyncPS(elastic=ELASTIC))
    with pytest.raises(ConfigError, match="leave out one of the three"):
        there.fit(
            IDS,
            steps=1,
            batch_size=BATCH,
            progress=False,
            detached=True,
            checkpoint=jg.Checkpoints(tmp_path, every=20),
        )
    there.close()


@pytest.mark.bad_input_row(27)
@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (lambda e: jg.AsyncPS(elastic=e, durability="replica"), r"write ps=\(2, 3\)"),
        (lambda e: jg.AsyncPS(elastic=e, partition_strategy="mod"), "strategy='div'"),
        (lambda e: jg.AsyncPS(elastic=e, placement=jg.RoundRobin()), "placement="),
        (lambda e: jg.SyncPS(elastic=e, gradient_dtype="int8"), "gradient_dtype="),
        (lambda e: jg.SyncPS(elastic=e, dense="auto"), "dense='ps'"),
    ],
)
def test_what_does_not_move_is_refused(strategy: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        strategy(ELASTIC)


@pytest.mark.row(57)
@pytest.mark.bad_input_row(27)
def test_a_run_has_as_many_ps_as_it_may_have(cluster: Cluster) -> None:
    def of(strategy: Strategy, **options: Any) -> Sequence[TaskName]:
        there = trainer(cluster, strategy)
        try:
            there.fit(IDS, steps=1, batch_size=BATCH, progress=False, **options)
        finally:
            there.close()
        return cluster.tasks()

    with pytest.raises(ConfigError, match="the run may have 2 to 3"):
        of(jg.AsyncPS(elastic=jg.Elastic(ps=(2, 3))))
    there = trainer(cluster, jg.AsyncPS(elastic=jg.Elastic(ps=(1, 2))))
    run = begun(cluster, there, IDS, BATCH)
    with pytest.raises(RescaleError, match="may have 1 to 2 parameter servers"):
        cluster.scale(ps=3)
    with pytest.raises(RescaleError, match="jgraph server --job ps --join"):
        cluster.scale(ps="+1")
    with pytest.raises(ConfigError, match="would leave 0 of 1 parameter servers"):
        cluster.scale(ps="-1")
    assert cluster.scale(ps=1) == cluster.tasks("ps")
    run.stop()
    run.wait(30)
    there.close()


@pytest.mark.row(56)
def test_a_ps_that_has_no_memory_for_what_would_move_takes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on as it was, and says how much is missing."""
    monkeypatch.setattr(host_room, "memory_left", lambda: 10)
    there = trainer(cluster, jg.SyncPS(elastic=ELASTIC))
    run = begun(cluster, there, IDS, BATCH)
    joined = join_cluster(cluster.target, "ps")
    with pytest.raises(RescaleError, match=r"has 10 B of memory left, and \d+ B of"):
        cluster.scale(ps=2, timeout_s=5)
    assert "cannot have 2 parameter servers now" in cluster.explain()
    steps = run.steps
    wait_until(lambda: run.steps > steps)
    assert {(one.ps, one.nbytes) for one in run.rescales()} == {(2, 0)}
    run.stop()
    run.wait(30)
    check_together(there, run)
    there.close()
    joined.stop(1.0)


@pytest.mark.nightly  # smaller: test_batch_share.py
def test_workers_that_share_a_batch_go_on_while_ps_join_and_leave(
    cluster: Cluster,
) -> None:
    tx = optax.sgd(0.01)
    kept = jg.Elastic(workers=(1, 4), ps=(1, 2), batch="global")
    strategy = jg.SyncPS(elastic=kept, batch_share="measured")
    there = Trainer(Model(), loss, tx, cluster=cluster, strategy=strategy)
    run = begun(cluster, there, DATA, EXAMPLES // 2)
    rescaled = Rescaled(cluster, run)
    for ps in (2, 1):
        rescaled.to(ps)
    rescaled.end()
    ours = jax.tree.leaves(nnx.state(run.model()))
    theirs = jax.tree.leaves(plain(run.steps, tx))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    there.close()
    rescaled.stop()
