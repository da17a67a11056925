"""Every way on which rows of a hash table are trained, against a plain optax loop.

The loop has a row for each id from the beginning, and knows nothing of hashing: an
update is its own on the rows of the ids of a step alone. Each step of the cluster is of
all examples: of one worker, or of two that have half of them each.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.graph.rows.hash_spec import Column, Initial
from jgraph.launch.local.cluster import LocalCluster
from jgraph.runtime.store.hash_rows import initial_rows
from tests.support.servers import connected

DIM, BATCH, COUNT, STEPS = 3, 4, 3, 4
INITIAL: Final = Initial("normal", 0.5, seed=4)

OPTIMIZERS: Final[dict[str, optax.GradientTransformation]] = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.1),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "lamb": optax.lamb(0.1),
}
DTYPES: Final = ("int8", "int16", "int32", "pairs")
USES: Final = ("index", "bag", "two", "some")
PATHS: Final = ("async", "sync")
ENDS: Final = {
    "int8": [0, -1, 127, -128],
    "int16": [0, -1, 2**15 - 1, -(2**15)],
    "int32": [0, -1, 2**31 - 1, -(2**31)],
    # The least one is no id.
    "pairs": [0, -1, 2**63 - 1, 1 - 2**63, 2**31, -(2**31) - 1, 2**32, 1 << 62],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a few steps.

    Attributes:
      use: what the loss does with the table.
      dtype: of the ids; "pairs" are those of 64 bits.
      optimizer: one of ``OPTIMIZERS``.
      path: ``"async"`` or ``"sync"``.
      ids: how many there are.
    """

    use: str
    dtype: str
    optimizer: str
    path: str
    ids: int

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in self.__slots__)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.table = jg.HashTable(DIM, capacity_bytes=1 << 20, initializer=INITIAL)
        self.w = nnx.Param(jnp.arange(1.0, DIM + 1))


# ------------------------------------------------------------------------- batches


def known(case: Case) -> Any:
    """Returns the ids of a case: those at the ends of the type, and others."""
    rng = np.random.default_rng(len(str(case)))
    bits = 64 if case.dtype == "pairs" else np.iinfo(case.dtype).bits
    others = rng.integers(1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1, case.ids)
    ends = np.array(ENDS[case.dtype])
    return np.unique(np.concatenate([ends[: case.ids], others]))


def batches(case: Case) -> list[dict[str, Any]]:
    """Returns a batch per step: its ids, int64, and what goes with them."""
    rng, ids = np.random.default_rng(len(str(case)) + case.ids), known(case)
    found = []
    for step in range(STEPS):
        batch = {
            "ids": rng.choice(ids, (BATCH, COUNT)),
            "item": rng.choice(ids, BATCH),
            "weights": rng.integers(0, 3, (BATCH, COUNT)).astype(np.float32),
            "y": rng.normal(size=BATCH).astype(np.float32),
        }
        if case.dtype == "pairs" and case.use in {"bag", "some"}:
            # Of some no id is there, of the second step none of one worker.
            none = rng.random((BATCH, COUNT)) < 0.3
            none[:2] |= step == 1
            batch["ids"] = np.where(none, jg.NO_KEY, batch["ids"])
        found.append(batch)
    return found


