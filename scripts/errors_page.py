"""Writes docs/errors.md from the docstrings of jgraph/errors.

Run it after changing one; a test compares.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

from jgraph import errors
from jgraph.errors import ClusterError, InternalError, JGError, ProtocolError, UserError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
GROUPS = (
    ("Your program or your data", UserError),
    ("The cluster", ClusterError),
    ("Between client and servers", ProtocolError),
    ("jgraph itself", InternalError),
)
DO = "What to do: "
HEAD = """\
<!-- Written by scripts/errors_page.py from the docstrings of jgraph/errors. -->

# Errors

Every error of jgraph is a class of `jgraph.errors`, and has a code that stays. Its
first line says what happened, where, why, and what to type; here is what is behind it.
What fails leaves things as they were: a step that was refused changed no variable.

```python
try:
    trainer.fit(data, steps=1000)
except jg.errors.JGError as error:
    print(error.code, error.message, error.details)
```

A traceback shows your lines and one of ours; `JGRAPH_TRACEBACKS=full` shows all. The
command line prints the sentence only (`JGRAPH_DEBUG=1`: all), and exits with 3 when no
cluster was reached, 4 when it let nobody in, 2 for wrong usage and else 1.
"""


def members(group: type[JGError]) -> list[type[JGError]]:
    """Classes of a group that have a code of their own, by code."""
    found = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, group) and "code" in cls.__dict__
    }
    return sorted(found, key=lambda cls: cls.code)


def parts(cls: type[JGError]) -> tuple[str, str, str]:
    """What it is, when it happens, and what to do, as Markdown."""
    what, *when, do = (inspect.getdoc(cls) or "").replace("``", "`").split("\n\n")
    if not when or not do.startswith(DO):
        raise ValueError(
            f"the docstring of {cls.__name__} lacks a part; see its siblings"
        )
    return what, "\n\n".join(when), do.removeprefix(DO)


def page() -> str:
    """The text of the page."""
    return "\n".join(lines())


def lines() -> Iterator[str]:
    yield HEAD
    yield "| code | class | |\n|---|---|---|"
    for cls in members(JGError):
        if cls is not JGError:
            anchor = f"{cls.code}-{cls.__name__}".lower()
            yield f"| [{cls.code}](#{anchor}) | `{cls.__name__}` | {parts(cls)[0]} |"
    for title, group in GROUPS:
        yield f"\n## {title}"
        for cls in members(group):
            what, when, do = parts(cls)
            also = [base.__name__ for base in cls.__bases__ if base is not group]
            caught = f" `except {also[0]}` catches it too." if also else ""
            yield f"\n### {cls.code} {cls.__name__}\n\n**{what}**{caught}\n\n{when}\n"
            yield f"*What to do:* {do}"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
