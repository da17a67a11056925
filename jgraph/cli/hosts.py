"""Commands on a host: start one server there, make the certificates and tokens."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jgraph.cli.options import Json, TokenFile, say

if TYPE_CHECKING:
    from jgraph.cli.models_beside import ModelsBeside
    from jgraph.dashboard.task_metrics import TaskMetrics
    from jgraph.graph.device import TaskName
    from jgraph.server.server import Server

tokens = typer.Typer(help="Tokens of clusters.", no_args_is_help=True)


def server(
    job: Annotated[
        str | None,
        typer.Option(help="Job: ps or worker. Taken from TF_CONFIG or Slurm if unset."),
    ] = None,
    task: Annotated[
        int | None,
        typer.Option(
            help="Index in the job. Taken from TF_CONFIG, Slurm or the pod's name if "
            "unset."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="Cluster file (TOML). The environment variable TF_CONFIG is read if "
            "unset."
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            help="Join a cluster that is up, through any of its servers: "
            "jgraph://host:port. The cluster gives this one its index."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="With --join: name or address of this host for the others; the one "
            "that it reaches them from if unset."
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="With --join: port of the task; 0 takes a free one."
        ),
    ] = 0,
    dial_only: Annotated[
        bool,
        typer.Option(
            "--dial-only",
            help="With --join, for a worker behind a firewall: listen nowhere. It "
            "dials the other tasks, and they reach it over these connections.",
        ),
    ] = False,
    bind: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Addresses other than loopback need --tls-dir."
        ),
    ] = "127.0.0.1",
    health_port: Annotated[
        int,
        typer.Option(help="Port of the gRPC health service; 0 takes any free port."),
    ] = 0,
    data_port: Annotated[
        str,
        typer.Option(
            help="Port of the same address for tensors from other hosts; 0 takes any "
            "free port. 'off' leaves tensors in the gRPC connection, which is slower; "
            "so does a firewall that lets only the task's own port through."
        ),
    ] = "0",
    data_encryption: Annotated[
        str,
        typer.Option(
            help="What protects the data port where there are certificates: 'records' "
            "sealed with AES-256-GCM, or 'tls', which takes more time."
        ),
    ] = "records",
    tls_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory that `jgraph certs` wrote. `tls.dir` of the cluster file "
            "if unset; without either, connections are not encrypted."
        ),
    ] = None,
    token_file: TokenFile = None,
    insecure_i_accept: Annotated[
        bool,
        typer.Option(
            "--insecure-i-accept",
            help="Listen beyond loopback without TLS: anybody who can read the "
            "network can then run programs here. With TLS: let the child processes of "
            "SyncPS(dense='xla') listen there, without it.",
        ),
    ] = False,
    allow_source: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of functions (package.module:function) that may supply "
            "data. May be given more than once; also `sources.allow` of the "
            "cluster file."
        ),
    ] = None,
    max_request_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Bytes of requests held in memory at a time; further requests wait. "
            "A quarter of the free memory if unset.",
        ),
    ] = None,
    end_with_input: Annotated[
        bool,
        typer.Option(
            "--end-with-input",
            help="Exit when standard input is closed, so that the server ends with "
            "the process that started it.",
        ),
    ] = False,
    overdue_s: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Exit with code 76 when a computation goes on for so many seconds "
            "after the time of its step was up. For servers that are restarted when "
            "they fail: nothing but the end of its process ends a computation.",
        ),
    ] = None,
    sigterm_exit_code: Annotated[
        int,
        typer.Option(
            min=0,
            max=255,
            help="Exit code after SIGTERM. A Kubernetes Job restarts failed tasks "
            "only, so it needs 143 to bring the task back after a node is "
            "drained; 0 then means that a client ended it.",
        ),
    ] = 0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the same address for Prometheus: GET /metrics, with TLS "
            "where there are certificates. 0 takes any free one. Needs "
            "--metrics-token-file.",
        ),
    ] = None,
    metrics_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that a scrape shows; it is good for /metrics "
            "alone.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            help="For the job `serve`: a directory of models, for which this process "
            "answers requests beside its task; of those in training as they are now."
        ),
    ] = None,
    http_port: Annotated[
        int, typer.Option(help="With --models: port for REST; 0: any; -1: none.")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option(help="With --models: port for gRPC; 0: any; -1: none.")
    ] = 8001,
    serve_token_file: Annotated[
        Path | None,
        typer.Option(
            help="With --models: what callers show. If unset: ~/.jgraph/serve_token."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="With --models: certificate that callers see, PEM."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="With --models: its key, PEM.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve one task of a cluster. SIGTERM drains it.

    With --join it becomes a new task of a cluster that is up, and leaves that when it
    is drained. The exit code is 75 if another process took the place of this one.
    """
    if models is not None:
        _check_answers((tls_cert, tls_key), http_port, grpc_port)
    make_metrics = _metrics(metrics_port, metrics_token_file)
    options: dict[str, Any] = {
        "bind": bind,
        "health_port": health_port,
        "data_port": data_port,
        "data_encryption": data_encryption,  # the server checks it
        "token_file": token_file,
        "insecure_i_accept": insecure_i_accept,
        "max_request_bytes": max_request_bytes,
        "overdue_s": overdue_s,
    }
    listening = {
        "--host": host is not None,
        "--port": port != 0,
        "--bind": bind != "127.0.0.1",
        "--health-port": health_port != 0,
        "--metrics-port": metrics_port is not None,
        "--models": models is not None,
    }
    _check_dials_only(dial_only, join, [name for name in listening if listening[name]])
    if join is not None:
        _check_joins(job, task, cluster)
        options["dial_only"] = dial_only
        options["allow_sources"] = allow_source or ()
        running = _joined(join, job or "worker", host, port, tls_dir, options)
    else:
        sources = allow_source or ()
        running = _as_described(job, task, cluster, tls_dir, sources, options)
    from jgraph.server.main import serve

    metrics = make_metrics(running, bind)
    beside: list[ModelsBeside | TaskMetrics] = [metrics] if metrics else []
    if models is not None:
        answers = _models_beside(
            running,
            models,
            (cluster, tls_dir, token_file),
            bind=bind,
            http_port=http_port,
            grpc_port=grpc_port,
            token_file=serve_token_file,
            tls=(tls_cert, tls_key),
            insecure_i_accept=insecure_i_accept,
        )
        beside.append(answers)

    def ready() -> None:
        facts = {"task": running.task, "target": running.target, "pid": os.getpid()}
        where = f"serves at {running.target}" if running.listens else "only dials"
        text = f"{running.task} {where}"
        if metrics:
            facts["metrics"] = metrics.url
            text += f", its metrics at {metrics.url}"
        say(facts, text, as_json=as_json)
        for one in beside:
            one.start()

    orders = sys.stdin if end_with_input else None
    code = serve(running, orders, sigterm_code=sigterm_exit_code, ready=ready)
    for one in beside:
        one.stop()
    if code:
        raise typer.Exit(code)


