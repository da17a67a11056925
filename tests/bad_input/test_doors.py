"""What a browser, a script or a caller may try at the ports of a running cluster."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from jgraph.client.inspect import inspecting
from jgraph.cluster import event_loop
from jgraph.cluster.methods import METHODS
from jgraph.errors import (
    ClusterSpecError,
    ConfigError,
    DeviceSpecError,
    UnknownDeviceError,
)
from jgraph.launch.local.cluster import LocalCluster
from jgraph.launch.local.daemon import find, up
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.frames import body_of, frame
from tests.support.served import PS, WORKER, Served


def ports(served: Served) -> list[int]:
    """Every port at which this process listens; all are of the cluster."""
    listening = {
        connection.laddr.port
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    tasks = served.cluster.status().tasks
    known = {int(task.address.rpartition(":")[2]) for task in tasks}
    known |= {port for task in tasks for port in (task.health_port, task.data_port)}
    assert listening >= known
    return sorted(known)


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    length = f"Content-Length: {len(body)}"
    return "\r\n".join([line, *headers, length, "", ""]).encode() + body


HERE, JSON = "Host: localhost", "Content-Type: application/json"
FOREIGN = "Host: evil.example", "Origin: http://evil.example"
REQUESTED = {
    "a page": request("GET / HTTP/1.1", HERE),
    "a page of another host": request("GET / HTTP/1.1", *FOREIGN),
    "an unknown model": request("GET /v2/models/none HTTP/1.1", HERE),
    "JSON": request("POST /v2/models/m/infer HTTP/1.1", HERE, JSON, body=b"{}"),
    "a NaN": request("POST /infer HTTP/1.1", HERE, JSON, body=b'{"x": NaN}'),
    "no JSON": request("POST /infer HTTP/1.1", HERE, JSON, body=b"\xff\x00"),
    "brackets": request("POST /infer HTTP/1.1", HERE, JSON, body=b"[" * 10**5),
    "a batch of 1e9": request(
        "POST /infer HTTP/1.1", HERE, JSON, body=b'{"shape": [1000000000]}'
    ),
    "a method of ours": request(f"POST {ASKS_METHOD} HTTP/1.1", *FOREIGN, body=b"x"),
    "an end by GET": request("GET /api/Shutdown?grace_s=0 HTTP/1.1", *FOREIGN),
    "a log": request("GET /logs/../../etc/passwd HTTP/1.1", HERE),
    "a proxy": request("GET http://evil.example/ HTTP/1.1", *FOREIGN),
    "a tunnel": request("CONNECT evil.example:80 HTTP/1.1", *FOREIGN),
    "HTTP/2 in the clear": request(
        *("GET / HTTP/1.1", HERE, "Connection: Upgrade, HTTP2-Settings"),
        *("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    ),
}


def answer(port: int, sent: bytes) -> bytes:
    """Returns all that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        got = b""
        try:
            connection.sendall(sent)
            while chunk := connection.recv(1 << 16):
                got += chunk
        except ConnectionError:  # it did not wait for the rest
            pass
        return got


@pytest.mark.bad_input_row(24, 25)
@pytest.mark.parametrize("case", REQUESTED)
def test_no_port_answers_what_a_browser_or_a_script_asks(
    served: Served, case: str
) -> None:
    """Nothing but HTTP/2's own first words comes back, and the connection ends."""
    for port in ports(served):
        got = answer(port, REQUESTED[case])
        assert len(got) < 200
        assert b"HTTP/1.1" not in got
        assert b"text/html" not in got


@pytest.mark.bad_input_row(25)
@pytest.mark.parametrize("method", [ASKS_METHOD, EXCHANGE_METHOD, "/api/jobs"])
def test_a_page_that_speaks_http_2_is_nobody_without_the_token(
    served: Served, method: str
) -> None:
    """A browser sends its Host and Origin, and no Authorization that it has not got.

    It has no body here: what is still on its way when a stream ends may be told as
    an error of the stream, before why it ended.
    """

    async def ask(address: str) -> grpc.StatusCode:
        options = [("grpc.default_authority", "evil.example")]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.stream_stream(method, None, None)(
                iter(()), metadata=(("origin", "http://evil.example"),)
            )
            return await call.code()

    for server in served.servers.servers:
        assert event_loop.run(ask(server.address)) is grpc.StatusCode.UNAUTHENTICATED


ELSEWHERE = ("../../etc/passwd", "/etc/passwd", "..", "/job:ps/task:0/../x", "ps-0.log")


