"""Process of one task, as the driver sees it through whichever Spark task keeps it."""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.errors import CertificateError, StartError
from jgraph.graph.device import TaskName
from jgraph.launch.local.exit_codes import how_it_ended
from jgraph.launch.spark.control import KeeperLink, Message
from jgraph.rpc.security.certificates import Authority

LOST: Final = 1
"""In place of the exit code of a process that was lost with its Spark task."""
_KILL_S: Final = 5.0
_LOG_LINES: Final = 20


@final
@dataclass(frozen=True, slots=True)
class SparkOrder:
    """What all processes of a cluster are begun with.

    Attributes:
      authority: signs their certificates.
      token: of the cluster.
      transport: see ``Server``.
      allow_sources: see ``Server``.
      overdue_s: see ``Server``.
    """

    authority: Authority
    token: str
    transport: TransportChoice
    allow_sources: Sequence[str]
    overdue_s: float


@final
class SparkProcess:
    """A task's process on an executor; one after the other, maybe elsewhere.

    What ``launch.local.restarts.Restarter`` starts again.

    Args:
      task: which.
      order: what it is begun with.
      environment: variables to set for it.
      want: asks Spark for a task.
      is_over: whether Spark starts none any more.
      problem: returns what is wrong with where a Spark task is; empty: nothing.
      on_start: is told that it was started again, and returns where all are.
    """

    def __init__(
        self,
        task: TaskName,
        order: SparkOrder,
        environment: Mapping[str, str],
        want: Callable[[TaskName], None],
        is_over: Callable[[], bool],
        problem: Callable[[KeeperLink], str],
        on_start: Callable[["SparkProcess"], ClusterSpec],
    ) -> None:
        self.task = task
        self.address = ""
        self.pid = 0
        self._order = order
        self._environment = dict(environment)
        self._want = want
        self._is_over = is_over
        self._problem = problem
        self._on_start = on_start
        self._changed = threading.Condition()
        self._links: list[KeeperLink] = []
        self._number = 0
        self._has_begun = False
        self._code: int | None = None
        self._why = ""
        self._tail = ""
        self._lines: deque[str] = deque()
        self._any_port = False
        self._asked = False
        self._has_joined = False  # this process
        self._had_joined = False  # any before

    # ------------------------------------------------------------ the Spark task

    @property
    def link(self) -> KeeperLink | None:
        """The Spark task that keeps it now, or would."""
        return self._links[0] if self._links else None

    def seated(self, link: KeeperLink) -> None:
        """See ``control.Seat``; a second one waits for the loss of the first."""
        with self._changed:
            self._links.append(link)
            self._begin()
            self._changed.notify_all()

    def lost(self, link: KeeperLink) -> None:
        """See ``control.Seat``."""
        with self._changed:
            was_first = self._links[:1] == [link]
            if link in self._links:
                self._links.remove(link)
            if was_first and self._has_begun:
                self._end(LOST, f"the loss of its Spark task on {link.hello['host']}")
            self._changed.notify_all()

    def heard(self, link: KeeperLink, message: Message) -> None:
        """See ``control.Seat``."""
        with self._changed:
            if self._links[:1] != [link]:
                return
            if message.get("started") == self._number:
                self.pid = int(message["pid"])
            elif "line" in message and message.get("of") == self._number:
                self._lines.append(str(message["line"]))
            elif message.get("ended") == self._number:
                self._tail = str(message["tail"])
                code = int(message["code"])
                self._end(code, how_it_ended(code))
            self._changed.notify_all()

    def failed(self, why: str) -> None:
        """Its job has ended, and no Spark task is there."""
        with self._changed:
            if not self._links and self._code is None:
                self._end(LOST, f"its Spark task: {why}")
                self._changed.notify_all()

    def wait_link(self, timeout_s: float) -> str:
        """Waits for a Spark task; returns why there is none, or nothing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._links or self._code is not None, timeout_s
            )
            return self._why if self._code is not None else ""

    # ------------------------------------------------------------ see ``Process``

    def start(self, spec: ClusterSpec) -> None:
        """Starts it, where it was if it can be.

        Raises:
          OSError: the Spark application has ended.
        """
        if self._is_over():
            raise OSError("the Spark application has ended")
        with self._changed:
            self._number += 1
            # A port that another process took meanwhile is not waited for.
            self._any_port = self._code is not None and not self._has_joined
            self._code, self._has_begun, self._has_joined = None, False, False
            self._lines.clear()
            self.pid = 0
            has_one = bool(self._links)
            self._asked = True
            self._begin()
        if not has_one:
            self._want(self.task)

    def wait_started(self) -> None:
        """Waits for the process to tell its address, and signs its certificate.

        Raises:
          StartError: it ended instead; the message has the end of its log.
        """
        request = json.loads(self._line())["request"].encode()
        try:
            signed = self._order.authority.sign(request, self.task)
        except CertificateError:
            self.kill()
            raise
        certificate = {
            "ca": self._order.authority.certificate.decode(),
            "certificate": signed.decode(),
            "token": self._order.token,
        }
        self._tell(line=json.dumps(certificate))
        self.address = str(json.loads(self._line())["address"])

    def join(self, spec: ClusterSpec) -> None:
        """Gives the process the description of its cluster, and waits till it has it.

        Raises:
          StartError: it ended instead; the message has the end of its log.
        """
        if self._had_joined:
            spec = self._on_start(self)
        self._tell(line=spec.to_json())
        self._line()
        self._has_joined = self._had_joined = True

    def arrange(self, spec: ClusterSpec) -> None:
        """Tells a process that has joined where the others are now."""
        if self._has_joined:
            self._tell(line=spec.to_json())

    def wait_dead(self) -> int:
        """Waits for the end, however long it takes; returns the exit code."""
        with self._changed:
            self._changed.wait_for(lambda: self._code is not None)
            assert self._code is not None  # just waited for
            return self._code

    def how_it_ended(self) -> str:
        """Returns why it ended, as a part of a sentence."""
        return self._why

    def kill(self) -> None:
        """Kills it, as a crash would; returns when it is dead, or its task is lost."""
        self._tell(kill=True)
        with self._changed:
            if self._links:
                self._changed.wait_for(lambda: self._code is not None, _KILL_S)
            if self._code is None:
                self._end(LOST, "no answer from its Spark task")
                self._changed.notify_all()

    def tail(self, lines: int = _LOG_LINES) -> str:
        """Returns the end of the log of the process that has ended last."""
        return "\n".join(self._tail.splitlines()[-lines:])

    def close(self) -> None:
        """Ends the process by closing its input, and its Spark tasks."""
        with self._changed:
            links = list(self._links)
            if self._code is None:
                self._end(0, "the end of its cluster")
            self._changed.notify_all()
        for link in links:
            link.tell(close=True)

    # ------------------------------------------------------------ parts

    def _begin(self) -> None:
        """Begins the process if that is wanted, and a Spark task is there."""
        if not self._links or not self._asked or self._has_begun:
            return
        link = self._links[0]
        self._asked, self._has_begun = False, True
        if problem := self._problem(link):
            self._tail = problem
            self._end(LOST, problem)
            return
        job, _, index = self.task.removeprefix("/job:").partition("/task:")
        host, _, port = self.address.rpartition(":")
        where = f"{link.address}:{port if host == link.address else 0}"
        if self._any_port:
            where = f"{link.address}:0"
        alone = ClusterSpec({job: {int(index): where}}, port_zero=True)
        link.tell(
            begin={
                "number": self._number,
                "arguments": [
                    job,
                    index,
                    alone.to_json(),
                    self._order.transport,
                    f"{self._order.overdue_s}",
                    *self._order.allow_sources,
                ],
                "environment": self._environment,
            }
        )

    def _end(self, code: int, why: str) -> None:
        self._code, self._why, self._has_begun = code, why, False

    def _tell(self, **order: object) -> None:
        if (link := self.link) is not None:
            link.tell(**order)

    def _line(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._code is not None)
            if self._code is None:
                return self._lines.popleft()
        tail = self.tail()
        log = f"The end of its log:\n{tail}" if tail else "It has written no log"
        raise StartError(
            f"{self.task} ended by {self._why} while starting. {log}",
            task=self.task,
        )
