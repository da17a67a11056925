"""Commands about clusters: start, show, check, stop."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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
)
from jgraph.clock import SystemClock

if TYPE_CHECKING:
    from jgraph.graph.device import TaskName


def doctor(
    target: Target = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Cluster file; each of its tasks is dialled once."),
    ] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Measure a running cluster: latency and bandwidth between all tasks,"
            " and the speed of each. With --json, print a cost model for "
            "jg.auto.",
        ),
    ] = False,
    name: Name = "default",
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    timeout: Timeout = 120,
    as_json: Json = False,
) -> None:
    """Check this machine or a cluster. Problems are printed, and the exit code is 1."""
    if links:
        from jgraph.client.cluster import connect
        from jgraph.client.inspect import inspecting
        from jgraph.client.placement.measuring import measure

        where = target_of(target, name)
        files = {"tls": tls_dir, "token_file": token_file}
        with inspecting(where, timeout_s=timeout, **files) as visit:
            visit.status()  # where nothing listens, connect would wait for it
        with connect(where, timeout_s=min(30, timeout), **files) as running:
            model = measure(running, timeout_s=timeout)
        say(model.to_dict(), str(model), as_json=as_json)
        return
    if target is not None:
        raise typer.BadParameter("a running cluster is measured with --links")
    from jgraph.diagnose import doctor as examine

    report = examine(cluster, tls_dir)
    say(report.to_dict(), str(report), as_json=as_json)
    if report.problems:
        raise typer.Exit(FAILURE)


def up(
    ps: Annotated[int, typer.Option(min=0, help="Parameter servers.")] = 2,
    workers: Annotated[int, typer.Option(min=0, help="Workers.")] = 2,
    name: Name = "default",
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often a task that dies is started again within a minute. A task"
            " that is told to end (SIGTERM) exits with 0 and is not started "
            "again.",
        ),
    ] = 2,
    hosts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with one host per line. Start the tasks there over ssh, with "
            "new certificates; the tasks end when this command ends.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="With --hosts: port of the first task.")
    ] = 8470,
    remote: Annotated[
        str, typer.Option(help="With --hosts: path of jgraph on the hosts.")
    ] = "jgraph",
    ssh: Annotated[
        str,
        typer.Option(
            help="With --hosts: ssh command on this machine, with its options."
        ),
    ] = "ssh",
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard", help="Serve a page beside that shows the cluster live."
        ),
    ] = False,
    insecure_i_accept: Annotated[
        bool,
        typer.Option(
            "--insecure-i-accept",
            help="With --hosts: let the child processes of SyncPS(dense='xla') listen "
            "there, without TLS.",
        ),
    ] = False,
    timeout: Timeout = 90,
    as_json: Json = False,
) -> None:
    """Start a cluster: background processes on this machine, or tasks on --hosts."""
    if hosts is not None:
        if dashboard:
            raise typer.BadParameter(
                "with --hosts, start `jgraph dashboard ADDRESS` in another terminal"
            )
        from jgraph.cli.hosts_up import run_on_hosts

        counts = {"ps": ps, "worker": workers}
        options = (port, remote, ssh, timeout, restarts, name)
        run_on_hosts(
            *(hosts, counts, *options),
            insecure_i_accept=insecure_i_accept,
            as_json=as_json,
        )
        return
    if insecure_i_accept:
        raise typer.BadParameter(
            "on this machine nothing listens beyond loopback; --insecure-i-accept is "
            "for --hosts"
        )
    from jgraph.launch.local.daemon import describe, up as start

    cluster = start(name, ps, workers, restarts, timeout, dashboard=dashboard)
    page = f"  its page:   {cluster.dashboard}\n" if dashboard else ""
    say(
        describe(cluster),
        f"cluster '{name}' serves at {cluster.target}\nlogs: {cluster.log_dir}\n\n"
        f"  in Python:  cluster = jg.connect('{cluster.target}')\n"
        f"  its state:  jgraph status --name {name}\n"
        f"{page}"
        f"  its end:    jgraph down --name {name}",
        as_json=as_json,
    )


def scale(
    target: Target = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="How many workers there are to be, or a change: +1 starts one more, "
            "-1 lets the last one leave. If nothing is said: +1."
        ),
    ] = None,
    ps: Annotated[
        str | None,
        typer.Option(
            help="How many parameter servers there are to be, or a change: variables "
            "of runs move to those that join, and from those that leave."
        ),
    ] = None,
    name: Name = "default",
    timeout: Timeout = 60,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Change the number of workers, and of parameter servers, while runs go on.

    Those that join take part in runs that are elastic; those that leave hand over. More
    can be started of a cluster that `jgraph up` holds on this machine; elsewhere each
    host starts its own, with `jgraph server --join`.
    """
    from jgraph.client.cluster import connect_as_is
    from jgraph.client.runs.scaling import Scaler
    from jgraph.errors import RescaleError
    from jgraph.launch.local.daemon import forget_tasks, named_cluster, start_tasks

    where, began = target_of(target, name), SystemClock()
    if workers is None and ps is None:
        workers = "+1"

    def start(job: str, count: int) -> None:
        if target is not None:
            tasks = "parameter servers" if job == "ps" else "workers"
            raise RescaleError(
                f"{count} more {tasks} cannot be started from here: {target} may be "
                f"held anywhere; start each on its host: jgraph server --job {job} "
                f"--join {target}"
            )
        start_tasks(name, job, count)

    before = {} if target is not None else named_cluster(name).pids

    def ended(tasks: Sequence["TaskName"]) -> None:
        forget_tasks(name, {task: before[task] for task in tasks if task in before})

    since_s = began.now()
    files = {"tls": tls_dir, "token_file": token_file}
    # One that is lost is the first to leave.
    with connect_as_is(where, timeout_s=timeout, **files) as cluster:
        acts = start, cluster.leave, cluster.announce, ended
        Scaler(cluster, *acts, timeout_s=timeout).scale(*map(_count, (workers, ps)))
        arrangement = cluster.arrangement
        there = {job: cluster.tasks(job) for job in ("worker", "ps")}
    seconds = round(began.now() - since_s, 3)
    facts = {
        "workers": there["worker"],
        "ps": there["ps"],
        "arrangement": arrangement,
        "seconds": seconds,
    }
    asked = ["worker"] if workers is not None else []
    asked += ["ps"] if ps is not None else []
    names = {"worker": "workers", "ps": "ps"}
    text = "\n".join(
        f"{len(there[job])} {names[job]} after {seconds:.1f} s: {', '.join(there[job])}"
        for job in asked
    )
    say(facts, text, as_json=as_json)


