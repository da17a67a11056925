"""Rows over a real transport: as many travel as are there, and every update counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.cluster.loop_messages import LoopRequest
from jgraph.errors import RowIdError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.rows.rows import Layout, merge_rows, route_rows, split_rows
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import Plan, plan

LAYOUT, WIDTH, COUNT = Layout((30, 20)), 3, 16


def tables() -> list[jg.Variable]:
    return [
        jg.Variable(f"t{n}", jnp.zeros((size, WIDTH)), device=f"/job:ps/task:{n}")
        for n, size in enumerate(LAYOUT.sizes)
    ]


def counting(cluster: Cluster, shards: list[jg.Variable], total: jg.Variable) -> Plan:
    """Plans a step that adds one to each row of a batch, and counts these rows."""
    worker = cluster.tasks("worker")[0]

    def step(ids: jax.Array) -> jax.Array:
        with jg.device("/job:worker"):
            positions, local = route_rows(ids, layout=LAYOUT, feature="colour")
        rows = [shard[part] for shard, part in zip(shards, local, strict=True)]
        with jg.device("/job:worker"):
            merged = merge_rows(local, rows, layout=LAYOUT)
            ones = split_rows(merged * 0 + 1, local, layout=LAYOUT)
            count = positions.max() + 1
        for shard, part, row, one in zip(shards, local, rows, ones, strict=True):
            shard[part] = row + one
        total[...] = total[...] + count
        return count

    types = jax.ShapeDtypeStruct((COUNT,), jnp.int32)
    return plan(
        trace(step, types, variables=[*shards, total])[0],
        tasks=cluster.tasks(),
        driver=worker,
        default=DeviceSpec.from_string(worker),
    )


def run(session: Session, cluster: Cluster, planned: Plan, data: Any) -> None:
    requests = []
    for number, worker in enumerate(cluster.tasks("worker")):
        program = planned.program.rename_task(planned.program.driver, worker)
        session.put_data(worker, "data", {"ids": data})
        requests.append(
            LoopRequest(
                task=worker,
                handle=session.register(program),
                data="data",
                steps=15,
                batch_size=COUNT,
                seed=number,
                replica=number,
            )
        )
    list(session.run_loops(requests))


def test_no_update_of_a_row_is_lost_between_workers(
    session: Session, cluster: Cluster
) -> None:
    shards = tables()
    total = jg.Variable("total", jnp.zeros((), jnp.int32), device="/job:ps/task:0")
    session.initialize([*shards, total])
    data = np.random.default_rng(0).integers(0, LAYOUT.rows, 400).astype(np.int32)
    run(session, cluster, counting(cluster, shards, total), data)
    values = session.read([*shards, total])
    counted = int(values["total"])
    assert 0 < counted < 2 * 15 * COUNT  # some ids came twice in a batch
    assert sum(float(values[s.name].sum()) for s in shards) == counted * WIDTH


def test_an_id_out_of_range_stops_the_run_and_names_its_feature(
    session: Session, cluster: Cluster
) -> None:
    shards = tables()
    total = jg.Variable("total", jnp.zeros((), jnp.int32), device="/job:ps/task:0")
    session.initialize([*shards, total])
    data = np.full(400, LAYOUT.rows, np.int32)
    with pytest.raises(RowIdError, match="'colour' has the id 50"):
        run(session, cluster, counting(cluster, shards, total), data)
    values = session.read(shards)
    assert not any(v.any() for v in values.values())
