"""What several commands take, and what all of them exit with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from jgraph.errors import ClusterUnreachableError

OK, FAILURE, USAGE, UNREACHABLE, FORBIDDEN = range(5)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Name = Annotated[str, typer.Option(help="Name of a cluster on this machine.")]
Target = Annotated[
    str | None, typer.Argument(help="jgraph://host:port of any of its servers.")
]
Certificates = Annotated[
    Path | None, typer.Option(help="Certificates, for a jgraphs:// address.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="The cluster's token; JGRAPH_TOKEN_FILE, that beside the certificates, or "
        "the user's own if unset."
    ),
]


Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds to wait; then it is an error.")
]


def target_of(target: str | None, name: str) -> str:
    """Returns the address of a cluster: as told, or that of one of this machine."""
    from jgraph.cluster.keeper import find

    if target is not None:
        return target
    kept = find(name)
    if kept is None:
        raise ClusterUnreachableError(
            f"no cluster '{name}' runs on this machine; start one with `jgraph "
            "up`, or name a server: jgraph://host:port"
        )
    return kept.target


def say(facts: object, text: str | Callable[[], str], *, as_json: bool) -> None:
    """Prints what a command found: for a program, or for people."""
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(text if isinstance(text, str) else text())
