import socket
from pathlib import Path

import pytest

from jgraph import diagnose
from jgraph.diagnose import Finding, Report, doctor
from jgraph.graph.ir import TaskName
from jgraph.rpc.security.certificates import make_certificates
from jgraph.server.server import Server


def test_this_machine_passes_every_check() -> None:
    report = doctor()
    names = [finding.name for finding in report.findings]
    assert names == [
        "python",
        "jax",
        "flatbuffers",
        "grpc",
        "cpus",
        "loopback",
        "proxies",
        "shared memory",
        "export",
    ]
    assert not report.problems
    assert str(report).endswith("\nno problems")


def test_every_problem_is_numbered_and_has_a_fix() -> None:
    report = Report(
        (
            Finding("python", "ok", "3.11"),
            Finding("a", "problem", "is broken", "mend a"),
            Finding("b", "note", "is odd"),
            Finding("c", "problem", "is gone", "get c"),
        )
    )
    assert str(report).splitlines() == [
        "✓ python: 3.11",
        "✗ a: is broken; fix: mend a",
        "! b: is odd",
        "✗ c: is gone; fix: get c",
        "2 problems:",
        "  1. a: is broken",
        "  2. c: is gone",
    ]
    assert report.to_dict()["ok"] is False


def test_a_check_that_breaks_is_a_problem_of_its_subject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def _check_gravity() -> None:
        raise ZeroDivisionError("no\nmass")

    monkeypatch.setattr(diagnose, "_CHECKS", (_check_gravity,))
    (finding,) = doctor().findings
    assert (finding.name, finding.state) == ("gravity", "problem")
    assert finding.text == "ZeroDivisionError: no mass"


def test_a_missing_flatbuffers_is_told_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnose, "_version", lambda package: "missing")
    (finding,) = diagnose._run(diagnose._check_flatbuffers)
    assert finding.state == "problem"
    assert finding.fix == "pip install flatbuffers"


def test_proxy_variables_are_named_but_are_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    (finding,) = diagnose._run(diagnose._check_proxies)
    assert finding.state == "note"
    assert "HTTPS_PROXY" in finding.fix
    assert "proxy.example" not in str(finding)  # may hold a password


def test_each_task_of_a_cluster_is_dialled(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as closed,  # bound and not listening: refuses, stays ours
    ):
        closed.bind(("127.0.0.1", 0))
        there, gone = server.getsockname()[1], closed.getsockname()[1]
        path = tmp_path / "cluster.toml"
        path.write_text(
            f'[cluster]\nps = ["127.0.0.1:{there}"]\nworker = ["127.0.0.1:{gone}"]\n'
        )
        cluster, ps, worker, data = doctor(path).findings[-4:]
    assert cluster.text.endswith("lists 1 ps, 1 worker")
    assert (ps.name, ps.state) == ("/job:ps/task:0", "ok")
    assert (worker.name, worker.state) == ("/job:worker/task:0", "problem")
    assert "Connection refused" in worker.text
    assert (data.name, data.state) == ("data ports", "note")
    assert data.text.startswith("not tried: ")
    assert worker.fix == (
        f"on 127.0.0.1: jgraph server --job worker --task 0 --cluster {path}"
    )


def test_a_server_that_refuses_the_handshake_is_named(tmp_path: Path) -> None:
    """Only the caller can tell: the server's log has no line of it."""
    task = TaskName("/job:ps/task:0")
    for name in ("theirs", "ours"):
        make_certificates(tmp_path / name, [task])
    server = Server({"ps": ["localhost:0"]}, tls=tmp_path / "theirs")
    path = tmp_path / "cluster.toml"
    path.write_text(
        f'[cluster]\nps = ["{server.address}"]\n[tls]\ndir = "{tmp_path / "ours"}"\n'
    )
    try:
        refused = doctor(path).findings[-1]
        taken = doctor(path, tmp_path / "theirs").findings[-3:]
    finally:
        server.stop()
    assert (refused.name, refused.state) == (task, "problem")
    assert "was not signed by" in refused.text
    assert [f.state for f in taken] == ["ok", "ok", "ok"], taken
    assert str(tmp_path / "theirs" / "client.crt") in taken[0].text


def test_a_data_port_that_is_filtered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server({"ps": ["127.0.0.1:0"]})
    path = tmp_path / "cluster.toml"
    path.write_text(f'[cluster]\nps = ["{server.address}"]\n')
    dial, port = socket.create_connection, int(server.address.rpartition(":")[2])

    def filtered(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[1] != port:
            raise TimeoutError
        return dial(address, timeout)

    try:
        found = [doctor(path).findings[-1]]
        monkeypatch.setattr(socket, "create_connection", filtered)
        found.append(doctor(path).findings[-1])
    finally:
        server.stop()
    assert [finding.name for finding in found] == ["/job:ps/task:0 data port"] * 2
    assert [finding.state for finding in found] == ["ok", "note"]
    assert "as where a firewall drops it; frames from here take gRPC" in found[1].text
    assert found[1].fix.startswith("open port ")


def test_shared_memory_needs_no_room_in_the_file_system() -> None:
    """It has no name there: `docker run` needs no --shm-size."""
    (finding,) = diagnose._run(diagnose._check_shared_memory)
    assert (finding.state, finding.fix) == ("ok", "")
    assert "/dev/shm" not in finding.text


def test_a_host_that_does_not_resolve_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\nps = ["no-such-host.invalid:8470"]\n')
    assert doctor(path).findings[-1].text == ("cannot resolve 'no-such-host.invalid'")


def test_a_missing_cluster_file_is_not_to_be_edited(tmp_path: Path) -> None:
    found = doctor(tmp_path / "none.toml").problems
    assert [f.name for f in found] == ["cluster"]
    assert "give the path of a TOML file" in found[0].text
    assert "edit" not in found[0].fix
