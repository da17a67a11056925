"""Lines and events of tasks, also of those that are started again, come, or go."""

from jgraph.client.inspect import inspecting
from jgraph.client.logs import EventTail
from jgraph.client.status import ClusterStatus
from jgraph.errors import JGError
from jgraph.server.server import Server
from tests.support.free_port import free_port
from tests.support.waiting import wait_until


def look(events: EventTail, status: ClusterStatus) -> list[str]:
    events.look_at(status)
    return [event.kind for event in events.new()]


def test_what_a_task_notes_is_told_again_from_its_start_by_another_process() -> None:
    where = {"worker": [f"localhost:{free_port()}"]}
    server = Server(where)
    try:
        with inspecting(server.target, timeout_s=10) as visit:
            events = visit.events()
            assert look(events, visit.status()) == ["joined"]
            assert look(events, visit.status()) == []
            server.stop()
            server = Server(where)

            def answers() -> bool:
                try:
                    return not visit.status().missing
                except JGError:
                    return False

            wait_until(answers)
            # It has as many events as the process before: the number says nothing.
            assert look(events, visit.status()) == ["joined"]
            assert look(events, visit.status()) == []
    finally:
        server.stop()