def _metrics(
    port: int | None, token_file: Path | None
) -> "Callable[[Server, str], TaskMetrics | None]":
    """Returns what makes a task's port for Prometheus; refuses before that is there."""
    from jgraph.cli.options import metrics_token
    from jgraph.errors import ConfigError

    if (port is None) != (token_file is None):
        raise ConfigError(
            "--metrics-port and --metrics-token-file go together: who scrapes shows a "
            "token of its own, for example one made by `jgraph token new`"
        )
    if port is None:
        return lambda server, bind: None
    try:
        from jgraph.dashboard.task_metrics import TaskMetrics
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--metrics-port needs the package {error.name}: "
            "pip install 'jgraph[dashboard]'"
        ) from error
    token = metrics_token(token_file)
    return lambda server, bind: TaskMetrics(server, bind, port, token)


def _check_answers(
    tls: tuple[Path | None, Path | None], http_port: int, grpc_port: int
) -> None:
    """Refuses options of --models that mean nothing, before the task is there."""
    from jgraph.errors import ConfigError

    if len([file for file in tls if file is not None]) == 1:
        raise ConfigError("give --tls-cert and --tls-key, both or none")
    if http_port < 0 and grpc_port < 0:
        raise ConfigError("nobody could ask: give --http-port or --grpc-port")


def _models_beside(
    running: "Server",
    models: Path,
    identity: tuple[Path | None, Path | None, Path | None],
    *,
    http_port: int,
    grpc_port: int,
    tls: tuple[Path | None, Path | None],
    **options: Any,
) -> "ModelsBeside":
    """Returns what serves models beside a task.

    Args:
      running: the task.
      models: directory of them.
      identity: cluster file, directory of certificates and file of the token, which
        show that the server is a client of the cluster.
      http_port: negative: none.
      grpc_port: likewise.
      tls: certificate and key that callers see, or neither.
      **options: of ``ModelServer``.
    """
    from jgraph.cli.models_beside import ModelsBeside
    from jgraph.cluster.transport_choice import tls_directory_in

    cluster, tls_dir, token_file = identity
    own = tls_dir or (tls_directory_in(cluster) if cluster else None)
    ports = {"http_port": http_port, "grpc_port": grpc_port}
    options |= {name: None if port < 0 else port for name, port in ports.items()}
    files = tls if all(tls) else None
    return ModelsBeside(running, models, own, token_file, tls=files, **options)


def _check_joins(job: str | None, task: int | None, cluster: Path | None) -> None:
    """Refuses what does not go with --join."""
    from jgraph.errors import ConfigError

    if task is not None or cluster is not None:
        option = "--task" if task is not None else "--cluster"
        raise ConfigError(
            f"--join does not go with {option}: the cluster that is joined says which "
            f"task this is; write jgraph server --job {job or 'worker'} --join ADDRESS"
        )


