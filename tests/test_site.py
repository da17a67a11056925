"""The pages build as a site, with warnings as errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jgraph

ROOT = Path(__file__).parent.parent


OUTSIDE = {"errors", "spark", "__version__", "testing"}
"""No objects, or shown by their parts."""
PUBLIC = {*jgraph.__all__, *jgraph.testing.__all__} - OUTSIDE


def test_the_reference_has_every_public_name() -> None:
    pytest.importorskip("mkdocs", reason="needs pip install 'jgraph[docs]'")
    from scripts.docs_site import reference

    assert set(re.findall(r"^::: \S+\.(\w+)$", reference(), re.M)) >= PUBLIC


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(400)
def test_the_site_builds_with_every_public_name_and_pages_from_outside_of_docs(
    tmp_path: Path,
) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="needs pip install 'jgraph[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr

    def page(name: str) -> str:
        return (tmp_path / f"{name}.html").read_text(encoding="utf-8")

    shown = set(re.findall(r'id="jgraph\.[\w.]*?\.(\w+)"', page("api")))
    assert shown >= PUBLIC
    assert 'href="notebooks/05_jgraph_from_scratch.html"' in page("index")
    assert 'href="../architecture.html"' in page("notebooks/05_jgraph_from_scratch")
    assert "plan train_step" in page("notebooks/01_quickstart")  # a picture's title
    for name in ("security", "benchmarks", "examples", "changelog", "errors"):
        assert "</html>" in page(name)
