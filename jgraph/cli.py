"""The ``jgraph`` command: one function per command, heavy imports inside.

Exit codes: 0 ok, 1 failure, 2 usage, 3 cluster unreachable, 4 not allowed. The first
line of an error on stderr is its sentence; ``JGRAPH_DEBUG=1`` adds the traceback.
"""

import importlib.metadata
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from jgraph import __version__
from jgraph.errors import (
    AddressError,
    CertificateError,
    ClusterUnreachableError,
    JGError,
    PlainTextError,
    RoleError,
)
from jgraph.examples.cli import app as examples
from jgraph.train.ckpt_cli import app as ckpt

_NOT_ALLOWED = (CertificateError, PlainTextError, RoleError, PermissionError)
OK, FAILURE, USAGE, UNREACHABLE, FORBIDDEN = range(5)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]

app = typer.Typer(
    name="jgraph",
    help="Train and run JAX programs over ps and worker hosts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tokens = typer.Typer(help="Tokens of clusters.", no_args_is_help=True)
app.add_typer(tokens, name="token")
app.add_typer(examples, name="examples")
app.add_typer(ckpt, name="ckpt")


@app.callback()
def _root() -> None:
    """Makes every command a named one, also while there is only one."""


@app.command()
def version(as_json: Json = False) -> None:
    """Print the versions of jgraph and of what it stands on."""
    packages = ("jax", "jaxlib", "flax", "optax", "grpcio", "protobuf", "numpy")
    versions = {"jgraph": __version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        typer.echo("\n".join(f"{name} {value}" for name, value in versions.items()))


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


@app.command()
def doctor(
    target: Target = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="A cluster file; each of its tasks is dialled once."),
    ] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Measure a running cluster instead: latency and bandwidth between "
            "all its tasks, and how fast they compute. With --json: a cost model for "
            "jg.auto.",
        ),
    ] = False,
    name: Name = "default",
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds for --links.")] = 120,
    as_json: Json = False,
) -> None:
    """Check this machine, and a cluster; exit 1 with numbered problems."""
    if links:
        from jgraph.cluster.client import connect
        from jgraph.cluster.measuring import measure

        where = _target(target, name)
        with connect(where, tls=tls_dir, token_file=token_file) as running:
            model = measure(running, timeout_s=timeout)
        typer.echo(json.dumps(model.to_dict()) if as_json else str(model))
        return
    if target is not None:
        raise typer.BadParameter("a running cluster is measured with --links")
    from jgraph.diagnose import doctor as examine

    report = examine(cluster)
    typer.echo(json.dumps(report.to_dict()) if as_json else str(report))
    if report.problems:
        raise typer.Exit(FAILURE)


def _target(target: str | None, name: str) -> str:
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


@app.command()
def server(
    job: Annotated[
        str | None, typer.Option(help="Job of this task: ps, worker.")
    ] = None,
    task: Annotated[int | None, typer.Option(help="Index of this task.")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Cluster file (TOML); the variable TF_CONFIG if unset."),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            help="Host to listen on. Loopback unless told; others need --tls-dir."
        ),
    ] = "127.0.0.1",
    health_port: Annotated[
        int, typer.Option(help="Port of the gRPC health service; 0: any.")
    ] = 0,
    tls_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory that `jgraph certs` wrote; dir of [tls] in the cluster "
            "file if unset. Without either, plain text."
        ),
    ] = None,
    token_file: TokenFile = None,
    insecure_i_accept: Annotated[
        bool,
        typer.Option(
            "--insecure-i-accept",
            help="Listen beyond loopback without TLS: whoever reads the network may "
            "run programs here.",
        ),
    ] = False,
    allow_source: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of package.module:function that data may come from; may be "
            "given more than once, and in the cluster file: allow of [sources]."
        ),
    ] = None,
) -> None:
    """Serve one task of a cluster until SIGTERM, which drains it."""
    if job == "ps":  # a ps must not take an accelerator from a worker
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jgraph.cluster.allocator import keep_memory
    from jgraph.cluster.server import Server
    from jgraph.cluster.serving import configure_logging, serve
    from jgraph.cluster.sources import allowed_sources_in
    from jgraph.cluster.spec import ClusterSpec, TFConfig
    from jgraph.cluster.transport_choice import tls_directory_in

    keep_memory()
    configure_logging()
    if cluster is not None:
        spec = ClusterSpec.from_toml(cluster)
        tls_dir = tls_dir or tls_directory_in(cluster)
        allow_source = [*(allow_source or ()), *allowed_sources_in(cluster)]
    else:
        config = TFConfig.read()
        spec, job, task = (
            config.cluster,
            job or config.job,
            (config.task if task is None else task),
        )
    running = Server(
        spec,
        job,
        task,
        bind=bind,
        health_port=health_port,
        tls=tls_dir,
        token_file=token_file,
        insecure_i_accept=insecure_i_accept,
        allow_sources=allow_source or (),
    )
    typer.echo(f"{running.task} serves at {running.target}")
    serve(running)


