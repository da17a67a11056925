"""Rounds whose parameters are exchanged in turn, on servers of this process."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.plan.program.nodes import (
    RecvNode,
    SegmentNode,
    after_of,
    inputs_of,
    outputs_of,
)
from jgraph.train.step.compress import GradientDtype, compressed, expanded
from jgraph.train.step.fragments import fragment_rows
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.local_sgd import LocalSGD
from jgraph.train.trainer import Trainer
from tests.support.members import two_join_and_one_leaves
from tests.support.models import (
    NnxMLP,
    assert_close,
    batches_of,
    data,
    nnx_loss,
    parameters,
    step_by_hand,
)
from tests.support.servers import connected, ps_bytes

pytestmark = pytest.mark.usefixtures("nothing_is_left")

BATCH, EVERY, UPDATES = 4, 6, 7
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=1) as cluster:
        yield cluster


def trainer(cluster: Cluster, tx: Any, **options: Any) -> Trainer:
    every = options.pop("sync_every", EVERY)
    strategy = LocalSGD(sync_every=every, step_timeout_s=20, **options)
    model = NnxMLP(rngs=nnx.Rngs(0))
    return Trainer(model, nnx_loss, tx, cluster=cluster, strategy=strategy)


def fit(there: Trainer, steps: int = UPDATES) -> Any:
    return there.fit(data(), steps=steps, batch_size=BATCH, progress=False)


def masks_of(params: Any, fragments: int) -> list[Any]:
    """Returns which numbers of the parameters are of each fragment."""
    leaves, tree = jax.tree.flatten(params)
    sizes = [(x.shape[0], x[0].nbytes) for x in leaves]
    bounds = fragment_rows(sizes, fragments)
    masks = []
    for number in range(fragments):
        parts = []
        for leaf, each in zip(leaves, bounds, strict=True):
            rows = np.arange(leaf.shape[0])
            mask = (rows >= each[number]) & (rows < each[number + 1])
            parts.append(mask.reshape(-1, *[1] * (leaf.ndim - 1)))
        masks.append(jax.tree.unflatten(tree, parts))
    return masks


def mixed(own: Any, read: Any, mix: float) -> Any:
    return jax.tree.map(lambda a, b: mix * a + (1 - mix) * b, own, read)


def where(mask: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(jnp.where, mask, new, old)


def outer_state(new: Any, old: Any, mask: Any, last: bool) -> Any:
    """Returns the state of the outer optimizer after an update of a fragment."""
    params: Any = jax.tree.structure(mask)

    def is_params(part: Any) -> bool:
        tree: Any = jax.tree.structure(part)
        return bool(tree == params)

    def after(new: Any, old: Any) -> Any:
        if is_params(new):
            return where(mask, new, old)
        return new if last else old

    return jax.tree.map(after, new, old, is_leaf=is_params)


def by_hand(
    tx: Any,
    outer: Any,
    fragments: int,
    overlap: int,
    mix: float,
    dealt: Sequence[Sequence[int]] = ((0,), (1,), (2,), (3,), (4,), (5,), (6,)),
    travel: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """A loop of one process that does what all do.

    Args:
      dealt: per update, which batch of pieces each worker has.
      travel: rounds contributions; what that takes away is in the next ones.
    """
    graph, theta = nnx.split(NnxMLP(rngs=nnx.Rngs(0)))

    step = step_by_hand(graph, nnx_loss, tx)
    masks, piece = masks_of(theta, fragments), EVERY // fragments
    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH * piece, 0)
    batches = [next(stream) for _ in range(1 + max(n for row in dealt for n in row))]
    workers = len(dealt[0])
    own, inner = [theta] * workers, [tx.init(theta) for _ in range(workers)]
    base, state = theta, outer.init(theta)
    left = [jax.tree.map(jnp.zeros_like, theta) for _ in range(workers)]

    def sent(worker: int, mask: Any) -> Any:
        ways = jax.tree.map(lambda a, b, c: a - b + c, base, own[worker], left[worker])
        piece = where(mask, ways, jax.tree.map(jnp.zeros_like, theta))
        arrived = jax.tree.map(travel, piece)
        rest = jax.tree.map(lambda a, b: a - b, ways, arrived)
        left[worker] = where(mask, rest, left[worker])
        return arrived

    for update, numbers in enumerate(dealt):
        for worker, number in enumerate(numbers):
            newest = masks[(update - 1) % fragments]
            for n in range(piece + 1):
                if n == overlap and update:
                    mean = mixed(own[worker], theta, mix if overlap else 0.0)
                    own[worker] = where(newest, mean, own[worker])
                some = slice(n * BATCH, (n + 1) * BATCH)
                batch = batches[number]["x"][some], batches[number]["y"][some]
                if n < piece:
                    given = own[worker], inner[worker], batch
                    own[worker], inner[worker] = step(*given)
        if update:
            base = where(masks[(update - 1) % fragments], theta, base)
        mask = masks[update % fragments]
        ways = [sent(worker, mask) for worker in range(workers)]
        way = jax.tree.map(lambda *each: sum(each) / workers, *ways)
        updates, after = outer.update(way, state, theta)
        theta = where(mask, optax.apply_updates(theta, updates), theta)
        state = outer_state(after, state, mask, (update + 1) % fragments == 0)
    leaves = jax.tree.leaves(nnx.to_pure_dict(theta))
    return [np.asarray(leaf) for leaf in leaves]


@pytest.mark.parametrize(
    ("fragments", "overlap", "mix"),
    [
        pytest.param(2, 0, 0.5, marks=pytest.mark.nightly),
        (3, 1, 0.5),
        pytest.param(2, 3, 0.25, marks=pytest.mark.nightly),
        pytest.param(1, 2, 0.5, marks=pytest.mark.nightly),
    ],
)
def test_fragments_are_those_of_a_loop_by_hand(
    cluster: Cluster, fragments: int, overlap: int, mix: float
) -> None:
    tx = optax.adam(1e-2)
    there = trainer(
        *(cluster, tx), outer=NESTEROV, fragments=fragments, overlap=overlap, mix=mix
    )
    run = fit(there)
    assert (run.state, run.steps) == ("done", UPDATES)
    wanted = by_hand(tx, NESTEROV, fragments, overlap, mix)
    assert_close(parameters(run.model()), wanted)
    there.close()


def by_bits(dtype: GradientDtype) -> Callable[[Any], Any]:
    return lambda value: expanded(compressed(value, dtype))


@pytest.mark.parametrize(
    ("dtype", "shards"),
    [("bfloat16", 1), pytest.param("int8", 2, marks=pytest.mark.nightly)],
)
def test_fragments_travel_as_fewer_bits_and_what_is_rounded_away_comes_later(
    cluster: Cluster, dtype: GradientDtype, shards: int
) -> None:
    tx, options = optax.sgd(0.1), dict[str, Any](gradient_dtype=dtype)
    if shards > 1:
        options["variable_partitioner"] = jg.fixed_size_partitioner(shards)
    there = trainer(cluster, tx, outer=NESTEROV, fragments=2, overlap=1, **options)
    found = parameters(fit(there).model())
    due = by_hand(tx, NESTEROV, 2, 1, 0.5, travel=by_bits(dtype))
    assert_close(found, due)
    exact = by_hand(tx, NESTEROV, 2, 1, 0.5)
    assert max(np.abs(a - b).max() for a, b in zip(due, exact, strict=True)) > 1e-4
    there.close()


def test_one_fragment_without_overlap_is_a_round_as_ever(cluster: Cluster) -> None:
    """Bit by bit; the option has a name, and changes nothing."""
    found = []
    options: list[dict[str, Any]] = [{}, {"fragments": 1, "overlap": 0}]
    for given in options:
        there = trainer(cluster, optax.adam(1e-2), outer=NESTEROV, **given)
        found.append(parameters(fit(there).model()))
        there.close()
    for value, due in zip(*found, strict=True):
        np.testing.assert_array_equal(value, due)


def test_each_worker_goes_on_with_parameters_of_its_own() -> None:
    """Who had which batches is not said: one of all ways to deal them fits."""
    updates, options = 2, (2, 1, 0.5)
    with connected(ps=1, worker=2) as cluster:
        names: dict[str, Any] = dict(
            zip(("fragments", "overlap", "mix"), options, strict=True)
        )
        there = trainer(cluster, optax.sgd(0.1), outer=NESTEROV, **names)
        run = fit(there, updates)
        assert run.metrics("contributions")["value"].tolist() == [2] * updates
        found = parameters(run.model())
        there.close()
    errors = []
    for swaps in itertools.product([False, True], repeat=updates - 1):
        dealt = [
            (2 * n + swap, 2 * n + 1 - swap) for n, swap in enumerate([False, *swaps])
        ]
        due = by_hand(optax.sgd(0.1), NESTEROV, *options, dealt=dealt)
        pairs = zip(found, due, strict=True)
        errors.append(max(np.abs(a - b).max() for a, b in pairs))
    assert min(errors) < 1e-6 < max(errors)


class Slope(nnx.Module):
    """Four numbers, each of which an SGD step of rate 1 makes one less."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(4))

    def __call__(self, x: Any) -> Any:
        return self.w[...].sum() + 0 * x.sum()


