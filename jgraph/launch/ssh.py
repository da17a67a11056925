"""A cluster on other hosts, started over the system's ssh and ended with this process.

Each task is one ``ssh`` whose standard input stays open: when this process ends,
however it ends, the input ends there, and with it the server. Nothing is left there.
"""

import logging
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final, Self, final

from jgraph.client.cluster import connect_as_is
from jgraph.client.inspect import status_of
from jgraph.clock import SystemClock
from jgraph.cluster.polling import Polling
from jgraph.cluster.signals import wait_signalled
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    StartError,
    TaskMissingError,
)
from jgraph.graph.device import TaskName
from jgraph.launch.hosts import (
    Host,
    RemoteTask,
    changed_hosts,
    cluster_file,
    deal,
    look_command,
    packed,
    remote_command,
)
from jgraph.launch.local.exit_codes import how_it_ended
from jgraph.launch.local.restarts import Restarter, check_restarts
from jgraph.rpc.security.certificates import make_certificates

_LINES: Final = 20
_READ_S: Final = 5.0
OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10"),
)


@final
@dataclass(slots=True)
class _Ssh:
    """One start of it: ``news`` is set when it serves, and when it is over."""

    process: "subprocess.Popen[bytes]"
    news: threading.Event = field(default_factory=threading.Event)
    serves: bool = False


@final
class RemoteProcess:
    """A task on its host; ended by closing its input, which it reads.

    Args:
      task: which, and where.
      files: what it needs, as ``packed`` makes it.
      run: names what is of this cluster on a host.
      jgraph: the command there.
      ssh: the command here.
      log_dir: where a file here keeps what it logs.
      say: takes each line of that.
    """

    def __init__(
        self,
        task: RemoteTask,
        files: bytes,
        run: str,
        jgraph: str,
        ssh: Sequence[str],
        log_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self.task = task.task
        self.host = task.host
        self._stem = task.stem
        self._files = files
        self._command = [
            *ssh_to(ssh, task.host),
            remote_command(task, len(files), run, jgraph),
        ]
        self._log = log_dir / f"{task.stem}.log"
        self._log.unlink(missing_ok=True)
        self._say = say
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._ssh = self._started()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._ssh.process.poll()

    def start(self, spec: ClusterSpec) -> None:
        """Starts it again, after its end; it has the cluster among its files."""
        self.end()
        self._ssh = self._started()

    def wait_dead(self) -> int:
        """Waits for the end, however long it takes; returns the exit code."""
        ssh = self._ssh
        code = ssh.process.wait()
        ssh.news.wait(_READ_S)  # the last lines say why
        return code

    def how_it_ended(self) -> str:
        """Returns why it ended, as a part of a sentence."""
        return how_it_ended(self._ssh.process.wait(_READ_S))

    def wait_started(self) -> None:
        """Waits until it serves.

        Raises:
          StartError: it ended instead.
        """
        wait_signalled(self._ssh.news)  # it ends with ssh, or by Ctrl-C
        if not self._ssh.serves:
            raise StartError(f"{self.task} ended on {self.host.login}", task=self.task)

    def join(self, spec: ClusterSpec) -> None:
        """Nothing: it has the cluster among its files."""

    def tail(self) -> str:
        """Returns the end of what it said."""
        return "\n".join(self._lines)

    def kill(self) -> None:
        """Ends the ssh at once, and with it the input of the server."""
        self._ssh.process.kill()

    def end(self) -> None:
        """Asks it to end."""
        assert self._ssh.process.stdin is not None  # a pipe
        with suppress(BrokenPipeError):
            self._ssh.process.stdin.close()

    def wait_ended(self, timeout_s: float) -> bool:
        """Waits for the end; returns whether it has ended by itself."""
        try:
            self._ssh.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._ssh.process.kill()
            return False
        return True

    def _started(self) -> _Ssh:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which ends it
        )
        assert process.stdin is not None  # pipes
        assert process.stdout is not None
        ssh = _Ssh(process)
        threading.Thread(
            target=self._follow, args=(ssh, process.stdout), daemon=True
        ).start()
        with suppress(BrokenPipeError):
            process.stdin.write(self._files)
            process.stdin.flush()
        return ssh

    def _follow(self, ssh: _Ssh, stream: IO[bytes]) -> None:
        with stream, self._log.open("a", encoding="utf-8", buffering=1) as file:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                file.write(f"{line}\n")
                self._say(f"[{self._stem}] {line}")
                if line.startswith(f"{self.task} serves at "):
                    ssh.serves = True
                    ssh.news.set()
        ssh.news.set()