_DIGITS: Final = 18
"""A number with more is none of tasks; Python refuses to read one of thousands."""


def _count(text: str | None) -> int | str | None:
    """Returns a number of tasks, or a change, as it was typed."""
    is_number = text is not None and text.isdecimal() and len(text) <= _DIGITS
    return int(text) if text is not None and is_number else text


def down(name: Name = "default", timeout: Timeout = 20, as_json: Json = False) -> None:
    """Stop a cluster of this machine, and check that no process is left."""
    from jgraph.launch.local.daemon import describe, down as end, find

    if find(name) is None:
        facts = {"name": name, "running": False}
        say(facts, f"no cluster '{name}' is up: nothing to stop", as_json=as_json)
        return
    cluster = end(name, timeout)
    count = len(cluster.pids)
    text = f"cluster '{name}' is down: {count} tasks ended, 0 processes left"
    say(describe(cluster), text, as_json=as_json)


def status(
    target: Target = None,
    name: Name = "default",
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show the steps in progress and what each waits for."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the tasks of a cluster, and which of them do not answer."""
    from jgraph.client.inspect import status_of

    state = status_of(
        target_of(target, name), timeout_s=timeout, tls=tls_dir, token_file=token_file
    )
    text = state.explain() if explain else str(state)
    say(state.to_dict(), text, as_json=as_json)
    if state.missing:
        raise typer.Exit(FAILURE)


def top(
    target: Target = None,
    name: Name = "default",
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two updates.")
    ] = 2,
    once: Annotated[
        bool, typer.Option("--once", help="Print one update and exit.")
    ] = False,
    timeout: Timeout = 10,
    tls_dir: Certificates = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show live what is wrong, and each task's CPU, memory, and where its time goes.

    With --json, print one line for each update.
    """
    from jgraph.cli.top import watch
    from jgraph.client.inspect import inspecting

    where, files = target_of(target, name), {"tls": tls_dir, "token_file": token_file}
    with inspecting(where, timeout_s=timeout, **files) as visit:
        missing = watch(visit.look, every_s=every, once=once, as_json=as_json)
    if missing:
        raise typer.Exit(FAILURE)
