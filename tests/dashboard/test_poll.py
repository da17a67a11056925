"""What a dashboard asks of a cluster, by the calls that its tasks counted."""

from collections.abc import AsyncIterator, Iterator

import pytest

from jgraph.client.inspect import ClusterInspector, inspecting
from jgraph.clock import WallClock
from jgraph.coordination.watch.facts import Fact
from jgraph.dashboard.poll import Poller
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame
from jgraph.server.server import Server

LOOKS = 6


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server({"worker": ["localhost:0"]})
    yield server
    server.stop()


def looked_at(visit: ClusterInspector) -> tuple[list[Fact], dict[str, int]]:
    """Returns the facts of some looks, and how often each method was called."""
    facts: list[Fact] = []
    poller = Poller(visit, facts.append, WallClock())
    for _ in range(LOOKS):
        poller.look()
    (task,) = visit.status().tasks
    return facts, {row.method: sum(row.buckets) for row in task.calls}


def test_each_look_is_one_question_to_each_task(server: Server) -> None:
    with inspecting(server.target) as visit:
        facts, calls = looked_at(visit)
    assert calls["Master.Status"] <= LOOKS + 1  # one says where the tasks are
    assert "Master.Runs" not in calls
    assert calls["TaskLog"] == 1  # its only event is told by the first look
    kinds = [fact["kind"] for fact in facts]
    assert (kinds.count("status"), kinds.count("runs")) == (LOOKS, LOOKS)
    assert kinds.count("events") == 1


def test_an_event_that_comes_later_is_asked_for(server: Server) -> None:
    assert server._server is not None
    facts: list[Fact] = []
    with inspecting(server.target) as visit:
        poller = Poller(visit, facts.append, WallClock())
        poller.look()
        server._server.service.events.note("lost", "/job:ps/task:7 is lost")
        poller.look()
        poller.look()
    told = [fact["events"] for fact in facts if fact["kind"] == "events"]
    assert [[event["kind"] for event in events] for events in told] == [
        ["joined"],
        ["lost"],
    ]


def test_tasks_of_an_older_version_are_asked_for_what_they_do_not_tell(
    server: Server,
) -> None:
    assert server._server is not None
    methods = server._server.service.methods
    newer = methods["TaskStatus"]

    async def older(request: Frame) -> AsyncIterator[Frame]:
        async for reply in newer(request):
            body_of(reply).ClearField("runs")
            body_of(reply).ClearField("newest_event")
            yield reply

    methods["TaskStatus"] = older
    with inspecting(server.target) as visit:
        facts, calls = looked_at(visit)
    assert (calls["Master.Runs"], calls["TaskLog"]) == (LOOKS, LOOKS)
    assert [fact["kind"] for fact in facts].count("events") == 1
