"""The notebooks run start to end, headless, with the asserts in their cells."""

from pathlib import Path

import nbformat.v4
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
QUICK = {"01_quickstart", "05_jgraph_from_scratch"}
CASES = [
    pytest.param(
        path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.nightly
    )
    for path in NOTEBOOKS
]


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", CASES)
def test_notebook_runs_start_to_end(path: Path) -> None:
    notebook = nbformat.v4.reads(path.read_text())  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit no outputs"
    client = NotebookClient(
        notebook, timeout=180, resources={"metadata": {"path": str(path.parents[1])}}
    )
    client.execute()
    asserts = [cell for cell in notebook.cells if "assert" in cell.source]
    assert asserts, f"{path.name} checks nothing"
