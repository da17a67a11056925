"""``jgraph up --hosts``: holds a cluster on other hosts until it is told to end."""

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import typer

from jgraph.cli.options import say
from jgraph.cluster.spec import check_counts
from jgraph.errors import JGError, TaskLostError
from jgraph.launch.hosts import Host, read_hosts
from jgraph.launch.ssh import HostsCluster
from jgraph.rpc.security.token import home


def run_on_hosts(
    file: Path,
    counts: Mapping[str, int],
    port: int,
    remote: str,
    ssh: str,
    timeout_s: float,
    restarts: int,
    name: str,
    *,
    insecure_i_accept: bool,
    as_json: bool,
) -> None:
    """Starts tasks, says how to connect, and ends them on SIGINT or SIGTERM.

    On SIGHUP it reads the file of hosts again: see ``HostsCluster.follow``. Logs of the
    tasks go to standard error and to files, and that one died too often.

    Raises:
      TaskLostError: none is left.
    """
    check_counts(counts)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("jgraph.events").setLevel(logging.INFO)
    stop, reads = threading.Event(), threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: reads.set())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    log_dir = home() / "logs" / f"hosts-{Path(name).name}"
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with HostsCluster(
        _hosts_of(file),
        counts,
        log_dir,
        port=port,
        jgraph=remote,
        ssh=ssh,
        restarts=restarts,
        say=_say,
        insecure_i_accept=insecure_i_accept,
    ) as cluster:
        cluster.wait(timeout_s, stop)
        if not stop.is_set():
            _say_where(cluster, file, log_dir, as_json=as_json)
        while not stop.wait(1.0) and not cluster.is_over():
            if reads.is_set():
                reads.clear()
                _follow(cluster, file)
            with suppress(JGError):  # the next turn tells again
                cluster.tell_leavers()
        if cluster.is_over() and (ends := cluster.gone()):
            raise TaskLostError(f"no task is left; {'; '.join(ends.values())}")
    say(
        {"ended": True},
        f"{len(cluster.spec.tasks())} tasks ended, nothing is left on the hosts",
        as_json=as_json,
    )


def _say_where(
    cluster: HostsCluster, file: Path, log_dir: Path, *, as_json: bool
) -> None:
    target, tls = cluster.target, str(cluster.certificates)
    where = {"target": target, "tls": tls}
    say(
        {**where, "cluster": cluster.spec.as_dict(), "log_dir": str(log_dir)},
        f"serves at {target}\nlogs: {log_dir}\n\n"
        f"  in Python:  jg.connect({target!r}, tls={tls!r})\n"
        f"  its state:  jgraph status {target} --tls-dir {tls}\n"
        f"  more hosts: add lines to {file}, and kill -HUP {os.getpid()}\n"
        "  its end:    Ctrl-C here",
        as_json=as_json,
    )


def _say(line: str) -> None:
    """Prints a line, for as long as somebody reads: logs are in files as well."""
    with suppress(OSError):
        typer.echo(line, err=True)


def _hosts_of(file: Path) -> list[Host]:
    return read_hosts(file.read_text(encoding="utf-8"), str(file))


def _follow(cluster: HostsCluster, file: Path) -> None:
    """Does as the file of hosts says now; one that is none changes nothing."""
    try:
        cluster.follow(_hosts_of(file))
    except (JGError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"{error}; the cluster stays as it is", err=True)