@pytest.mark.bad_input_row(25)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_log_is_of_a_task_and_never_a_path(served: Served, name: str) -> None:
    refused = (DeviceSpecError, UnknownDeviceError)
    with pytest.raises(refused):
        served.cluster.logs(name)
    with (
        inspecting(served.servers.server(PS).target) as visit,
        pytest.raises(refused),
    ):
        visit.logs(name, behind=5)


@pytest.mark.bad_input_row(25)
@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "", ".", "a\0", "x" * 101])
def test_files_of_a_named_cluster_are_in_its_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path / "home"))
    refused = "is no name of a cluster"
    with pytest.raises(ConfigError, match=refused):
        find(name)
    with pytest.raises(ConfigError, match=refused):
        up(name, 1, 1, 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.bad_input_row(25)
@pytest.mark.parametrize("tls", [False, True])
def test_a_job_whose_log_would_be_elsewhere_touches_no_file(
    tmp_path: Path, *, tls: bool
) -> None:
    logs, other = tmp_path / "logs", tmp_path / "other-0.log"
    logs.mkdir()
    other.write_text("of somebody else")
    with pytest.raises(ClusterSpecError, match=r"job name '\.\./other' must be"):
        LocalCluster(jobs={"../other": 1}, log_dir=logs, tls=tls)
    assert other.read_text() == "of somebody else"
    assert sorted(tmp_path.iterdir()) == [logs, other]


def texts_in(message: Descriptor | None, seen: set[str]) -> Iterator[FieldDescriptor]:
    """Yields the fields that are texts, of a message and of those inside it."""
    if message is None or message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield from texts_in(field.message_type, seen)
        if field.type == FieldDescriptor.TYPE_STRING:
            yield field


@pytest.mark.bad_input_row(25)
def test_no_request_of_a_client_names_an_address() -> None:
    """So none can send a server somewhere: it dials the tasks of its cluster."""
    fields = pb.Frame.DESCRIPTOR.fields_by_name
    texts = [
        text.full_name
        for kind in {m.request for m in METHODS.values() if "client" in m.roles}
        for text in texts_in(fields[kind].message_type, set())
    ]
    assert len(texts) > 50
    address = re.compile(r"address|host|url|uri|target|endpoint|port\b|peer")
    # The master writes it anew for the tasks; see the next test.
    known = {"jgraph.v1.Member.address"}
    assert {text for text in texts if address.search(text)} == known


@pytest.mark.bad_input_row(25)
def test_a_client_says_nothing_of_where_tasks_are(served: Served) -> None:
    worker = served.servers.server(WORKER).address
    members = [
        pb.Member(task=PS, address=worker, incarnation=1),
        pb.Member(task=WORKER, address="127.0.0.1:9", incarnation=1),
    ]
    order = pb.RegisterProgram(
        handle="moves tasks",
        program=pb.Program(
            driver=WORKER, partitions=[pb.Partition(task=PS), pb.Partition(task=WORKER)]
        ),
    )
    order.members.CopyFrom(pb.Members(arrangement=9, members=members))
    served.cluster.call("Master.RegisterProgram", frame(register_program=order))
    handle = frame(program_handle=pb.ProgramHandle(handle=order.handle))
    served.cluster.call("Master.UnregisterProgram", handle)
    statuses = [
        served.cluster.call("TaskStatus", frame(empty=pb.Empty()), to=address)
        for address in (served.servers.server(PS).address, worker)
    ]
    assert [body_of(status).arrangement for status in statuses] == [0, 0]


@pytest.mark.bad_input_row(25)
def test_who_deals_out_data_or_gets_it_is_a_task_of_the_cluster(
    served: Served,
) -> None:
    """Whoever is dialled is shown the token."""
    worker = served.servers.server(WORKER).address
    put = frame(put_data=pb.PutData(name="d", fields=["x"]), tensors=[np.zeros(8)])
    served.cluster.call("PutData", put, to=worker)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        there = f"127.0.0.1:{elsewhere.getsockname()[1]}"
        for dealer in (there, f"jgraph://{there}", "/job:ps/task:7"):
            order = pb.RunLoop(loop="l", data="d", data_run="r", dealer=dealer)
            order.batch_size = 1
            with pytest.raises(UnknownDeviceError, match="has no such task"):
                served.cluster.call("RunLoop", frame(run_loop=order), to=worker)
            send = frame(send_data=pb.SendData(name="d", task=dealer))
            with pytest.raises(UnknownDeviceError, match="has no such task"):
                served.cluster.call("SendData", send, to=worker)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
