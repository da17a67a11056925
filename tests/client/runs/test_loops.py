"""Between-graph replication: every worker's server runs its own loop over one state."""

import gc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.cluster import Cluster
from jgraph.client.runs import loops as loop_handle
from jgraph.client.session import Session
from jgraph.cluster.loop_messages import LoopReport, LoopRequest, report_of
from jgraph.errors import ClusterBusyError, DataError, DeadlineError, FeedError, JGError
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from tests.support.counted_loops import BATCH, WORKERS, ledger, requests


def test_every_update_of_two_concurrent_loops_counts_exactly_once(
    session: Session, cluster: Cluster
) -> None:
    reports = list(session.run_loops(requests(session, cluster, steps=60)))
    values = session.read([ledger(), Variable("count", jnp.int32(0))])
    expected = np.zeros((2, 64))
    expected[:, :60] = 1
    np.testing.assert_array_equal(values["ledger"], expected)
    assert values["count"] == 120
    for replica in range(2):
        own = [r for r in reports if r.replica == replica]
        assert np.concatenate([r.steps for r in own]).tolist() == list(range(60))
        assert [r.state for r in own if r.state != "running"] == ["done"]
        parts = {"wait", "input", "pull", "compute", "push", "other"}
        assert set().union(*(r.times for r in own)) == parts
        total = sum(sum(r.times.values()) for r in own)
        assert total <= own[-1].seconds[-1] if own[-1].seconds.size else total > 0


def test_loops_keep_their_session_which_has_their_programs(cluster: Cluster) -> None:
    session = cluster.session()
    loops = session.run_loops(requests(session, cluster, steps=3))
    still_there = weakref.ref(session)
    del session
    gc.collect()
    assert still_there() is not None
    assert {r.state for r in loops if r.state != "running"} == {"done"}
    del loops
    gc.collect()
    assert still_there() is None


def test_loop_that_ended_can_be_asked_for_what_was_on_its_way(
    session: Session, cluster: Cluster
) -> None:
    orders = requests(session, cluster, steps=20)
    loops = session.run_loops(orders)
    told = [report for report in loops if report.replica == 0]

    def account(after: int) -> LoopReport:
        order = pb.StopLoop(
            loop=f"{loops._name}-0", task=WORKERS[0], account=True, after=after
        )
        reply = cluster.call("Master.StopLoop", frame(stop_loop=order))
        return report_of(orders[0], reply)

    assert account(after=0).steps.tolist() == list(range(20))
    last = account(after=told[-1].number - 1)
    assert last.number == told[-1].number
    assert last.steps.tolist() == told[-1].steps.tolist()
    assert sum(lease.batches for lease in account(after=0).done) == 20
    assert account(after=told[-1].number).steps.size == 0


def test_each_epoch_shows_every_example_of_the_worker_once(
    session: Session, cluster: Cluster
) -> None:
    loops = session.run_loops(requests(session, cluster, steps=8))
    reports = [report for report in loops if report.steps.size]
    for replica in range(2):
        sums = np.concatenate([r.fetches[0] for r in reports if r.replica == replica])
        total = float(sum(range(16)) + 16 * 100 * replica)
        assert sums[:4].sum() == total
        assert sums[4:].sum() == total
        assert sums[:4].tolist() != sums[4:].tolist()


@pytest.mark.parametrize("steps", [1_000_000, 10**12])
def test_stopped_loops_report_what_they_did_and_end(
    session: Session, cluster: Cluster, steps: int
) -> None:
    orders = [
        replace(order, steps=steps, step_feed="", replica_feed="")
        for order in endless_requests(session, cluster)
    ]
    handle = session.run_loops(orders)
    ended: list[LoopReport] = []
    for report in handle:
        handle.stop()
        if report.state != "running":
            ended.append(report)
    assert [report.state for report in ended] == ["stopped", "stopped"]


def test_loop_that_is_told_to_end_before_its_order_has_come_ends(
    session: Session, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (order, _) = endless_requests(session, cluster)
    monkeypatch.setattr("jgraph.client.runs.loops.unique", lambda what: "overtaken")
    told = pb.StopLoop(loop="overtaken-0", task=WORKERS[0])
    cluster.call("Master.StopLoop", frame(stop_loop=told))
    loops = session.run_loops([replace(order, steps=1_000_000)])
    assert [report.state for report in loops][-1] == "stopped"


def endless_requests(session: Session, cluster: Cluster) -> list[LoopRequest]:
    """Loops without shared state."""
    graph, _ = trace(lambda x: x.sum(), jax.ShapeDtypeStruct((BATCH,), jnp.float32))
    orders = []
    for replica, worker in enumerate(WORKERS):
        session.put_data(worker, "train", {"x": np.zeros(16, np.float32)})
        program = plan(graph, tasks=cluster.tasks(), driver=worker).program
        handle = session.register(program)
        orders.append(LoopRequest(worker, handle, "train", 5, BATCH, replica=replica))
    return orders


def test_loop_without_its_data_says_which(session: Session, cluster: Cluster) -> None:
    orders = [
        replace(order, data="not there") for order in endless_requests(session, cluster)
    ]
    with pytest.raises(DataError, match="'not there'"):
        list(session.run_loops(orders))


def test_data_of_another_shape_is_refused_by_the_name_of_the_feed(
    session: Session, cluster: Cluster
) -> None:
    orders = endless_requests(session, cluster)
    session.put_data(WORKERS[1], "train", {"x": np.zeros((16, 3), np.float32)})
    with pytest.raises(FeedError, match=r"feed 'x' .* is float32\[4,3\]"):
        list(session.run_loops(orders))


def test_failing_replica_ends_the_others_and_raises_its_error(
    session: Session, cluster: Cluster
) -> None:
    orders = endless_requests(session, cluster)
    orders[0] = replace(orders[0], steps=1_000_000)
    orders[1] = replace(orders[1], handle="gone")
    with pytest.raises(JGError, match="no program 'gone'"):
        list(session.run_loops(orders))
    # The other loop was told to stop: its name is free again once it has.
    again = [replace(order, handle=orders[0].handle, steps=2) for order in orders[:1]]
    assert [r.state for r in session.run_loops(again)][-1] == "done"


def test_loops_that_report_nothing_for_too_long_are_named(
    session: Session, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = requests(session, cluster, steps=2)
    slow = replace(slow, compute_wait_s=2.0)
    longest_s = slow.step_timeout_s + slow.report_every_s
    monkeypatch.setattr(loop_handle, "_SILENCE_S", 1.0 - longest_s)
    with pytest.raises(DeadlineError, match=f"not ended: {slow.task}; look") as raised:
        list(session.run_loops([slow]))
    assert raised.value.code == "JG-133"


def test_loop_name_in_use_is_refused(session: Session, cluster: Cluster) -> None:
    (order, _) = endless_requests(session, cluster)
    twice = [replace(order, steps=1_000_000)] * 2
    with pytest.raises(ClusterBusyError, match="already runs"):
        list(session.run_loops(twice))
