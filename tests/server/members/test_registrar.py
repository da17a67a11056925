"""Processes join a cluster that is up, and leave it, and all tasks know of it."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jgraph.client.cluster import connect
from jgraph.client.wait_for_tasks import view_of
from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.coordination.liveness.members import (
    Arrangement,
    Gone,
    Knocked,
    Member,
    Served,
)
from jgraph.errors import (
    ConfigError,
    FencedError,
    RescaleError,
    TokenError,
    VersionError,
)
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.security.token import Token
from jgraph.rpc.transport import Frame
from jgraph.server.members import registrar
from jgraph.server.members.joining import join_cluster
from jgraph.server.members.messages import join_request
from jgraph.server.server import Server
from tests.support.servers import Servers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PS = "/job:ps/task:0"
WORKER1, WORKER2 = TaskName("/job:worker/task:1"), TaskName("/job:worker/task:2")


@pytest.fixture
def here() -> Iterator[Servers]:
    servers = Servers(ps=1, worker=1)
    yield servers
    servers.stop()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def joined(servers: Servers, stack: ExitStack) -> Server:
    """A worker that has joined; it ends with the test."""
    server = join_cluster(servers.servers[-1].target, "worker")
    stack.callback(server.stop, 0.0)
    return server


def known(server: Server) -> list[str]:
    """Which tasks there are, as a server knows."""
    assert server._server is not None
    return list(server._server.context.addresses)


def number(server: Server) -> int:
    """Which arrangement a server knows."""
    assert server._server is not None
    return server._server.context.arrangement.number


def test_one_that_joins_has_the_lowest_index_and_all_know_it(
    here: Servers, stack: ExitStack
) -> None:
    first, second = joined(here, stack), joined(here, stack)
    assert (first.task, second.task) == (WORKER1, WORKER2)
    everybody = [*here.servers, first, second]
    wait_until(lambda: {number(server) for server in everybody} == {2})
    tasks = [PS, "/job:worker/task:0", WORKER1, WORKER2]
    assert all(known(server) == tasks for server in everybody)
    with connect(first.target, timeout_s=20) as cluster:
        assert cluster.tasks() == tasks
        assert cluster.status().cluster == second.cluster


def test_one_that_ends_in_order_leaves_and_its_index_is_free(
    here: Servers, stack: ExitStack
) -> None:
    first, second = joined(here, stack), joined(here, stack)
    first.stop()
    wait_until(lambda: WORKER1 not in known(second))
    assert WORKER1 not in known(here.server(PS))
    assert joined(here, stack).task == WORKER1


def test_a_client_that_asks_how_tasks_are_knows_who_joined(
    here: Servers, stack: ExitStack
) -> None:
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        worker = joined(here, stack)
        assert worker.task in [one.task for one in cluster.status().tasks]
        assert worker.task in cluster.tasks("worker")


def test_one_that_a_client_tells_to_leave_ends(here: Servers, stack: ExitStack) -> None:
    worker = joined(here, stack)
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        assert cluster.scale(workers=1) == ["/job:worker/task:0"]
        assert cluster.tasks("worker") == ["/job:worker/task:0"]
    assert worker.join(10)
    assert worker.replaced is None


def test_a_task_of_the_description_leaves_if_it_is_told_to(here: Servers) -> None:
    here.servers.append(join_cluster(here.servers[0].target, "worker"))
    worker = here.server("/job:worker/task:0")
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        cluster.leave(TaskName(worker.task))
        assert worker.join(10)
        wait_until(lambda: worker.task not in known(here.servers[-1]))


@pytest.mark.row(40)
def test_two_that_join_at_one_moment_are_two(here: Servers, stack: ExitStack) -> None:
    with ThreadPoolExecutor(4) as pool:
        joining = [pool.submit(joined, here, stack) for _ in range(4)]
        tasks = sorted(future.result().task for future in joining)
    assert tasks == [f"/job:worker/task:{n}" for n in range(1, 5)]


@pytest.mark.row(39)
def test_one_of_another_version_is_refused_and_nobody_hears_of_it(
    here: Servers,
) -> None:
    request = join_request(TaskName(""), 7, job="worker")
    body_of(request).jgraph = "0.0.9"
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        with pytest.raises(VersionError, match=r"jgraph 0\.0\.9 would join") as told:
            cluster.call("Master.Join", request)
        assert told.value.code == "JG-141"
        assert cluster.status().arrangement == 0


@pytest.mark.row(39)
def test_one_that_is_not_where_it_says_is_no_member(here: Servers) -> None:
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        reply = cluster.call("Master.Join", join_request(TaskName(""), 7, job="worker"))
        given = body_of(reply).task
        assert given == WORKER1
        for address in ("127.0.0.1:1", here.server(PS).address):
            with pytest.raises(RescaleError, match="does not reach it at"):
                cluster.call("Master.Join", join_request(given, 7, address))
        assert cluster.status().arrangement == 0


def test_one_that_listens_for_its_own_host_alone_is_told_how_others_reach_it(
    here: Servers,
) -> None:
    target = here.servers[0].target
    with pytest.raises(ConfigError, match=r"no other host reaches it; add --bind 0"):
        join_cluster(target, "worker", host="nodeA")
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        reply = cluster.call("Master.Join", join_request(TaskName(""), 7, job="worker"))
        given = body_of(reply).task
        with pytest.raises(RescaleError, match="own host alone; let it"):
            cluster.call("Master.Join", join_request(given, 7, "127.0.0.1:1"))
        with pytest.raises(RescaleError, match="an address that all tasks reach"):
            cluster.call("Master.Join", join_request(given, 7, "no.invalid:1"))
        assert cluster.status().arrangement == 0


@pytest.mark.bad_input_row(27)
def test_only_workers_and_parameter_servers_join(here: Servers) -> None:
    with pytest.raises(RescaleError, match="only workers and parameter servers") as no:
        join_cluster(here.servers[0].target, "chief")
    assert no.value.code == "JG-144"
    with connect(here.servers[0].target, timeout_s=20) as cluster:
        with pytest.raises(RescaleError, match="it numbers the tasks that join"):
            cluster.leave(TaskName(PS))
        assert cluster.status().arrangement == 0


@pytest.mark.bad_input_row(27)
def test_one_with_the_token_of_another_cluster_does_not_join(
    here: Servers, tmp_path: Path
) -> None:
    token = Token.make(tmp_path / "token")
    with pytest.raises(TokenError):
        join_cluster(here.servers[0].target, "worker", token_file=token.path)


def test_one_that_is_given_a_target_with_a_token_file_joins(tmp_path: Path) -> None:
    """As ``Cluster.target`` and the lines of ``jgraph scale`` have it."""
    path = Token.make(tmp_path / "token").path
    with Server({"ps": ["127.0.0.1:0"]}, token_file=path) as ps:
        target = f"{ps.target}?token_file={path}"
        with join_cluster(target, "worker") as worker:
            assert worker.task == "/job:worker/task:0"


@pytest.fixture
def slow_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a registrar tells others takes a while, as over a busy link."""
    look = registrar.Registrar._look

    async def slow(self: registrar.Registrar, task: TaskName, member: Member) -> Any:
        await asyncio.sleep(0.3)
        return await look(self, task, member)

    monkeypatch.setattr(registrar.Registrar, "_look", slow)


