"""What is installed: the wheel is built, and every file in it is looked through."""

import ast
import dis
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Final

import jax
import pytest

ROOT: Final = Path(__file__).parent.parent
UNPICKLE: Final = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
)
EVALUATE: Final = frozenset({"eval", "exec", "compile", "__import__", "execfile"})
METHODS: Final = frozenset({"compile", "eval"})
"""Of ``re``, JAX and Flax, with nothing to do with the functions of these names."""
BUILD: Final = "from setuptools import build_meta; build_meta.build_{0}('{0}')"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built: a build leaves files in its tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jgraph", source / "jgraph", ignore=ignored)
    return source


def built(source: Path, kind: str) -> Path:
    command = [sys.executable, "-c", BUILD.format(kind)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=100)
    (path,) = (source / kind).iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(source: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built(source, "wheel")) as opened:
        yield opened


@pytest.mark.slow
def test_type_checkers_find_an_editable_install(source: Path) -> None:
    with zipfile.ZipFile(built(source, "editable")) as opened:
        paths = [n for n in opened.namelist() if n.endswith((".pth", ".py"))]
        (path,) = paths  # no finder, which mypy and pyright cannot run
        assert opened.read(path).decode().split() == [str(source)]


SCRIPT: Final = """
import jgraph as jg
import jax.numpy as jnp

w = jg.Variable("w", jnp.zeros((4, 2)))
reveal_type(jg.LocalCluster(ps=1, workers=1).session())
jg.Local().no_such_method()
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)  # JAX is checked, too, without a cache
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_users_script_is_checked_with_our_types(
    kind: str, source: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built(source, kind)) as opened:
        opened.extractall(site)
    # Where packages are, wherever: a path file there is not read.
    (site / "others.pth").write_text(str(Path(jax.__file__).parents[1]))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    command += ["--python-executable", str(environment / "bin" / "python"), "script.py"]
    checked = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=600
    )
    assert 'Revealed type is "jgraph.client.session.Session"' in checked.stdout
    assert '"Local" has no attribute "no_such_method"' in checked.stdout
    assert "Found 1 error" in checked.stdout


LOADS: Final = (
    # What an instruction's name begins with, what it may not say, and what that is.
    ("IMPORT_", UNPICKLE | {"builtins"}, "imports"),
    ("LOAD_CONST", UNPICKLE | EVALUATE, "spells"),  # for importlib or getattr
    ("LOAD_ATTR", (UNPICKLE | EVALUATE) - METHODS, "uses ."),
    ("LOAD_METHOD", (UNPICKLE | EVALUATE) - METHODS, "uses ."),
    ("LOAD_", UNPICKLE | EVALUATE, "uses"),
)


SENDS_FUNCTIONS: Final = ("jgraph/client/spark/by_value.py",)
"""Tells Spark that the modules of some functions travel to its executors with these."""
NAMES_HABITS: Final = "jgraph/errors/hints.py"
"""Says what stands for names of other libraries, such as ``trainer.compile``."""


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


def words(code: CodeType) -> Iterator[str]:
    """Yields every name and every string of compiled code."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from words(constant)
        elif isinstance(constant, str):
            yield constant


def found(text: str) -> list[str]:
    tree = ast.parse(text)
    code = compile(tree, "<wheel>", "exec")
    # Instructions are looked at where there is such a word: that takes long.
    there = {word.partition(".")[0] for word in words(code)}
    told = list(evils(code)) if there & (UNPICKLE | EVALUATE | {"builtins"}) else []
    if "allow_pickle" not in text:
        return told
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
    told = {name: set(found(wheel.read(name).decode())) for name in sources}
    for name in SENDS_FUNCTIONS:
        told[name] -= {"imports cloudpickle", "uses cloudpickle"}
    told[NAMES_HABITS] -= {"spells compile", "spells eval"}
    assert {name: evil for name, evil in told.items() if evil} == {}
    assert len(sources) == len(list((ROOT / "jgraph").rglob("*.py")))
    page = "jgraph/dashboard/page/"  # has tests of its own
    costs = "jgraph/testing/scale/cost_model.json"  # numbers, in JSON
    assert costs in names
    apart = (page, costs)
    others = [n for n in names if n.startswith("jgraph/") and not n.startswith(apart)]
    assert len([n for n in names if n.startswith(page)]) > 5
    kinds = {PurePosixPath(n).suffix for n in others}
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
