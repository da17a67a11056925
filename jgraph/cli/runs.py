"""Commands about the runs and events of a cluster."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    until_interrupted,
)

if TYPE_CHECKING:
    from jgraph.cluster.events import Event

_LOOK_EVERY_S = 0.5


def runs(
    target: Target = None,
    name: Name = "default",
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List detached runs, which go on without their clients: fit(…, detached=True).

    Another client takes one over with trainer.attach(NAME).
    """
    from jgraph.client.inspect import inspecting

    where, files = target_of(target, name), {"tls": tls_dir, "token_file": token_file}
    with inspecting(where, timeout_s=timeout, **files) as visit:
        found = visit.runs()
    lines = [
        f"{run.name}  {run.state}  step {run.step}/{run.steps}  {run.seconds:.1f} s  "
        f"master {run.master}"
        for run in found
    ]
    text = "\n".join(lines) or "no run goes on without its client"
    say([asdict(run) for run in found], text, as_json=as_json)


def events(
    target: Target = None,
    name: Name = "default",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print new events as they come, until Ctrl-C."
        ),
    ] = False,
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the events of a cluster: tasks that joined, were lost or died, and runs.

    For a cluster of this machine: all events since it was started. With an address: the
    events that its tasks know of since each of them started. With --follow and --json,
    print one line of JSON for each event.
    """
    from jgraph.cluster.events import Once, in_order

    files = {"tls": tls_dir, "token_file": token_file}
    with _news(target, name, timeout, files) as new:
        if not follow:
            found = in_order(new())
            text = "\n".join(map(str, found)) or "nothing has happened yet"
            say([asdict(event) for event in found], text, as_json=as_json)
            return
        once, is_stopped = Once(), False
        with until_interrupted() as stop:
            while not is_stopped:
                for event in filter(once.is_new, new()):
                    typer.echo(event.to_json() if as_json else str(event))
                is_stopped = stop.wait(_LOOK_EVERY_S)


@contextmanager
def _news(
    target: str | None, name: str, timeout_s: float, files: Mapping[str, Path | None]
) -> Iterator[Callable[[], "list[Event]"]]:
    """Opens what tells the events since it was asked last."""
    if target is None:
        from jgraph.cluster.events import LogFiles
        from jgraph.launch.local.daemon import named_cluster

        yield LogFiles(Path(named_cluster(name).log_dir)).new
        return
    from jgraph.client.inspect import inspecting

    with inspecting(target, timeout_s=timeout_s, **files) as visit:
        yield visit.events().new
