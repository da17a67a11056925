"""Every way on which rows of a table are trained, against a plain optax loop.

The loop knows nothing of rows: it has the whole table, ids as wide numbers and a mask
of those that count. A lazy update is its own on the rows of the step alone. The paths
are those of a cluster, run in this process: a program of one worker after the other, or
the contributions of two and then their mean.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph as jg
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.accumulate import MEAN, averaging, contributing, shards_of
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from tests.support.graph_interpreter import Compiled, run_program
from tests.support.plans import FAST
from tests.support.small_tables import travel_whole

DIM, BATCH, COUNT, STEPS = 3, 4, 3, 5
PS: Final = [TaskName(f"/job:ps/task:{n}") for n in range(2)]
WORKER: Final = TaskName("/job:worker/task:0")
TASKS: Final = [*PS, WORKER]

OPTIMIZERS: Final[dict[str, optax.GradientTransformation]] = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.1),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "lamb": optax.lamb(0.1),
    "multi_steps": optax.MultiSteps(optax.adagrad(0.1), 2).gradient_transformation(),
}
WAITING: Final = {"multi_steps"}
DTYPES: Final = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
USES: Final = ("index", "drop", "clip", "bag", "two")
PATHS: Final = ("local", "async", "sync")
CUTS: Final = ("whole", "div", "mod")
SPARSE: Final = ("auto", "exact", "lazy", "off")


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a few steps.

    Attributes:
      use: what the loss does with the table.
      dtype: of the ids.
      optimizer: one of ``OPTIMIZERS``.
      sparse: as for ``Trainer``.
      path: ``"local"``, ``"async"`` or ``"sync"``.
      cut: ``"whole"``, or how the rows lie in three shards.
      rows: of the table.
    """

    use: str
    dtype: str
    optimizer: str
    sparse: str
    path: str
    cut: str
    rows: int

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in self.__slots__)


class Parameters(nn.Module):
    rows: int

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        self.param("t", nn.initializers.normal(), (self.rows, DIM))
        self.param("w", nn.initializers.normal(), (DIM,))
        return ids


# ------------------------------------------------------------------------- batches


def batches(case: Case) -> list[dict[str, Any]]:
    """Returns a batch per step, with ids of every kind that the use allows."""
    rng = np.random.default_rng(len(str(case)))
    last, kind = case.rows - 1, np.iinfo(case.dtype)
    middle = rng.integers(0, case.rows, (BATCH, COUNT))
    chosen = [
        np.concatenate([[[0] * COUNT], middle[1:]]),
        np.full((BATCH, COUNT), last),
        np.array([[0, last, 0]] * BATCH),
        np.full((BATCH, COUNT), 0),
        rng.integers(0, case.rows, (BATCH, COUNT)),
    ]
    no_id = {"bag": -1, "drop": case.rows, "clip": case.rows + 3}.get(case.use)
    if no_id is not None and kind.min <= no_id <= kind.max:
        chosen[1][:2], chosen[3][:], chosen[4][1, :] = no_id, no_id, no_id
    return [
        {
            "ids": ids.astype(case.dtype),
            "item": rng.integers(0, case.rows, BATCH).astype(case.dtype),
            "weights": rng.integers(0, 3, (BATCH, COUNT)).astype(np.float32),
            "y": rng.normal(size=BATCH).astype(np.float32),
        }
        for ids in chosen
    ]


def counted(case: Case, batch: Any) -> tuple[Any, Any]:
    """Returns ids in the table, and which of them count."""
    ids = batch["ids"].astype(np.int64)
    there = (ids >= 0) & (ids < case.rows)
    if case.use == "clip":
        return np.clip(ids, 0, case.rows - 1), np.ones_like(there)
    if case.use == "bag":
        there &= batch["weights"] > 0
    return np.where(there, ids, 0), there


# -------------------------------------------------------------------------- losses


