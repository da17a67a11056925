"""Spark task that keeps the process of one server: begins it, watches it, ends it.

Runs in a Python worker of Spark, which need not have jgraph, and is sent there by
value: so it imports the standard library alone. It decides nothing: the driver says
what to do, and is told what became of it, over a connection that the task opens. Where
that ends, or the executor does, the process of the server ends with its input.
"""

import json
import os
import queue
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

BEAT_S: Final = 2.0
"""Both sides say something so often."""
SILENT_BEATS: Final = 10
"""Who has said nothing for so many beats is gone."""
LOG_LINES: Final = 200
_CONNECT_S: Final = 30.0
_END_S: Final = 8.0
_VERSIONS_S: Final = 60.0
_VERSIONS: Final = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in ("jgraph", "jax"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = ""
try:
    import jgraph
    found["jgraph"] = jgraph.__version__
except ImportError:
    pass
print(json.dumps(found))
"""


def serve(orders: Iterable[str]) -> Iterator[str]:
    """Keeps a server for each order, of which a Spark task has one; yields nothing."""
    for order in orders:
        Keeper(json.loads(order)).run()
    return iter(())


class Keeper:
    """One Spark task: a connection to the driver, and a process or none.

    Args:
      order: ``task``, ``hosts`` and ``port`` of the driver, ``ca``, ``secret``,
        ``python`` (of the servers, or empty), ``driver_python``, ``module``, ``echo``.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._news: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._socket: ssl.SSLSocket | None = None
        self._received = b""
        self._child: subprocess.Popen[str] | None = None
        self._parent = os.getppid()
        self._python = ""

    def run(self) -> None:
        """Does what the driver says until it says that all is over, or is gone."""
        try:
            self._socket = self._connected()
            self._say_hello(self._socket)
            silent = 0
            while silent < SILENT_BEATS and os.getppid() == self._parent:
                ready, _, _ = select.select([self._socket, self._bell], [], [], BEAT_S)
                if self._bell in ready:
                    self._tell_news()
                if self._socket in ready:
                    silent = 0
                    if not self._obey():
                        break
                elif not ready:
                    silent += 1
                # Not after pauses alone: the driver, which gives up who is silent, may
                # speak just before each of them is over.
                self._tell(beat=True)
        except OSError:
            pass  # the driver is gone, or another Spark task has this place
        finally:
            self._end_child()
            for one in (self._socket, self._bell, self._ring):
                if one is not None:
                    one.close()

    # ------------------------------------------------------------ the driver

    def _connected(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cadata=self._order["ca"])
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        why: OSError | None = None
        for host in self._order["hosts"]:
            try:
                plain = socket.create_connection(
                    (host, self._order["port"]), timeout=_CONNECT_S
                )
                return context.wrap_socket(plain, server_hostname="launcher.jgraph")
            except OSError as error:
                why = error
        where = " or ".join(f"{h}:{self._order['port']}" for h in self._order["hosts"])
        raise RuntimeError(
            f"{self._order['task']} on {socket.gethostname()} does not reach the "
            f"driver at {where}: {why}; let executors reach that port of the driver"
        )

    def _say_hello(self, driver: ssl.SSLSocket) -> None:
        order = self._order
        self._python, problem = self._found_python()
        versions: dict[str, str] = {}
        if not problem:
            versions, problem = self._versions()
        self._tell(
            hello={
                "task": order["task"],
                "secret": order["secret"],
                "address": driver.getsockname()[0],
                "host": socket.gethostname(),
                "worker": os.getpid(),
                "python": self._python,
                "versions": versions,
                "problem": problem,
            }
        )

    def _found_python(self) -> tuple[str, str]:
        named, of_driver = self._order["python"], self._order["driver_python"]
        if named:
            there = os.access(named, os.X_OK)
            return named, "" if there else f"there is no program {named}"
        return (of_driver if os.access(of_driver, os.X_OK) else sys.executable), ""

    def _versions(self) -> tuple[dict[str, str], str]:
        """Returns what the Python of the servers has."""
        try:
            asked = subprocess.run(
                [self._python, "-c", _VERSIONS],
                capture_output=True,
                text=True,
                timeout=_VERSIONS_S,
                check=True,
            )
            return json.loads(asked.stdout.splitlines()[-1]), ""
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            return {}, f"{self._python} cannot tell its versions: {error}"

    def _tell(self, **facts: Any) -> None:
        if self._socket is not None:
            self._socket.sendall(json.dumps(facts).encode() + b"\n")

    def _obey(self) -> bool:
        """Does what has come from the driver; False if nothing more comes."""
        if self._socket is None:
            return False
        while True:
            chunk = self._socket.recv(65536)
            if not chunk:
                return False
            self._received += chunk
            if not self._socket.pending():
                break
        *lines, self._received = self._received.split(b"\n")
        goes_on = True
        for line in lines:
            goes_on = self._obey_one(json.loads(line)) and goes_on
        return goes_on

    def _obey_one(self, order: Mapping[str, Any]) -> bool:
        if "begin" in order:
            self._begin(**order["begin"])
        if "line" in order and self._child is not None:
            self._write(order["line"])
        if "kill" in order and self._child is not None:
            self._child.kill()
        return "close" not in order

    # ------------------------------------------------------------ the process

    def _begin(
        self, number: int, arguments: list[str], environment: dict[str, str]
    ) -> None:
        self._end_child()
        try:
            child = subprocess.Popen(
                [self._python, "-m", self._order["module"], *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **_devices(), **environment},
                start_new_session=True,  # Spark's signals are for its own processes
            )
        except OSError as error:
            self._tell(ended=number, code=127, tail=f"{self._python}: {error}")
            return
        self._child = child
        self._tell(started=number, pid=child.pid)
        follow = threading.Thread(target=self._follow, args=(child, number))
        follow.daemon = True
        follow.start()

    def _follow(self, child: "subprocess.Popen[str]", number: int) -> None:
        """Passes on what a process says, until it has ended, and how it did."""
        tail: deque[str] = deque(maxlen=LOG_LINES)
        log = threading.Thread(target=self._read_log, args=(child, tail))
        log.daemon = True
        log.start()
        if child.stdout is not None:
            with child.stdout as answers:
                for line in answers:
                    self._note("line", number, line.rstrip("\n"))
        code = child.wait()
        log.join(BEAT_S)
        self._note("ended", number, (code, "\n".join(tail)))

    def _read_log(self, child: "subprocess.Popen[str]", tail: deque[str]) -> None:
        if child.stderr is None:
            return
        with child.stderr as lines:
            for line in lines:
                tail.append(line.rstrip("\n"))
                if self._order["echo"]:  # into the log of the executor
                    sys.stderr.write(line)

    def _note(self, what: str, number: int, fact: Any) -> None:
        self._news.put((what, number, fact))
        with suppress(OSError):  # nobody waits any more
            self._ring.send(b"!")

    def _tell_news(self) -> None:
        self._bell.recv(4096)
        while not self._news.empty():
            what, number, fact = self._news.get()
            if what == "line":
                self._tell(line=fact, of=number)
            else:
                self._tell(ended=number, code=fact[0], tail=fact[1])

    def _write(self, line: str) -> None:
        if self._child is not None and self._child.stdin is not None:
            try:
                self._child.stdin.write(line + "\n")
                self._child.stdin.flush()
            except (OSError, ValueError):
                pass  # it has ended, which is told

    def _end_child(self) -> None:
        """Ends the process by closing its input; by force if it does not."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            if child.stdin is not None:
                child.stdin.close()
        except OSError:
            pass  # it has ended
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            child.wait(_END_S)


def _devices() -> dict[str, str]:
    """Returns what says which GPUs Spark has given to this task."""
    try:
        from pyspark import TaskContext
    except ImportError:
        return {}  # not a task of Spark
    context = TaskContext.get()
    gpus = None if context is None else context.resources().get("gpu")
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}
