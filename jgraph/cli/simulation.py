"""``jgraph simulate``: predicts training on a cluster of any size from a plan."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from jgraph.cli.options import Json, say


def simulate(
    workers: Annotated[int, typer.Option(help="Workers to simulate.")],
    plan: Annotated[
        Path, typer.Option(help="File of trainer.plan(…).save('plan.json').")
    ],
    ps: Annotated[
        int | None,
        typer.Option(
            help="Parameter servers to simulate. The fewest that are nearly as fast as "
            "any number if unset."
        ),
    ] = None,
    sharded: Annotated[
        bool,
        typer.Option(
            "--sharded", help="Cut large variables, as min_max_variable_partitioner."
        ),
    ] = False,
    mode: Annotated[
        Literal["sync", "async"], typer.Option(help="As SyncPS or AsyncPS trains.")
    ] = "sync",
    steps: Annotated[int, typer.Option(help="Steps of each worker.")] = 20,
    backup_workers: Annotated[int, typer.Option(help="Of SyncPS.")] = 0,
    max_staleness: Annotated[int | None, typer.Option(help="Of AsyncPS.")] = None,
    max_readers: Annotated[int | None, typer.Option(help="Of SyncPS.")] = None,
    compute_ms: Annotated[
        float | None,
        typer.Option(
            help="Median time that a worker computes for a step. As its operations "
            "take at the measured speed if unset."
        ),
    ] = None,
    sigma: Annotated[
        float, typer.Option(help="Spread of that time: sigma of its logarithm.")
    ] = 0.0,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="File of `python -m benchmarks calibrate`. Those of the package if "
            "unset."
        ),
    ] = None,
    transport: Annotated[
        str, typer.Option(help="Which of its transports: network or auto.")
    ] = "network",
    gbit: Annotated[
        float | None,
        typer.Option(help="Network of a host, Gbit/s each way. As measured if unset."),
    ] = None,
    latency_us: Annotated[
        float | None,
        typer.Option(help="Of a message between hosts. As measured if unset."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same one gives the same run.")] = 0,
    as_json: Json = False,
) -> None:
    """Predict what a cluster would do with a plan. Starts no cluster."""
    from jgraph.plan.traffic import StepTraffic
    from jgraph.testing.scale.computing import Computing
    from jgraph.testing.scale.costs import MEASURED, load_costs
    from jgraph.testing.scale.simulate import (
        NOT_MODELLED,
        computing_s,
        simulate as simulated,
    )

    step = StepTraffic.load(plan)
    constants = load_costs(costs or MEASURED, transport).on_network(
        None if gbit is None else gbit * 1e9 / 8,
        None if latency_us is None else latency_us / 1e6,
    )
    if compute_ms is None:
        seconds = computing_s(step, constants)
    else:
        seconds = compute_ms / 1e3
    found = simulated(
        step,
        workers=workers,
        ps=ps,
        mode=mode,
        steps=steps,
        backup_workers=backup_workers,
        max_staleness=max_staleness,
        computing=Computing(seconds, sigma),
        costs=constants,
        seed=seed,
        sharded=sharded,
        max_readers=max_readers,
    )
    facts = {"simulated": True, **asdict(found), "not_modelled": NOT_MODELLED}
    say(facts, str(found), as_json=as_json)
