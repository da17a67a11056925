"""Every command that the pages show is typed here, or in the test that is named."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import typer
from flax import nnx

import jgraph as jg
from jgraph import cli
from jgraph.launch.local.daemon import find
from jgraph.testing import dense_step
from tests.support.cli import Shell, run
from tests.support.models import data, nnx_loss
from tests.support.pages import PAGES, ROOT, blocks

CLUSTER = "tests/cli/test_cli_cluster.py"
UP = f"{CLUSTER}::test_cluster_goes_up_shows_itself_and_goes_down"
JSON = "test_the_command_prints_one_line_of_json"
ELSEWHERE = {
    "server": f"{CLUSTER}::test_servers_started_by_hand_make_a_cluster",
    "up --hosts": "tests/launch/test_ssh.py::"
    "test_tasks_on_hosts_end_when_their_command_is_killed",
    "top": UP,
    "serve": "tests/serving/test_versions_served.py::"
    "test_a_server_that_is_told_to_end_answers_what_it_has",
    "logs": UP,
    "trace": "tests/client/timeline/test_collecting.py::"
    "test_the_command_writes_a_file_and_says_what_steps_wait_for",
    "dashboard": "tests/dashboard/test_command.py::"
    "test_the_command_serves_until_it_is_told_to_end",
    "doctor --links": "tests/client/placement/test_measuring.py::"
    "test_every_task_and_every_link_is_measured_and_printed",
    "examples wide-deep": f"tests/examples/test_wide_deep.py::{JSON}",
    "examples lm": f"tests/examples/test_lm.py::{JSON}",
    "examples dlrm": f"tests/examples/test_dlrm.py::{JSON}",
    "examples inception": "tests/examples/test_inception.py::"
    "test_the_command_trains_a_cluster_and_prints_one_line_of_json",
    "examples federated": "tests/examples/test_federated.py::"
    "test_the_command_prints_one_line_of_json",
    "examples diloco": "tests/examples/test_diloco.py::"
    "test_the_command_prints_what_each_way_came_to",
    "examples pipeline": "tests/examples/test_pipeline.py::"
    "test_without_a_cluster_it_says_what_to_type",
}
"""Those that go on until they are stopped, or train for long."""


def shown() -> dict[str, str]:
    """Commands as a shell would take them -> the page that has them."""
    found = {}
    for page in PAGES:
        for block in blocks(str(page.relative_to(ROOT)), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                typed = re.split(r"\s#|\s[|>]", line)[0]
                if match := re.match(r"(?:\S*/)?jgraph (.*)", typed):
                    found[" ".join(match[1].split())] = page.name
    return found


SHOWN = shown()
ORDER = ("up", "status", "runs", "events", "drain", "down")


@pytest.mark.parametrize("typed", SHOWN)
def test_a_shown_command_has_such_options(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").touch()
    for name in ("certs", "census", "tinyshakespeare"):
        (tmp_path / name).mkdir()
    words, command = shlex.split(typed), typer.main.get_command(cli.app)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if "--help" not in words:
        command.make_context(typed, words)  # what is wrong with them it raises


@pytest.mark.parametrize(("command", "test"), ELSEWHERE.items())
def test_what_is_typed_elsewhere_is_typed_there(command: str, test: str) -> None:
    file, name = test.split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    (body,) = re.findall(rf"^def {name}\(.*?(?=^def |\Z)", text, re.S | re.M)
    word = command.rsplit(maxsplit=1)[-1]
    assert f'"{word}"' in body or f'"{word}' in text, f"{name} types no {word}"
    assert any(typed.startswith(command) for typed in SHOWN), f"no page has {command}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that is worked in; what is started from there has ended after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JGRAPH_TOKEN_FILE", raising=False)
    yield tmp_path / "home"
    if find("default") is not None:
        with pytest.raises(SystemExit):
            cli.main(["down"])


@pytest.fixture
def files(home: Path) -> None:
    """What the commands name."""
    Path("cluster.toml").write_text(blocks("docs/cluster.md", "toml")[0])
    trainer = jg.Trainer(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    saved = jg.Checkpoints("runs/mlp", every=2)
    trainer.fit(data(), steps=6, batch_size=8, progress=False, checkpoint=saved)
    dense_step(4_000_000).save("plan.json")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path("flax_run").absolute(), {"params": {"w": np.zeros(3)}})
    jg.export(lambda x: x / 2 + 3, np.zeros(1, np.float32), "models/line")


def asks_a_cluster(command: str) -> bool:
    return any(command.startswith(asking) for asking in ORDER)


TYPED = [c for c in SHOWN if not any(c.startswith(e) for e in ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(600)
def test_the_commands_of_the_pages_that_ask_a_cluster_do_what_they_say(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A cluster is up before anything asks it, then a task of it ends, and at last all.
    typed = sorted(
        filter(asks_a_cluster, TYPED),
        key=lambda c: next(n for n, w in enumerate(ORDER) if c.startswith(w)),
    )
    assert typed[0].startswith("up ")
    for command in typed:
        kept = find("default")
        words = shlex.split(command)
        if kept is not None:
            words = [w.replace("jgraph://head:8470", kept.target) for w in words]
        if words[0] == "up":  # its daemon is no child of the tests
            done = Shell(home)(*words)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            code, out, err = run(capsys, *words)
        assert code == cli.OK, f"jgraph {command}: {out}{err}"
        assert out


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_the_other_commands_of_the_pages_do_what_they_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in TYPED:
        if asks_a_cluster(command):
            continue
        words = shlex.split(command)
        if words[0] == "certs":  # each page makes its own
            shutil.rmtree("certs", ignore_errors=True)
        code, out, err = run(capsys, *words)
        # The hosts of the page's cluster file are not there.
        wanted = {cli.FAILURE} if command.startswith("doctor --cluster") else {cli.OK}
        assert code in wanted, f"jgraph {command}: {out}{err}"
        assert out
