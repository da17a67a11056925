"""``jgraph trace``: one timeline of all tasks, for Perfetto."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jgraph.cli.options import (
    Certificates,
    Json,
    Name,
    Target,
    Timeout,
    TokenFile,
    say,
    target_of,
    task_of,
)


def trace(
    target: Target = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Of what happens from now on; 10 unless --last is given."),
    ] = None,
    last: Annotated[
        float | None,
        typer.Option(help="Seconds of what happened before now, as tasks keep it."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write; it ends in .pftrace or .json."
        ),
    ] = Path("cluster.pftrace"),
    xprof: Annotated[
        str | None,
        typer.Option(
            help="Task of which XLA's own profile is taken at the same time, into a "
            "directory beside the file that TensorBoard opens."
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(
            help="Collector of OpenTelemetry to send the last 100 steps to as spans: "
            "http://localhost:4318, or with OTEL_EXPORTER_OTLP_PROTOCOL=grpc "
            "http://localhost:4317."
        ),
    ] = None,
    name: Name = "default",
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Write when all tasks did what, on one clock, and say what steps wait for.

    Open the file in ui.perfetto.dev. Every task keeps when the nodes of its last steps
    ran, so --last 30 shows what came before something went wrong.
    """
    from jgraph.client.inspect import inspecting
    from jgraph.client.timeline.collecting import check_seconds
    from jgraph.client.timeline.otel import export, otlp_exporter
    from jgraph.coordination.timeline.cluster_trace import check_path

    if seconds is None and last is None:
        seconds = 10.0
    check_seconds(seconds, last)
    check_path(output)
    exporter = None if otlp is None else otlp_exporter(otlp)
    where = target_of(target, name)
    with inspecting(
        where, timeout_s=timeout, tls=tls_dir, token_file=token_file
    ) as visit:
        task = None if xprof is None else task_of(xprof)
        found, profile = visit.trace(seconds, last, task)
    found.save(output)
    facts: dict[str, Any] = {
        "path": str(output),
        "tasks": found.tasks,
        "missing": found.missing,
        "steps": found.steps,
        "seconds": found.seconds,
        "clock_error_s": dict(found.clock_error_s),
        "critical_path": dict(found.critical_path().shares),
    }
    lines = [str(found), f"wrote {output}; open it in ui.perfetto.dev"]
    lines += [f"{task} does not answer, and is not in it" for task in found.missing]
    if exporter is not None:
        count = facts["otel_spans"] = export(found, exporter)
        lines.append(f"sent {count:,} spans to {otlp}")
    if profile:
        folder = output.with_suffix(".xprof")
        for file, content in profile.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        facts["xprof"] = str(folder)
        lines.append(f"wrote {folder}; tensorboard --logdir {folder} shows it")
    say(facts, "\n".join(lines), as_json=as_json)
