"""Snapshots: what a task holds, as it was at one moment."""

import threading

import jax.numpy as jnp
import numpy as np

from jgraph.client.cluster import Cluster, connect
from jgraph.client.session import Session
from jgraph.graph.variable import Variable
from jgraph.plan.sharding.partitioner import fixed_size_partitioner
from tests.support.servers import Servers

ELEMENTS = 5 << 20  # 20 MB each: read in a piece of its own


def test_a_snapshot_while_others_update_is_of_one_moment(
    session: Session, servers: Servers
) -> None:
    first, second = (
        Variable(
            f"half{i}", ((ELEMENTS,), jnp.float32, jnp.zeros), device="/job:ps/task:0"
        )
        for i in range(2)
    )
    session.initialize([first, second])
    over = threading.Event()

    def step() -> None:
        first[...] = first[...] + 1
        second[...] = second[...] + 1

    def update() -> None:
        with connect(servers.servers[0].target, timeout_s=20) as own:
            updating = own.session()
            while not over.is_set():
                updating.run(step)

    thread = threading.Thread(target=update)
    thread.start()
    try:
        taken = [session.snapshot([first, second]) for _ in range(2)]
    finally:
        over.set()
        thread.join(60)
    for values in taken:
        assert len({*values["half0"], *values["half1"]}) == 1
    assert taken[0]["half0"][0] < taken[-1]["half0"][0]


def test_a_snapshot_joins_shards_and_leaves_nothing_behind(
    session: Session, cluster: Cluster
) -> None:
    table = Variable(
        "table",
        np.arange(12.0).reshape(6, 2),
        device="/job:ps",
        partitioner=fixed_size_partitioner(2),
    )
    count = Variable("count", np.int32(3), device="/job:worker/task:0")
    session.initialize([table, count])
    before = cluster.status().to_dict()["tasks"]
    values = session.snapshot([table, count])
    assert values["table"].tolist() == np.arange(12.0).reshape(6, 2).tolist()
    assert values["count"] == 3
    after = cluster.status().to_dict()["tasks"]
    held = [[task["variable_bytes"] for task in tasks] for tasks in (before, after)]
    assert held[0] == held[1]


def test_what_one_task_holds_is_read_by_one_node(session: Session) -> None:
    several = [
        Variable(f"v{i}", np.float32(i), device="/job:ps/task:1") for i in range(5)
    ]
    session.initialize(several)
    copies = [
        Variable(f"c{i}", ((), jnp.float32, None), device="/job:ps/task:1")
        for i in range(5)
    ]

    def copied() -> None:
        values = [v[...] for v in several]
        for copy, value in zip(copies, values, strict=True):
            copy[...] = value

    (partition,) = [
        p for p in session.plan(copied).program.partitions if p.task == "/job:ps/task:1"
    ]
    reading, writing = partition.nodes
    assert type(reading).__name__ in {"ReadNode", "SegmentNode"}
    assert type(writing).__name__ == "WriteNode"


def test_tasks_forget_what_took_snapshots_and_is_not_there_any_more(
    session: Session, cluster: Cluster
) -> None:
    w = Variable("w", jnp.zeros(2), device="/job:ps/task:0")
    session.initialize([w])
    known = {len(t.programs) for t in cluster.status().tasks}
    for _ in range(3):
        take = session.snapshots.prepared([w])
        take().release()
    told = [len(t.programs) for t in cluster.status().tasks]
    assert max(told) <= max(known) + 2, "the newest, and the one before it"
