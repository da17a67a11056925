"""Gradients and parameters in fewer bits between workers and parameter servers."""

from collections.abc import Collection, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph import fixed_size_partitioner
from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.accumulate import averaging, contributing
from jgraph.plan.program.nodes import ContributeNode
from jgraph.plan.program.replicas import for_replica
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.compress import (
    GradientDtype,
    begun,
    compressed,
    expanded,
)
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.async_runner import AsyncPS
from jgraph.train.strategies.sync_runner import SyncPS
from jgraph.train.trainer import Trainer
from tests.support.graph_interpreter import Compiled, run_program
from tests.support.models import NnxMLP, cross_entropy, data, nnx_loss
from tests.support.servers import connected

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
BATCH: Any = tuple(data(8))
TX = optax.adam(1e-2)


class Wide(nnx.Module):
    """Computes in ``dtype``; parameters are float32."""

    def __init__(self, dtype: Any, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 64, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(64, 2, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.first(x))).astype(jnp.float32)


def make_step(model: nnx.Module, shards: int = 1, **options: Any) -> TrainStep:
    cut = fixed_size_partitioner(shards)
    on_ps = Arrangement(lambda sizes: dict.fromkeys(sizes, PS), cut)
    adapter = adapt(model, nnx_loss, seed=0)
    return TrainStep(adapter, TX, arrangement=on_ps, **options)


def planned(graph: Graph) -> Plan:
    here = DeviceSpec.from_string(WORKER)
    return plan(graph, tasks=[PS, WORKER], driver=WORKER, default=here)


def sent(found: Plan, src: TaskName, dst: TaskName) -> int:
    return sum(e.nbytes for e in found.edges if (e.src, e.dst) == (src, dst))


@pytest.mark.parametrize("shards", [1, 2])
def test_parameters_that_are_cast_travel_as_what_they_are_cast_to(shards: int) -> None:
    full, half = (
        planned(make_step(Wide(dtype, rngs=nnx.Rngs(0)), shards).graph(BATCH))
        for dtype in (None, jnp.bfloat16)
    )
    assert sent(half, PS, WORKER) == sent(full, PS, WORKER) / 2
    assert sent(half, WORKER, PS) <= sent(full, WORKER, PS) * 0.51
    (update,) = [s for s in half.segments if s.task == PS and s.updates]
    part = "" if shards == 1 else "/part_1"
    assert f"params/first/kernel{part}" in update.updates
    types = {v.name: v.dtype for v in half.graph.variables}
    assert types[f"params/first/kernel{part}"] == jnp.float32


def test_parameters_of_synchronous_training_travel_as_what_they_are_cast_to() -> None:
    def contribution(dtype: Any) -> Plan:
        step = SyncStep(
            make_step(Wide(dtype, rngs=nnx.Rngs(0))), BATCH, contributions=2
        )
        names = {f"mean/params/{n}/kernel" for n in ("first", "last")}
        return planned(step.gradient_graph(names))

    full, half = contribution(None), contribution(jnp.bfloat16)
    assert sent(half, PS, WORKER) == sent(full, PS, WORKER) / 2
    nodes = [n for p in contributing(half.program, "g").partitions for n in p.nodes]
    (contributed,) = [n for n in nodes if isinstance(n, ContributeNode)]
    assert len(contributed.variables) == 2


