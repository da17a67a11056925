"""The notebooks run start to end, headless, and have their outputs in a normal form."""

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

import nbformat.v4
import pytest
from nbclient import NotebookClient

from jgraph.view.svg import document
from scripts.notebook_outputs import essence, normal

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
QUICK = {"01_quickstart", "05_jgraph_from_scratch"}
CASES = [
    pytest.param(
        path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.nightly
    )
    for path in NOTEBOOKS
]
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

LARGEST_OUTPUT, LARGEST_SUM = 100_000, 700_000
OF_ONE_RUN = {
    "an absolute path": r"(?<![\w.…:/<])/(?!job:)[\w.-]+/[\w.-]+",
    "a host and port": r"\b[\w.-]+:\d{4,5}\b",
    "a date": r"\b\d{4}-\d\d-\d\d\b",
    "the id of a run": r"loop-[0-9a-f]{6}",
    "the address of an object": r"\b0x[0-9a-f]{6}",
    "a rate": r"\d (steps|ex)/s",
}


def code_cells(path: Path) -> list[Any]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shows(source: str) -> bool:
    """Whether a cell surely has an output: it prints, or ends with what is no call."""
    last = ast.parse(source, mode="exec").body[-1]
    picture = re.search(r"\.(show|plot)\(\)$", source)
    value = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)
    return (
        value or picture is not None or re.search(r"^print\(", source, re.M) is not None
    )


def text_of(output: Any) -> str:
    """What a reader sees of an output, without pictures."""
    texts = [output.get("text", []), *output.get("data", {"image/png": ""}).values()]
    return "\n".join("".join(text) for text in texts if isinstance(text, list))


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", CASES)
def test_notebook_runs_start_to_end(path: Path) -> None:
    notebook = nbformat.v4.reads(path.read_text())  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook, timeout=180, resources={"metadata": {"path": str(path.parents[1])}}
    )
    client.execute()
    asserts = [cell for cell in notebook.cells if "assert" in cell.source]
    assert asserts, f"{path.name} checks nothing"


@each
def test_each_cell_that_shows_something_has_its_output(path: Path) -> None:
    cells = code_cells(path)
    without = [
        c["id"] for c in cells if shows("".join(c["source"])) and not c["outputs"]
    ]
    assert not without, f"`make docs` writes the outputs of {without}"
    assert any(cell["outputs"] for cell in cells)


@each
def test_outputs_have_nothing_of_one_run_or_machine(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["execution_count"] is None
        assert cell["metadata"] == {}
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            text = re.sub(r'src="[^"]*"', "", text_of(output))
            for what, pattern in OF_ONE_RUN.items():
                found = re.search(pattern, text)
                assert found is None, f"{cell['id']} has {what}: {found}"


@each
def test_outputs_are_in_their_normal_form(path: Path) -> None:
    for cell in code_cells(path):
        assert normal(cell["outputs"]) == cell["outputs"]


def test_notebooks_stay_small_with_their_outputs() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < LARGEST_SUM
    outputs = [o for path in NOTEBOOKS for c in code_cells(path) for o in c["outputs"]]
    assert max(len(json.dumps(output)) for output in outputs) < LARGEST_OUTPUT


# ---------------------------------------------------------------- normal forms


def shown(**data: str) -> dict[str, Any]:
    kinds = {"plain": "text/plain", "html": "text/html", "png": "image/png"}
    named = {kinds[kind]: text for kind, text in data.items()}
    return {"output_type": "display_data", "data": named, "metadata": {}}


def printed(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def test_a_progress_display_stays_as_the_text_of_its_last_frame() -> None:
    frame = shown(
        html="<progress value=3></progress>",
        plain="step 3/3  14.8 steps/s  926 ex/s  loss 0.5\n"
        "/job:worker/task:0  step 3  7.1 steps/s  wait 0% compute 58%  stale 0\n"
        "/job:worker/task:0: 2031-01-02 03:04:05,678 INFO jgraph.events: [began] a run",
    )
    [output] = normal([frame])
    assert output["data"] == {
        "text/plain": [
            "step 3/3  loss 0.5\n",
            "/job:worker/task:0  step 3  stale 0",
        ]
    }


def test_what_a_stream_says_in_parts_is_one_output_without_addresses() -> None:
    parts = [
        printed("2031-01-02 03:04:05,678 WARNING lost 127.0.0.1:4321\n", "stderr"),
        printed("after 1.6 s run 'loop-0123456789ab' goes on\n", "stderr"),
        printed("1\n"),
    ]
    assert [output["text"] for output in normal(parts)] == [
        ["WARNING lost HOST:PORT\n", "after … s run 'loop-…' goes on\n"],
        ["1\n"],
    ]


def test_a_picture_is_an_image_of_its_first_view_without_a_script() -> None:
    views = (
        '<g class="view"><text>first</text></g><g class="view"><text>second</text></g>'
    )
    picture = document("plan step", 300, 200, views)
    [output] = normal([shown(html=picture._repr_html_(), plain="<picture>")])
    [page] = output["data"]["text/html"]
    code = re.fullmatch(
        r'<img alt="plan step" src="data:image/svg\+xml;base64,(.*)">', page
    )
    assert code is not None
    drawing = base64.b64decode(code[1]).decode()
    assert "first" in drawing
    assert "second" not in drawing
    assert "script" not in drawing
    assert 'width="300" height="200"' in drawing


def test_a_table_of_tasks_lacks_what_each_run_has_anew() -> None:
    page = (
        "<table><thead><tr><th>task</th><th>pid</th><th>state</th></tr></thead>"
        "<tbody><tr><td>/job:ps/task:0</td><td>17</td><td>ready</td></tr></tbody></table>"
    )
    [output] = normal([shown(html=page)])
    assert "".join(output["data"]["text/html"]) == (
        "<table><thead><tr><th>task</th><th>state</th></tr></thead>"
        "<tbody><tr><td>/job:ps/task:0</td><td>ready</td></tr></tbody></table>"
    )


def notebook(*outputs: dict[str, Any], source: str = "x") -> dict[str, Any]:
    return {"cells": [{"source": source, "outputs": normal(outputs)}]}


def test_which_tasks_noticed_a_loss_first_is_no_difference() -> None:
    noticed = "WARNING jgraph.events: [lost] a task ended its connection\n"
    first, second = "WARNING the log ended with:\n", "WARNING the run goes on\n"
    assert essence(notebook(printed(first + noticed + second))) == essence(
        notebook(printed(first + second))
    )


def test_a_notebook_differs_in_code_words_and_bytes_and_not_in_measured_values() -> (
    None
):
    old = essence(notebook(printed("loss █▁ 0.31, sends 299.1 KiB"), shown(png="AA")))
    same = notebook(printed("loss █▄▁ 0.2, sends 299.1 KiB"), shown(png="BB"))
    assert essence(same) == old
    for other in (
        notebook(printed("loss █▁ 0.31, sends 12.1 KiB"), shown(png="AA")),
        notebook(printed("loss █▁ 0.31, gets 299.1 KiB"), shown(png="AA")),
        notebook(
            *[printed("loss █▁ 0.31, sends 299.1 KiB"), shown(png="AA")], source="y"
        ),
    ):
        assert essence(other) != old