def loss_of(case: Case) -> Callable[[Any, Any], Any]:
    """Returns the loss as a user writes it."""

    def looked_up(t: Any, batch: Any) -> Any:
        ids = batch["ids"]
        match case.use:
            case "bag":
                return jg.embedding_bag(t, ids, batch["weights"])
            case "drop":
                return jnp.take(t, ids, axis=0, mode="fill", fill_value=0).sum(1)
            case "clip":
                return jnp.take(t, ids, axis=0, mode="clip").sum(1)
            case "two":
                return t[ids].sum(1) * jnp.take(t, batch["item"], axis=0)
            case _:
                return t[ids].sum(1)

    return lambda params, batch: squares(looked_up(params["t"], batch), params, batch)


def squares(rows: Any, params: Any, batch: Any) -> Any:
    return jnp.mean((jnp.sin(rows) @ params["w"] - batch["y"]) ** 2)


def plain_loss(params: Any, use: str, ids: Any, there: Any, batch: Any) -> Any:
    """The same loss on a whole table, by ids that are all there."""
    rows = params["t"][ids] * there[..., None]
    total = rows.sum(1)
    if use == "bag":
        weights = jnp.where(there, batch["weights"], 0)
        total = (rows * weights[..., None]).sum(1)
        total = total / jnp.maximum(weights.sum(1), 1)[:, None]
    elif use == "two":
        total = total * params["t"][batch["item"]]
    return squares(total, params, batch)


# ------------------------------------------------------------------ the plain loop


