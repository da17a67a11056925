"""``jgraph dashboard`` as one types it."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

import jgraph as jg
from jgraph.dashboard.journal import JournalWriter
from jgraph.graph.device import TaskName
from jgraph.launch.local.daemon import down, find
from jgraph.rpc.security.certificates import make_certificates
from tests.support.cli import run
from tests.support.dashboards import scene

pytestmark = [pytest.mark.slow, pytest.mark.procs]


def state_at(url: str) -> Any:
    base, _, token = url.partition("#token=")
    asked = urllib.request.Request(f"{base}api/v1/state")
    asked.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(asked, timeout=20) as reply:
        return json.loads(reply.read())


def test_a_cluster_that_refuses_whoever_asks_is_told_at_the_start(
    tmp_path: Path,
) -> None:
    """The page would be empty for ever."""
    for name in ("ours", "theirs"):
        make_certificates(tmp_path / name, [TaskName("/job:worker/task:0")])
    command = [sys.executable, "-m", "jgraph", "dashboard", "--port", "0"]
    spec = {"worker": ["localhost:0"]}
    with jg.Server(spec, tls=tmp_path / "ours") as server:
        done = subprocess.run(
            [*command, server.target, "--tls-dir", str(tmp_path / "theirs")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    assert "was not signed by" in done.stderr
    assert not done.stdout


def test_whoever_looks_at_a_cluster_loads_no_jax() -> None:
    """It would take more memory, and more time to start, than all the rest."""
    code = (
        "import jgraph.dashboard.serve, jgraph.dashboard.sources, jgraph.cli.top, sys\n"
        "print('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    journal = JournalWriter(path)
    for fact in scene():
        journal.write(fact)
    journal.close()
    command = [sys.executable, "-m", "jgraph", "dashboard", "--port", "0", "--json"]
    with subprocess.Popen(
        [*command, "--replay", str(path), "--attended"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert (told["kind"], told["skipped"]) == ("replay", 0)
        assert state_at(told["url"])["runs"]["mlp"]["step"] == 4860
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_cluster_of_this_machine_has_a_dashboard_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    monkeypatch.delenv("JGRAPH_TOKEN_FILE", raising=False)
    command = [sys.executable, "-m", "jgraph", "up", "--ps", "1", "--workers", "0"]
    options = ["--name", "shown", "--dashboard"]
    done = subprocess.run(
        [*command, *options], check=True, capture_output=True, text=True
    )
    cluster = find("shown")
    assert cluster is not None
    try:
        assert f"its page:   {cluster.dashboard}" in done.stdout
        (board,) = [
            child
            for child in psutil.Process(cluster.daemon).children()
            if "dashboard" in child.cmdline()
        ]
        assert state_at(cluster.dashboard)["version"] == 1
    finally:
        down("shown")
    assert not board.is_running()


def test_the_token_of_the_cluster_opens_no_page_and_is_told_to_nobody(
    tmp_path: Path,
) -> None:
    """Who has it runs programs: no browser gets it, and none is let in by it."""
    with jg.LocalCluster(ps=1, workers=0) as cluster:
        secret = Path(cluster.target.partition("token_file=")[2]).read_text().strip()
        journal = tmp_path / "board.jsonl"
        with cluster.dashboard(journal=journal) as shown:
            url, _, token = shown.url.partition("#token=")
            assert token != secret
            assert state_at(shown.url)["version"] == 1
            for path in ("state", "stream", "timeline", "tasks/ps/0/log"):
                for headers, query in (
                    ({"Authorization": f"Bearer {secret}"}, ""),
                    ({"Cookie": f"token={secret}; jgraph-token={secret}"}, ""),
                    ({}, f"?token={secret}"),
                    ({"Authorization": f"Bearer {secret}"}, f"?token={token}"),
                ):
                    asked = urllib.request.Request(f"{url}api/v1/{path}{query}")
                    for name, value in headers.items():
                        asked.add_header(name, value)
                    with pytest.raises(urllib.error.HTTPError) as refused:
                        urllib.request.urlopen(asked, timeout=20)
                    assert refused.value.code == 401
                    said = f"{refused.value.headers}{refused.value.read().decode()}"
                    assert "JG-114" in said
                    assert secret not in said
            assert secret not in json.dumps(state_at(shown.url))
        assert secret not in journal.read_text()


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["--replay", "none.jsonl"], 1, "JG-622 cannot read the journal none.jsonl"),
        (["--bind", "0.0.0.0"], 4, "JG-116 a dashboard speaks plain HTTP"),
        (["--embed-origin", "*"], 1, "JG-124 --embed-origin '*' is no origin"),
        (["--journal", "/dev/null/board.jsonl"], 1, "JG-124 cannot write the journal"),
        (["--at", "yesterday"], 2, "--at is a time of a journal"),
        (["--replay", "a", "--journal", "b"], 2, "--replay asks no cluster"),
        (["--grafana", "no/g.json"], 1, "JG-124 cannot write no/g.json: No such file"),
        (["--view-token-file", "no/token"], 1, "of yours with --view-token-file"),
        (["--port", "70000"], 2, "65535"),
    ],
)
def test_what_is_typed_wrong_is_said_in_a_sentence(
    typed: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    server = jg.Server({"worker": ["localhost:0"]})
    try:
        found, out, err = run(capsys, "dashboard", server.target, *typed)
    finally:
        server.stop()
    assert (found, out) == (code, "")
    assert said in err
