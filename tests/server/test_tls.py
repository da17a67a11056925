"""Encrypted clusters: certificates from the command line to a running step."""

import socket
import ssl
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.cli import exit_code, main
from jgraph.client.cluster import connect
from jgraph.client.inspect import status_of
from jgraph.client.no_handler import NoHandler
from jgraph.cluster import event_loop
from jgraph.cluster.options import reset_order
from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import address_of, as_tls, tls_directory_in
from jgraph.errors import (
    CertificateError,
    ClusterSpecError,
    ConfigError,
    NotAllowedError,
    PlainTextError,
    RoleError,
)
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.launch.local.cluster import LocalCluster
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.certificates import make_certificates
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import find_token
from jgraph.server.server import Server


@pytest.mark.procs
@pytest.mark.slow
def test_cluster_of_processes_runs_steps_over_tls() -> None:
    with LocalCluster(ps=1, workers=1, tls=True) as cluster:
        w = Variable("w", jnp.zeros(3), device="/job:ps/task:0")

        def add(x: Any) -> Any:
            w[...] = w[...] + x
            with device("/job:worker/task:0"):
                return w[...] * 2

        session = cluster.session()
        assert session.run(add, np.ones(3, np.float32)).tolist() == [2, 2, 2]
        assert cluster.target.startswith("jgraphs://")
        directory = Path(cluster.tls_directory)
        assert not status_of(cluster.target, tls=directory).missing
        with pytest.raises(PlainTextError, match="speaks TLS, and this side plain"):
            connect(f"jgraph://{cluster.address}", timeout_s=20)
    assert not directory.exists()


def test_server_and_client_meet_with_the_files_of_one_run(tmp_path: Path) -> None:
    spec = ClusterSpec({"worker": ["localhost:0"]}, port_zero=True)
    make_certificates(tmp_path / "ours", spec.tasks())
    make_certificates(tmp_path / "theirs", spec.tasks())
    with Server(spec, tls=tmp_path / "ours") as server:
        assert server.target.startswith("jgraphs://")
        with connect(server.target, tls=tmp_path / "ours") as cluster:
            assert cluster.tasks() == ["/job:worker/task:0"]
            assert cluster.target == server.target
        with pytest.raises(CertificateError, match="was not signed by"):
            connect(server.target, tls=tmp_path / "theirs", timeout_s=5)


def test_server_refuses_the_files_of_another_task(tmp_path: Path) -> None:
    make_certificates(tmp_path, ClusterSpec({"ps": ["h:1", "h:2"]}).tasks())
    files = TLS(tmp_path / "ps-1.crt", tmp_path / "ps-1.key", tmp_path / "ca.crt")
    with pytest.raises(RoleError, match=r"of ps-1\.jgraph.*give the file ps-0\.crt"):
        Server({"ps": ["localhost:0"]}, tls=files)


@pytest.mark.parametrize(
    ("target", "tls", "message"),
    [
        ("jgraphs://h:1", None, "needs certificates"),
        ("jgraph://h:1", "certs", "write jgraphs://h:1"),
        ("http://h:1", None, "write jgraph://host:port"),
    ],
)
def test_scheme_and_certificates_must_agree(
    target: str, tls: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(target, tls=tls)


def test_address_may_do_without_a_scheme(tmp_path: Path) -> None:
    assert address_of("h:1", None) == address_of("h:1", tmp_path) == "h:1"


def test_option_that_is_no_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls=True is no option; give the directory"):
        as_tls(True, None)  # type: ignore[arg-type]


def test_cluster_file_names_the_certificates(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\nps = ["h:1"]\n[tls]\ndir = "certs"\n')
    assert ClusterSpec.from_toml(path).tasks() == ["/job:ps/task:0"]
    assert tls_directory_in(path) == tmp_path / "certs"
    path.write_text('[cluster]\nps = ["h:1"]\n')
    assert tls_directory_in(path) is None


@pytest.mark.parametrize(
    "line", ["tls = 5", "[tls]", "[tls]\ndir = 1", "[tls]\nca = ''"]
)
def test_other_tls_tables_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'{line}\n[cluster]\nps = ["h:1"]\n')
    with pytest.raises(ClusterSpecError, match=r"\[tls\] is .*dir = \"certs\""):
        ClusterSpec.from_toml(path)


def test_command_makes_certificates_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["certs", str(tmp_path / "made"), "--ps", "1", "--workers", "1"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert "--tls-dir" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert names == sorted(
        ["ca.crt", "token"]
        + [f"{n}.{e}" for n in ("client", "ps-0", "worker-0") for e in ("crt", "key")]
    )
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 4
    assert capsys.readouterr().err.startswith("JG-112 ")


def test_what_is_not_allowed_has_an_exit_code_of_its_own() -> None:
    errors = CertificateError("x"), PlainTextError("x"), RoleError("x")
    assert {exit_code(error) for error in errors} == {4}


def hello_of(address: str, certificate: Path | None, name: str = "client") -> bytes:
    """Returns what a server says first to who skips all checks on this side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(
            certificate / f"{name}.crt", certificate / f"{name}.key"
        )
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain) as stream,
        ):
            stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            return stream.recv(9)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_server_itself_refuses_foreign_missing_and_expired_certificates(
    tmp_path: Path,
) -> None:
    spec = ClusterSpec({"worker": ["localhost:0"]}, port_zero=True)
    make_certificates(tmp_path / "ours", spec.tasks())
    make_certificates(tmp_path / "theirs", spec.tasks())
    with Server(spec, tls=tmp_path / "ours") as server:
        assert hello_of(server.address, tmp_path / "ours") != b""
        assert hello_of(server.address, tmp_path / "theirs") == b""
        assert hello_of(server.address, None) == b""


def test_expired_certificates_are_refused_with_their_reason(tmp_path: Path) -> None:
    spec = ClusterSpec({"worker": ["localhost:0"]}, port_zero=True)
    make_certificates(tmp_path, spec.tasks(), days=-1.0)
    with pytest.raises(CertificateError, match="expired"):
        Server(spec, tls=tmp_path)


def test_task_certificate_does_not_let_a_client_do_what_clients_may(
    tmp_path: Path,
) -> None:
    spec = ClusterSpec({"worker": ["localhost:0"]}, port_zero=True)
    ps = TaskName("/job:ps/task:0")
    make_certificates(tmp_path, [*spec.tasks(), ps])
    files = TLS(tmp_path / "ps-0.crt", tmp_path / "ps-0.key", tmp_path / "ca.crt")

    async def reset(address: str) -> None:
        # As a task: as a client this side would refuse the files itself.
        transport = GrpcTransport(
            ps, bind="127.0.0.1:0", tls=files, token=find_token(None, tmp_path)
        )
        await transport.start(NoHandler())
        try:
            await transport.ask(address, "Master.Reset", reset_order(()), timeout_s=20)
        finally:
            await transport.close()

    with Server(spec, tls=tmp_path) as server, pytest.raises(NotAllowedError):
        event_loop.run(reset(server.address))