def command_words(command: str, option: str) -> list[str]:
    """Returns the words of a command that was typed.

    Args:
      command: with its options, as a shell takes it.
      option: that it was typed behind.

    Raises:
      ConfigError: it has none, or a quote that does not end.

    Example:
      >>> command_words("ssh -i 'my key'", "--ssh")
      ['ssh', '-i', 'my key']
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words:
        raise ConfigError(
            f"{option} is {command!r:.60}, which is no command: it has no word, or a "
            "quote that does not end; write for example --ssh 'ssh -p 2222'"
        )
    return words


def ssh_to(ssh: Sequence[str], host: Host) -> list[str]:
    """Returns the words before a command for a host.

    Example:
      >>> ssh_to(["ssh"], Host("ada@a", "a"))[-2:]
      ['--', 'ada@a']
    """
    return [*ssh, *OPTIONS, "--", host.login]


_LOG = logging.getLogger("jgraph.launch")
_POLL_S: Final = 0.5
_START_S: Final = 90.0
_END_S: Final = 40.0
_CHECK_S: Final = 20.0
_LATE_S: Final = 15.0
"""So long a process may take to start, and then ends, as its input is closed."""
_SPARES: Final = 64
"""Certificates for workers that may join."""


@final
class HostsCluster:
    """The servers of a cluster on hosts; a context manager that ends them.

    Args:
      hosts: where; tasks are dealt to them in turn.
      counts: tasks of each job.
      log_dir: an existing directory here for the logs of the tasks.
      port: of the first task.
      jgraph: the command on the hosts.
      ssh: the command here, with its options.
      restarts: how often a task that died is started again within a minute.
      say: takes each line that a server logs.
      insecure_i_accept: children of the servers may listen beyond loopback; see
        ``Server``.

    Attributes:
      spec: the cluster.
      target: what ``jg.connect`` takes.
      certificates: the directory for its ``tls=``; goes with the cluster.

    Raises:
      ConfigError: ``ssh`` or ``jgraph`` is no command.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        counts: Mapping[str, int],
        log_dir: Path,
        *,
        port: int = 8470,
        jgraph: str = "jgraph",
        ssh: str = "ssh",
        restarts: int = 2,
        say: Callable[[str], None] = print,
        insecure_i_accept: bool = False,
    ) -> None:
        check_restarts(restarts)
        self._ssh = command_words(ssh, "--ssh")
        command_words(jgraph, "--remote")
        if shutil.which(self._ssh[0]) is None:
            raise ConfigError(
                f"there is no command '{self._ssh[0]}' on this machine; install it, or "
                "name another one with --ssh"
            )
        tasks, self.spec = deal(hosts, counts, port)
        self._insecure_i_accept = insecure_i_accept
        first = self.spec.address(self.spec.tasks()[0])
        self.target = f"jgraphs://{first}"
        self._secrets = tempfile.TemporaryDirectory(prefix="jgraph-certs-")
        self.certificates = Path(self._secrets.name)
        self._clock = SystemClock()
        self._restarts = restarts
        self._restarter: Restarter | None = None
        self._run = f"jgraph-{secrets.token_hex(6)}"
        self._hosts, self._ever = list(hosts), dict.fromkeys(hosts)
        first_spare = counts.get("worker", 0)
        self._next_port = port + len(tasks)
        # The key that signs them is not kept.
        self._spares = [
            TaskName(f"/job:worker/task:{first_spare + n}") for n in range(_SPARES)
        ]
        make_certificates(self.certificates, [*self.spec.tasks(), *self._spares])
        self._jgraph, self._log_dir, self._say = jgraph, log_dir, say
        self._remotes = [self._start(task) for task in tasks]
        self._joined: list[RemoteProcess] = []
        self._leavers: list[RemoteProcess] = []
        self._untold: list[RemoteProcess] = []

    def wait(self, timeout_s: float, stop: threading.Event | None = None) -> None:
        """Waits until all tasks answer; those that die later are started again.

        Args:
          timeout_s: limit.
          stop: once it is set, nothing more is waited for.

        Raises:
          StartError: an ssh ended; shows the end of what it said.
          TaskMissingError: not all answer in time.
        """
        stop = stop or threading.Event()
        polling = Polling(_POLL_S, timeout_s, self._clock, stop)
        missing = [str(task) for task in self.spec.tasks()]
        while missing:
            self._check_alive()
            with suppress(ClusterUnreachableError):
                status = status_of(self.target, tls=self.certificates)
                missing = [str(task) for task in status.missing]
            if missing and not polling.wait():
                if stop.is_set():
                    return
                raise TaskMissingError(
                    f"no answer after {timeout_s:g} s from {', '.join(missing)}; see "
                    "what they logged above, and that the hosts reach each other's "
                    "ports",
                    missing=missing,
                )
        self._restarter = Restarter(
            self._remotes,
            self.spec,
            self._restarts,
            start_s=_START_S,
            clock=self._clock,
            on_start=lambda: None,
        )

    def _start(self, task: RemoteTask) -> RemoteProcess:
        task = replace(task, insecure_i_accept=self._insecure_i_accept)
        return RemoteProcess(
            *(task, self._files(task), self._run, self._jgraph, self._ssh),
            self._log_dir,
            self._say,
        )

    def follow(self, hosts: Sequence[Host]) -> None:
        """Starts a worker for each new line of the hosts file; those of old ones leave.

        Args:
          hosts: of the file as it is now.

        Raises:
          JGError: a worker could not be told to leave.
        """
        new, old = changed_hosts(self._hosts, hosts)
        self._hosts = list(hosts)
        for host in new:
            self._join(host)
        for host in old:
            here = [one for one in self._joined if one.host == host]
            if here:
                self._joined.remove(here[-1])
                if self._restarter is not None:  # however it ends, it stays away
                    self._restarter.forget(here[-1])
                self._leavers.append(here[-1])
                self._untold.append(here[-1])
            else:
                self._say(
                    f"{host.login} keeps its tasks: those that the cluster began with "
                    "stay"
                )
        self.tell_leavers()

    def tell_leavers(self) -> None:
        """Tells workers to leave whose lines are gone.

        One that only starts, and one that could not be told, is told by a later call.

        Raises:
          JGError: one could not be told.
        """
        if not self._untold:
            return
        with connect_as_is(self.target, tls=self.certificates) as cluster:
            members = cluster.renewed_tasks("worker")
            for one in list(self._untold):
                if one.task in members:
                    self._say(f"{one.task} is told to leave")
                    cluster.leave(one.task)
                elif one.code is None:
                    continue  # it has not joined yet
                self._untold.remove(one)

    def _join(self, host: Host) -> None:
        if not self._spares:
            self._say(
                f"{host.login} gets no worker: all {_SPARES} certificates of this "
                "cluster for more are in use"
            )
            return
        task = RemoteTask(self._spares.pop(0), host, self.target, self._next_port)
        self._next_port += 1
        self._ever[host] = None
        self._say(f"{task.task} joins on {host.login}")
        remote = self._start(task)
        self._remotes.append(remote)
        self._joined.append(remote)
        if self._restarter is not None:
            self._restarter.watch(remote)

    def gone(self) -> dict[TaskName, str]:
        """Returns why, by task, for those that died and are not started again."""
        return dict(self._restarter.final_deaths) if self._restarter is not None else {}

    def is_over(self) -> bool:
        """Whether no task runs any more, or will."""
        ends = {*self.gone(), *(one.task for one in self._leavers if one.code)}
        return all(one.code == 0 or one.task in ends for one in self._remotes)

    def close(self) -> None:
        """Ends all tasks, and looks on every host whether something is left.

        Raises:
          StartError: something is, or a host cannot be asked; it is named.
        """
        if self._restarter is not None:
            self._restarter.close()
        for remote in self._remotes:
            remote.end()
        deadline = self._clock.now() + _END_S
        for remote in self._remotes:
            remote.wait_ended(max(0.1, deadline - self._clock.now()))
        if self._restarter is not None:
            self._restarter.join()
        self._secrets.cleanup()
        # What lost its input as it started ends when it comes to read that.
        is_late = any((one.code or 0) < 0 for one in self._remotes)
        polling = Polling(_POLL_S, _LATE_S if is_late else 0.0, self._clock)
        while found := self._left_over():
            if not polling.wait():
                raise StartError(f"the cluster ended, but {'; '.join(found)}")

    def _left_over(self) -> list[str]:
        """Returns in words what is left, by host."""
        hosts = {host.login: host for host in self._ever}
        looks = [(host, self._look(host)) for host in hosts.values()]
        return [said for host, look in looks if (said := _remains(host, look))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            self.close()
        except StartError as error:
            if kind is None:
                raise
            _LOG.error("%s", error)  # the first error says why

    def _check_alive(self) -> None:
        for remote in self._remotes:
            if remote.code is not None:
                code = remote.wait_dead()
                raise StartError(
                    f"{remote.task} on {remote.host.login} ended with exit code "
                    f"{code}; try: ssh {remote.host.login} jgraph version. "
                    f"The end of what it said:\n{remote.tail()}",
                    task=remote.task,
                )

    def _look(self, host: Host) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*ssh_to(self._ssh, host), look_command(self._run)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _files(self, task: RemoteTask) -> bytes:
        names = ("ca.crt", "token", f"{task.stem}.crt", f"{task.stem}.key")
        files = {name: (self.certificates / name).read_bytes() for name in names}
        if task.joins:  # it learns of the others
            return packed(files)
        return packed({"cluster.toml": cluster_file(self.spec), **files})


def _remains(host: Host, look: "subprocess.Popen[str]") -> str:
    """Returns what is left on a host, in words; nothing if nothing is."""
    try:
        out, err = look.communicate(timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        look.kill()
        out, err = look.communicate()
        return f"{host.login} did not say within {_CHECK_S:g} s whether its tasks did"
    if look.returncode:
        why = (err.strip().splitlines() or [f"exit code {look.returncode}"])[-1]
        return f"{host.login} cannot be asked whether its tasks did: {why}"
    pids = " ".join(out.split())
    return f"{host.login} still runs processes of it: kill {pids}" if pids else ""