@pytest.mark.usefixtures("slow_words")
def test_a_registrar_that_was_started_again_learns_who_joined(
    here: Servers, stack: ExitStack
) -> None:
    worker = joined(here, stack)
    # At once: who joined was not answered before another task knew of it.
    assert number(here.server("/job:worker/task:0")) == 1
    here.start_again(PS)
    assert number(here.server(PS)) == 0
    assert joined(here, stack).task == WORKER2
    assert WORKER1 in known(here.server(PS))
    wait_until(lambda: number(worker) == 2)


@pytest.mark.usefixtures("slow_words")
def test_a_registrar_that_was_started_again_asks_those_of_whom_it_hears(
    here: Servers, stack: ExitStack
) -> None:
    worker = joined(here, stack)
    assert worker._server is not None
    context = worker._server.context
    # As if the registrar had died when it had told one task that another one joined.
    newer = Arrangement(
        2, {**context.arrangement.members, WORKER2: Member("127.0.0.1:1", 7)}
    )

    async def hear() -> None:
        assert context.arrange(newer)

    event_loop.run(hear())
    assert number(here.server("/job:worker/task:0")) == 1
    here.start_again(PS)
    joined(here, stack)
    wait_until(lambda: number(here.server(PS)) >= 3)  # 2 is not given again


def test_a_member_that_hangs_keeps_nobody_waiting(
    here: Servers, stack: ExitStack
) -> None:
    ps = here.server(PS)._server
    assert ps is not None
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    registrar = ps.master.registrar

    async def hang() -> None:
        await registrar._learn()
        assert registrar._handle(Knocked("worker", 7)) == WORKER1
        registrar._handle(Served(WORKER1, 7, address))

    event_loop.run(hang())
    began = SystemClock()
    since_s = began.now()
    assert joined(here, stack).task == WORKER2
    assert began.now() - since_s < 2.8  # a look at it takes 3 s
    assert WORKER1 in known(here.server(PS))  # until its lease is over


