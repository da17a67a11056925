"""``jgraph show``: from a file of the user's to a page."""

from pathlib import Path

import pytest

from jgraph import cli
from jgraph.cli.show import show
from jgraph.errors import ConfigError

PROGRAM = """
import jax.numpy as jnp
import jgraph as jg

w = jg.Variable("w", jnp.ones((4, 2)), device="/job:ps")
example = jnp.ones((3, 4))
number = 3

@jg.function
def step(x):
    with jg.device("/job:worker/task:1"):
        return x @ w[...]

def plain():
    return w[...].sum()

graph = step.graph(example)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program_to_show.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("argument", ["float32[3,4]", "example"])
def test_a_function_is_planned_for_the_tasks_that_it_names(
    program: Path, argument: str
) -> None:
    picture = show(f"{program}:step", [argument])
    assert picture.title == "plan step"
    for text in ("/job:ps/task:0", "/job:worker/task:1", "float32[4,2]", "48 FLOP"):
        assert text in picture.svg
    assert "/job:worker/task:0" not in picture.svg


def test_a_cluster_file_says_which_tasks_there_are(
    program: Path, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[cluster]\nps = ["a:1"]\nworker = ["b:1", "b:2"]\n', encoding="utf-8"
    )
    picture = show(f"{program}:step", ["example"], cluster=file)
    assert "/job:worker/task:0" in picture.svg


@pytest.mark.parametrize(("name", "title"), [("plain", "plain"), ("graph", "step")])
def test_plain_functions_and_graphs_are_shown_too(
    program: Path, name: str, title: str
) -> None:
    assert show(f"{program}:{name}").title == f"plan {title}"
    assert show(f"{program}:{name}", only_graph=True).title == f"graph {title}"


@pytest.mark.parametrize(
    ("where", "arguments", "message"),
    [
        ("{}", [], "names no function"),
        ("{}:missing", [], "has no 'missing'"),
        ("{}:number", [], "is a int; name a function"),
        ("{}:step", ["float99[3]"], "'float99' of 'float99.3.' is no dtype"),
        ("{}:step", ["whatever"], "neither a type nor a name"),
        ("nowhere.py:step", [], "there is no file 'nowhere.py'"),
        ("no.such.module:step", [], "cannot import 'no.such.module'"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    program: Path, where: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        show(where.format(str(program).replace(":", "")), arguments)


def test_a_missing_argument_is_asked_for(program: Path) -> None:
    with pytest.raises(ConfigError, match=r"--arg 'float32\[32,784\]'"):
        show(f"{program}:step")


def test_the_command_writes_one_page(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    args = ["show", f"{program}:step", "-o", str(page), "--arg", "float32[3,4]"]
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == cli.OK
    assert capsys.readouterr().out == f"plan step: {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
