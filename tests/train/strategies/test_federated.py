"""Federated rounds on data that stays with its clients, on servers of this process."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.coordination.data.slots import epoch_order
from jgraph.coordination.run.privacy_account import Spent
from jgraph.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    NonFiniteError,
    SourceError,
)
from jgraph.graph.ir import TaskName
from jgraph.train.data.source import Source
from jgraph.train.privacy.accounting import epsilon_of
from jgraph.train.privacy.options import Privacy
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.federated import Federated
from jgraph.train.trainer import Trainer
from tests.support.clients import client_trainer as trainer, loss
from tests.support.models import NnxMLP, data, parameters
from tests.support.servers import Servers, connected

pytestmark = pytest.mark.usefixtures("nothing_is_left")

BATCH, ROUNDS, SIZES = 4, 3, (9, 17, 14)
Client = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=len(SIZES)) as cluster:
        yield cluster


@pytest.fixture
def clients(tmp_path: Path) -> list[Client]:
    """What each client has, in a file of its own."""
    x, y = data()
    ends = np.cumsum([0, *SIZES])
    own = [{"x": x[first:end], "y": y[first:end]} for first, end in pairwise(ends)]
    for number, arrays in enumerate(own):
        np.savez(tmp_path / f"{number}.npz", **arrays)
    return own


@pytest.fixture
def source(tmp_path: Path, clients: list[Client]) -> Source:
    return Source.npz(str(tmp_path / "{task}.npz"))


def fit(there: Trainer, source: Any, **options: Any) -> Any:
    options = {"steps": ROUNDS, "batch_size": BATCH, **options}
    return there.fit(source, progress=False, **options)


def by_hand(
    clients: Sequence[Client],
    tx: Any,
    *,
    epochs: int,
    weights: Sequence[float],
    proximal: float = 0.0,
) -> list[Any]:
    """One process that does what all clients do, one after the other."""
    graph, params = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))

    @jax.jit
    def step(params: Any, opt: Any, batch: Any, start: Any) -> Any:
        def all_of_it(params: Any) -> Any:
            apart = jax.tree.map(lambda a, b: ((a - b) ** 2).sum(), params, start)
            far = sum(jax.tree.leaves(apart))
            return loss(nnx.merge(graph, params), batch) + proximal / 2 * far

        updates, opt = tx.update(jax.grad(all_of_it)(params), opt, params)
        return optax.apply_updates(params, updates), opt

    for number in range(ROUNDS):
        came = []
        for client, own in enumerate(clients):
            mine, opt, count = params, tx.init(params), len(own["x"])
            order = np.concatenate(
                [epoch_order(count, client, number, epoch) for epoch in range(epochs)]
            )
            for first in range(0, len(order) - BATCH + 1, BATCH):
                rows = order[first : first + BATCH]
                batch = {name: array[rows] for name, array in own.items()}
                mine, opt = step(mine, opt, batch, params)
            came.append(mine)
        params = jax.tree.map(
            lambda *each: np.average(np.stack(each), axis=0, weights=weights),
            *came,
        )
    leaves = jax.tree.leaves(nnx.to_pure_dict(params))
    return [np.asarray(leaf) for leaf in leaves]


def assert_close(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for value, due in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", ["examples", "equal"])
def test_rounds_are_those_of_a_loop_by_hand(
    cluster: Cluster, source: Source, clients: list[Client], weight: Any
) -> None:
    tx = optax.sgd(0.1, momentum=0.5)
    strategy = Federated(local_epochs=2, weight=weight, proximal=0.3)
    there = trainer(cluster, strategy, tx)
    run = fit(there, source)
    weights = SIZES if weight == "examples" else [1] * len(SIZES)
    due = by_hand(clients, tx, epochs=2, weights=weights, proximal=0.3)
    assert_close(parameters(run.model()), due)
    steps = sum(2 * size // BATCH for size in SIZES)
    names = set(cluster.tasks("worker"))
    assert [(set(r.members), dict(r.dropped), r.steps) for r in run.rounds()] == [
        (names, {}, steps)
    ] * ROUNDS
    assert [r.number for r in run.rounds()] == [1, 2, 3]
    assert f"round 3  3 clients  {steps} steps" in str(run.rounds())
    assert f"<td>{steps}</td>" in run.rounds()._repr_html_()
    there.close()


def test_half_parameters_of_clients_with_many_examples_have_their_mean(
    cluster: Cluster, tmp_path: Path
) -> None:
    many = 70_000  # more than float16 holds
    x = np.random.default_rng(0).normal(size=(many, 2)).astype(np.float16)
    for client in range(len(SIZES)):
        np.savez(tmp_path / f"{client}.npz", x=x + client, y=x[:, :1])

    def error(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)

    found: list[Any] = []
    for weight in ("examples", "equal"):
        half = {"dtype": jnp.float16, "param_dtype": jnp.float16}
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0), **half)
        strategy = Federated(weight=weight)
        with Trainer(
            model, error, optax.sgd(0.1), cluster=cluster, strategy=strategy
        ) as there:
            source = Source.npz(str(tmp_path / "{task}.npz"))
            run = fit(there, source, steps=1, batch_size=many)
            found.append(parameters(run.model()))
    for value, due in zip(*found, strict=True):
        assert value.dtype == np.float16
        np.testing.assert_allclose(value, due, rtol=2e-3)


def test_some_clients_are_drawn_anew_for_each_round(
    cluster: Cluster, source: Source
) -> None:
    found = []
    for _ in range(2):
        there = trainer(cluster, Federated(fraction=0.5), optax.sgd(0.1), seed=5)
        run = fit(there, source, steps=9)
        found.append([sorted(r.members) for r in run.rounds()])
        assert run.metrics("contributions")["value"].tolist() == [2] * 9
        there.close()
    assert found[0] == found[1]  # the seed decides
    assert {len(members) for members in found[0]} == {2}
    assert len({tuple(members) for members in found[0]}) == 3


def test_no_example_leaves_its_client_and_models_are_evaluated_as_ever(
    cluster: Cluster, source: Source, clients: list[Client]
) -> None:
    """The Trainer holds types of the examples, and no values."""
    there = trainer(cluster, Federated(local_epochs=5), optax.adam(1e-2))
    x, y = data()
    run = fit(there, source, steps=20, eval_data={"x": x, "y": y}, eval_every=10)
    assert run.metrics("eval_loss")["value"][-1] < 0.1
    assert there.predict({"x": x}, fn=lambda m, b: m(b["x"])).shape[0] == len(x)
    assert "5 epochs of a client's own optimizer, on its own data" in str(there.plan())
    position = there.current_position()
    assert position is not None
    assert position["plan"]["parts"][0][0] == "rounds"
    there.close()


def spoil(tmp_path: Path, *clients: int) -> None:
    """Makes what these clients have NaN."""
    for client in clients:
        path = tmp_path / f"{client}.npz"
        with np.load(path) as own:
            y = own["y"]
            x = np.full_like(own["x"], np.nan)
        np.savez(path, x=x, y=y)


@pytest.mark.bad_input_row(33)
@pytest.mark.parametrize(
    ("weight", "inner_state"),
    [
        ("examples", "keep"),
        pytest.param("equal", "average", marks=pytest.mark.nightly),
    ],
)
def test_what_is_not_finite_is_in_no_round_and_its_client_is_named(
    cluster: Cluster,
    source: Source,
    clients: list[Client],
    tmp_path: Path,
    weight: Any,
    inner_state: Any,
) -> None:
    spoil(tmp_path, 1)
    strategy = Federated(weight=weight, inner_state=inner_state)
    there = trainer(cluster, strategy, optax.sgd(0.1))
    run = fit(there, source)
    kept = [SIZES[0], SIZES[2]] if weight == "examples" else [1, 1]
    # The others draw as they do beside one that is well.
    due = by_hand(clients, optax.sgd(0.1), epochs=1, weights=[kept[0], 0, kept[1]])
    assert_close(parameters(run.model()), due)
    bad = TaskName("/job:worker/task:1")
    assert [dict(r.dropped) for r in run.rounds()] == [{bad: "not finite"}] * ROUNDS
    assert {len(r.members) for r in run.rounds()} == {2}
    assert f"; {bad} not finite" in str(run.rounds())
    assert np.isfinite(run.metrics("loss")["value"]).all()
    there.close()


@pytest.mark.bad_input_row(33)
def test_a_client_that_is_well_again_counts_again(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    """The state of its optimizer, which it keeps, is not spoilt."""

    def loss_of(model: Any, batch: Any) -> Any:
        weights = nnx.state(model, nnx.Param)
        moved = sum(
            abs(x - y).sum() for x, y in zip(leaves(weights), first, strict=True)
        )
        bad = (moved == 0) & (batch["x"].max() > 50)  # in the first round
        return jnp.where(bad, jnp.nan, 1.0) * loss(model, batch)

    leaves = jax.tree.leaves
    first = leaves(nnx.state(NnxMLP(rngs=nnx.Rngs(0)), nnx.Param))
    with np.load(tmp_path / "2.npz") as own:
        x, y = own["x"], own["y"]
    x[:, 0] = 60.0
    np.savez(tmp_path / "2.npz", x=x, y=y)
    strategy = Federated(inner_state="keep")
    model = NnxMLP(rngs=nnx.Rngs(0))
    there = Trainer(
        model, loss_of, optax.adam(1e-3), cluster=cluster, strategy=strategy
    )
    run = fit(there, source)
    assert [list(r.dropped.values()) for r in run.rounds()] == [["not finite"], [], []]
    there.close()


@pytest.mark.bad_input_row(33)
def test_a_run_ends_with_the_rounds_before_where_too_few_are_finite(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    there = trainer(cluster, Federated(min_clients=2), optax.sgd(0.1))
    due = parameters(fit(there, source).model())
    spoil(tmp_path, 0, 2)
    with pytest.raises(NonFiniteError, match=r"JG-212 what .*0, .*task:2 con"):
        fit(there, source)
    for value, wanted in zip(parameters(there.model()), due, strict=True):
        np.testing.assert_array_equal(value, wanted)
    there.close()


@pytest.mark.bad_input_row(29)
def test_what_cannot_be_is_refused_in_words(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    wrong: Any
    globally = Elastic(workers=(1, 4), batch="global")
    for name, wrong, words in [
        ("local_epochs", 0, "local_epochs is 0; give the passes over"),
        ("min_clients", 1.5, "min_clients is 1.5; give the contributions"),
        ("fraction", 0, "fraction is 0; it is of the clients"),
        ("fraction", 1.1, "fraction is 1.1; it is of the clients"),
        ("fraction", True, "fraction is True"),
        ("proximal", -1, "proximal is -1; give how strongly"),
        ("round_timeout_s", 0, "round_timeout_s is 0; give the seconds"),
        ("outer", "sgd", "outer is 'sgd'; give an optax optimizer"),
        ("weight", "steps", "weight is 'steps'; give 'examples' or 'equal'"),
        ("inner_state", "no", "inner_state is 'no'; give 'keep', 'average' or 'reset'"),
        ("secure", True, "Federated has no argument 'secure': write secure_sum=jg.Sec"),
        ("elastic", globally, "a worker takes batches of its own, .* leave out batch="),
    ]:
        with pytest.raises(ConfigError, match=words):
            Federated(**{name: wrong})
    there = trainer(cluster, Federated(min_clients=4), optax.sgd(0.1))
    with pytest.raises(ConfigError, match="needs as many workers, and the cluster has"):
        fit(there, source)
    there = trainer(cluster, Federated(), optax.sgd(0.1))
    with pytest.raises(ConfigError, match="data is a tuple of this process; give a jg"):
        fit(there, data())
    with pytest.raises(ConfigError, match="write steps=3 in place of epochs"):
        fit(there, source, steps=None, epochs=3)
    few = r"task:0 has 9 examples, which in 1 epochs make no batch of 10; give"
    with pytest.raises(DataError, match=few):
        fit(there, source, batch_size=10)
    np.savez(tmp_path / "1.npz", x=np.zeros((5, 3), np.float32), y=np.zeros(5))
    with pytest.raises(DataError, match="all clients need fields of the same names"):
        fit(there, source)
    np.savez(tmp_path / "1.npz", x=np.zeros((0, 3), np.float32), y=np.zeros(0))
    with pytest.raises(DataError, match="on /job:worker/task:1: data field 'x' has no"):
        fit(there, source)
    (tmp_path / "1.npz").unlink()
    with pytest.raises(SourceError, match="on /job:worker/task:1: there is no file"):
        fit(there, source)
    there.close()


def with_a_late_client(cluster: Cluster, source: Source, min_clients: int) -> Trainer:
    """The last of three clients takes four seconds for a step, and a round one."""
    strategy = Federated(min_clients=min_clients, round_timeout_s=1.0)
    there = trainer(cluster, strategy, optax.sgd(0.1))
    there.plan(source, BATCH)
    runner: Any = there._parts.build()[1]
    runner.compute_wait_s = {2: 4.0}
    return there


@pytest.mark.row(11)
def test_a_round_goes_on_without_a_client_that_is_late(
    cluster: Cluster, source: Source
) -> None:
    there = with_a_late_client(cluster, source, min_clients=2)
    run = fit(there, source)
    slow = cluster.tasks("worker")[2]
    first, *others = run.rounds()
    assert (len(first.members), dict(first.dropped)) == (2, {slow: "late"})
    assert first.wait_s > 0.2
    # While it is busy it is drawn for no other.
    assert [(len(r.members), dict(r.dropped)) for r in others] == [(2, {})] * 2
    there.close()


@pytest.mark.row(11)
def test_with_too_few_clients_a_run_ends_and_says_who_did_not_come(
    cluster: Cluster, source: Source
) -> None:
    there = with_a_late_client(cluster, source, min_clients=3)
    with pytest.raises(DeadlineError, match=r"has 2 of 3 .* to come: /job:worker/ta"):
        fit(there, source)
    there.close()


@pytest.mark.row(1)
def test_rounds_go_on_without_a_client_that_is_lost(source: Source) -> None:
    servers = Servers(ps=1, worker=3)
    lost = TaskName("/job:worker/task:2")
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        there = trainer(cluster, Federated(min_clients=2), optax.sgd(0.1))

        seen: list[int] = []  # how many rounds there were when it was cut off

        def lose(run: Any, report: Any) -> None:
            if not seen:
                servers.lose(lost)
                seen.append(len(run.rounds()))
            after = run.rounds()[seen[0] :]
            if len(after) >= 5 and all(lost not in r.members for r in after[-5:]):
                run.stop()

        run = fit(there, source, steps=100_000, callbacks=[lose])
        assert run.state == "stopped"
        assert {len(r.members) for r in run.rounds()} == {2, 3}
        assert lost not in run.rounds()[-1].members
        there.close()
    servers.stop()


def test_what_a_client_adds_is_cut_and_a_sum_of_those_is_taken(
    cluster: Cluster, source: Source, clients: list[Client]
) -> None:
    tx = optax.sgd(0.1, momentum=0.5)

    def private(clip: float, **options: Any) -> Federated:
        hidden = Privacy(unit="client", noise_multiplier=1e-10, clip=clip, delta=1e-5)
        return Federated(weight="equal", privacy=hidden, **options)

    there = trainer(cluster, private(100.0, local_epochs=2), tx)
    run = fit(there, source)
    due = by_hand(clients, tx, epochs=2, weights=[1] * len(SIZES))
    assert_close(parameters(run.model()), due)
    there.close()
    start = parameters(NnxMLP(rngs=nnx.Rngs(0)))
    for fraction, drawn in [(1.0, 3), (0.5, 2)]:
        there = trainer(cluster, private(1e-2, fraction=fraction), tx)
        run = fit(there, source, steps=1)
        moved = [a - b for a, b in zip(parameters(run.model()), start, strict=True)]
        norm = np.sqrt(sum(np.square(m).sum() for m in moved))
        assert 1e-2 / drawn < norm <= 1e-2 * 1.001
        there.close()


def test_epsilon_of_rounds_counts_each_for_each_client(
    cluster: Cluster, source: Source
) -> None:
    hidden = Privacy(unit="client", noise_multiplier=3.0, clip=0.1, delta=1e-5)
    strategy = Federated(weight="equal", fraction=0.5, privacy=hidden)
    there = trainer(cluster, strategy, optax.sgd(0.1))
    run = fit(there, source, steps=2)
    due = epsilon_of([Spent("client", 3.0, 1.0, 2)], 1e-5)
    assert abs(run.epsilon - due) < 1e-9
    assert run.rounds()[-1].epsilon == run.epsilon
    assert all(0 < r.epsilon <= run.epsilon for r in run.rounds())
    assert f"epsilon {due:.3g}" in str(run.rounds()[-1])
    assert f"<td>{due:.3g}</td>" in run.rounds()._repr_html_()
    there.close()


def test_weights_that_would_tell_of_a_client_are_refused() -> None:
    hidden = Privacy(unit="client", noise_multiplier=3.0, clip=0.1, delta=1e-5)
    with pytest.raises(ConfigError, match="write weight='equal'"):
        Federated(privacy=hidden)
    with pytest.raises(ConfigError, match="would travel without noise"):
        Federated(weight="equal", inner_state="average", privacy=hidden)
    with pytest.raises(ConfigError, match="Federated hides the part of one client"):
        Federated(
            weight="equal", privacy=Privacy(noise_multiplier=1.0, clip=1.0, delta=1e-5)
        )
