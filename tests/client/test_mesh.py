"""Tensor parallelism inside a task, over four devices of one process."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jgraph as jg
from jgraph.client.session import Session
from jgraph.errors import ConfigError, DeviceCountError, PlacementError
from jgraph.launch.local.cluster import LocalCluster
from jgraph.plan.plan import plan
from jgraph.runtime.store.local_mesh import layouts_of
from tests.support.plans import DRIVER, TASKS, WORKERS
from tests.support.servers import Servers

FOUR = {"JAX_NUM_CPU_DEVICES": "4"}
WORKER = "/job:worker/task:0"
PS = "/job:ps/task:0"
MODEL = jg.mesh(model=4)
X = np.ones((4, 4), np.float32)


def by(*axes: str | None) -> NamedSharding:
    return NamedSharding(MODEL, P(*axes))


def loss(w1: Any, w2: Any, x: Any) -> Any:
    """Two layers as Megatron spreads them: by columns, then by rows."""
    w1 = jax.lax.with_sharding_constraint(w1, by(None, "model"))
    w2 = jax.lax.with_sharding_constraint(w2, by("model", None))
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w1), by(None, "model"))
    return ((hidden @ w2) ** 2).mean()


def weights() -> tuple[Any, Any]:
    first = np.linspace(-1, 1, 3 * 16, dtype=np.float32).reshape(3, 16)
    return first, np.linspace(1, -1, 16 * 2, dtype=np.float32).reshape(16, 2)


def training_step(w1: jg.Variable, w2: jg.Variable) -> Any:
    @jg.function(symbolic="batch, ...")
    def step(x: Any) -> Any:
        def placed(first: Any, second: Any) -> Any:
            with jg.device(WORKER):
                return loss(first, second, x)

        value, grads = jax.value_and_grad(placed, (0, 1))(w1[...], w2[...])
        for variable, gradient in zip((w1, w2), grads, strict=True):
            variable[...] = variable[...] - 0.1 * gradient
        return value

    return step


def alone(weights: tuple[Any, Any], x: Any) -> tuple[Any, tuple[Any, Any]]:
    """The same step of JAX on one device, without constraints."""

    def plain(weights: tuple[Any, Any]) -> Any:
        return ((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2).mean()

    value, (first, second) = jax.value_and_grad(plain)(weights)
    return value, (weights[0] - 0.1 * first, weights[1] - 0.1 * second)


@pytest.fixture(scope="module")
def spread() -> Iterator[LocalCluster]:
    with LocalCluster(ps=1, workers=1, env=FOUR) as cluster:
        yield cluster


@pytest.mark.procs
@pytest.mark.parametrize("home", [PS, WORKER])
def test_a_step_over_four_devices_is_that_of_one(
    spread: LocalCluster, home: str
) -> None:
    first, second = weights()
    w1 = jg.Variable("w1", first, device=home, container=home)
    w2 = jg.Variable("w2", second, device=home, container=home)
    step = training_step(w1, w2)
    new = (first, second)
    with spread.session() as session:
        for size in (4, 4, 6):
            x = np.linspace(-1, 1, size * 3, dtype=np.float32).reshape(size, 3)
            value, new = alone(new, x)
            np.testing.assert_allclose(session.run(step, x), value, rtol=1e-5)
        after = session.read([w1, w2])
    np.testing.assert_allclose(after["w1"], new[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after["w2"], new[1], rtol=1e-5, atol=1e-6)


def stored(servers: Servers, name: str) -> Any:
    """Returns the value of a variable as the worker has it."""
    server: Any = servers.server(WORKER)._server
    return server.service.runtime.store._entries["", name].value


def test_parameters_and_moments_lie_in_pieces_as_their_constraints_say(
    session: Session, servers: Servers
) -> None:
    tx = optax.adam(0.1)
    state = {"w": weights(), "opt": tx.init(weights()), "b": np.ones(2, np.float32)}
    leaves, tree = jax.tree.flatten(state)
    cells = [jg.Variable(f"v{n}", x, device=WORKER) for n, x in enumerate(leaves)]

    def trained(state: Any, x: Any) -> Any:
        def placed(w: Any) -> Any:
            return loss(w[0], w[1], x) + state["b"].sum()

        value, grads = jax.value_and_grad(placed)(state["w"])
        updates, opt = tx.update(grads, state["opt"], state["w"])
        w = optax.apply_updates(state["w"], updates)
        return value, {"w": w, "opt": opt, "b": state["b"] + 1}

    @jg.function
    def step(x: Any) -> Any:
        with jg.device(WORKER):
            now = jax.tree.unflatten(tree, [cell[...] for cell in cells])
            value, new = trained(now, x)
        for cell, leaf in zip(cells, jax.tree.leaves(new), strict=True):
            cell[...] = leaf
        return value

    x, alone = np.ones((4, 3), np.float32), jax.jit(trained)
    for turn in range(3):
        value, state = alone(state, x)
        np.testing.assert_allclose(session.run(step, x), value, rtol=1e-5)
        for cell, leaf in zip(cells, jax.tree.leaves(state), strict=True):
            parts = stored(servers, cell.name).addressable_shards
            size = leaf.size // 4 if leaf.ndim == 2 else leaf.size
            assert [part.data.size for part in parts] == [size] * 4
        if turn == 1:  # whoever reads and writes them knows nothing of that
            after = session.read(cells)
            session.write({cell: after[cell.name] for cell in cells})
    for cell, leaf in zip(cells, jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(
            session.read([cell])[cell.name], leaf, rtol=1e-5, atol=1e-6
        )


def test_code_without_a_mesh_uses_and_replaces_what_lies_in_pieces(
    session: Session, servers: Servers
) -> None:
    first, _ = weights()
    w = jg.Variable("w", first, device=WORKER)

    def rows(ids: Any) -> Any:
        return w[ids]

    def doubled() -> None:
        w[...] = w[...] * 2

    @jg.function
    def spread() -> Any:
        with jg.device(WORKER):
            return jax.lax.with_sharding_constraint(w[...], by(None, "model")) + 1

    np.testing.assert_array_equal(session.run(spread), first + 1)
    assert len(stored(servers, "w").addressable_shards) == 4
    ids = np.array([2, 0], np.int32)
    np.testing.assert_array_equal(session.run(rows, ids), first[ids])
    np.testing.assert_array_equal(session.run(spread), first + 1)
    session.run(doubled)
    assert len(stored(servers, "w").addressable_shards) == 1
    np.testing.assert_array_equal(session.run(spread), 2 * first + 1)
    np.testing.assert_array_equal(session.read([w])["w"], 2 * first)


def test_each_device_computes_its_part(session: Session) -> None:
    @jg.function
    def where(x: Any) -> Any:
        @jax.shard_map(mesh=MODEL, in_specs=P(None, "model"), out_specs=P("model"))
        def each(part: Any) -> Any:
            total = jax.lax.psum(part.sum(), "model")
            me = jax.lax.axis_index("model")
            return jnp.stack([me, part.shape[1], total.astype(jnp.int32)])[None]

        with jg.device(WORKER):
            return each(x)

    told = session.run(where, np.ones((2, 16), np.float32))
    assert told.tolist() == [[device, 4, 32] for device in range(4)]


def test_code_that_takes_nothing_lies_over_its_mesh(session: Session) -> None:
    def table() -> Any:
        with jg.device(WORKER):
            rows = jnp.arange(16.0).reshape(4, 4)
            return jnp.sin(jax.lax.with_sharding_constraint(rows, by("model")))

    wanted = np.sin(np.arange(16, dtype=np.float32).reshape(4, 4))
    np.testing.assert_allclose(session.run(table), wanted, rtol=1e-6, atol=1e-6)


def test_a_segment_is_compiled_for_the_devices_of_its_mesh() -> None:
    w1, w2 = (jg.Variable(f"w{n}", w, device=PS) for n, w in enumerate(weights()))
    step = training_step(w1, w2).__wrapped__
    graph = jg.function(step).graph(np.ones((4, 3), np.float32))
    made = plan(graph, tasks=TASKS, driver=DRIVER)
    exports = [
        jax.export.deserialize(bytearray(code.exported))
        for code in made.program.segments
    ]
    assert sorted(export.nr_devices for export in exports)[-2:] == [1, 4]
    (export,) = [export for export in exports if export.nr_devices == 4]
    arguments, results = layouts_of(export, "loss")
    jitted = jax.jit(export.call, in_shardings=arguments, out_shardings=results)
    text = str(jitted.lower(*export.in_avals).compile().as_text())
    assert "num_partitions=4" in text
    assert re.search(r"f32\[4,4\]\S* dot\(", text)  # a quarter of 16 columns


def test_a_task_with_fewer_devices_says_how_to_get_them(session: Session) -> None:
    many = NamedSharding(jg.mesh(model=8), P())
    with pytest.raises(
        DeviceCountError, match=r"mesh of 8 devices, and this task has 4 .*DEVICES=8"
    ):
        session.run(lambda x: jax.lax.with_sharding_constraint(x, many), X)


def test_two_meshes_in_one_segment_are_refused_with_both_lines() -> None:
    two = NamedSharding(jg.mesh(rows=2), P("rows"))

    def step(x: Any) -> Any:
        with jg.device(WORKERS[1]):
            x = jax.lax.with_sharding_constraint(x, by("model"))
            return jax.lax.with_sharding_constraint(x * 2, two)

    lines = r"test_mesh.py:\d+.* mesh of 2 devices.*test_mesh.py:\d+.* one of 4"
    with pytest.raises(PlacementError, match=lines):
        plan(jg.function(step).graph(X), tasks=TASKS, driver=DRIVER)


@pytest.mark.parametrize("axes", [{}, {"model": 0}])
def test_a_mesh_without_devices_is_refused(axes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="sizes from 1 on"):
        jg.mesh(**axes)
