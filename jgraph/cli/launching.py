"""Files for Slurm and Kubernetes, printed; nothing is submitted or applied."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jgraph.cli.options import Json, say
from jgraph.errors import ConfigError

if TYPE_CHECKING:
    from jgraph.launch.kubernetes import Manifest

slurm = typer.Typer(help="Clusters of Slurm.", no_args_is_help=True)
k8s = typer.Typer(help="Clusters of Kubernetes.", no_args_is_help=True)

Ps = Annotated[int, typer.Option(min=0, help="Parameter servers.")]
Workers = Annotated[int, typer.Option(min=0, help="Workers.")]
Port = Annotated[int, typer.Option(min=1024, max=65535, help="Port of the tasks.")]
_CHILDREN = (
    "Let the child processes of SyncPS(dense='xla') listen in the cluster's network, "
    "without TLS."
)
OF_CLUSTER = (
    *("ps", "workers", "port", "jobset", "elastic"),
    *("ps_cpu", "ps_memory", "worker_cpu", "worker_memory", "worker_gpus"),
)
OF_SERVERS = ("replicas", "serve_cpu", "serve_memory", "serve_gpus")
"""Options of `jgraph k8s render` that mean nothing beside --serve, or without."""
Called = Annotated[str, typer.Option(help="Name of the cluster.")]


@slurm.callback()
@k8s.callback()
def _group() -> None:
    """Makes ``render`` a command of the group, also while it is the only one."""


@slurm.command("render")
def render_slurm(
    program: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the command to run on the first node."),
    ] = None,
    ps: Ps = 1,
    workers: Workers = 2,
    name: Called = "jgraph",
    port: Port = 8470,
    spare: Annotated[
        int,
        typer.Option(min=0, help="Further workers, which may join later: see --join."),
    ] = 0,
    join: Annotated[
        Path | None,
        typer.Option(
            help="Print a script of workers alone, which join the cluster of a job "
            "that runs: its directory, jgraph-JOBID, with certificates to --spare."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Option for sbatch, such as --option=--time=1:00:00; may be given "
            "more than once."
        ),
    ] = None,
    wait: Annotated[
        int, typer.Option(min=2, help="Seconds to wait for the tasks to start.")
    ] = 120,
    insecure_i_accept: Annotated[
        bool, typer.Option("--insecure-i-accept", help=_CHILDREN)
    ] = False,
    as_json: Json = False,
) -> None:
    """Print a script for sbatch that starts the tasks and then your program."""
    from jgraph.launch.slurm import SlurmJob, SlurmWorkers

    options = option or ()
    if join is not None:
        _check_only_joins(program, spare, insecure_i_accept=insecure_i_accept)
        text = SlurmWorkers(str(join), workers, name, options).script()
    else:
        job = SlurmJob(
            *(program or (), ps, workers, name, port, options, wait, spare),
            insecure_i_accept=insecure_i_accept,
        )
        text = job.script()
    say({"script": text}, text.rstrip(), as_json=as_json)


def _check_only_joins(
    program: list[str] | None, spare: int, *, insecure_i_accept: bool
) -> None:
    """Refuses what does not go with --join."""
    for value, what in [
        (program, "a program"),
        (spare, "--spare"),
        (insecure_i_accept, "--insecure-i-accept"),
    ]:
        if value:
            raise ConfigError(
                f"--join does not go with {what}: those that join train for the "
                "program of the first job, which made their certificates; write "
                "jgraph slurm render --join jgraph-JOBID --workers 2"
            )


@k8s.command("render")
def render_k8s(
    context: typer.Context,
    image: Annotated[
        str, typer.Option(help="Container image of the tasks; see Dockerfile.")
    ],
    ps: Ps = 1,
    workers: Workers = 2,
    name: Called = "jgraph",
    port: Port = 8470,
    jobset: Annotated[
        bool,
        typer.Option(
            "--jobset", help="Print a JobSet, for clusters with its controller."
        ),
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Workers as a StatefulSet, for `kubectl scale` and autoscalers: each "
            "pod joins the cluster by itself, and leaves it when it is drained. Make "
            "certificates for as many as there may be: `jgraph certs --spare`.",
        ),
    ] = False,
    certs: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directory that `jgraph certs` wrote, for the Secret. If unset, make"
            " the Secret NAME-secret yourself. With --serve: of token, tls.crt, and "
            "tls.key, for the Secrets NAME-serve-token and NAME-serve-tls.",
        ),
    ] = None,
    ps_cpu: Annotated[str, typer.Option(help="Cores of a ps.")] = "1",
    ps_memory: Annotated[str, typer.Option(help="Memory of a ps.")] = "2Gi",
    worker_cpu: Annotated[str, typer.Option(help="Cores of a worker.")] = "1",
    worker_memory: Annotated[str, typer.Option(help="Memory of a worker.")] = "2Gi",
    worker_gpus: Annotated[int, typer.Option(min=0, help="GPUs of a worker.")] = 0,
    serve: Annotated[
        str,
        typer.Option(
            help="Print a server of exported models in place of a cluster; they are in"
            " the PersistentVolumeClaim of this name.",
            metavar="CLAIM",
        ),
    ] = "",
    replicas: Annotated[int, typer.Option(min=1, help="Pods of --serve.")] = 2,
    serve_cpu: Annotated[str, typer.Option(help="Cores of a pod of --serve.")] = "1",
    serve_memory: Annotated[
        str, typer.Option(help="Memory of a pod of --serve.")
    ] = "2Gi",
    serve_gpus: Annotated[
        int, typer.Option(min=0, help="GPUs of a pod of --serve.")
    ] = 0,
    insecure_i_accept: Annotated[
        bool,
        typer.Option(
            "--insecure-i-accept",
            help=f"{_CHILDREN} With --serve: plain text, to pods with the label "
            "jgraph-client only.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print manifests for kubectl apply: a StatefulSet of ps, a Job of workers."""
    from jgraph.launch.kubernetes import Deployment, Size
    from jgraph.launch.kubernetes_serving import ModelDeployment

    paths = sorted(certs.iterdir()) if certs else []
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    _check_are_of(context, is_cluster=not serve)
    if serve:
        servers = ModelDeployment(
            image,
            serve,
            replicas,
            name,
            size=Size(serve_cpu, serve_memory, serve_gpus),
            tls=not insecure_i_accept,
            files=files,
        )
        _say_manifests(servers.manifests(), as_json=as_json)
        return
    deployment = Deployment(
        image,
        ps,
        workers,
        name,
        port,
        sizes={
            "ps": Size(ps_cpu, ps_memory),
            "worker": Size(worker_cpu, worker_memory, worker_gpus),
        },
        elastic=elastic,
        files=files,
        insecure_i_accept=insecure_i_accept,
    )
    found = deployment.jobset() if jobset else deployment.plain()
    _say_manifests(found, as_json=as_json)


def _check_are_of(context: typer.Context, *, is_cluster: bool) -> None:
    """Refuses options that what is printed has nothing of."""
    for name in OF_SERVERS if is_cluster else OF_CLUSTER:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is of servers of models; write --serve CLAIM too, or leave "
                f"{option} away"
                if is_cluster
                else f"{option} is of a cluster; leave {option} or --serve away"
            )


def _say_manifests(manifests: "list[Manifest]", *, as_json: bool) -> None:
    from jgraph.launch.kubernetes import as_yaml

    listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
    say(listed, lambda: as_yaml(manifests).rstrip(), as_json=as_json)
