import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from jgraph import __version__, cli
from jgraph.cli.options import INSTEAD
from jgraph.errors import (
    AddressError,
    ClusterUnreachableError,
    FeedError,
    JGError,
    PortInUseError,
)
from tests.support.cli import run

COMMANDS_HERE = {
    c.name or c.callback.__name__  # type: ignore[union-attr]  # ours all have a callback
    for c in cli.app.registered_commands
}


def test_version_prints_one_line_per_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "version")
    assert code == cli.OK
    assert f"jgraph {__version__}\n" in out
    assert "\njax 0." in out


def test_the_option_version_prints_that_of_jgraph(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(capsys, "--version") == (cli.OK, f"jgraph {__version__}\n", "")


def test_version_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "version", "--json")
    assert code == cli.OK
    assert json.loads(out)["jgraph"] == __version__


@pytest.mark.parametrize("args", [("no-such-command",), ("version", "--jsno"), ()])
def test_wrong_usage_exits_two(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...]
) -> None:
    assert run(capsys, *args)[0] == cli.USAGE


@pytest.mark.parametrize("name", INSTEAD)
def test_a_command_of_other_tools_says_what_is_typed_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, name, "--", "train.py")
    assert (code, out) == (cli.USAGE, "")
    assert err == f"there is no `jgraph {name}`: {INSTEAD[name]}\n"
    typed = set(re.findall(r"`jgraph (\w+)", INSTEAD[name]))
    assert typed <= {*COMMANDS_HERE, "ckpt", "model", "slurm"}


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"version", "doctor"} <= COMMANDS_HERE
    for name in COMMANDS_HERE:
        code, out, _ = run(capsys, name, "--help")
        assert code == cli.OK
        assert "Usage:" in out


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yields every text of help of a command, its options and its sub-commands."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for sub_name, sub in getattr(command, "commands", {}).items():
        yield from helps(sub, f"{name} {sub_name}")


def test_no_help_text_is_taken_for_markup() -> None:
    texts = dict(helps(typer.main.get_command(cli.app), "jgraph"))
    assert len(texts) > 100
    for name, text in texts.items():
        assert Text.from_markup(text).plain == text, name


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FeedError("x"), cli.FAILURE),
        (PortInUseError("x"), cli.FAILURE),
        (ClusterUnreachableError("x"), cli.UNREACHABLE),
        (AddressError("x"), cli.UNREACHABLE),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: JGError, code: int) -> None:
    assert cli.exit_code(error) == code


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``jgraph version`` fail as a command does that meets no cluster."""

    def fail(package: str) -> str:
        raise ClusterUnreachableError(f"no jgraph server at {package}:8470")

    monkeypatch.setattr(importlib.metadata, "version", fail)


@pytest.mark.usefixtures("failing")
def test_an_error_is_one_sentence_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JGRAPH_DEBUG", raising=False)
    code, out, err = run(capsys, "version")
    assert (code, out) == (cli.UNREACHABLE, "")
    assert err == "JG-101 no jgraph server at jax:8470\n"


@pytest.mark.usefixtures("failing")
def test_debug_shows_the_traceback_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JGRAPH_DEBUG", "1")
    code, _, err = run(capsys, "version")
    assert code == cli.UNREACHABLE
    assert "Traceback" in err
    assert err.rstrip().endswith("JG-101 no jgraph server at jax:8470")


def test_doctor_of_a_bad_file_exits_one_with_numbered_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\nps = ["nodeA"]\nworker = []\n')
    code, out, _ = run(capsys, "doctor", "--cluster", str(path))
    assert code == cli.FAILURE
    assert "\n2 problems:\n  1. cluster: worker has no tasks" in out
    assert "\n  2. cluster: ps[0] is 'nodeA', which has no port" in out


@pytest.mark.slow
@pytest.mark.procs
def test_the_command_runs_as_a_module_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jgraph", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == cli.OK, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("st", "status"), ("logs --fo", "--follow")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    words = ["jgraph", *typed.split()]
    done = subprocess.run(
        [sys.executable, "-c", "from jgraph.cli import app; app(prog_name='jgraph')"],
        env={
            **os.environ,
            "_JGRAPH_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert offered in done.stdout.split(), done.stderr
