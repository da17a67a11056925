"""A server on another host, and the ssh that holds it from here."""

import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, final

from jgraph.cluster.signals import wait_signalled
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import StartError
from jgraph.launch.hosts import Host, RemoteTask, remote_command
from jgraph.launch.local.exit_codes import how_it_ended

_LINES: Final = 20
_READ_S: Final = 5.0
OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10"),
)


@final
@dataclass(slots=True)
class _Ssh:
    """One start of it: ``told`` is set when it serves, and when it is over."""

    process: "subprocess.Popen[bytes]"
    told: threading.Event = field(default_factory=threading.Event)
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
        self._ssh = self._started()

    def wait_dead(self) -> int:
        """Waits for the end, however long it takes; returns the exit code."""
        ssh = self._ssh
        code = ssh.process.wait()
        ssh.told.wait(_READ_S)  # the last lines say why
        return code

    def how_it_ended(self) -> str:
        """Returns why it ended, as a part of a sentence."""
        return how_it_ended(self._ssh.process.wait(_READ_S))

    def wait_started(self) -> None:
        """Waits until it serves.

        Raises:
          StartError: it ended instead.
        """
        wait_signalled(self._ssh.told)  # it ends with ssh, or by Ctrl-C
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
        with self._log.open("a", encoding="utf-8", buffering=1) as kept:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                kept.write(f"{line}\n")
                self._say(f"[{self._stem}] {line}")
                if line.startswith(f"{self.task} serves at "):
                    ssh.serves = True
                    ssh.told.set()
        ssh.told.set()


def ssh_to(ssh: Sequence[str], host: Host) -> list[str]:
    """Returns the words before a command for a host.

    Example:
      >>> ssh_to(["ssh"], Host("ada@a", "a"))[-2:]
      ['--', 'ada@a']
    """
    return [*ssh, *OPTIONS, "--", host.login]