def given(case: Case, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch as a user gives it."""
    as_ids = jg.split_keys if case.dtype == "pairs" else lambda x: x.astype(case.dtype)
    there = (batch["ids"] != jg.NO_KEY).astype(np.float32)
    changed = {"ids": as_ids(batch["ids"]), "item": as_ids(batch["item"])}
    return {**batch, **changed, "there": there}


def loss(use: str, look_up: Callable[[Any], Any], w: Any, batch: Any) -> Any:
    """The loss, of what looks rows up."""
    # Bounded: rounding does not grow from step to step.
    rows, there = jnp.tanh(look_up(batch["ids"])), batch["there"][..., None] > 0
    match use:
        case "bag":
            weights = batch["weights"][..., None]
            total = jnp.where(there, rows * weights, 0).sum(1)
        case "two":
            total = rows.sum(1) * jnp.tanh(look_up(batch["item"]))
        case _:
            total = jnp.where(there, rows, 0).sum(1)
    return jnp.mean((jnp.sin(total) @ w - batch["y"]) ** 2)


# ------------------------------------------------------------------ the plain loop


def plainly(case: Case) -> tuple[dict[int, Any], Any]:
    """Returns the rows of all ids that were looked up, and the other parameter."""
    ids, tx = known(case), OPTIMIZERS[case.optimizer]
    rows = jnp.asarray(initial_rows(ids, Column("", DIM, initial=INITIAL)))
    params: Any = {"t": rows, "w": jnp.arange(1.0, DIM + 1)}
    state, shape, seen = tx.init(params), rows.shape, set[int]()

    def total(params: Any, batch: Any) -> Any:
        return loss(case.use, lambda places: params["t"][places], params["w"], batch)

    for batch in batches(case):
        there = batch["ids"] != jg.NO_KEY
        touched = np.unique(batch["ids"][there])
        if case.use == "two":
            touched = np.union1d(touched, batch["item"])
        seen |= {*touched.tolist()}
        places = {name: np.searchsorted(ids, batch[name]) for name in ("ids", "item")}
        placed = {**batch, **places, "there": there.astype(np.float32)}
        grads = jax.grad(total)(params, placed)
        at = np.searchsorted(ids, touched)
        take = lambda x, at=at: x[at] if x.shape == shape else x
        part: Any = jax.tree.map(take, params)
        updates, new = tx.update(*jax.tree.map(take, (grads, state)), part)
        changed = optax.apply_updates(part, updates), new
        put = lambda o, n, at=at: o.at[at].set(n) if o.shape == shape else n
        params, state = jax.tree.map(put, (params, state), changed)
    found = dict(zip(ids.tolist(), np.asarray(params["t"]), strict=True))
    return {key: found[key] for key in seen}, params["w"]


# --------------------------------------------------------------------- the clusters


def check(case: Case, cluster: Cluster | LocalCluster) -> None:
    """Trains both ways and compares the parameters."""
    is_sync = case.path == "sync"

    def loss_of(model: Model, batch: Any) -> Any:
        return loss(case.use, model.table, model.w[...], batch)

    there = jg.Trainer(
        *(Model(), loss_of, OPTIMIZERS[case.optimizer]),
        cluster=cluster,
        strategy=jg.SyncPS(step_timeout_s=20) if is_sync else jg.AsyncPS(),
        sparse="lazy",
    )
    size = BATCH // 2 if is_sync else BATCH
    with there:
        for batch in batches(case):
            data = given(case, batch)
            there.fit(data, steps=1, batch_size=size, progress=False)
        model = there.model()
    rows = np.asarray(model.table.rows[...])[1:]
    found = dict(zip(model.table.keys().tolist(), rows, strict=True))
    due, w = plainly(case)
    assert found.keys() == due.keys(), str(case)
    for key, row in due.items():
        np.testing.assert_allclose(found[key], row, 1e-4, 1e-5, err_msg=f"{key}")
    np.testing.assert_allclose(np.asarray(model.w[...]), w, 1e-4, 1e-5)


def cases(count: int) -> list[Case]:
    """Returns so many cases, in which each value of each choice comes again."""
    rng = random.Random(19)
    choices: list[Sequence[Any]] = [USES, DTYPES, list(OPTIMIZERS), PATHS]
    columns = []
    for values in choices:
        column = [values[n % len(values)] for n in range(count)]
        rng.shuffle(column)
        columns.append(column)
    return [
        Case(use, dtype, optimizer, path, rng.choice([1, 5, 40]))
        for use, dtype, optimizer, path in zip(*columns, strict=True)
    ]


@pytest.fixture(scope="module")
def servers() -> Iterator[Cluster]:
    with connected(ps=3, worker=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalCluster]:
    with LocalCluster(ps=2, workers=2) as cluster:
        yield cluster


KEPT: Final = [
    Case("bag", "pairs", "adam", "async", 5),
]
KEPT_FOR_THE_NIGHT: Final = [
    Case("some", "pairs", "adamw", "sync", 1),
    Case("bag", "pairs", "adagrad", "sync", 40),
    Case("two", "int8", "momentum", "sync", 5),
]


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_hashed_rows_are_trained_as_a_plain_loop_trains_them(
    servers: Cluster, case: Case
) -> None:
    check(case, servers)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*KEPT_FOR_THE_NIGHT, *cases(64)], ids=str)
def test_hashed_rows_are_trained_on_every_path_as_a_plain_loop_trains_them(
    servers: Cluster, case: Case
) -> None:
    check(case, servers)


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.parametrize("case", cases(6), ids=str)
def test_hashed_rows_are_trained_in_processes_as_a_plain_loop_trains_them(
    processes: LocalCluster, case: Case
) -> None:
    check(case, processes)
