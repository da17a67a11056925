"""The ``jgraph`` command: a function per command, heavy imports inside.

Exit codes: 0 ok, 1 failure, 2 usage, 3 cluster unreachable, 4 not allowed. The first
line of an error on stderr is its sentence; ``JGRAPH_DEBUG=1`` adds the traceback. Every
command takes ``--json``, and those that wait for others ``--timeout``.
"""

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from jgraph.cli import (
    clusters,
    dashboard,
    hosts,
    launching,
    looking,
    runs,
    serving,
    simulation,
    tasks,
    trace,
)
from jgraph.cli.options import FAILURE, FORBIDDEN, OK, UNREACHABLE, USAGE, Commands
from jgraph.errors import (
    AddressError,
    CertificateError,
    ClusterUnreachableError,
    JGError,
    PlainTextError,
    RoleError,
)
from jgraph.examples.cli import app as examples
from jgraph.loading import end_uncollected
from jgraph.serving.cli import app as models
from jgraph.train.checkpoint.cli import app as ckpt

__all__ = [
    "FAILURE",
    "FORBIDDEN",
    "OK",
    "UNREACHABLE",
    "USAGE",
    "app",
    "exit_code",
    "main",
]

_NOT_ALLOWED = (CertificateError, PlainTextError, RoleError, PermissionError)

app = typer.Typer(
    name="jgraph",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(looking.jgraph)
for command in (
    *(looking.version, clusters.doctor, hosts.server, hosts.certs),
    *(clusters.up, clusters.scale, clusters.down, clusters.status, clusters.top),
    *(dashboard.dashboard, trace.trace),
    *(runs.runs, runs.events, tasks.logs, tasks.drain, looking.show, looking.demo),
    *(serving.export, serving.serve, serving.predict, simulation.simulate),
):
    app.command()(command)
app.add_typer(hosts.tokens, name="token")
app.add_typer(launching.slurm, name="slurm")
app.add_typer(launching.k8s, name="k8s")
app.add_typer(examples, name="examples")
app.add_typer(ckpt, name="ckpt")
app.add_typer(models, name="model")


def exit_code(error: JGError) -> int:
    """Returns what the command exits with after ``error``.

    Example:
      >>> exit_code(ClusterUnreachableError("no jgraph server at head:8470"))
      3
    """
    if isinstance(error, _NOT_ALLOWED):
        return FORBIDDEN
    unreachable = isinstance(error, ClusterUnreachableError | AddressError)
    return UNREACHABLE if unreachable else FAILURE


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Args:
      args: what follows ``jgraph``; the process's own arguments if unset.
    """
    if args is None:
        end_uncollected()
    try:
        app(args=args)
    except JGError as error:
        if os.environ.get("JGRAPH_DEBUG") == "1":
            traceback.print_exc()
        else:
            typer.echo(str(error), err=True)
        sys.exit(exit_code(error))
