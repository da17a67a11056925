"""``jgraph examples``: one function per example, heavy imports inside."""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from jgraph.examples.options import Example, Figures, Options

app = typer.Typer(
    name="examples",
    help="Train an example, with a cluster on this machine.",
    no_args_is_help=True,
)

Census = Annotated[Path, typer.Option(help="Directory with adult.data and adult.test.")]
Text = Annotated[Path, typer.Option(help="Directory with input.txt.")]
Ps = Annotated[int, typer.Option(min=1, help="Parameter servers.")]
Workers = Annotated[int, typer.Option(min=1, help="Workers.")]
Steps = Annotated[int, typer.Option(min=1, help="Updates, all workers together.")]
Seed = Annotated[int, typer.Option(help="Decides initial values and the data's order.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one line: the final figures, as JSON.")
]


@app.command()
def wide_deep(
    data: Census,
    ps: Annotated[
        int | None,
        typer.Option(min=1, help="Parameter servers; 2, with --spark 1."),
    ] = None,
    workers: Workers = 2,
    steps: Steps = 3000,
    seed: Seed = 0,
    spark: Annotated[
        str | None,
        typer.Option(help="Master of Spark, which trains and scores: local[3]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Wide & Deep on the census income data: adult.data and adult.test."""
    if spark is None:
        from jgraph.examples.wide_deep import run

        train = functools.partial(run, data)
        run_example("wide-deep", train, ps or 2, workers, steps, seed, as_json=as_json)
        return
    from jgraph.examples import wide_deep_spark

    num_ps = ps or 1
    on_spark = functools.partial(wide_deep_spark.run, data, spark, num_ps, workers)
    tell_figures("wide-deep", on_spark, num_ps, workers, steps, seed, as_json=as_json)


@app.command()
def lm(
    data: Text,
    ps: Ps = 2,
    workers: Workers = 2,
    steps: Steps = 1000,
    seed: Seed = 0,
    tied: Annotated[
        bool, typer.Option(help="Use the embedding for the output too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """An LSTM that predicts the next word of a text: input.txt."""
    from jgraph.examples.lm import run

    train = functools.partial(run, data, tied=tied)
    run_example("lm", train, ps, workers, steps, seed, as_json=as_json)


@app.command()
def dlrm(
    data: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Directory with train.txt of Criteo's format; made up if unset.",
        ),
    ] = None,
    ps: Ps = 2,
    workers: Workers = 2,
    steps: Steps = 2000,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """DLRM on made-up clicks, or Criteo's: a hash table on the ps has their ids."""
    from jgraph.examples.dlrm import run

    train = functools.partial(run, data=data)
    run_example("dlrm", train, ps, workers, steps, seed, as_json=as_json)


@app.command()
def pipeline(
    data: Text,
    workers: Annotated[int, typer.Option(min=1, help="Workers, a stage each.")] = 4,
    replicas: Annotated[
        int, typer.Option(min=1, help="Copies of the model that share the workers.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 500,
    microbatches: Annotated[int, typer.Option(help="Parts of a batch of 32.")] = 8,
    schedule: Annotated[str, typer.Option(help="gpipe or 1f1b.")] = "1f1b",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """A transformer in stages, one per worker, on the words of a text: input.txt."""
    from jgraph.examples.pipeline import run

    train = functools.partial(
        run, data, microbatches=microbatches, schedule=schedule, replicas=replicas
    )
    run_example("pipeline", train, 0, workers, steps, seed, as_json=as_json)


@app.command()
def inception(
    ps: Ps = 2,
    workers: Workers = 2,
    steps: Steps = 600,
    width: Annotated[
        float, typer.Option(help="Of the layers, times the published ones.")
    ] = 0.125,
    size: Annotated[int, typer.Option(help="Pixels of a side; 75 or more.")] = 75,
    backup_workers: Annotated[
        int, typer.Option(min=0, help="Workers that an update does not wait for.")
    ] = 0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """A narrow Inception-v3 on enlarged digits, in synchronous training."""
    from jgraph.examples.inception import run

    train = functools.partial(
        run, width=width, size=size, backup_workers=backup_workers
    )
    run_example("inception", train, ps, workers, steps, seed, as_json=as_json)


@app.command()
def federated(
    ps: Annotated[int, typer.Option(min=1, help="Parameter servers.")] = 1,
    workers: Annotated[int, typer.Option(help="Workers: ten, a client each.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Rounds of each way.")] = 100,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Digits on ten clients with two digits each: by FedAvg, and as DiLoCo does."""
    from jgraph.examples.federated import run

    run_example("federated", run, ps, workers, steps, seed, as_json=as_json)


@app.command()
def diloco(
    data: Text,
    ps: Annotated[int, typer.Option(min=1, help="Parameter servers.")] = 1,
    workers: Workers = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each worker.")] = 1000,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """A transformer of characters whose workers seldom talk: input.txt."""
    from jgraph.examples.diloco import run

    train = functools.partial(run, data)
    run_example("diloco", train, ps, workers, steps, seed, as_json=as_json)


def run_example(
    name: str,
    example: "Example",
    ps: int,
    workers: int,
    steps: int,
    seed: int,
    *,
    as_json: bool,
) -> None:
    """Trains an example with a cluster of processes, and prints its figures.

    Args:
      name: of the command.
      example: what to train.
      ps: parameter servers.
      workers: workers.
      steps: updates of the model, all workers together.
      seed: decides initial values and the order of examples.
      as_json: print nothing but one line of JSON.
    """
    from jgraph.launch.local.cluster import LocalCluster

    def train(options: "Options") -> "Figures":
        with LocalCluster(ps=ps, workers=workers) as cluster:
            return example(cluster, options)

    tell_figures(name, train, ps, workers, steps, seed, as_json=as_json)


def tell_figures(
    name: str,
    train: "Callable[[Options], Figures]",
    ps: int,
    workers: int,
    steps: int,
    seed: int,
    *,
    as_json: bool,
) -> None:
    """Prints the figures of an example, wherever it trains; see ``run_example``."""
    from jgraph.clock import SystemClock
    from jgraph.examples.options import Options

    clock = SystemClock()
    began = clock.now()
    options = (
        Options(steps, seed)
        if as_json
        else Options(steps, seed, progress=True, say=typer.echo)
    )
    found = train(options)
    figures = {
        "example": name,
        "ps": ps,
        "workers": workers,
        "steps": steps,
        "seed": seed,
        **found,
        "seconds": round(clock.now() - began, 1),
    }
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo("\n".join(f"{key}: {value}" for key, value in figures.items()))
