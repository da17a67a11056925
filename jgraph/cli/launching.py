"""Files for Slurm and Kubernetes, printed; nothing is submitted or applied."""

from pathlib import Path
from typing import Annotated

import typer

from jgraph.cli.options import Json, say

slurm = typer.Typer(help="Clusters of Slurm.", no_args_is_help=True)
k8s = typer.Typer(help="Clusters of Kubernetes.", no_args_is_help=True)

Ps = Annotated[int, typer.Option(min=0, help="Parameter servers.")]
Workers = Annotated[int, typer.Option(min=0, help="Workers.")]
Port = Annotated[int, typer.Option(min=1024, max=65535, help="Port of the tasks.")]
Called = Annotated[str, typer.Option(help="Name of the cluster.")]


@slurm.callback()
@k8s.callback()
def _group() -> None:
    """Makes ``render`` a command of the group, also while it is the only one."""


@slurm.command("render")
def render_slurm(
    program: Annotated[
        list[str],
        typer.Argument(help="After --: the command to run on the first node."),
    ],
    ps: Ps = 1,
    workers: Workers = 2,
    name: Called = "jgraph",
    port: Port = 8470,
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
    as_json: Json = False,
) -> None:
    """Print a script for sbatch that starts the tasks and then your program."""
    from jgraph.launch.slurm import SlurmJob

    text = SlurmJob(program, ps, workers, name, port, option or (), wait).script()
    say({"script": text}, text.rstrip(), as_json=as_json)


@k8s.command("render")
def render_k8s(
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
    certs: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directory that `jgraph certs` wrote, for the Secret. If unset, make"
            " the Secret NAME-secret yourself.",
        ),
    ] = None,
    ps_cpu: Annotated[str, typer.Option(help="Cores of a ps.")] = "1",
    ps_memory: Annotated[str, typer.Option(help="Memory of a ps.")] = "2Gi",
    worker_cpu: Annotated[str, typer.Option(help="Cores of a worker.")] = "1",
    worker_memory: Annotated[str, typer.Option(help="Memory of a worker.")] = "2Gi",
    worker_gpus: Annotated[int, typer.Option(min=0, help="GPUs of a worker.")] = 0,
    as_json: Json = False,
) -> None:
    """Print manifests for kubectl apply: a StatefulSet of ps, a Job of workers."""
    from jgraph.launch.kubernetes import Deployment, Size, as_yaml

    files = sorted(certs.iterdir()) if certs else []
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
        files={path.name: path.read_bytes() for path in files},
    )
    found = deployment.jobset() if jobset else deployment.plain()
    listed = {"apiVersion": "v1", "kind": "List", "items": found}
    say(listed, lambda: as_yaml(found).rstrip(), as_json=as_json)
