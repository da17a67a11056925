"""Versions on executors beside those of the driver, as a table where they differ."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from jgraph.errors import VersionError
from jgraph.launch.spark.control import KeeperLink
from jgraph.rpc.frames import installed_version

_NAMES: Final = ("python", "jgraph", "jax")


def own_versions() -> dict[str, str]:
    """Returns those of this process."""
    import platform

    import jax

    import jgraph

    return {
        "python": platform.python_version(),
        "jgraph": jgraph.__version__ or installed_version("jgraph"),
        "jax": jax.__version__,
    }


def problem_of(link: KeeperLink) -> str:
    """Returns what is wrong with where a Spark task is; empty: nothing."""
    hello = link.hello
    if hello["problem"]:
        return f"{hello['host']}: {hello['problem']}"
    return difference(hello["versions"], own_versions())


def difference(there: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Returns why a server with these versions will not do; empty: it will.

    JAX may be another than the client's, and Python any that has both.

    Example:
      >>> own = {"python": "3.12.1", "jgraph": "0.1.0", "jax": "0.10.2"}
      >>> difference({**own, "jgraph": "0.0.9"}, own)
      'jgraph 0.0.9 is not 0.1.0 of the driver'
      >>> difference({**own, "jgraph": ""}, own)
      'jgraph is not installed'
      >>> difference({**own, "python": "3.13.0", "jax": "0.11.0"}, own)
      ''
    """
    for name in ("jgraph", "jax"):
        if not there.get(name):
            return f"{name} is not installed"
    if there["jgraph"] != own["jgraph"]:
        return f"jgraph {there['jgraph']} is not {own['jgraph']} of the driver"
    return ""


def check_hellos(links: Iterable[KeeperLink | None]) -> None:
    """Refuses executors that have other versions than the driver.

    Raises:
      VersionError: has the table of all.
    """
    check_versions([link.hello for link in links if link is not None], own_versions())


def check_versions(
    hellos: Sequence[Mapping[str, object]], own: Mapping[str, str]
) -> None:
    """Refuses what ``difference`` finds; see ``check_hellos``."""
    wrong: list[str] = []
    rows = [("host", "program", *_NAMES), ("the driver", "", *(own[n] for n in _NAMES))]
    for hello in hellos:
        versions = hello["versions"]
        assert isinstance(versions, dict)  # as the keeper has made it
        problem = str(hello["problem"] or difference(versions, own))
        if problem:
            wrong.append(f"{hello['host']}: {problem}")
        cells = [str(versions.get(name) or "none") for name in _NAMES]
        row = (str(hello["host"]), str(hello["python"]), *cells)
        if row not in rows:
            rows.append(row)
    if wrong:
        raise VersionError(
            f"executors cannot run servers of this cluster: {sorted(set(wrong))[0]}. "
            "Install the same jgraph and JAX on all, or name the program that has them "
            f"with python='/path/to/python':\n{_table(rows)}",
            tasks=[str(hello["task"]) for hello in hellos],
        )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)
