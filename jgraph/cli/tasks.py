"""Commands about single tasks: show their logs, stop them."""

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jgraph.cli.options import (
    FAILURE,
    Certificates,
    Json,
    Name,
    Target,
    Timeout,
    TokenFile,
    say,
    target_of,
    task_of,
    until_interrupted,
)

if TYPE_CHECKING:
    from jgraph.client.inspect import ClusterInspector

_LOOK_EVERY_S = 0.2

Task = Annotated[
    str, typer.Argument(help="Task, such as /job:ps/task:0 or ps:0.", parser=task_of)
]


def logs(
    task: Task,
    target: Target = None,
    name: Name = "default",
    tail: Annotated[
        int, typer.Option(min=1, help="Number of lines, from the end.")
    ] = 20,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Print new lines as they come, until Ctrl-C."
        ),
    ] = False,
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show the end of a task's log; with an address, of a task on another machine.

    With --follow and --json, print one line of JSON for each line of the log.
    """
    if target is not None:
        from jgraph.client.inspect import inspecting

        files = {"tls": tls_dir, "token_file": token_file}
        with inspecting(target, timeout_s=timeout, **files) as visit:
            _show(
                task, target, _remote_lines(visit, task, tail, follow), follow, as_json
            )
        return
    from jgraph.launch.local.daemon import log_of

    path = log_of(name, task)
    _show(task, str(path), _file_lines(path, tail, follow), follow, as_json)


def _remote_lines(
    visit: "ClusterInspector", task: str, tail: int, follow: bool
) -> Iterator[str]:
    log, stop = visit.logs(task, tail), threading.Event()
    if not follow:
        stop.set()
    return (line for _, line in log.follow(_LOOK_EVERY_S, stop))


def _file_lines(path: Path, tail: int, follow: bool) -> Iterator[str]:
    """Yields the last lines of a file, and those that are written from then on."""
    from jgraph.launch.local.log_file import last_lines

    pause = threading.Event()
    with path.open("rb") as file:
        yield from last_lines(file, tail)
        rest = b""
        while follow:
            *whole, rest = (rest + file.read()).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            pause.wait(_LOOK_EVERY_S)


def _show(
    task: str, where: str, lines: Iterable[str], follow: bool, as_json: bool
) -> None:
    if not follow:
        found = list(lines)
        facts = {"task": task, "path": where, "lines": found}
        say(facts, "\n".join(found), as_json=as_json)
        return
    with until_interrupted() as stop:
        for line in lines:
            typer.echo(json.dumps({"task": task, "line": line}) if as_json else line)
            if stop.is_set():
                return


def drain(
    task: Task,
    target: Target = None,
    name: Name = "default",
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds that running steps may take to finish."),
    ] = 30,
    timeout: Timeout = 60,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """End one task as SIGTERM does, and wait until it is gone.

    It takes no new work; a worker's batches go to the others. A ps lets the runs that
    use it save first; they go on when it is started again.
    """
    from jgraph.client.inspect import inspecting
    from jgraph.clock import SystemClock
    from jgraph.cluster.polling import Polling

    where, clock = target_of(target, name), SystemClock()
    files = {"tls": tls_dir, "token_file": token_file}
    with inspecting(where, timeout_s=min(10.0, timeout), **files) as visit:
        began = clock.now()
        is_over = visit.drain(task, grace)
        polling = Polling(_LOOK_EVERY_S, timeout, clock)
        while not is_over() and polling.wait():
            pass
        seconds, ended = round(clock.now() - began, 3), is_over()
    facts = {"task": task, "ended": ended, "seconds": seconds}
    text = (
        f"{task} ended after {seconds:.1f} s"
        if ended
        else (
            f"{task} takes no new work, and what runs there has not ended after "
            f"{timeout:g} s; `jgraph status --explain` says what it waits for"
        )
    )
    say(facts, text, as_json=as_json)
    if not ended:
        raise typer.Exit(FAILURE)