@app.command()
def certs(
    directory: Annotated[Path, typer.Argument(help="Where to; made if not there.")],
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file; its tasks get certificates.")
    ] = None,
    ps: Annotated[int, typer.Option(min=0, help="Parameter servers.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Workers.")] = 0,
    days: Annotated[float, typer.Option(min=0.01, help="How long they hold.")] = 365,
    as_json: Json = False,
) -> None:
    """Make certificates for encrypted connections, one per task and for clients."""
    from jgraph.cluster.processes import check_counts, tasks_of
    from jgraph.cluster.spec import ClusterSpec
    from jgraph.rpc.certificates import make_certificates

    if cluster is not None:
        tasks = ClusterSpec.from_toml(cluster).tasks()
    else:
        check_counts({"ps": ps, "worker": workers})
        tasks = tasks_of({"ps": ps, "worker": workers})
    files = [str(file) for file in make_certificates(directory, tasks, days=days)]
    typer.echo(
        json.dumps(files)
        if as_json
        else "\n".join(files)
        + "\n\nEach host needs ca.crt, token and the two files of its task, clients "
        "ca.crt, token and client.*.\nThe key of the authority was not kept.\n"
        f"  a server:  jgraph server … --tls-dir {directory}\n"
        f"  a client:  jg.connect('jgraphs://host:port', tls='{directory}')"
    )


@tokens.command("new")
def new_token(
    file: Annotated[
        Path | None, typer.Argument(help="Where to; the user's own if unset.")
    ] = None,
) -> None:
    """Make a token in place of the one there is; servers take it when they start."""
    from jgraph.rpc.token import NAME, Token, home

    typer.echo(Token.make(file or home() / NAME, replace=True).path)


@app.command()
def up(
    ps: Annotated[int, typer.Option(min=0, help="Parameter servers.")] = 2,
    workers: Annotated[int, typer.Option(min=0, help="Workers.")] = 2,
    name: Name = "default",
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often a task that died is started again within a minute.",
        ),
    ] = 2,
    as_json: Json = False,
) -> None:
    """Start a cluster of processes on this machine, in the background."""
    from jgraph.cluster.keeper import describe, up as start

    kept = start(name, ps, workers, restarts)
    if as_json:
        typer.echo(json.dumps(describe(kept)))
        return
    typer.echo(
        f"cluster '{name}' serves at {kept.target}\nlogs: {kept.log_dir}\n\n"
        f"  in Python:  cluster = jg.connect('{kept.target}')\n"
        f"  its state:  jgraph status --name {name}\n"
        f"  its end:    jgraph down --name {name}"
    )


@app.command()
def down(name: Name = "default", as_json: Json = False) -> None:
    """Stop a cluster of this machine; checks that nothing of it is left."""
    from jgraph.cluster.keeper import describe, down as end

    kept = end(name)
    count = len(kept.pids)
    text = f"cluster '{name}' is down: {count} tasks ended, 0 processes left"
    typer.echo(json.dumps(describe(kept)) if as_json else text)


@app.command()
def status(
    target: Target = None,
    name: Name = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the tasks.")] = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show every task of a cluster, and those that do not answer."""
    from jgraph.cluster.client import status_of

    state = status_of(
        _target(target, name), timeout_s=timeout, tls=tls_dir, token_file=token_file
    )
    typer.echo(json.dumps(state.to_dict()) if as_json else str(state))
    if state.missing:
        raise typer.Exit(FAILURE)


@app.command()
def show(
    where: Annotated[str, typer.Argument(help="file.py:step or package.module:step.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Ends in .html or .svg.")
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
        typer.Option(help="Cluster file; the tasks that the program names if unset."),
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Show what was traced, before placing.")
    ] = False,
) -> None:
    """Draw what goes where when a function runs; runs the file, and no cluster."""
    from jgraph.cluster.showing import show as picture_of

    picture = picture_of(where, arg or (), cluster=cluster, only_graph=graph)
    picture.save(output)
    typer.echo(f"{picture.title}: {output}")


@app.command()
def demo(
    ps: Annotated[int, typer.Option(min=1, help="Parameter servers.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the model.")] = 800,
    output: Annotated[
        Path, typer.Option(help="Directory for the checkpoint and the curves.")
    ] = Path("demo-output"),
) -> None:
    """Train a small CNN on scanned digits with a cluster on this machine."""
    from jgraph.train import demo as demonstration

    demonstration.main(ps=ps, workers=workers, steps=steps, output=output)


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
    try:
        app(args=args)
    except JGError as error:
        if os.environ.get("JGRAPH_DEBUG") == "1":
            traceback.print_exc()
        else:
            typer.echo(str(error), err=True)
        sys.exit(exit_code(error))