@pytest.mark.combined
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 2), ("int8", 3.5)])
def test_contributions_take_fewer_bytes_and_are_summed_as_float32(
    dtype: GradientDtype, factor: float, shards: int
) -> None:
    def contribution(dtype: GradientDtype | None) -> Plan:
        model = Wide(None, rngs=nnx.Rngs(0))
        step = SyncStep(make_step(model, shards, gradient_dtype=dtype), BATCH, 2)
        parts = [f"/part_{i}" for i in range(shards)] if shards > 1 else [""]
        return planned(
            step.gradient_graph({f"mean/params/first/kernel{part}" for part in parts})
        )

    plain, small = contribution(None), contribution(dtype)
    least = sent(plain, WORKER, PS) / factor
    assert sent(small, WORKER, PS) <= least * 1.1 + 16
    assert f"gradients travel as {dtype}" in str(small)
    on_ps, on_worker = (
        contributing(small.program, "gate").partition(task) for task in (PS, WORKER)
    )
    (node,) = [n for n in on_ps.nodes if isinstance(n, ContributeNode)]
    assert {on_ps.values[v].dtype for v in node.values} == {"float32"}
    # What is not contributed has no left-overs either.
    kernel = "params/first/kernel"
    assert {v.name.removeprefix("residual/0/") for v in on_worker.variables} == {
        *(kernel, f"before/{kernel}", "seen")
    }


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("int8", 0.5 / 127)])
def test_compressed_values_are_near_and_what_is_missing_is_known(
    dtype: GradientDtype, error: float
) -> None:
    value = jnp.asarray(np.random.default_rng(0).normal(size=(7, 5)), jnp.float32)
    found = expanded(compressed(value, dtype))
    assert jnp.abs(found - value).max() <= error * jnp.abs(value).max()
    empty, zeros = jnp.zeros((0, 3)), jnp.zeros(3)
    assert expanded(compressed(empty, dtype)).shape == (0, 3)
    assert expanded(compressed(zeros, dtype)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_is_not_finite_stays_so(dtype: GradientDtype, bad: float) -> None:
    found = expanded(compressed(jnp.array([1.0, bad]), dtype))
    assert not jnp.isfinite(found).all()


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 2), ("int8", 3.5)])
def test_gradients_take_fewer_bytes_and_the_plan_says_so(
    dtype: GradientDtype, factor: float
) -> None:
    plain = planned(make_step(Wide(None, rngs=nnx.Rngs(0))).graph(BATCH))
    step = make_step(Wide(None, rngs=nnx.Rngs(0)), gradient_dtype=dtype)
    small = planned(step.graph(BATCH))
    assert sent(plain, WORKER, PS) >= factor * sent(small, WORKER, PS)
    assert sent(plain, PS, WORKER) == sent(small, PS, WORKER)
    assert f"gradients travel as {dtype}" in str(small)
    assert small.variable_tasks["", "residual/0/params/first/kernel"] == WORKER


def test_what_rounding_takes_away_is_sent_later() -> None:
    step = make_step(NnxMLP(rngs=nnx.Rngs(0)), gradient_dtype="int8")
    assert step.compression is not None
    program = planned(step.graph(BATCH)).program
    held = step.compression.residuals
    values: list[Any] = [np.asarray(v) for v in step.initial_values]
    store = {("", n): v for n, v in zip(step.names, values, strict=True)}
    store |= {("", v.name): np.zeros(v.shape, np.float32) for v in held}
    feeds = {"batch[0]": BATCH[0], "batch[1]": BATCH[1], "step": 0, "replica": 0}
    given = {n: np.asarray(feeds[n]) for n, _ in program.feeds}
    name = "params/layers/0/kernel"
    grads = jax.grad(nnx_loss)(NnxMLP(rngs=nnx.Rngs(0)), BATCH)
    exact = np.asarray(grads.layers[0].kernel[...])
    run_program(program, store, given)
    arrived = store["", f"opt/0/mu/{name[7:]}"] / 0.1  # of adam with b1 = 0.9
    left = store["", f"residual/0/{name}"]
    assert np.abs(left).max() > 0
    np.testing.assert_allclose(arrived + left, exact, 1e-4, 1e-6)


class Slope(nnx.Module):
    """Its gradient is the mean of the batch, wherever it is."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(50))

    def __call__(self, x: Any) -> Any:
        return x @ self.w[...]


@final
class Together:
    """Workers of ``SyncPS`` in one process; who counts is up to the test."""

    def __init__(self, dtype: GradientDtype, replicas: int, wanted: int) -> None:
        batch = jax.ShapeDtypeStruct((1, 50), jnp.float32)
        on_ps = Arrangement(lambda sizes: dict.fromkeys(sizes, PS))
        adapter = adapt(Slope(), lambda model, x: model(x).mean(), seed=0)
        tx = optax.sgd(1.0)
        step = TrainStep(adapter, tx, arrangement=on_ps, gradient_dtype=dtype)
        sync = SyncStep(step, batch, wanted, replicas)
        self._apply = averaging(planned(sync.apply_graph()).program, "gate", [PS])
        read = {v.name for p in self._apply.partitions for v in p.variables}
        gradient = sync.gradient_graph(read)
        program = contributing(planned(gradient).program, "gate")
        self._programs = [for_replica(program, n) for n in range(replicas)]
        self._compiled: Compiled = {}
        self.store: dict[tuple[str, str], Any] = {
            ("", v.name): np.asarray(value)
            for v, value in zip(step.variables, step.initial_values, strict=True)
        }
        for each in (None, *range(replicas)):
            for variable in begun(gradient, each):
                zeros = np.zeros(variable.shape, variable.dtype)
                self.store["", variable.name] = zeros

    def contribute(self, replica: int, x: Any) -> None:
        """A worker's step; its contribution waits."""
        feeds = {"batch": x[None], "step": 0, "replica": replica, "slot": replica}
        program = self._programs[replica]
        given = {n: np.asarray(feeds[n], t.dtype) for n, t in program.feeds}
        run_program(program, self.store, given, self._compiled)

    def update(self, counted: Collection[int]) -> None:
        """Applies the mean of some of what waits, and drops the others."""
        for key in [k for k in self.store if "@" in k[1]]:
            if int(key[1].rpartition("@")[2]) not in counted:
                del self.store[key]
        run_program(self._apply, self.store, {}, self._compiled)