def test_strange_members_end_no_watch_over_the_task_that_tells_them(
    here: Servers, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(here, stack)
    ps = here.server(PS)._server
    assert ps is not None
    members = ps.master.registrar
    member = ps.context.arrangement.members[WORKER1]
    strange = pb.Members(
        task=WORKER1,
        incarnation=member.incarnation,
        members=[pb.Member(task="no task", address="a:1")],
    )

    async def tell(*_: Any, **__: Any) -> Frame:
        return frame(members=strange)

    monkeypatch.setattr(ps.context.transport, "ask", tell)

    async def look() -> bool | None:
        return await members._look(WORKER1, member)

    assert event_loop.run(look()) is False
    assert WORKER1 in known(here.server(PS))


def test_a_status_tells_a_task_that_was_started_again(
    here: Servers, stack: ExitStack
) -> None:
    joined(here, stack)
    wait_until(lambda: number(here.server("/job:worker/task:0")) == 1)
    here.start_again(PS)
    with connect(here.server("/job:worker/task:0").target, timeout_s=20) as cluster:
        cluster.status()
        assert WORKER1 in known(here.server(PS))
        view = event_loop.run(view_of(cluster, here.server(PS).address))
        assert view is not None
        assert view.arrangement == 1


@pytest.mark.row(41)
def test_a_process_that_was_given_up_ends_when_it_hears_of_that(
    here: Servers, stack: ExitStack
) -> None:
    worker = joined(here, stack)
    with connect(here.server(PS).target, timeout_s=20) as cluster:
        left = pb.LeaveRequest(task=worker.task, ended=True)  # it has not
        cluster.call("Master.Leave", frame(leave_request=left))
    wait_until(lambda: worker.replaced is not None)
    assert isinstance(worker.replaced, FencedError)
    assert "no member of its cluster" in worker.replaced.message
    assert worker.join(20)


def test_that_one_is_no_member_any_more_is_told_beside_the_loss_of_its_link(
    here: Servers, stack: ExitStack
) -> None:
    worker, ps = joined(here, stack), here.server(PS)._server
    assert ps is not None
    events, members = ps.service.events, ps.master.registrar

    async def lose() -> None:
        events.note("lost", f"{worker.task} is gone: its connection ended")
        joins = ps.context.arrangement.members[WORKER1].incarnation
        members._handle(Gone(WORKER1, joins))

    event_loop.run(lose())
    texts = [event.text for event in events.newest() if event.subject == WORKER1]
    assert any("is gone" in text for text in texts)
    assert any("no member of the cluster any more" in text for text in texts)


@pytest.mark.row(41)
def test_a_process_whose_place_another_has_ends_and_leaves_that_its_place(
    here: Servers, stack: ExitStack
) -> None:
    old, ps = joined(here, stack), here.server(PS)
    assert old._server is not None
    assert ps._server is not None
    context = old._server.context
    with connect(ps.target, timeout_s=20) as cluster:
        # As one that was silent is given up, and does not hear of it.
        left = pb.LeaveRequest(task=old.task, incarnation=context.incarnation)
        left.ended = True
        old._server.context.rearranged.clear()
        cluster.call("Master.Leave", frame(leave_request=left))
        new = joined(here, stack)
        assert new.task == old.task
        wait_until(lambda: number(ps) == 3)
        assert context.arrange(ps._server.context.arrangement)
        event_loop.run(old._server.master.registrar.say_left(ended=True))
        assert number(ps) == 3
        assert new.task in known(ps)
    assert new.replaced is None


def test_no_task_that_is_a_ps_is_told_to_leave(here: Servers) -> None:
    with (
        connect(here.server("/job:worker/task:0").target, timeout_s=20) as cluster,
        pytest.raises(RescaleError, match="cannot leave its cluster"),
    ):
        cluster.leave(TaskName(PS))


def test_a_ps_that_joins_a_cluster_of_workers_does_not_number_tasks(
    stack: ExitStack,
) -> None:
    workers = Servers(worker=1)
    stack.callback(workers.stop)
    ps = join_cluster(workers.servers[0].target, "ps")
    stack.callback(ps.stop, 0.0)
    joined(workers, stack)
    wait_until(lambda: number(ps) == 2)
    # It looks after nobody, and so gives nobody up: not itself either, of whom it
    # never hears, after the time of its lease.
    assert ps._server is not None
    assert ps._server.master.registrar._machine is None
    ps.stop(0.0)
    wait_until(lambda: PS not in known(workers.servers[0]))
    again = join_cluster(workers.servers[0].target, "ps")
    stack.callback(again.stop, 0.0)
    assert again.task == PS