@cache
def compiled_step(use: str, optimizer: str) -> Callable[..., Any]:
    """Returns a step of plain optax, on a whole table."""
    tx = OPTIMIZERS[optimizer]

    def step(params: Any, state: Any, ids: Any, there: Any, batch: Any) -> Any:
        grads = jax.grad(plain_loss)(params, use, ids, there, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return jax.jit(step)


def plainly(case: Case, params: Any) -> Any:
    """Returns the parameters after a plain loop."""
    tx = OPTIMIZERS[case.optimizer]
    state, step = tx.init(params), compiled_step(case.use, case.optimizer)
    shape = params["t"].shape
    for batch in batches(case):
        ids, there = counted(case, batch)
        known = {**batch, "item": batch["item"].astype(np.int64)}
        new, new_state, grads = step(params, state, ids, there, known)
        if case.sparse == "lazy" and case.optimizer not in WAITING:
            touched = np.unique(ids[there])
            if case.use == "two":
                touched = np.union1d(touched, known["item"])
            take = lambda x, t=touched: x[t] if x.shape == shape else x
            old = params, state
            updates, new_state = tx.update(*jax.tree.map(take, (grads, state, params)))
            new = optax.apply_updates(take_all(take, params), updates)
            put = lambda o, n, t=touched: o.at[t].set(n) if o.shape == shape else n
            new, new_state = jax.tree.map(put, old, (new, new_state))
        params, state = new, new_state
    return params


def take_all(take: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(take, tree)


# ------------------------------------------------------------------------ the paths


def locally(case: Case, step: TrainStep) -> dict[str, Any]:
    """Returns values after steps in one process."""
    given = batches(case)
    graph = step.graph(given[0])
    run = jax.jit(lambda v, f: eval_graph(graph, v, f)[1], compiler_options=FAST)
    values = step.initial_values
    for n, batch in enumerate(given):
        values = run(values, [*jax.tree.leaves(batch), np.int32(n), np.int32(0)])
    return dict(zip(step.names, values, strict=True))


def planned(graph: Graph, driver: TaskName) -> Plan:
    home = DeviceSpec.from_string(driver)
    return plan(graph, tasks=TASKS, driver=driver, default=home)


def feeds_of(graph: Graph, *values: Any) -> dict[str, Any]:
    names = (feed.name for feed in graph.feeds)
    leaves = jax.tree.leaves(values)
    return dict(zip(names, map(np.asarray, leaves), strict=True))


def stored(step: TrainStep) -> dict[tuple[str, str], Any]:
    return {
        ("", part.name): np.array(part.init())  # type: ignore[misc]
        for variable in step.variables
        for part in variable.shards
    }


def joined(step: TrainStep, store: Any) -> dict[str, Any]:
    found = {}
    for variable in step.variables:
        parts = [store["", part.name] for part in variable.shards]
        cut = variable.spec.sharding
        found[variable.name] = cut.joined(parts) if cut else parts[0]
    return found


def one_after_the_other(case: Case, step: TrainStep) -> dict[str, Any]:
    """Returns values after steps of two workers, one at a time."""
    given, compiled = batches(case), Compiled()
    graph = step.graph(given[0])
    program, store = planned(graph, WORKER).program, stored(step)
    for n, batch in enumerate(given):
        feeds = feeds_of(graph, batch, np.int32(n), np.int32(n % 2))
        run_program(program, store, feeds, compiled, FAST)
    return joined(step, store)


def together(case: Case, step: TrainStep) -> dict[str, Any]:
    """Returns values after steps of two workers at once, each with half of a batch."""
    given, compiled = batches(case), Compiled()
    halves = [[jax.tree.map(lambda x, n=n: x[n::2], b) for n in (0, 1)] for b in given]
    sync = SyncStep(step, halves[0][0], contributions=2)
    applied = planned(sync.apply_graph(), PS[0]).program
    used = {v.name for p in applied.partitions for v in p.variables}
    graph = sync.gradient_graph({name for name in used if name.startswith(MEAN)})
    contribution = contributing(planned(graph, WORKER).program, "gate")
    update = averaging(applied, "gate", {PS[0], *shards_of(contribution)})
    store = stored(step)
    for n, pair in enumerate(halves):
        for replica, batch in enumerate(pair):
            feeds = feeds_of(graph, batch, *map(np.int32, (n, replica, replica)))
            run_program(contribution, store, feeds, compiled, FAST)
        run_program(update, store, {}, compiled, FAST)
    return joined(step, store)


RUNS: Final = {"local": locally, "async": one_after_the_other, "sync": together}


def check(case: Case) -> None:
    """Trains both ways and compares the parameters."""
    first = batches(case)[0]
    ids = as_dataset(first["ids"])
    adapter = adapt(Parameters(case.rows), loss_of(case), seed=0, data=ids)
    arrangement = None
    if case.path != "local":
        arrangement = Arrangement(
            place=lambda sizes: dict(zip(sizes, itertools.cycle(PS))),
            partitioner=None if case.cut == "whole" else jg.fixed_size_partitioner(3),
            partition_strategy="div" if case.cut == "whole" else case.cut,
        )
    sparse: Any = case.sparse
    step = TrainStep(
        adapter, OPTIMIZERS[case.optimizer], arrangement=arrangement, sparse=sparse
    )
    compare(case, adapter.params, RUNS[case.path](case, step))


def compare(case: Case, initial: Any, found: dict[str, Any]) -> None:
    for name, wanted in plainly(case, initial).items():
        np.testing.assert_allclose(
            found[f"params/{name}"], wanted, 1e-4, 1e-5, err_msg=f"{case}: {name}"
        )


# ------------------------------------------------------------------------- the cases


def cases(count: int) -> list[Case]:
    """Returns so many cases, in which each value of each choice comes again."""
    rng = random.Random(19)
    choices: list[Sequence[Any]] = [
        *(USES, DTYPES, list(OPTIMIZERS), SPARSE, PATHS, CUTS)
    ]
    columns = []
    for values in choices:
        column = [values[n % len(values)] for n in range(count)]
        rng.shuffle(column)
        columns.append(column)
    return [
        Case(use, dtype, optimizer, sparse, path, cut, rng.choice(sizes(dtype)))
        for use, dtype, optimizer, sparse, path, cut in zip(*columns, strict=True)
    ]


def sizes(dtype: str) -> list[int]:
    # The largest number of a byte is a row, where JAX allows it; tables may be small.
    return [{"int8": 127, "uint8": 256}.get(dtype, 300), 40, 13, 1]


KEPT: Final = [
    # Row 0 lost its gradient.
    Case("index", "int32", "momentum", "exact", "async", "whole", 40),
    # Padding of a bag was row 0, and the largest id was padding.
    Case("bag", "int8", "adamw", "lazy", "local", "whole", 128),
    Case("bag", "uint8", "adagrad", "auto", "async", "div", 256),
    # Accumulated gradients were lost.
    Case("index", "uint16", "multi_steps", "lazy", "async", "mod", 40),
    # A small table travelled whole, and rows that no id named were updated.
    Case("drop", "uint32", "momentum", "lazy", "sync", "div", 1),
    # Ids of two shards are put together on a ps.
    Case("index", "uint32", "rmsprop", "auto", "sync", "div", 40),
]
KEPT_FOR_THE_NIGHT: Final = [
    Case("two", "int16", "adamw", "auto", "async", "mod", 40),  # as the first above
    Case("drop", "int32", "momentum", "lazy", "sync", "mod", 40),  # as the last
    Case("bag", "int16", "adam", "lazy", "async", "whole", 300),
    Case("two", "int32", "lamb", "lazy", "async", "mod", 13),
]


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_rows_are_trained_as_a_plain_loop_trains_them(case: Case) -> None:
    check(case)


SMALL: Final = [
    Case("index", "int32", "adam", "auto", "async", "whole", 40),
    Case("two", "uint8", "lamb", "exact", "sync", "whole", 40),
    Case("drop", "int16", "sgd", "auto", "sync", "whole", 13),
    Case("clip", "uint32", "multi_steps", "auto", "async", "whole", 40),
    Case("bag", "int32", "adagrad", "auto", "async", "whole", 40),
    Case("index", "int32", "momentum", "auto", "async", "mod", 40),
    Case("index", "int32", "momentum", "lazy", "async", "whole", 40),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_tables_are_trained_as_a_plain_loop_trains_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    travel_whole(monkeypatch)
    check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", cases(300), ids=str)
def test_small_tables_are_trained_on_every_path_as_a_plain_loop_trains_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    travel_whole(monkeypatch)
    check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*KEPT_FOR_THE_NIGHT, *cases(300)], ids=str)
def test_rows_are_trained_on_every_path_as_a_plain_loop_trains_them(case: Case) -> None:
    check(case)


# -------------------------------------------------------------------- in processes


IN_PROCESSES: Final = [c for c in [*KEPT, *KEPT_FOR_THE_NIGHT] if c.path != "local"]


@pytest.fixture(scope="module")
def processes() -> Iterator[jg.LocalCluster]:
    with jg.LocalCluster(ps=2, workers=2) as cluster:
        yield cluster


def in_processes(case: Case, cluster: jg.LocalCluster) -> dict[str, Any]:
    """Returns values after steps of one worker each, or of two at once."""
    kind = jg.SyncPS if case.path == "sync" else jg.AsyncPS
    cut = None if case.cut == "whole" else jg.fixed_size_partitioner(3)
    strategy: Any = kind(
        variable_partitioner=cut,
        partition_strategy="mod" if case.cut == "mod" else "div",
    )
    there = jg.Trainer(
        *(Parameters(case.rows), loss_of(case), OPTIMIZERS[case.optimizer]),
        cluster=cluster,
        strategy=strategy,
        sparse=case.sparse,  # type: ignore[arg-type]  # one of SPARSE
    )
    size = BATCH // 2 if case.path == "sync" else BATCH
    with there:
        for batch in batches(case):
            there.fit(batch, steps=1, batch_size=size, progress=False)
        return dict(zip(there.names, there.current_values(), strict=True))


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.parametrize("case", IN_PROCESSES, ids=str)
def test_rows_are_trained_in_processes_as_a_plain_loop_trains_them(
    processes: jg.LocalCluster, case: Case
) -> None:
    ids = as_dataset(batches(case)[0]["ids"])
    adapter = adapt(Parameters(case.rows), loss_of(case), seed=0, data=ids)
    compare(case, adapter.params, in_processes(case, processes))
