"""Runs of options drawn at random, which others go on with: the numbers of plain JAX.

Each seed draws a model, an optimizer, and two Trainers with strategies and options of
their own. The first trains on batches in a known order and saves; the second restores
that and goes on. What comes out is what a loop in JAX alone makes of the same batches,
or the options are refused in a sentence before anything is trained.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.cluster.options import RECORDS_DIR
from jgraph.errors import ConfigError
from jgraph.train.strategies.strategies import Strategy
from tests.support.servers import connected

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("nothing_is_left")]

SEEDS: Final = 24
WORKERS: Final = 2
Batch: TypeAlias = dict[str, np.ndarray[Any, Any]]

_rng = np.random.default_rng(0)
_X = _rng.normal(size=(96, 8)).astype(np.float32)
_DATA: Final[Batch] = {
    "x": _X,
    "y": _X @ _rng.normal(size=8).astype(np.float32),
    "id": _rng.integers(0, 50, 96).astype(np.int32),
}


class Dense(nnx.Module):
    """Two layers of which the first is used twice, and a scalar."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(0.5))
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        hidden = jnp.tanh(self.first(jnp.tanh(self.first(batch["x"]))))
        return self.last(hidden * self.scale[...])[:, 0]


class Embedded(nnx.Module):
    """A table of which rows travel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(50, 8, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        inputs = [self.table(batch["id"]), batch["x"]]
        return self.last(jnp.concatenate(inputs, axis=-1))[:, 0]


class Bags(nnx.Module):
    """A table of which each example takes two rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jnp.linspace(-1.0, 1.0, 200).reshape(50, 4))
        self.last = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        ids = jnp.stack([batch["id"], (batch["id"] * 7) % 50], axis=1)
        bags = jg.embedding_bag(self.table[...], ids, combiner="sum")
        return self.last(jnp.concatenate([bags, batch["x"]], axis=-1))[:, 0]


MODELS: Final = (Dense, Embedded, Bags)
_schedule = optax.cosine_decay_schedule(0.01, 100)
OPTIMIZERS: Final[Mapping[str, Callable[[], Any]]] = {
    "sgd": lambda: optax.sgd(0.01),
    "adam": lambda: optax.adam(0.01),
    "nesterov": lambda: optax.sgd(0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.05),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(_schedule)
    ),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a Trainer trains, and of how many batches its updates are."""

    name: str
    options: Mapping[str, Any]
    batches: int

    @property
    def strategy(self) -> Strategy | None:
        """What the Trainer is given; None: it trains in this process."""
        return None if self.name == "Local" else jg.SyncPS(**self.options)


def drawn(draw: random.Random) -> Kind:
    """Draws what gives the numbers of one process."""
    options: dict[str, Any] = {}

    def perhaps(name: str, *values: object) -> None:
        if draw.random() < 0.35:
            options[name] = draw.choice(values)

    name = draw.choice(["SyncPS", "SyncPS", "SyncPS", "Local"])
    if name == "Local":
        return Kind(name, {}, 1)
    cut = jg.min_max_variable_partitioner(2, min_slice_size=64)
    perhaps("variable_partitioner", jg.fixed_size_partitioner(2), cut)
    perhaps("placement", jg.RoundRobin(), jg.GreedyLoadBalancing())
    perhaps("partition_strategy", "mod")
    perhaps("durability", "log", "replica")
    perhaps("dense", "workers", "auto")
    few = (1, 4)
    perhaps("elastic", jg.Elastic(workers=few), jg.Elastic(workers=few, ps=(2, 3)))
    return Kind(name, options, WORKERS)


def batches(first: int, count: int) -> list[Batch]:
    """Returns batches of 8 in their order, over and over."""
    starts = [(n * 8) % 89 for n in range(first, first + count)]
    return [{f: a[s : s + 8] for f, a in _DATA.items()} for s in starts]


def loss(model: Any, batch: Any) -> Any:
    return ((model(batch) - batch["y"]) ** 2).mean()


def parameters(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def in_jax_alone(model: nnx.Module, tx: Any, updates: Sequence[list[Batch]]) -> Any:
    """Returns the parameters after updates by the mean gradient of some batches."""
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)

    def of(params: Any, batch: Any) -> Any:
        nnx.replace_by_pure_dict(state, params)
        return loss(nnx.merge(graph, state), batch)

    opt = tx.init(params)
    for some in updates:
        gradients = [jax.grad(of)(params, batch) for batch in some]
        total = jax.tree.map(lambda *each: sum(each), *gradients)
        mean = optax.tree.scale(1 / len(some), total)
        changes, opt = tx.update(mean, opt, params)
        params = optax.apply_updates(params, changes)
    return params


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORDS_DIR, str(tmp_path_factory.mktemp("logs")))
        with connected(ps=2, worker=WORKERS) as cluster:
            yield cluster


@pytest.mark.parametrize("seed", range(SEEDS))
def test_runs_drawn_at_random_have_the_numbers_of_jax_alone(
    seed: int, cluster: Cluster, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    model, tx = draw.choice(MODELS), draw.choice(list(OPTIMIZERS))
    kinds, steps = [drawn(draw), drawn(draw)], draw.choice([2, 3])
    sparse: Any = draw.choice(["auto", "exact", "off"])
    print(seed, model.__name__, tx, sparse, steps, *kinds, sep="\n  ")  # noqa: T201
    updates: list[list[Batch]] = []
    for number, kind in enumerate(kinds):
        done = sum(map(len, updates))
        fed = batches(done, steps * kind.batches)
        try:
            trainer = jg.Trainer(
                model(nnx.Rngs(number)),
                loss,
                OPTIMIZERS[tx](),
                cluster=None if kind.name == "Local" else cluster,
                strategy=kind.strategy,
                sparse=sparse,
            )
            with trainer:
                if number:
                    trainer.restore(tmp_path / "saved")
                run = trainer.fit(iter(fed), steps=steps, progress=False)
                run.save(tmp_path / ("again" if number else "saved"))
        except ConfigError as error:
            print(" ", error)  # noqa: T201
            return
        cut = kind.batches
        updates += [fed[n : n + cut] for n in range(0, len(fed), cut)]
        assert run.steps == len(updates)
        want = in_jax_alone(model(nnx.Rngs(0)), OPTIMIZERS[tx](), updates)
        jax.tree.map(
            lambda is_, ought: np.testing.assert_allclose(is_, ought, 2e-4, 2e-5),
            parameters(run.model()),
            want,
        )