def _check_dials_only(
    dial_only: bool, join: str | None, listening: Sequence[str]
) -> None:
    """Refuses what does not go with --dial-only, if that was told."""
    from jgraph.errors import ConfigError

    if not dial_only:
        return
    if join is None:
        raise ConfigError(
            "--dial-only goes with --join: a task that the cluster's description lists "
            "is dialled by the others; write jgraph server --join ADDRESS --dial-only"
        )
    if listening:
        raise ConfigError(
            f"--dial-only does not go with {listening[0]}: such a task listens "
            "nowhere; leave one of them out"
        )


def _joined(
    target: str,
    job: str,
    host: str | None,
    port: int,
    tls: Path | None,
    options: dict[str, Any],
) -> "Server":
    """Returns a server that has joined a cluster."""
    from jgraph.server.main import configure_logging
    from jgraph.server.members.joining import join_cluster
    from jgraph.server.process_setup import set_up_process

    set_up_process()
    configure_logging()
    return join_cluster(target, job, host=host, port=port, tls=tls, **options)


def _as_described(
    job: str | None,
    task: int | None,
    cluster: Path | None,
    tls_dir: Path | None,
    allow_source: Sequence[str],
    options: dict[str, Any],
) -> "Server":
    """Returns a server of a task that the description of a cluster has."""
    from jgraph.cluster.spec import ClusterSpec, TFConfig
    from jgraph.launch.identity import task_here

    if cluster is not None:
        spec = ClusterSpec.from_toml(cluster)
    else:
        config = TFConfig.read()
        spec, job = config.cluster, job or config.job
        task = config.task if task is None else task
    job, task = task_here(spec, job, task, os.environ)
    if job == "ps":  # a ps must not take an accelerator from a worker; JAX reads it
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jgraph.cluster.options import allowed_sources_in
    from jgraph.cluster.transport_choice import tls_directory_in
    from jgraph.server.main import configure_logging
    from jgraph.server.process_setup import set_up_process
    from jgraph.server.server import Server

    set_up_process()
    configure_logging()
    if cluster is not None:
        tls_dir = tls_dir or tls_directory_in(cluster)
        allow_source = [*allow_source, *allowed_sources_in(cluster)]
    return Server(spec, job, task, tls=tls_dir, allow_sources=allow_source, **options)


def certs(
    directory: Annotated[
        Path, typer.Argument(help="Directory to write to; it is created if need be.")
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(help="Cluster file; each of its tasks gets a certificate."),
    ] = None,
    ps: Annotated[int, typer.Option(min=0, help="Parameter servers.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Workers.")] = 0,
    spare: Annotated[
        int,
        typer.Option(
            min=0,
            max=4096,
            help="Further workers, which may join later: certificates of the indices "
            "after those of the cluster.",
        ),
    ] = 0,
    days: Annotated[
        float, typer.Option(min=0.01, help="Days until the certificates expire.")
    ] = 365,
    as_json: Json = False,
) -> None:
    """Make certificates for encrypted connections: one a task, and one for clients."""
    from jgraph.cluster.spec import ClusterSpec, check_counts
    from jgraph.launch.local.processes import tasks_of
    from jgraph.rpc.security.certificates import make_certificates

    if cluster is not None:
        tasks = ClusterSpec.from_toml(cluster).tasks()
    else:
        check_counts({"ps": ps, "worker": workers})
        tasks = tasks_of({"ps": ps, "worker": workers})
    tasks += _spare_workers(tasks, spare)
    files = [str(file) for file in make_certificates(directory, tasks, days=days)]
    say(
        files,
        "\n".join(files)
        + "\n\nEach host needs ca.crt, token and the two files of its task, clients "
        "ca.crt, token and client.*.\nThe key of the authority was not kept.\n"
        f"  a server:  jgraph server … --tls-dir {directory}\n"
        f"  a client:  jg.connect('jgraphs://host:port', tls='{directory}')",
        as_json=as_json,
    )


def _spare_workers(tasks: Sequence[str], count: int) -> "list[TaskName]":
    """Returns the names of so many workers more than there are."""
    from jgraph.graph.device import TaskName, is_worker

    taken = [int(task.rpartition(":")[2]) for task in filter(is_worker, tasks)]
    first = max(taken, default=-1) + 1
    return [TaskName(f"/job:worker/task:{first + n}") for n in range(count)]


@tokens.command("new")
def new_token(
    file: Annotated[
        Path | None, typer.Argument(help="File to write; ~/.jgraph/token if unset.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a new token in place of the present one. Servers read it when they start."""
    from jgraph.rpc.security.token import NAME, Token, home

    path = str(Token.make(file or home() / NAME, replace=True).path)
    say({"path": path}, path, as_json=as_json)
