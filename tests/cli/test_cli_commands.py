"""What holds for all commands: --json, --timeout, exit codes, sentences of errors."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from jgraph import cli
from jgraph.cli.top import Sight, Watch
from jgraph.client.inspect import status_of
from jgraph.client.status import ClusterStatus
from jgraph.graph.ir import TaskName
from jgraph.server.server import Server
from tests.support.cli import run


def walk(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Commands by how one types them. Their classes are Click's, or Typer's copy."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, inner in command.commands.items():
        yield from walk(inner, *path, name)


COMMANDS = dict(walk(typer.main.get_command(cli.app)))
WAITS = (
    *(
        "doctor",
        "up",
        "down",
        "status",
        "top",
        "logs",
        "predict",
        "drain",
        "runs",
        "events",
        "scale",
    ),
    *("dashboard", "trace"),
)
"""Those that wait for tasks; others read files, train, or serve until they are told."""
TASK = "/job:worker/task:0"
ASKS = (
    *(("status",), ("top", "--once"), ("doctor", "--links")),
    *(("logs", TASK), ("drain", TASK), ("events",)),
)
"""Those that ask a cluster; the address comes after what is given here."""


def test_the_commands_that_wait_are_those_with_a_timeout() -> None:
    have = {name for name, one in COMMANDS.items() if "--timeout" in options_of(one)}
    assert have == set(WAITS)


def options_of(command: Any) -> dict[str, Any]:
    return {flag: option for option in command.params for flag in option.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_json_and_explains_every_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--json" in options_of(COMMANDS[name])
    code, out, _ = run(capsys, *name.split(), "--help")
    assert code == cli.OK
    assert COMMANDS[name].help
    for flag, option in options_of(COMMANDS[name]).items():
        if flag.startswith("--"):
            assert option.help, f"jgraph {name} {flag} says nothing"
    if name in WAITS:
        assert "--timeout" in out
        timeout = options_of(COMMANDS[name])["--timeout"]
        assert f"[default: {timeout.default:g}]" in " ".join(out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_a_command_does_not_have_exits_two(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, *name.split(), "--no-such-option")[0] == cli.USAGE


def asked(command: tuple[str, ...], target: str) -> list[str]:
    words = [word for word in command if not word.startswith("--")]
    return [*words, target, *command[len(words) :]]


@pytest.mark.parametrize("command", ASKS)
def test_where_nothing_listens_a_command_exits_three(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *asked(command, "jgraph://localhost:1"), "--json")
    assert (code, out) == (cli.UNREACHABLE, "")
    assert err.startswith("JG-101 ")
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server({"worker": ["localhost:0"]})
    yield server
    server.stop()


@pytest.mark.parametrize("command", ASKS)
def test_with_another_token_a_command_exits_four(
    command: tuple[str, ...],
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "token"
    assert run(capsys, "token", "new", str(other), "--json")[0] == cli.OK
    typed = asked(command, server.target)
    code, out, err = run(capsys, *typed, "--token-file", str(other))
    assert (code, out) == (cli.FORBIDDEN, "")
    assert err.startswith("JG-114 ")


def test_status_and_top_tell_the_same_of_a_task(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, status, _ = run(capsys, "status", server.target, "--json")
    assert code == cli.OK
    code, top, _ = run(
        capsys, "top", server.target, "--once", "--json", "--every", "0.1"
    )
    assert code == cli.OK
    told, seen = json.loads(status), json.loads(top)
    assert seen.keys() - told.keys() == {"seconds", "shares", "alarms"}
    assert seen["alarms"] == []
    assert seen["tasks"][0]["pid"] == told["tasks"][0]["pid"]
    assert seen["seconds"] >= 0.1
    assert seen["shares"]["/job:worker/task:0"]["process"] >= 0


def test_top_prints_a_table_once(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "top", server.target, "--once", "--every", "0.1")
    assert code == cli.OK
    assert "1 of 1 tasks ready" in out
    assert "/job:worker/task:0" in out
    assert "%" in out


def later(status: ClusterStatus, **busy_s: float) -> ClusterStatus:
    (task,) = status.tasks
    more = {k: task.busy_s.get(k, 0.0) + seconds for k, seconds in busy_s.items()}
    return replace(status, tasks=(replace(task, busy_s={**task.busy_s, **more}),))


def seen(before: ClusterStatus, after: ClusterStatus, seconds: float) -> Sight:
    watch = Watch()
    assert watch.see((before, []), 100.0) is None
    sight = watch.see((after, []), 100.0 + seconds)
    assert sight is not None
    return sight


def test_shares_are_of_the_time_between_two_looks(server: Server) -> None:
    before = status_of(server.target)
    sight = seen(before, later(before, process=3.0, compute=1.0), 2.0)
    share = sight.shares["/job:worker/task:0"]
    assert (share["process"], share["compute"]) == (1.5, 0.5)


def test_of_a_task_that_was_started_again_there_is_no_share_yet(
    server: Server,
) -> None:
    after = status_of(server.target)
    (task,) = after.tasks
    before = replace(after, tasks=(replace(task, incarnation="0"),))
    sight = seen(before, after, 1.0)
    assert sight.shares == {}
    (alarm,) = sight.alarms
    assert alarm.text.startswith("/job:worker/task:0 was started again, once")


def test_a_task_that_does_not_answer_stands_first(server: Server) -> None:
    status = status_of(server.target)
    (task,) = status.tasks
    gone = TaskName("/job:ps/task:0")
    lost = replace(status, missing=(gone,))
    console = Console(width=140, no_color=True)
    with console.capture() as capture:
        console.print(seen(lost, lost, 1.0).shown())
    said = capture.get()
    assert f" warning: {gone} does not answer; type: " in said.splitlines()[0]
    assert said.index("no answer") < said.rindex(task.task)


def test_status_explains_what_is_under_way(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "status", server.target, "--explain")
    assert (code, out) == (
        cli.OK,
        "No step is under way, and all tasks answer.\n",
    )


def test_logs_come_over_the_network_where_a_task_is_elsewhere(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("jgraph.test").warning("a %s line", "telling")
    code, out, _ = run(capsys, "logs", "worker:0", server.target, "--tail", "1")
    assert code == cli.OK
    assert out.endswith("WARNING jgraph.test: a telling line\n")
    code, out, err = run(capsys, "logs", "/job:ps/task:3", server.target)
    assert (code, out, err[:6]) == (cli.FAILURE, "", "JG-221")


def test_a_drained_task_ends_and_the_command_waits_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server({"worker": ["localhost:0"]})
    code, out, _ = run(capsys, "drain", TASK, server.target, "--json")
    assert code == cli.OK
    assert json.loads(out)["ended"] is True
    assert server.join(20)
    assert run(capsys, "drain", TASK, server.target)[0] == cli.UNREACHABLE
