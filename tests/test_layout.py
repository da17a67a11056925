"""The shape of the source tree: documented modules, no way around the layers."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Set as AbstractSet
from functools import cache
from pathlib import Path

import pytest

# The first of them parses the whole tree, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parent.parent
FOLDERS = ("jgraph", "tests", "benchmarks", "scripts")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "_pb" not in path.parts
)
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "jgraph")]
MODULES = 16
"""In one folder, at most."""
STUBS = 3
"""Modules of less than 60 lines that one other module imports, at most."""
PARTICIPLES = re.compile(
    "told|made|left|given|shown|got|gone|heard|handed|dealt|drawn|tried|spent|waited|"
    "begun|kept"
)
"""Say what happened to a value, not what it is."""
# Built from pieces, so that this file does not find itself.
CONFLICT = re.compile(r"(<{7}|>{7}) ")
HOME_PATHS = re.compile(r"/(?:home|root|Users|work|tmp)" + r"/\w")
NUMERIC_HOST = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
HARMLESS_HOSTS = re.compile(r"127\.0\.0\.\d+|0\.0\.0\.0|10\.0\.0\.\d+|192\.0\.2\.\d+")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> AbstractSet[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_there_are_sources_to_check() -> None:
    assert len(PACKAGE) > 20


def test_what_several_tests_need_is_in_support_and_imported_from_there() -> None:
    tests = [path for path in SOURCES if path.is_relative_to(ROOT / "tests")]
    support = ROOT / "tests/support"
    of_pytest = ("test_", "conftest.")
    for path in tests:
        assert path.is_relative_to(support) or path.name.startswith(of_pytest), (
            f"{name(path)} belongs to tests/support"
        )
    of_a_test = re.compile(r"\bfrom tests\.(?:\w+\.)*(?:test_\w+|conftest) import\b")
    for path in SOURCES:
        found = of_a_test.findall(path.read_text("utf-8"))
        assert not found, f"{name(path)}: {found}"


def test_folders_of_tests_are_those_of_the_package() -> None:
    across = {"bad_input", "faults", "fuzz", "planted", "simulation", "support"}
    package = {path.parent.relative_to(ROOT / "jgraph") for path in PACKAGE}
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        assert folder in package or folder.parts[0] in across, name(path)


def test_only_compat_touches_jax_internals() -> None:
    inside = [
        name(path)
        for path in SOURCES
        if "_src" in path.read_text("utf-8")
        and any(f"{module}.".startswith("jax._src.") for module in imports_of(path))
    ]
    assert set(inside) <= {"jgraph/_compat.py"}


@pytest.mark.parametrize("folder", ["jgraph"])
def test_every_package_says_what_it_is(folder: str) -> None:
    packages = {path.parent for path in (ROOT / folder).rglob("*.py")}
    for package in packages:
        init = package / "__init__.py"
        assert init.is_file(), f"{name(package)} has no __init__.py"
        if "_pb" not in package.parts:
            assert ast.get_docstring(tree_of(init)), name(init)


def first_line(path: Path) -> str:
    """The first line of the docstring of a module, which begins its file."""
    found = re.match(r'"""(\S.*?)(?:"""|$)', path.read_text("utf-8"), re.M)
    return found[1] if found else ""


def test_every_module_has_a_docstring() -> None:
    for path in PACKAGE:
        assert first_line(path), name(path)


def test_first_lines_are_what_a_specialist_would_search_for() -> None:
    asks = re.compile(r"(?:Whether|Which|What|Who|Whose|Whom|Where|When|How|Why)\b")
    for path in PACKAGE:
        line = first_line(path)
        assert not asks.match(line), f"{name(path)}: {line}"


def values(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names of variables, parameters, attributes, properties; whether it is local."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, True
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, False
            case ast.FunctionDef(name=name, decorator_list=decorators):
                if any("property" in ast.unparse(one) for one in decorators):
                    yield name, False


def test_values_have_nouns_for_names() -> None:
    assert list(values(ast.parse("def f(told): self._left = 1"))) == [
        ("told", False),
        ("_left", False),
    ]
    counters = {("jgraph/runtime/store/hash_shard.py", "found")}  # rows of a look-up
    for path in PACKAGE:
        for value, is_local in values(tree_of(path)):
            word = value.strip("_")
            # In a function the line above says what is looked for.
            vague = PARTICIPLES.fullmatch(word) or (word == "found" and not is_local)
            assert not vague or (name(path), word) in counters, f"{name(path)}: {value}"


def test_no_folder_has_more_modules_than_one_can_look_through() -> None:
    modules = Counter(path.parent for path in PACKAGE if not path.name.startswith("__"))
    crowded = {name(folder): n for folder, n in modules.items() if n > MODULES}
    assert not crowded


def module_graph() -> dict[str, set[str]]:
    """Imports between modules of the package, those for types included."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE
    }
    del modules["jgraph"]  # its names are imported at first use
    return {
        module: set(imports_of(path) & modules.keys() - {module})
        for module, path in modules.items()
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    # What leads nowhere, or comes from nowhere, is on no circle.
    graph = module_graph()
    while True:
        imported = set().union(*graph.values())
        loose = {m for m, used in graph.items() if not used or m not in imported}
        if not loose:
            break
        graph = {m: used - loose for m, used in graph.items() if m not in loose}
    assert not graph, f"on circles: {sorted(graph)}"


def test_small_modules_are_not_cut_from_their_only_user() -> None:
    graph = module_graph()
    users = Counter(used for imports in graph.values() for used in imports)
    small = {
        name(path)
        for path in PACKAGE
        if not path.name.startswith("__")
        and len(path.read_text("utf-8").splitlines()) < 60
        and users[".".join(path.relative_to(ROOT).with_suffix("").parts)] == 1
    }
    assert len(small) <= STUBS, small


def test_modules_that_docstrings_name_are_there() -> None:
    dotted = re.compile(r"``((?:coordination|plan|rpc|runtime)(?:\.[a-z_]+)+)``")
    for path in PACKAGE:
        for named in dotted.findall(path.read_text("utf-8")):
            home = ROOT / "jgraph" / named.replace(".", "/")
            assert home.with_suffix(".py").is_file(), f"{name(path)}: {named}"


def test_the_architecture_page_names_what_is_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)` \| `([\w.]+)` \|$", page, re.M)
    assert len(rows) >= 10
    for file, function in rows:
        body = ast.parse((ROOT / "jgraph" / file).read_text("utf-8")).body
        for part in function.split("."):
            found = [n for n in body if getattr(n, "name", None) == part]
            assert found, f"{file} has no {function}"
            body = getattr(found[0], "body", [])


def test_the_architecture_page_has_a_line_of_each_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    house = page.partition("## Where do I find")[0]
    lines = re.findall(r"^\| (`[^|]+`) \|", house, re.M)
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    there = {path.relative_to(ROOT / "jgraph").parts[0] for path in PACKAGE}
    public = {part.removesuffix(".py") for part in there if not part.startswith("__")}
    assert named == public


def machines() -> Iterator[tuple[Path, str]]:
    """State machines of the cluster: the module of each, and its class."""
    for path in (ROOT / "jgraph/coordination").glob("*/*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                methods = {getattr(part, "name", "") for part in node.body}
                doc = ast.get_docstring(node) or ""
                if "handle" in methods or doc.startswith("State machine"):
                    yield path, node.name


def test_every_state_machine_has_a_transcript() -> None:
    assert len(list(machines())) > 15
    for path, machine in machines():
        package, module = path.parent.name, path.stem
        scripts = ROOT / "tests/coordination" / package / "testdata" / module
        made = re.compile(rf"^{machine}\b", re.M)
        found = [script.read_text("utf-8") for script in scripts.glob("*.txt")]
        assert any(map(made.search, found)), f"{scripts} has no {machine}"


def texts() -> list[Path]:
    """Everything that people read, without what tools and builds leave behind."""
    patterns = [
        *("*.md", "*.toml", "Makefile", ".ci/*", "docs/*", "protos/*"),
        *("notebooks/*.ipynb", "scripts/*", "benchmarks/*.md"),
    ]
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    files = {*found, *SOURCES} - {ROOT / "LICENSE"}
    return sorted(path for path in files if path.suffix != ".png")


def test_no_file_names_a_path_or_host_of_one_machine() -> None:
    for path in filter(Path.is_file, texts()):
        text = path.read_text(encoding="utf-8")
        assert not HOME_PATHS.search(text), f"{name(path)} has an absolute path"
        hosts = NUMERIC_HOST.findall(HARMLESS_HOSTS.sub("", text))
        assert not hosts, f"{name(path)} names the hosts {hosts}"


def test_no_file_has_both_sides_of_a_conflict() -> None:
    for path in filter(Path.is_file, texts()):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not CONFLICT.match(line), f"{name(path)} has '{line}'"
