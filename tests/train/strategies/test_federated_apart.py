"""Federated rounds that wait for nobody, on servers of this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.coordination.data.slots import epoch_order
from jgraph.errors import ConfigError, NonFiniteError
from jgraph.graph.ir import TaskName
from jgraph.server.members.joining import join_cluster
from jgraph.train.data.source import Source
from jgraph.train.privacy.options import Privacy
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.federated import Federated
from jgraph.train.trainer import Trainer
from tests.support.clients import (
    EXAMPLES,
    client_trainer as trainer,
    loss,
    named,
    tallied,
)
from tests.support.models import NnxMLP, data, parameters
from tests.support.servers import Servers, connected
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")

BATCH, ROUNDS, SIZES = 4, 9, (4, 12, 9)
NESTEROV = optax.sgd(0.5, momentum=0.9, nesterov=True)
CLIENTS = [TaskName(f"/job:worker/task:{n}") for n in range(len(SIZES))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=len(SIZES)) as cluster:
        yield cluster


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """What each client has: one example, so often, so that no order matters."""
    for client, size in enumerate(SIZES):
        write(tmp_path, client, *(np.stack([part] * size) for part in example(client)))
    return Source.npz(str(tmp_path / "{task}.npz"))


def write(tmp_path: Path, client: int, x: Any, y: Any) -> None:
    np.savez(tmp_path / f"{client}.npz", x=x, y=y)


def example(client: int) -> tuple[Any, Any]:
    x, y = data()
    return x[client], y[client]


def fit(there: Trainer, source: Any, **options: Any) -> Any:
    options = {"steps": ROUNDS, "batch_size": BATCH, **options}
    return there.fit(source, progress=False, **options)


def fit_until(
    there: Trainer, source: Any, is_enough: Callable[[Any], bool], **options: Any
) -> Any:
    """A run that ends when its rounds are enough."""

    def look(run: Any, report: Any) -> None:
        if is_enough(run.rounds()):
            run.stop()

    return fit(there, source, steps=100_000, callbacks=[look], **options)


def one_by_one(there: Trainer, source: Any, count: int) -> list[Any]:
    """Rounds of runs of one round each, so that their order is known exactly."""
    return [one for _ in range(count) for one in fit(there, source, steps=1).rounds()]


def tasks_of(rounds: Any) -> set[str]:
    return {task for one in rounds for task in one.members}


class ByHand:
    """Clients that train one after the other, in one process.

    Args:
      tx: of each.
      outer: applies how far one came.
      proximal: as in the strategy.
    """

    def __init__(self, tx: Any, outer: Any, proximal: float = 0.0) -> None:
        self._graph, self._params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))
        self._tx, self._outer, self._state = tx, outer, outer.init(self._params)

        @jax.jit
        def step(params: Any, opt: Any, batch: Any, start: Any) -> Any:
            def all_of_it(params: Any) -> Any:
                apart = jax.tree.map(lambda a, b: ((a - b) ** 2).sum(), params, start)
                far = sum(jax.tree.leaves(apart))
                value = loss(nnx.merge(self._graph, params), batch)
                return value + proximal / 2 * far

            updates, opt = tx.update(jax.grad(all_of_it)(params), opt, params)
            return optax.apply_updates(params, updates), opt

        self._step = step

    def take(self, batches: Sequence[Any]) -> None:
        """One client trains on these, and its contribution is applied."""
        mine, opt = self._params, self._tx.init(self._params)
        for batch in batches:
            mine, opt = self._step(mine, opt, batch, self._params)
        way = jax.tree.map(lambda old, new: old - new, self._params, mine)
        updates, self._state = self._outer.update(way, self._state, self._params)
        self._params = optax.apply_updates(self._params, updates)

    @property
    def parameters(self) -> list[Any]:
        leaves = jax.tree.leaves(nnx.to_pure_dict(self._params))
        return [np.asarray(leaf) for leaf in leaves]


def batch_of(one: tuple[Any, Any]) -> Any:
    x, y = (np.stack([part] * BATCH) for part in one)
    return {"x": x, "y": y}


def replayed(rounds: Any, hand: ByHand, epochs: int) -> list[Any]:
    """What rounds come to that were one after the other."""
    for one in rounds:
        for task in one.members:
            client = CLIENTS.index(task)
            steps = epochs * SIZES[client] // BATCH
            assert one.steps == steps
            hand.take([batch_of(example(client))] * steps)
    return hand.parameters


def assert_close(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for value, due in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, due, rtol=1e-4, atol=1e-5)


def ages_of(run: Any) -> dict[int, int]:
    """How many contributions were so old."""
    counts: dict[int, int] = {}
    for servers in run.staleness().values():
        for ages in servers.values():
            for age, count in ages.items():
                counts[age] = counts.get(age, 0) + count
    return counts


@pytest.mark.parametrize(
    "outer",
    [pytest.param(None, marks=pytest.mark.nightly), NESTEROV],
    ids=["mean", "nesterov"],
)
def test_one_client_is_training_alone(tmp_path: Path, outer: Any) -> None:
    """Each round is another order of its examples, as in rounds of several."""
    x, y = (part[:10] for part in data())
    write(tmp_path, 0, x, y)
    tx = optax.sgd(0.1, momentum=0.5)
    hand = ByHand(tx, outer or optax.sgd(1.0), proximal=0.3)
    for number in range(4):
        rows = np.concatenate([epoch_order(10, 0, number, epoch) for epoch in (0, 1)])
        cuts = [rows[first : first + BATCH] for first in range(0, 20, BATCH)]
        hand.take([{"x": x[cut], "y": y[cut]} for cut in cuts])
    with connected(ps=1, worker=1) as cluster:
        strategy = Federated(2, outer=outer, proximal=0.3, max_staleness=0)
        there = trainer(cluster, strategy, tx)
        own = Source.npz(str(tmp_path / "{task}.npz"))
        fit(there, own, steps=3)
        run = fit(there, own, steps=1)  # goes on where the first one ended
        assert_close(parameters(run.model()), hand.parameters)
        there.close()


def test_clients_in_turn_come_to_what_they_do_one_after_the_other(
    cluster: Cluster, source: Source
) -> None:
    """Of unequal amounts of data, of which each round tells the steps."""
    tx = optax.sgd(0.1, momentum=0.5)
    there = trainer(cluster, Federated(2, outer=NESTEROV, max_staleness=0), tx)
    rounds = one_by_one(there, source, ROUNDS)
    assert [r.number for r in rounds] == [*range(1, ROUNDS + 1)]
    due = replayed(rounds, ByHand(tx, NESTEROV), epochs=2)
    assert_close(parameters(there.model()), due)
    run = fit_until(there, source, lambda rounds: tasks_of(rounds) == set(CLIENTS))
    rounds = run.rounds()
    numbers = range(ROUNDS + 1, run.steps + 1)
    assert [r.number for r in rounds] == [*numbers]
    assert {len(r.members) for r in rounds} == {1}
    assert rounds[0].nbytes > 0
    assert {(r.wait_s, *r.dropped) for r in rounds} == {(0.0,)}
    assert ages_of(run) == {0: run.steps - ROUNDS}
    assert f"round {ROUNDS + 1}  1 clients" in str(rounds)
    there.close()


@pytest.mark.parametrize("bound", [1, 2])
def test_no_contribution_is_older_than_the_bound(
    cluster: Cluster, source: Source, bound: int
) -> None:
    strategy = Federated(outer=optax.sgd(0.5), max_staleness=bound)
    there = trainer(cluster, strategy, optax.sgd(0.1))
    run = fit(there, source, steps=60)
    assert (run.state, run.steps, len(run.rounds())) == ("done", 60, 60)
    ages = ages_of(run)
    assert sum(ages.values()) == 60
    assert max(ages) <= bound
    assert run.repeated() == 0
    there.close()


@pytest.mark.bad_input_row(33)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"gradient_dtype": "int8"}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_what_is_not_finite_changes_nothing_and_its_client_is_named(
    cluster: Cluster, source: Source, tmp_path: Path, options: Any
) -> None:
    x, y = (np.stack([part] * SIZES[0]) for part in example(0))
    write(tmp_path, 1, np.full_like(x, np.nan), y)
    write(tmp_path, 2, x, y)  # as the first one, so that no order matters
    tx, hand = optax.sgd(0.1), ByHand(optax.sgd(0.1), NESTEROV)
    strategy = Federated(outer=NESTEROV, max_staleness=0, **options)
    there = trainer(cluster, strategy, tx)
    well = {CLIENTS[0], CLIENTS[2]}

    def is_enough(rounds: Any) -> bool:
        return tasks_of(rounds) == well and any(not r.members for r in rounds)

    run = fit_until(there, source, is_enough)
    rounds = run.rounds()
    assert [r.number for r in rounds] == [*range(1, run.steps + 1)]
    bad = [dict(r.dropped) for r in rounds if not r.members]
    assert bad == [{CLIENTS[1]: "not finite"}] * len(bad)
    assert {r.steps for r in rounds if not r.members} == {0}
    assert f"; {CLIENTS[1]} not finite" in str(rounds)
    if options:
        assert all(np.isfinite(value).all() for value in parameters(run.model()))
    else:
        for _ in range(len(rounds) - len(bad)):
            hand.take([batch_of(example(0))])
        assert_close(parameters(run.model()), hand.parameters)
    there.close()


@pytest.mark.bad_input_row(33)
def test_who_asks_for_it_has_the_run_end_where_a_round_is_not_finite(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    there = trainer(
        cluster, Federated(max_staleness=0), optax.sgd(0.1), check_finite=True
    )
    before = parameters(fit(there, source, steps=1).model())
    x, y = data()
    for client in range(len(SIZES)):
        write(tmp_path, client, np.full_like(x[:12], np.nan), y[:12])
    with pytest.raises(NonFiniteError, match="JG-212"):
        fit(there, source)
    for value, due in zip(parameters(there.model()), before, strict=True):
        np.testing.assert_array_equal(value, due)
    there.close()


def test_a_checkpoint_goes_on_with_the_next_round(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    tx, strategy = optax.sgd(0.1), Federated(outer=NESTEROV, max_staleness=0)
    there = trainer(cluster, strategy, tx)
    hand = ByHand(tx, NESTEROV)
    replayed(one_by_one(there, source, 2), hand, epochs=1)
    saved = there.save(tmp_path / "saved")
    there.close()
    again = trainer(cluster, strategy, tx)
    again.restore(saved)
    rounds = one_by_one(again, source, 2)
    assert [r.number for r in rounds] == [3, 4]
    assert_close(parameters(again.model()), replayed(rounds, hand, epochs=1))
    again.close()


@pytest.mark.row(1)
def test_rounds_go_on_without_a_client_that_is_lost_for_good(source: Source) -> None:
    servers = Servers(ps=1, worker=3)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        there = trainer(cluster, Federated(max_staleness=1), optax.sgd(0.1))
        seen: list[int] = []  # rounds when it was cut off, and when that was known

        def lose(run: Any, report: Any) -> None:
            if not seen:
                servers.lose(CLIENTS[2])
            is_lost = any(m.state == "lost" for m in run.members())
            if len(seen) == is_lost:
                seen.append(len(run.rounds()))
            elif is_lost and len(run.rounds()) > seen[1] + 10:
                run.stop()

        run = fit(there, source, steps=100_000, callbacks=[lose])
        assert [m.task for m in run.members() if m.state == "lost"] == [CLIENTS[2]]
        rounds = run.rounds()[-10:]
        assert tasks_of(rounds) <= set(CLIENTS[:2])
        # What it had computed when it was cut off may not have come to the ps.
        assert 0 <= len(run.rounds()) - run.steps <= 1
        assert max(ages_of(run)) <= 1
        there.close()
    servers.stop()


def test_clients_join_and_leave_and_each_round_counts_once(tmp_path: Path) -> None:
    with connected(ps=1, worker=1) as cluster:
        strategy = Federated(max_staleness=2, elastic=Elastic(workers=(1, 4)))
        there = tallied(cluster, strategy, len(CLIENTS))
        source = named(tmp_path, len(CLIENTS))
        run = fit(there, source, steps=10**6, batch_size=EXAMPLES, block=False)
        wait_until(lambda: tasks_of(run.rounds()) == {CLIENTS[0]})
        joined = [join_cluster(cluster.target, "worker") for _ in CLIENTS[1:]]
        wait_until(lambda: tasks_of(run.rounds()) == set(CLIENTS))
        joined.pop().stop()  # returns when nothing is waited for from there
        before = len(run.rounds())
        wait_until(lambda: tasks_of(run.rounds()[before + 5 :]) == set(CLIENTS[:2]))
        run.stop()
        run.wait(30)
        rounds = run.rounds()
        assert tasks_of(rounds[before + 5 :]) == set(CLIENTS[:2])
        assert [r.number for r in rounds] == [*range(1, run.steps + 1)]
        members = [task for r in rounds for task in r.members]
        (counts,) = parameters(run.model())
        assert counts.tolist() == [members.count(task) for task in CLIENTS]
        there.close()
        for server in joined:
            server.stop(0.0)


@pytest.mark.bad_input_row(29)
def test_what_is_of_several_is_refused_where_each_is_alone() -> None:
    with pytest.raises(ConfigError, match="max_staleness is -1; give how many updates"):
        Federated(max_staleness=-1)
    hidden = Privacy(unit="client", noise_multiplier=1.0, clip=1.0, delta=1e-5)
    options: list[dict[str, Any]] = [
        {"fraction": 0.5},
        {"min_clients": 2},
        {"weight": "examples"},
        {"inner_state": "average"},
        {"weight": "equal", "privacy": hidden},
        {"secure_sum": SecureSum()},
    ]
    for each in options:
        name = list(each)[-1]
        with pytest.raises(
            ConfigError, match=f"JG-124 .*contributes alone, and {name}"
        ):
            Federated(max_staleness=2, **each)
    assert Federated(max_staleness=np.int64(2), weight="equal").max_staleness == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="write max_staleness=4"):
        Federated(staleness=3)  # type: ignore[call-arg]
