"""What is installed: the wheel is built, and every file in it is looked through."""

import ast
import dis
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
UNPICKLE: Final = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
)
EVALUATE: Final = frozenset({"eval", "exec", "compile", "__import__", "execfile"})
METHODS: Final = frozenset({"compile", "eval"})
"""Of ``re``, JAX and Flax, with nothing to do with the functions of these names."""
BUILD: Final = "from setuptools import build_meta; build_meta.build_wheel('wheel')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jgraph", source / "jgraph", ignore=ignored)
    command = [sys.executable, "-c", BUILD]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)
    (built,) = (source / "wheel").iterdir()
    with zipfile.ZipFile(built) as opened:
        yield opened


LOADS: Final = (
    # What an instruction's name begins with, what it may not say, and what that is.
    ("IMPORT_", UNPICKLE | {"builtins"}, "imports"),
    ("LOAD_CONST", UNPICKLE | EVALUATE, "spells"),  # for importlib or getattr
    ("LOAD_ATTR", (UNPICKLE | EVALUATE) - METHODS, "uses ."),
    ("LOAD_METHOD", (UNPICKLE | EVALUATE) - METHODS, "uses ."),
    ("LOAD_", UNPICKLE | EVALUATE, "uses"),
)


def evils(code: CodeType) -> Iterator[str]:
    """Yields what compiled code imports, names or spells that it may not."""
    for one in dis.get_instructions(code):
        if isinstance(one.argval, CodeType):
            yield from evils(one.argval)
        elif isinstance(one.argval, str):
            kinds = (kind for kind in LOADS if one.opname.startswith(kind[0]))
            _, banned, verb = next(kinds, ("", frozenset(), ""))
            if one.argval.partition(".")[0] in banned:
                yield f"{verb} {one.argval}".replace(". ", ".")


def found(text: str) -> list[str]:
    tree = ast.parse(text)
    told = list(evils(compile(tree, "<wheel>", "exec")))
    # NumPy unpickles only when it is told to.
    told += [
        f"allow_pickle={ast.unparse(node.value)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        if ast.unparse(node.value) != "False"
    ]
    return told


@pytest.mark.slow
def test_nothing_in_the_wheel_unpickles_or_evaluates(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    sources = [name for name in names if name.endswith(".py")]
    told = {name: found(wheel.read(name).decode()) for name in sources}
    assert {name: evil for name, evil in told.items() if evil} == {}
    assert len(sources) == len(list((ROOT / "jgraph").rglob("*.py")))
    kinds = {PurePosixPath(n).suffix for n in names if n.startswith("jgraph/")}
    assert kinds == {".py", ".pyi", ".typed"}, "neither bytecode, libraries nor data"


@pytest.mark.parametrize(
    ("text", "evil"),
    [
        ("import pickle", "imports pickle"),
        ("from multiprocessing.reduction import pickle", "imports pickle"),
        ("def f():\n  from cloudpickle import loads", "imports cloudpickle"),
        ("import importlib\nimportlib.import_module('dill')", "spells dill"),
        ("f = lambda t: eval(t)", "uses eval"),
        ("class A:\n  def f(self):\n    exec('x')", "uses exec"),
        ("import builtins\nbuiltins.eval('x')", "imports builtins"),
        ("f.__globals__['x'].exec('x')", "uses .exec"),
        ("import x\ngetattr(x, 'eval')", "spells eval"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle=True"),
        ("import numpy as np\nnp.load(f, allow_pickle=x)", "allow_pickle=x"),
        ("from torch import serialization\nserialization.pickle", "uses .pickle"),
    ],
)
def test_what_would_is_found_wherever_it_hides(text: str, evil: str) -> None:
    assert found(text) == [evil] or evil in found(text)


def test_methods_of_these_names_are_not_meant() -> None:
    assert found("import re\nre.compile('x')\njax.jit(f).compile()\nmodel.eval()") == []
