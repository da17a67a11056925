"""The exception tree: complete, drawn as it is, and safe to carry around."""

import copy
import inspect
import pickle  # noqa: TID251  # users' pools pickle errors; jgraph itself does not
import re
from pathlib import Path

import pytest

from jgraph import errors
from jgraph.errors import InternalError, JGError, error_from_code
from scripts import errors_page

ROOT = Path(__file__).parent.parent
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, JGError)
]
GROUPS = {
    errors.JGError,
    errors.UserError,
    errors.ClusterError,
    errors.ProtocolError,
}
LEAVES = [cls for cls in CLASSES if cls not in GROUPS]


def drawn_tree() -> dict[str, tuple[str, str]]:
    """Name -> (parent, code or "") as the module docstring draws it."""
    tree: dict[str, tuple[str, str]] = {}
    parents = {0: ""}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+Error)\b(?: +(JG-\d+))?", line)
        if match:
            depth = len(match[1]) // 4
            parents[depth + 1] = match[2]
            tree[match[2]] = (parents[depth], match[3] or "")
    return tree


def test_the_drawn_tree_is_the_real_tree() -> None:
    real = {}
    for cls in CLASSES:
        parents = [base for base in cls.__bases__ if issubclass(base, JGError)]
        code = cls.__dict__.get("code", "")
        parent = parents[0].__name__ if parents else ""
        real[cls.__name__] = (parent, "" if cls is JGError else code)
    assert drawn_tree() == real


def test_every_leaf_has_a_code_of_its_own() -> None:
    codes = [cls.__dict__["code"] for cls in LEAVES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"JG-\d{3}", code) for code in codes)


def test_a_code_cannot_name_two_classes() -> None:
    with pytest.raises(TypeError, match="JG-211 names two error classes"):
        type("OtherFeedError", (errors.UserError,), {"code": "JG-211"})


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_says_in_its_docstring_what_it_is(cls: type[JGError]) -> None:
    doc = inspect.getdoc(cls) or ""
    assert doc.splitlines()[0].endswith(".")


@pytest.mark.parametrize("cls", LEAVES)
def test_an_error_prints_its_code_and_its_sentence(cls: type[JGError]) -> None:
    error = cls("what happened; what to type", task="/job:ps/task:0")
    assert str(error) == f"{cls.code} what happened; what to type"
    assert error.message == "what happened; what to type"


@pytest.mark.parametrize("cls", LEAVES)
def test_an_error_survives_copies_and_its_wire_form(cls: type[JGError]) -> None:
    error = cls("sentence", task="/job:ps/task:0", sizes=[1, 2])
    for twin in (
        copy.copy(error),
        copy.deepcopy(error),
        pickle.loads(pickle.dumps(error)),
        error_from_code(error.code, error.message, error.details),
    ):
        assert type(twin) is cls
        assert str(twin) == str(error)
        assert twin.details == {"task": "/job:ps/task:0", "sizes": [1, 2]}


def test_a_code_of_a_newer_version_is_an_internal_error() -> None:
    error = error_from_code("JG-999", "from the future", {})
    assert type(error) is InternalError
    assert error.message == "from the future"


def test_the_page_of_errors_is_what_the_docstrings_say() -> None:
    path = ROOT / "docs" / "errors.md"
    assert path.read_text("utf-8") == errors_page.page(), "run scripts/errors_page.py"


@pytest.mark.parametrize("cls", LEAVES)
def test_the_page_of_errors_has_every_class_and_says_what_to_do(
    cls: type[JGError],
) -> None:
    _, after = errors_page.page().split(f"\n### {cls.code} {cls.__name__}\n")
    section = after.split("\n### ")[0]
    assert "*What to do:* " in section
