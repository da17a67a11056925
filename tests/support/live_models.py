"""A model with hash tables and a plain one, for tests of live serving."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster


class Model(nnx.Module):
    """A table of ads, whose keys are admitted at a second sight, and one of users."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.ads = jg.HashTable(
            3,
            1 << 20,
            initializer=jg.Initial("normal", 0.5, seed=3),
            admission=jg.Admission(sightings=2),
            eviction="lfu",
        )
        self.users = jg.HashTable(2, 1 << 20, initializer=0.25)
        self.places = nnx.Embed(10, 2, rngs=rngs)
        self.out = nnx.Linear(7, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        bags = self.ads(batch["ads"])
        there = (batch["ads"] != jg.split_keys([jg.NO_KEY])).any(-1)
        ads = jnp.where(there[..., None], bags, 0).sum(1)
        rows = [ads, self.users(batch["user"]), self.places(batch["place"])]
        return self.out(jnp.concatenate(rows, -1))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch) - batch["place"]) ** 2)


def score(model: Any, batch: Any) -> Any:
    return {"score": model(batch)}


def batch(rows: int, seed: int = 0, *, first_key: int = -20) -> dict[str, Any]:
    """Examples whose keys are 40 numbers from ``first_key`` on."""
    rng = np.random.default_rng(seed)
    ads = first_key + rng.integers(0, 40, (rows, 4))
    users = ads[:, 0].astype(np.int32)
    ads = np.where(ads % 3 == 0, ads * 2**40, ads)  # some of more than 32 bits
    ads[:, 3] = jg.NO_KEY
    return {
        "ads": jg.split_keys(ads),
        "user": users,
        "place": rng.integers(0, 10, rows).astype(np.int32),
    }


def trained(cluster: Cluster) -> jg.Trainer:
    """A Trainer that has trained the model on the first 40 keys."""
    trainer = jg.Trainer(Model(nnx.Rngs(0)), loss, optax.adagrad(0.1), cluster=cluster)
    fit(trainer)
    return trainer


def fit(trainer: jg.Trainer) -> None:
    """Trains it on."""
    trainer.fit(batch(64), steps=8, batch_size=16, progress=False)
