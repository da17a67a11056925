"""Secure by default: what a cluster lets in without being told to."""

import logging
import re
from pathlib import Path

import jax.numpy as jnp
import psutil
import pytest

from jgraph.cli import exit_code, main
from jgraph.client.cluster import connect
from jgraph.client.inspect import status_of
from jgraph.client.no_handler import NoHandler
from jgraph.client.status import ClusterStatus
from jgraph.cluster import event_loop
from jgraph.cluster.methods import ROLES
from jgraph.cluster.transport_choice import is_loopback, token_file_in
from jgraph.errors import InsecureError, JGError, NotAllowedError, TokenError
from jgraph.graph.device import TaskName
from jgraph.launch.local.cluster import LocalCluster
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import TOKEN_FILE, Token
from jgraph.server.server import Server
from tests.support.servers import Servers

WORKER = TaskName("/job:worker/task:0")


def test_every_method_of_a_server_is_in_the_table_of_roles(servers: Servers) -> None:
    server = servers.servers[0]._server
    assert server is not None
    assert set(server.service.methods) == set(ROLES)
    assert all(roles <= {"client", "task"} and roles for roles in ROLES.values())


@pytest.mark.parametrize(
    ("bind", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("nodeA", False),
    ],
)
def test_only_this_machine_reaches_loopback(bind: str, loopback: bool) -> None:
    assert is_loopback(bind) is loopback


def test_a_server_on_all_interfaces_is_known_by_its_name_in_the_cluster() -> None:
    with Server(
        {"ps": ["localhost:0"]}, bind="0.0.0.0", insecure_i_accept=True
    ) as server:
        assert re.fullmatch(r"jgraph://localhost:[1-9]\d*", server.target)
        with connect(server.target, timeout_s=20) as cluster:
            (task,) = cluster.status().tasks
            assert task.address == server.address
            assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0


def test_other_hosts_are_let_in_only_with_certificates_or_by_name(
    tmp_path: Path,
) -> None:
    spec = {"ps": ["localhost:0"]}
    with pytest.raises(InsecureError, match=r"--insecure-i-accept") as caught:
        Server(spec, bind="0.0.0.0")
    assert (caught.value.code, exit_code(caught.value)) == ("JG-116", 4)
    Server(spec, bind="0.0.0.0", insecure_i_accept=True, start=False)
    make_certificates(tmp_path, [TaskName("/job:ps/task:0")])
    Server(spec, bind="0.0.0.0", tls=tmp_path, start=False)


def test_the_command_makes_a_new_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    tokens = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["token", "new"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "token")
        tokens.append(Token.read(tmp_path / "token").value)
    assert tokens[0] != tokens[1]


def test_a_client_with_another_token_is_refused_and_told_what_to_do(
    servers: Servers, tmp_path: Path
) -> None:
    other = Token.make(tmp_path / "token")
    target = servers.servers[0].target
    with pytest.raises(TokenError, match=str(other.path)) as caught:
        connect(target, token_file=other.path, timeout_s=5)
    assert exit_code(caught.value) == 4
    with pytest.raises(TokenError, match="another token"):
        status_of(f"{target}?token_file={other.path}")


def test_a_server_and_a_client_on_one_machine_find_the_users_own_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path / "home"))
    with Server({"worker": ["localhost:0"]}) as server, connect(server.target) as one:
        assert one.tasks() == ["/job:worker/task:0"]
        assert one.target == server.target
    assert (tmp_path / "home" / "token").stat().st_mode & 0o777 == 0o600


def test_with_tls_a_task_may_not_call_what_is_for_clients(tmp_path: Path) -> None:
    make_certificates(tmp_path, [WORKER])
    token = Token.read(tmp_path / "token")

    async def shut_down(address: str) -> None:
        transport = GrpcTransport(WORKER, token=token, tls=TLS.of(tmp_path, WORKER))
        await transport.start(NoHandler())
        try:
            order = frame(shutdown=pb.Shutdown(grace_s=0.0))
            await transport.ask(address, "Shutdown", order, timeout_s=10)
        finally:
            await transport.close()

    with Server({"worker": ["localhost:0"]}, tls=tmp_path) as server:
        with pytest.raises(NotAllowedError, match="'task' may not call 'Shutdown'"):
            event_loop.run(shut_down(server.address))
        assert not server.join(0.0)


@pytest.mark.bad_input_row(2)
def test_every_method_is_for_the_roles_in_the_table_and_no_other(
    tmp_path: Path,
) -> None:
    """Who may call is told that the frame is wrong, and others not even that."""
    make_certificates(tmp_path, [WORKER])
    token = Token.read(tmp_path / "token")
    wrong = frame(values=pb.Values(handle="h", key="k"))

    async def codes_of(task: TaskName | None, address: str) -> dict[str, str]:
        transport = GrpcTransport(task, token=token, tls=TLS.of(tmp_path, task))
        await transport.start(NoHandler())
        codes = {}
        for method in ROLES:
            with pytest.raises(JGError) as caught:
                await transport.ask(address, method, wrong, timeout_s=10)
            codes[method] = caught.value.code
        await transport.close()
        return codes

    with Server({"worker": ["localhost:0"]}, tls=tmp_path) as server:
        for role, task in (("client", None), ("task", WORKER)):
            assert event_loop.run(codes_of(task, server.address)) == {
                method: "JG-401" if role in may else "JG-115"
                for method, may in ROLES.items()
            }
        assert not server.join(0.0)


def assert_only_documented_ports(
    process: psutil.Process, status: ClusterStatus, task: str
) -> None:
    """A task listens at its address, for health and data, and not beyond loopback."""
    (told,) = (t for t in status.tasks if t.task == task)
    listening = [
        connection.laddr
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {at.ip.removeprefix("::ffff:") for at in listening} == {"127.0.0.1"}
    own = int(told.address.rpartition(":")[2])
    ports = {own, told.health_port, told.data_port}
    assert {at.port for at in listening} == ports


@pytest.mark.procs
@pytest.mark.slow
def test_the_token_of_a_local_cluster_is_in_its_file_and_nowhere_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        LocalCluster(ps=1, workers=1, log_dir=tmp_path) as cluster,
    ):
        file = token_file_in(cluster.target)
        assert file is not None
        secret = Token.read(Path(file)).value
        assert cluster.session().run(jnp.add, 1.0, 2.0) == 3.0
        with connect(cluster.target) as other:
            assert other.tasks() == cluster.tasks()
        with pytest.raises(TokenError):  # the user's own is another
            connect(f"jgraph://{cluster.address}", timeout_s=5)
        for task in cluster.tasks():
            process = psutil.Process(cluster.pid(task))
            assert_only_documented_ports(process, cluster.status(), task)
            assert secret not in " ".join(process.cmdline())
            assert process.environ()[TOKEN_FILE] == file
            assert secret not in " ".join(process.environ().values())
    logs = [path.read_text() for path in tmp_path.iterdir()]
    assert len(logs) == 2
    assert any("without the token" in log for log in logs)
    assert not any(secret in text for text in (*logs, caplog.text))
    assert not Path(file).exists()
