"""The shape of the source tree: documented modules, no way around the layers."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("jgraph", "tests", "benchmarks", "scripts")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "_pb" not in path.parts
)
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "jgraph")]
# Built from pieces, so that this file does not find itself.
HOME_PATHS = re.compile(r"/(?:home|root|Users|work|tmp)" + r"/\w")
NUMERIC_HOST = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
HARMLESS_HOSTS = re.compile(r"127\.0\.0\.\d+|0\.0\.0\.0|10\.0\.0\.\d+|192\.0\.2\.\d+")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_there_are_sources_to_check() -> None:
    assert len(PACKAGE) > 20


def test_only_compat_touches_jax_internals() -> None:
    inside = [
        name(path)
        for path in SOURCES
        if any(f"{module}.".startswith("jax._src.") for module in imports_of(path))
    ]
    assert set(inside) <= {"jgraph/_compat.py"}


@pytest.mark.parametrize("folder", ["jgraph"])
def test_every_package_says_what_it_is(folder: str) -> None:
    packages = {path.parent for path in (ROOT / folder).rglob("*.py")}
    for package in packages:
        init = package / "__init__.py"
        assert init.is_file(), f"{name(package)} has no __init__.py"
        if "_pb" not in package.parts:
            assert ast.get_docstring(ast.parse(init.read_text("utf-8"))), name(init)


def test_every_module_has_a_docstring() -> None:
    for path in PACKAGE:
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), name(path)


def texts() -> list[Path]:
    """Everything that people read, without what tools and builds leave behind."""
    patterns = [
        *("*.md", "*.toml", "Makefile", ".ci/*", "docs/*", "protos/*"),
        *("notebooks/*.ipynb", "scripts/*", "benchmarks/*.md"),
    ]
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted({*found, *SOURCES} - {ROOT / "LICENSE"})


def test_no_file_names_a_path_or_host_of_one_machine() -> None:
    for path in filter(Path.is_file, texts()):
        text = path.read_text(encoding="utf-8")
        assert not HOME_PATHS.search(text), f"{name(path)} has an absolute path"
        hosts = NUMERIC_HOST.findall(HARMLESS_HOSTS.sub("", text))
        assert not hosts, f"{name(path)} names the hosts {hosts}"
