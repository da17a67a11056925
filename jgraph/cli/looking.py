"""Commands that show something: versions, pictures, the demonstration."""

import contextlib
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from jgraph import __version__
from jgraph.cli.options import Json, say


def version(as_json: Json = False) -> None:
    """Print the versions of jgraph and of the packages that it needs."""
    packages = ("jax", "jaxlib", "flax", "optax", "grpcio", "protobuf", "numpy")
    versions = {"jgraph": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    text = "\n".join(f"{name} {value}" for name, value in versions.items())
    say(versions, text, as_json=as_json)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jgraph {__version__}")
        raise typer.Exit


def jgraph(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version of jgraph, and exit.",
        ),
    ] = False,
) -> None:
    """Train and run JAX programs over ps and worker hosts."""


def show(
    where: Annotated[str, typer.Argument(help="file.py:step or package.module:step.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="File to write; it ends in .html or .svg."),
    ] = Path("plan.html"),
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Type of an argument, float32[32,784], or the name of an example in "
            "the file; one for each argument, in order."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Cluster file. The tasks that the program names if unset."),
    ] = None,
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Show the traced graph, before it is placed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw where the operations of a function run. Runs the file, but no cluster."""
    from jgraph.cli.show import show as picture_of

    picture = picture_of(where, arg or (), cluster=cluster, only_graph=graph)
    picture.save(output)
    facts = {"title": picture.title, "path": str(output)}
    say(facts, f"{picture.title}: {output}", as_json=as_json)


def demo(
    ps: Annotated[int, typer.Option(min=1, help="Parameter servers.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the model.")] = 800,
    output: Annotated[
        Path, typer.Option(help="Directory for the checkpoint and the curves.")
    ] = Path("demo-output"),
    as_json: Json = False,
) -> None:
    """Train a small CNN on scanned digits with a cluster on this machine."""
    from jgraph.examples import demo as demonstration

    # For a program the live lines go beside the figures, not among them.
    aside = contextlib.redirect_stdout(sys.stderr) if as_json else None
    with aside or contextlib.nullcontext():
        accuracy = demonstration.main(
            ps=ps, workers=workers, steps=steps, output=output
        )
    if as_json:
        say({"accuracy": accuracy, "output": str(output)}, "", as_json=True)
