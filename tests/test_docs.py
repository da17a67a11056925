"""What the pages show must be true."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jgraph
from jgraph.cli import app
from jgraph.cluster.spec import ClusterSpec, TFConfig
from tests.support.pages import PAGES, ROOT, blocks


def lines_of(example: str, directory: Path) -> list[str]:
    """What an example prints, run as a script."""
    script = directory / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # docs/serving.md compiles many functions
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_readme_run(number: int, tmp_path: Path) -> None:
    last = lines_of(blocks("README.md", "python")[number], tmp_path)[-1]
    if number == 0:
        # 0.25 of a model that says 0; 0.02 to 0.04, by how stale gradients are.
        assert float(last.removeprefix("mean error ")) < 0.1
    else:
        assert last.startswith("2.28")


BY_DAY = ("checkpoints", "concepts", "data", "serving")


def guides_with_examples_that_run() -> list[str]:
    """Those whose examples look at what came out."""
    return sorted(
        page.stem
        for page in (ROOT / "docs").glob("*.md")
        if any("assert" in example for example in blocks(f"docs/{page.name}", "python"))
    )


def test_by_day_run_the_examples_of_guides_that_have_some() -> None:
    assert set(BY_DAY) < set(guides_with_examples_that_run())


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(guide, marks=[] if guide in BY_DAY else [pytest.mark.nightly])
        for guide in guides_with_examples_that_run()
    ],
)
def test_the_examples_of_a_guide_run_one_after_the_other(
    guide: str, tmp_path: Path
) -> None:
    examples = blocks(f"docs/{guide}.md", "python")
    lines_of("\n".join(examples), tmp_path)


@pytest.mark.nightly  # smaller: the first example of the README
@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(300)
def test_the_example_for_those_who_come_from_tensorflow_runs(tmp_path: Path) -> None:
    (example,) = blocks("docs/coming-from-tensorflow.md", "python")
    *plan, last = lines_of(example, tmp_path)
    assert any("params/table/embedding travels by rows" in line for line in plan)
    found = re.fullmatch(r"steps 100, oldest gradient (\d+)", last)
    assert found
    assert int(found[1]) <= 4


HISTORY = {"CHANGELOG.md", "decisions.md"}
"""Pages that tell of names of before."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_names_and_keywords_that_a_page_shows_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = set() if page.name in HISTORY else set(re.findall(r"\bjg\.(\w+)", text))
    assert not {name for name in shown if not hasattr(jgraph, name)}
    for example in blocks(str(page.relative_to(ROOT)), "python"):
        for call in ast.walk(ast.parse(example)):
            match call:
                case ast.Call(func=ast.Attribute(ast.Name("jg"), name)):
                    for word in call.keywords:
                        assert takes(getattr(jgraph, name), word.arg), ast.unparse(call)


def takes(called: Any, keyword: str | None) -> bool:
    """Whether something has a parameter of that name; None: of ``**``."""
    # The metaclass of Flax's modules hides the arguments.
    begins = vars(called)["__init__"] if isinstance(called, type) else called
    parameters = inspect.signature(begins).parameters
    has_others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return keyword is None or keyword in parameters or has_others


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_cluster_files_of_the_page_are_cluster_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    found = blocks("docs/cluster.md", "toml")
    for text in found:
        path.write_text(text, encoding="utf-8")
        assert ClusterSpec.from_toml(path)
    assert len(found) == 3


def test_the_tf_config_of_the_page_is_one() -> None:
    (text,) = blocks("docs/cluster.md", "json")
    config = TFConfig.read(text)
    assert (config.job, config.task) == ("worker", 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_are_commands(page: Path) -> None:
    commands = app.registered_commands
    known = {c.name or getattr(c.callback, "__name__", "") for c in commands}
    known |= {str(group.name) for group in app.registered_groups}
    shown = set()
    for text in blocks(str(page.relative_to(ROOT)), "bash"):
        shown |= set(re.findall(r"^(?:\S*/)?jgraph (\w+)", text, re.M))
    assert shown <= known


def test_decisions_are_numbered_without_gaps() -> None:
    text = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
    numbers = [
        int(n) for n in re.findall(r"^## D(\d+)\. .+ \(\d{4}-\d\d-\d\d\)$", text, re.M)
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    assert text.count("\n## ") == len(numbers)


def test_each_decision_has_one_topic() -> None:
    text = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
    index = text.split("By topic:")[1].split("\n## ")[0]
    listed = [int(n) for n in re.findall(r"\bD(\d+)\b", index)]
    assert sorted(listed) == list(range(1, text.count("\n## ") + 1))