@pytest.mark.parametrize(
    ("dtype", "drops", "steps"),
    [
        ("int8", True, 200),
        *(
            pytest.param(dtype, drops, 1600, marks=pytest.mark.nightly)
            for dtype in ("int8", "bfloat16")
            for drops in (True, False)
        ),
    ],
)
def test_rounding_of_contributions_that_are_dropped_is_made_good(
    dtype: GradientDtype, drops: bool, steps: int
) -> None:
    rng = np.random.default_rng(0)
    together = Together(dtype, replicas=3, wanted=2)
    due, errors = np.zeros(50), []
    for step in range(1, steps + 1):
        # A worker may also miss updates between two of its contributions.
        taking_part = rng.permutation(3)[: rng.integers(2, 4) if drops else 2]
        grads = {int(n): rng.normal(size=50).astype(np.float32) for n in taking_part}
        counted = list(grads)[:2]
        for n, grad in grads.items():
            together.contribute(n, grad)
        together.update(counted)
        due -= np.mean([grads[n].astype(np.float64) for n in counted], axis=0)
        if step in (100, 200, 400, 1600):
            error = together.store["", "params/w"] - due
            errors.append(np.sqrt((error**2).mean()))
    once = {"int8": 2.5 / 127, "bfloat16": 2**-8}[dtype]
    assert max(errors) < once, errors


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=1, worker=2) as cluster:
        yield cluster


class Rows(nnx.Module):
    """A table that goes by rows, and a layer that does not."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(20_000, 4, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(self.table(ids))


def test_tables_that_go_by_rows_leave_nothing_over(cluster: Cluster) -> None:
    trainer = Trainer(
        Rows(rngs=nnx.Rngs(0)),
        nnx_loss,
        optax.sgd(0.1),
        cluster=cluster,
        strategy=AsyncPS(gradient_dtype="int8"),
    )
    batch = np.arange(64) * 300, np.arange(64) % 2
    trainer.fit(batch, steps=2, batch_size=8, progress=False)
    query = frame(variable_query=pb.VariableQuery())
    stored = body_of(cluster.call("Master.Variables", query)).variables
    assert {(v.task, v.name) for v in stored if v.task.startswith("/job:worker")} == {
        (f"/job:worker/task:{n}", f"residual/{n}/params/last/{leaf}")
        for n in (0, 1)
        for leaf in ("bias", "kernel")
    }
    trainer.close()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(
            AsyncPS(gradient_dtype="bfloat16", max_staleness=1),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            AsyncPS(gradient_dtype="int8", max_staleness=1), marks=pytest.mark.nightly
        ),
        pytest.param(SyncPS(gradient_dtype="int8"), marks=pytest.mark.nightly),
    ],
    ids=["bfloat16", "int8", "int8 in step"],
)
def test_training_with_compressed_gradients_converges_as_without(
    cluster: Cluster, strategy: AsyncPS | SyncPS
) -> None:
    def final_loss(**options: Any) -> float:
        model = NnxMLP(rngs=nnx.Rngs(0))
        trainer = Trainer(model, nnx_loss, optax.adam(3e-2), **options)
        for _ in range(2):  # left-overs begin anew
            trainer.fit(data(), steps=40, batch_size=8, progress=False)
        loss = trainer.evaluate(data())["loss"]
        assert len(trainer.current_values()) == len(trainer.names)
        trainer.close()
        return loss

    exact, found = final_loss(), final_loss(cluster=cluster, strategy=strategy)
    chance = float(cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1, int)))
    assert exact < chance / 2
    assert abs(found - exact) < 0.1


def test_unknown_gradient_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_dtype is 'int4'; give 'bfloat16'"):
        AsyncPS(gradient_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gradient_dtype is 'int4'; give 'bfloat16'"):
        SyncPS(gradient_dtype="int4")  # type: ignore[arg-type]
