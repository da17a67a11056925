"""A cluster on other hosts, started over the system's ssh and ended with this process.

Each task is one ``ssh`` whose standard input stays open: when this process ends,
however it ends, the input ends there, and with it the server. Nothing is left there.
"""

import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Self, final

from jgraph.clock import Clock, SystemClock
from jgraph.cluster.visit import status_of
from jgraph.errors import ClusterUnreachableError, StartError, TaskMissingError
from jgraph.launch.hosts import (
    Host,
    RemoteTask,
    cluster_file,
    deal,
    packed,
    remote_command,
)
from jgraph.rpc.certificates import make_certificates

_LOOK_S: Final = 0.5
_END_S: Final = 40.0
_LINES: Final = 20


@final
@dataclass(slots=True)
class _Remote:
    """An ssh, and what it says; the last lines are kept for errors."""

    task: RemoteTask
    process: "subprocess.Popen[bytes]"
    lines: list[str] = field(default_factory=list)

    def follow(self, stream: IO[bytes], say: Callable[[str], None]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            self.lines[:] = [*self.lines[1 - _LINES :], line]
            say(f"[{self.task.stem}] {line}")


@final
class HostsCluster:
    """The servers of a cluster on hosts; a context manager that ends them.

    Args:
      hosts: where; tasks are dealt to them in turn.
      counts: tasks of each job.
      port: of the first task.
      jgraph: the command on the hosts.
      ssh: the command here, with its options.
      say: takes each line that a server logs.
      clock: of the wait.

    Attributes:
      spec: the cluster.
      target: what ``jg.connect`` takes.
      certificates: the directory for its ``tls=``; goes with the cluster.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        counts: Mapping[str, int],
        *,
        port: int = 8470,
        jgraph: str = "jgraph",
        ssh: str = "ssh",
        say: Callable[[str], None] = print,
        clock: Clock | None = None,
    ) -> None:
        tasks, self.spec = deal(hosts, counts, port)
        first = self.spec.address(self.spec.tasks()[0])
        self.target = f"jgraphs://{first}"
        self._secrets = tempfile.TemporaryDirectory(prefix="jgraph-certs-")
        self.certificates = Path(self._secrets.name)
        self._clock = clock or SystemClock()
        make_certificates(self.certificates, self.spec.tasks())
        self._remotes = [_start(t, self._files(t), jgraph, ssh, say) for t in tasks]

    def wait(self, timeout_s: float) -> None:
        """Waits until all tasks answer.

        Raises:
          StartError: an ssh ended; shows the end of what it said.
          TaskMissingError: not all answer in time.
        """
        deadline, pause = self._clock.now() + timeout_s, threading.Event()
        missing = [str(task) for task in self.spec.tasks()]
        while missing:
            self._check_alive()
            if self._clock.now() > deadline:
                raise TaskMissingError(
                    f"no answer after {timeout_s:g} s from {', '.join(missing)}; see "
                    "what they logged above, and that the hosts reach each other's "
                    "ports",
                    missing=missing,
                )
            with suppress(ClusterUnreachableError):
                status = status_of(self.target, tls=self.certificates)
                missing = [str(task) for task in status.missing]
            pause.wait(_LOOK_S if missing else 0)

    def ended(self) -> bool:
        """Whether a task is gone."""
        return any(remote.process.poll() is not None for remote in self._remotes)

    def close(self) -> None:
        """Ends all tasks, and waits until they have ended on their hosts.

        Raises:
          StartError: a host did not say so; it is named.
        """
        for remote in self._remotes:
            assert remote.process.stdin is not None  # a pipe
            with suppress(BrokenPipeError):
                remote.process.stdin.close()
        deadline, left = self._clock.now() + _END_S, []
        for remote in self._remotes:
            try:
                remote.process.wait(max(0.1, deadline - self._clock.now()))
            except subprocess.TimeoutExpired:
                remote.process.kill()
                left.append(f"{remote.task.task} on {remote.task.host.login}")
        self._secrets.cleanup()
        if left:
            raise StartError(f"these did not end in {_END_S:g} s: {', '.join(left)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        for remote in self._remotes:
            code = remote.process.poll()
            if code is not None:
                said = "\n".join(remote.lines)
                raise StartError(
                    f"{remote.task.task} on {remote.task.host.login} ended with exit "
                    f"code {code}; try: ssh {remote.task.host.login} jgraph version. "
                    f"The end of what it said:\n{said}",
                    task=remote.task.task,
                )

    def _files(self, task: RemoteTask) -> bytes:
        names = ("ca.crt", "token", f"{task.stem}.crt", f"{task.stem}.key")
        files = {name: (self.certificates / name).read_bytes() for name in names}
        return packed({"cluster.toml": cluster_file(self.spec), **files})


def _start(
    task: RemoteTask, files: bytes, jgraph: str, ssh: str, say: Callable[[str], None]
) -> _Remote:
    options = ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10"]
    command = remote_command(task, len(files), jgraph)
    process = subprocess.Popen(
        [*shlex.split(ssh), *options, "--", task.host.login, command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process, which ends them in order
    )
    assert process.stdin is not None  # pipes
    assert process.stdout is not None
    remote = _Remote(task, process)
    threading.Thread(
        target=remote.follow, args=(process.stdout, say), daemon=True
    ).start()
    with suppress(BrokenPipeError):
        process.stdin.write(files)
        process.stdin.flush()
    return remote