def slope_by_hand(contributions: Sequence[int], fragments: int, again: bool) -> Any:
    """Returns the numbers after updates of so many workers each.

    Args:
      contributions: of each update.
      fragments: how many there are.
      again: all workers read all of the model where their number changes.
    """
    found, ages, last = np.zeros(4), [0], contributions[0]
    for update, count in enumerate(contributions):
        ages = [0] * count if again and count != last else ages[:count]
        ages += [0] * (count - len(ages))
        steps = [min(EVERY, EVERY // fragments * (age + 1)) for age in ages]
        piece = slice(*(4 // fragments * (update % fragments + n) for n in (0, 1)))
        found[piece] -= np.mean(steps)
        ages, last = [age + 1 for age in ages], count
    return found


def test_workers_join_and_leave_between_two_fragments() -> None:
    """All may read all of the model then: their own steps since are lost."""
    with connected(ps=2, worker=1) as cluster:
        strategy = LocalSGD(sync_every=EVERY, fragments=2, elastic=Elastic())
        there = Trainer(
            Slope(),
            lambda model, x: model(x),
            optax.sgd(1.0),
            cluster=cluster,
            strategy=strategy,
        )
        run = there.fit(
            np.zeros((48, 1), np.float32),
            steps=10**6,
            batch_size=BATCH,
            block=False,
            progress=False,
        )
        joined = two_join_and_one_leaves(cluster.target, run)
        run.stop()
        run.wait(30)
        assert run.repeated() == 0
        found = run.model().w[...]
        counts = run.metrics("contributions")["value"].tolist()
        least = slope_by_hand(counts, 2, again=True)
        most = slope_by_hand(counts, 2, again=False)
        assert np.all(most - 1e-3 <= found)
        assert np.all(found <= least + 1e-3)
        there.close()
        for server in joined:
            server.stop(0.0)


@pytest.mark.nightly  # smaller: the same without fragments, test_local_sgd.py
def test_a_fit_goes_on_where_the_one_before_was_in_the_round(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Given other values, a worker reads all of them."""
    tx = optax.adam(1e-2)
    there = trainer(cluster, tx, outer=NESTEROV, fragments=3, overlap=2)
    fit(there, 4).save(tmp_path / "four")
    found = parameters(fit(there, UPDATES - 4).model())
    assert_close(found, by_hand(tx, NESTEROV, 3, 2, 0.5))
    other = trainer(cluster, tx, outer=NESTEROV, fragments=3, overlap=2)
    again = [
        parameters(fit(each.restore(tmp_path / "four"), UPDATES - 4).model())
        for each in (there, other)
    ]
    assert_close(*again)
    moved = [np.abs(a - b).max() for a, b in zip(found, again[0], strict=True)]
    assert max(moved) > 1e-4
    there.close()
    other.close()


@pytest.mark.nightly
def test_fragments_are_cut_of_shards_that_have_copies(cluster: Cluster) -> None:
    """As of whole parameters."""
    tx = optax.sgd(0.1)
    given: Any = {"durability": "replica", "fragments": 2, "overlap": 1}
    cut = jg.fixed_size_partitioner(2)
    there = trainer(cluster, tx, outer=NESTEROV, variable_partitioner=cut, **given)
    run = fit(there)
    assert_close(parameters(run.model()), by_hand(tx, NESTEROV, 2, 1, 0.5))
    there.close()


class Norm(nnx.Module):
    """BatchNorm, whose statistics are the state of the model."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(nnx.relu(self.first(x))))


def statistics_by_hand(piece: int) -> list[Any]:
    """Returns those of a plain loop over what one worker is dealt."""
    model: Any = Norm(rngs=nnx.Rngs(0))
    model.train()
    split: Any = nnx.split
    graph, params, stats = split(model, nnx.Param, ...)

    @jax.jit
    def step(params: Any, stats: Any, batch: Any) -> Any:
        def value(params: Any) -> Any:
            there = nnx.merge(graph, params, stats, copy=True)
            found = nnx_loss(there, batch)
            return found, split(there, nnx.Param, ...)[2]

        grads, stats = jax.grad(value, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats

    x, y = data()
    stream = batches_of({"x": x, "y": y}, BATCH * piece, 0)
    for _ in range(UPDATES):
        batch = next(stream)
        for n in range(piece):
            some = slice(n * BATCH, (n + 1) * BATCH)
            params, stats = step(params, stats, (batch["x"][some], batch["y"][some]))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(stats)]


@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_state_of_the_model_is_that_of_the_steps_in_fragments_too(
    cluster: Cluster, overlap: int
) -> None:
    """Alone, and with nothing mixed in, a worker trains as a plain loop does.

    All of its state is exchanged each time, as it is after the steps before.
    """
    strategy = LocalSGD(
        sync_every=EVERY, fragments=2, overlap=overlap, mix=1.0, step_timeout_s=20
    )
    made = Norm(rngs=nnx.Rngs(0))
    there = Trainer(made, nnx_loss, optax.sgd(0.1), cluster=cluster, strategy=strategy)
    found = nnx.state(fit(there).model(), nnx.BatchStat)
    wanted = statistics_by_hand(EVERY // 2)
    assert len(wanted) == 2
    assert_close([np.asarray(x) for x in jax.tree.leaves(found)], wanted)
    there.close()


def nodes_of(there: Trainer) -> list[Any]:
    program = there.plan(data(), BATCH).program
    part = next(p for p in program.partitions if "worker" in str(p.task))
    return list(part.nodes)


def test_steps_ahead_wait_for_nothing_that_another_task_sends(
    cluster: Cluster,
) -> None:
    there = trainer(cluster, optax.adam(1e-2), fragments=2, overlap=1)
    nodes = nodes_of(there)
    maker = {value: n for n, node in enumerate(nodes) for value in outputs_of(node)}
    waits: dict[int, bool] = {}
    for n, node in enumerate(nodes):
        before = [*after_of(node), *(maker[v] for v in inputs_of(node) if v in maker)]
        waits[n] = isinstance(node, RecvNode) or any(waits[b] for b in before)
    segments = [n for n, node in enumerate(nodes) if isinstance(node, SegmentNode)]
    (ahead,) = [n for n in segments if not waits[n] and len(outputs_of(nodes[n])) > 9]
    made = set(outputs_of(nodes[ahead]))  # all that a step goes on with
    assert [n for n in segments if waits[n] and made & set(inputs_of(nodes[n]))]
    assert "mixed in after 1 step" in str(there.plan())
    there.close()


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 300, rngs=rngs)
        self.second = nnx.Linear(300, 400, rngs=rngs)
        self.last = nnx.Linear(400, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def test_bytes_of_an_exchange_fall_by_the_number_of_fragments() -> None:
    """By the counters of the ps, in both directions: the most of any exchange."""

    def most(cluster: Cluster, fragments: int, **options: Any) -> int:
        strategy = LocalSGD(
            sync_every=4, fragments=fragments, step_timeout_s=20, **options
        )
        there = Trainer(
            Wide(nnx.Rngs(0)),
            nnx_loss,
            optax.sgd(0.1),
            cluster=cluster,
            strategy=strategy,
        )

        def nbytes(steps: int) -> int:
            before = ps_bytes(cluster)
            there.fit(data(), steps=steps, batch_size=BATCH, progress=False)
            return ps_bytes(cluster) - before

        nbytes(1)
        # A fit of one update less costs all that is of a fit.
        each = [nbytes(2) - nbytes(1) for _ in range(fragments)]
        there.close()
        return max(each)

    with connected(ps=1, worker=1) as cluster:
        whole, half = most(cluster, 1), most(cluster, 2)
        model = 4 * sum(x.size for x in jax.tree.leaves(nnx.state(Wide(nnx.Rngs(0)))))
        assert whole > 1.8 * model
        assert half < 1.2 * whole / 2
        # Half of it is what is read.
        assert most(cluster, 2, gradient_dtype="bfloat16") < 0.8 * half


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 7])
def test_fragments_are_of_equal_bytes_but_for_a_row(fragments: int) -> None:
    rng = np.random.default_rng(fragments)
    sizes = [(int(rng.integers(1, 50)), int(rng.integers(1, 9)) * 4) for _ in range(9)]
    bounds = fragment_rows(sizes, fragments)
    assert [each[-1] for each in bounds] == [rows for rows, _ in sizes]
    assert all(list(each) == sorted(each) and each[0] == 0 for each in bounds)
    total = sum(rows * nbytes for rows, nbytes in sizes)
    for number in range(fragments):
        nbytes = sum(
            (each[number + 1] - each[number]) * size
            for each, (_, size) in zip(bounds, sizes, strict=True)
        )
        assert abs(nbytes - total / fragments) <= 36


@pytest.mark.bad_input_row(29)
def test_fragments_that_cannot_be_are_refused_in_words(cluster: Cluster) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"fragments": 0}, "fragments is 0; give a whole number, 1 or more"),
        ({"fragments": 2.5}, "fragments is 2"),
        ({"overlap": -1}, "overlap is -1; give a whole number, 0 or more"),
        ({"fragments": 2, "mix": 1.5}, "mix is 1"),
        ({"fragments": 4}, "no multiple of fragments=4, and .* write sync_every=8"),
        ({"fragments": 3, "overlap": 3}, "more than the 2 steps .* write overlap=2"),
        ({"fragments": 2, "inner_state": "reset"}, "not go with inner_state='reset'"),
        ({"fragments": 2, "dense": "workers"}, "does not go with dense"),
        ({"overlap": 1, "sync_every_s": 1.0}, "does not go with sync_every_s"),
        ({"overlap": 1, "max_staleness": 1}, "does not go with max_staleness"),
    ]
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            LocalSGD(sync_every=EVERY, **options)
    there = trainer(cluster, optax.sgd(0.1), fragments=500, sync_every=500)
    words = r"fragments=500, and the parameters of this model can be cut into \d+ betw"
    with pytest.raises(ConfigError, match=words):
        fit(there)
    factored = optax.adafactor(0.1, min_dim_size_to_factor=2)
    there = trainer(cluster, optax.sgd(0.1), fragments=2, outer=factored)
    with pytest.raises(ConfigError, match=r"outer= keeps .* cuts between rows"):
        fit(there)
