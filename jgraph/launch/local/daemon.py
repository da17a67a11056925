"""Daemon of a named local cluster: ``jgraph up`` starts it, ``jgraph down`` ends it.

The daemon starts the tasks' processes and writes what it is to a state file; the tasks
end when the daemon ends, however it ends. The file is in the user's own directory,
which others cannot read. Nothing here imports JAX: the tasks' processes do meanwhile.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

import psutil

from jgraph.client.dashboard_process import Dashboard
from jgraph.clock import SystemClock
from jgraph.cluster.signals import wait_signalled
from jgraph.cluster.spec import check_counts, task_named
from jgraph.cluster.wait_message import show_wait
from jgraph.errors import (
    ClusterBusyError,
    ClusterUnreachableError,
    ConfigError,
    JGError,
    StartError,
)
from jgraph.graph.device import TaskName
from jgraph.launch.local.log_file import last_lines
from jgraph.launch.local.processes import (
    TaskProcesses,
    check_room,
    end_within,
    hand_over_stdout,
)
from jgraph.launch.local.restarts import check_restarts
from jgraph.loading import module_command
from jgraph.rpc.security.token import home

_MODULE: Final = "jgraph.launch.local.daemon"
_NAME: Final = re.compile(r"[\w-]{1,100}")
_START_S = 90.0
_END_S = 20.0
_LINES: Final = 20
_READY: Final = "ready\n"
_ORDERS: Final = ".orders"
"""How the names of files of orders end."""


@final
@dataclass(frozen=True, slots=True)
class NamedCluster:
    """What the state file says of a named cluster.

    Attributes:
      name: its name.
      target: what ``jg.connect`` takes.
      daemon: process id of its daemon.
      pids: process id of each task, by task name.
      log_dir: where the tasks' logs are.
      dashboard: address of the page, with its token; empty: there is none.
    """

    name: str
    target: str
    daemon: int
    pids: dict[str, int]
    log_dir: str
    dashboard: str = ""

    @property
    def running(self) -> bool:
        """Whether the daemon lives."""
        return _is_daemon(self.daemon, self.name)


def state_directory() -> Path:
    """Returns the directory of state files, made for this user alone.

    ``JGRAPH_HOME`` moves it; ``~/.jgraph`` is the default.
    """
    directory = home() / "clusters"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def find(name: str) -> NamedCluster | None:
    """Returns a named cluster that runs; None if there is none.

    Raises:
      ConfigError: no cluster can be called so.
    """
    path = _state_file(name)
    with suppress(OSError, ValueError, TypeError):
        cluster = NamedCluster(**json.loads(path.read_text()))
        return cluster if cluster.running else None
    return None


def named_cluster(name: str) -> NamedCluster:
    """Returns a named cluster that runs.

    Raises:
      ClusterUnreachableError: there is none.
    """
    cluster = find(name)
    if cluster is None:
        raise ClusterUnreachableError(
            f"no cluster '{name}' runs on this machine; start one with `jgraph up`, or "
            "name a server: jgraph://host:port",
            name=name,
        )
    return cluster


def up(
    name: str,
    ps: int,
    workers: int,
    restarts: int,
    timeout_s: float = _START_S,
    *,
    dashboard: bool = False,
) -> NamedCluster:
    """Starts a named cluster in the background and waits until it serves.

    A task that dies is started again, up to ``restarts`` times within a minute. With
    ``dashboard`` one is started beside, and ends with the cluster.

    Raises:
      ConfigError: no task at all, or no cluster can be called so.
      ClusterBusyError: it runs already.
      StartError: it could not be started; shows why.
    """
    check_counts({"ps": ps, "worker": workers})
    check_room(ps + workers)
    check_restarts(restarts)
    with _reserved(name) as lock:
        return _started(name, lock, (ps, workers, restarts, int(dashboard)), timeout_s)


@contextmanager
def _reserved(name: str) -> Iterator[int]:
    """Holds the name of a cluster, as its daemon does, to which the lock is handed on.

    Raises:
      ClusterBusyError: it runs already, or is about to.
    """
    with _state_file(name).with_suffix(".lock").open("w") as lock:
        is_free, running = True, find(name)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        if running is not None:
            raise ClusterBusyError(
                f"cluster '{name}' runs already at {running.target}; stop it with "
                f"`jgraph down --name {name}`, or start another with --name",
                name=name,
            )
        if not is_free:
            raise ClusterBusyError(
                f"cluster '{name}' is starting or ending; wait for that, or start "
                "another with --name",
                name=name,
            )
        yield lock.fileno()


def _started(
    name: str, lock: int, numbers: tuple[int, int, int, int], timeout_s: float
) -> NamedCluster:
    """Starts the daemon of a cluster, and waits until all of it is there."""
    log_dir = state_directory().parent / "logs" / name
    log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (log_dir / "daemon.log").open("w") as log:
        daemon = subprocess.Popen(
            [*module_command(_MODULE), name, *map(str, (*numbers, log_dir))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=[lock],
            text=True,
            start_new_session=True,
        )
    assert daemon.stdout is not None  # a pipe
    timer = threading.Timer(timeout_s, partial(_give_up, daemon))
    timer.start()
    try:
        with daemon.stdout as said, show_wait(f"starting {sum(numbers[:2])} tasks"):
            # Python itself may say something first: a sitecustomize of this machine.
            ready = _READY in iter(said.readline, "")
    except BaseException:  # Ctrl-C
        _give_up(daemon)
        raise
    finally:
        timer.cancel()
    cluster = find(name) if ready else None
    if cluster is None:
        _give_up(daemon)
        with (log_dir / "daemon.log").open("rb") as file:
            tail = "\n".join(last_lines(file, _LINES))
        raise StartError(
            f"cluster '{name}' did not start. The end of its log:\n{tail}", name=name
        )
    return cluster


def _give_up(daemon: "subprocess.Popen[str]") -> None:
    daemon.terminate()
    end_within(daemon, _END_S)


def down(name: str, timeout_s: float = _END_S) -> NamedCluster:
    """Ends a named cluster and waits until nothing of it is left.

    What has not ended after ``timeout_s`` is killed.

    Raises:
      ClusterUnreachableError: no such cluster runs.
      StartError: a process did not end; it is named.
    """
    cluster = named_cluster(name)
    processes: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        daemon = psutil.Process(cluster.daemon)
        # What a task that has ended was called by is another's process by now, maybe.
        processes = [daemon, *daemon.children(recursive=True)]
    with suppress(ProcessLookupError):
        os.kill(cluster.daemon, signal.SIGTERM)
    with show_wait(f"ending {len(cluster.pids)} tasks"):
        remaining = _wait_ended(processes, timeout_s)
    for process in remaining:
        process.kill()
    remaining = _wait_ended(remaining, 5.0)
    if remaining:
        pids = [process.pid for process in remaining]
        raise StartError(f"cluster '{name}': killed processes {pids} did not end")
    _state_file(name).unlink(missing_ok=True)
    return cluster


def start_tasks(name: str, job: str, count: int) -> None:
    """Lets the daemon of a named cluster start so many tasks more, which join it.

    Raises:
      ClusterUnreachableError: no such cluster runs.
      ConfigError: there is no memory for so many.
    """
    check_room(count)
    _order(name, f"start {job} {count}")


def forget_tasks(name: str, pids: Mapping[TaskName, int]) -> None:
    """Lets the daemon of a named cluster end tasks that have left it, for good.

    Args:
      name: of the cluster.
      pids: their processes: one that starts may have the name of a task that left. A
        task that the daemon has started again since is known by the one before, too.

    Raises:
      ClusterUnreachableError: no such cluster runs.
    """
    if pids:
        _order(name, *(f"forget {task} {pid}" for task, pid in pids.items()))


def _order(name: str, *lines: str) -> None:
    """Gives a daemon orders, in a file of their own: others may do so as well."""
    cluster = named_cluster(name)
    written = _state_file(name).with_suffix(f".{secrets.token_hex(4)}.new")
    written.write_text("\n".join(lines))
    written.rename(written.with_suffix(_ORDERS))
    os.kill(cluster.daemon, signal.SIGHUP)


def _orders(name: str) -> list[Path]:
    """Returns the files of orders that a daemon has not carried out, oldest first."""
    state = _state_file(name)
    found = state.parent.glob(f"{state.stem}.*{_ORDERS}")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def log_of(name: str, task: str) -> Path:
    """Returns the log of a task of a named cluster that runs.

    Raises:
      ClusterUnreachableError: no such cluster runs.
      UnknownDeviceError: it has no such task.
    """
    cluster = named_cluster(name)
    named = task_named(task, list(map(TaskName, cluster.pids)))
    stem = named.removeprefix("/job:").replace("/task:", "-")
    return Path(cluster.log_dir) / f"{stem}.log"


def _wait_ended(
    processes: list[psutil.Process], timeout_s: float
) -> list[psutil.Process]:
    """Returns those that still run after ``timeout_s``."""
    clock = SystemClock()
    deadline = clock.now() + timeout_s
    remaining = processes
    while remaining and clock.now() < deadline:
        # A daemon that has ended is a zombie until init looks after it, which may take
        # seconds and matters to nobody: psutil alone would wait for that too.
        remaining = [
            p for p in psutil.wait_procs(remaining, timeout=0.05)[1] if _runs(p)
        ]
    return remaining


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def describe(cluster: NamedCluster) -> dict[str, Any]:
    """Returns the facts of a named cluster as plain values."""
    return asdict(cluster)


def _state_file(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name:.80}' is no name of a cluster: files are called so; take letters, "
            "digits, _ and -, as in --name default",
            name=name,
        )
    return state_directory() / f"{name}.json"


def _is_daemon(pid: int, name: str) -> bool:
    # A process id is given to others after its end: look at what it runs.
    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return (_MODULE, name) in pairwise(command)


def _carry_out(tasks: TaskProcesses, orders: Path) -> None:
    """Starts the tasks that a file asks for, once, and forgets processes that left."""
    try:
        lines = orders.read_text().splitlines()
        orders.unlink()
        for act, *words in map(str.split, lines):
            if act == "forget":
                tasks.forget_process(TaskName(words[0]), int(words[1]))
            else:
                job, count = words
                tasks.forget_ended()
                tasks.start_joiners(int(count), job)
    except (OSError, ValueError, JGError):
        logging.getLogger("jgraph.restarts").exception("orders were not carried out")


def _drop_orders(name: str) -> None:
    """Forgets what a daemon was told that was killed."""
    for old in _orders(name):
        old.unlink()


def _wait_ended_by_signal(
    tasks: TaskProcesses, name: str, ended: threading.Event, woken: threading.Event
) -> None:
    """Carries out orders, as often as it is woken, until ``ended`` is set."""
    while not ended.is_set():
        wait_signalled(woken)
        woken.clear()
        if not ended.is_set():
            for orders in _orders(name):
                _carry_out(tasks, orders)


def main(
    name: str, ps: int, workers: int, restarts: int, dashboard: int, log_dir: str
) -> None:
    """Holds a cluster until SIGTERM or SIGINT."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jgraph.events").setLevel(logging.INFO)
    parent = hand_over_stdout()
    ended, woken = threading.Event(), threading.Event()
    tasks: TaskProcesses | None = None

    def on_signal(number: int, frame: object) -> None:
        woken.set()
        if number == signal.SIGHUP or ended.is_set():
            return
        ended.set()
        if tasks is None:  # none is left of those that start
            sys.exit(f"ended by {signal.Signals(number).name} while tasks started")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    writing = threading.Lock()

    def note() -> None:
        if tasks is None:  # not all are there; one that died is started again
            return
        with writing:
            target = f"jgraph://{tasks.spec.address(tasks.master)}"
            page = "" if board is None else board.url
            cluster = NamedCluster(name, target, os.getpid(), tasks.pids, log_dir, page)
            path = _state_file(name)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(asdict(cluster)))
            new.replace(path)

    _drop_orders(name)
    counts = {"ps": ps, "worker": workers}
    board: Dashboard | None = None
    tasks = TaskProcesses(counts, Path(log_dir), {}, restarts=restarts, on_start=note)
    try:
        note()
        if dashboard:
            target = f"jgraph://{tasks.spec.address(tasks.master)}"
            board = Dashboard([target, "--port", "0"])
            note()
        parent.write(_READY)
        parent.close()
        _wait_ended_by_signal(tasks, name, ended, woken)
    finally:
        if board is not None:
            board.close()
        tasks.end()


if __name__ == "__main__":
    try:
        name, *numbers, log_dir = sys.argv[1:]
        ps, workers, restarts, dashboard = map(int, numbers)
        main(name, ps, workers, restarts, dashboard, log_dir)
    except JGError as failure:
        sys.exit(str(failure))  # the end of the log, which `jgraph up` shows
