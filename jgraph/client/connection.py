"""Connection: one client's calls to the master and the tasks of a cluster."""

import atexit
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from jgraph.client.retry import retry_while_busy
from jgraph.client.status import ClusterStatus
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import CONTROL_S
from jgraph.cluster.options import reset_order
from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import target_of
from jgraph.errors import ClusterUnreachableError, ConfigError, JGError, TaskLostError
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.transport import Address, Frame

UNKNOWN_PLATFORM: Final[tuple[str, ...]] = ("cpu", "cuda")
"""What code is compiled for where nobody knows what a task has."""

_OPEN: "weakref.WeakSet[Connection]" = weakref.WeakSet()


@atexit.register
def _drop_all() -> None:
    """Drops what the clients hold that a process leaves open as it ends."""
    for connection in list(_OPEN):
        connection.drop_held()


def unique(prefix: str) -> str:
    """Returns a name that no other client uses."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


class Connection:
    """Calls to the tasks of one cluster, through its master unless told otherwise.

    Attributes:
      spec: which tasks there are and where.
      master: the task whose server this client talks to.
      ends_with_client: whether its servers end when this process does.
    """

    ends_with_client = False

    def __init__(
        self,
        address: Address,
        transport: GrpcTransport,
        reply: Any,
        tls: TLS | None = None,
        token_file: Path | None = None,
    ) -> None:
        self.address = address
        self.spec = ClusterSpec.from_json(reply.cluster_json)
        self.arrangement = reply.arrangement
        """Number of the arrangement of its tasks that is known here."""
        self.master = TaskName(reply.master)
        # A task that did not answer may have either when it does.
        self.platforms: dict[TaskName, tuple[str, ...]]
        self.platforms = dict.fromkeys(self.spec.tasks(), UNKNOWN_PLATFORM)
        self.platforms |= {TaskName(t.task): (t.platform,) for t in reply.tasks}
        self._transport = transport
        self._tls = tls
        self._token_file = token_file
        self.at_close: dict[int, Callable[[], None]] = {}
        """What this client drops on the cluster as it ends, by any number."""
        self._closed = False
        _OPEN.add(self)

    @property
    def target(self) -> str:
        """What ``jg.connect`` takes to reach this cluster from elsewhere."""
        return target_of(self.address, self._tls, self._token_file)

    def tasks(self, job: str | None = None) -> list[TaskName]:
        """Returns the tasks of a job (of all jobs if unset), in order.

        Those that this client knows of: ``status()`` asks who has joined since.
        """
        prefix = f"/job:{job}/" if job is not None else "/"
        return [task for task in self.spec.tasks() if task.startswith(prefix)]

    def renewed_tasks(self, job: str) -> list[TaskName]:
        """Returns the tasks of a job, those that joined since this client included."""
        self.refresh()
        return self.tasks(job)

    def find(self, task: TaskName) -> Address:
        """Returns where a task is; it may have joined since this client connected.

        Raises:
          UnknownDeviceError: there is none.
        """
        if task not in self.spec.tasks():
            self.refresh()
        return self.spec.address(task)

    def refresh(self) -> None:
        """Asks the master who has joined the cluster, and left it."""
        self.status_now()

    def status_now(self) -> pb.ClusterStatus:
        """Asks the master how the tasks are, and takes note of who they are."""
        reply = self.call("Master.Status", frame(empty=pb.Empty()), timeout_s=15.0)
        status: pb.ClusterStatus = body_of(reply)
        self.take_members(status)
        return status

    def take_members(self, status: pb.ClusterStatus) -> None:
        """Takes note of the tasks that a master tells of, unless they are older."""
        if status.arrangement < self.arrangement:
            return
        self.arrangement = status.arrangement
        self.spec = ClusterSpec.from_json(status.cluster_json)
        self.platforms |= {TaskName(t.task): (t.platform,) for t in status.tasks}

    def gone(self) -> Mapping[TaskName, str]:
        """Returns how tasks ended that nobody starts again, as far as is known here."""
        return {}

    @property
    def starts_again(self) -> bool:
        """Whether a lost task is started again, as far as is known here."""
        return False

    def check_startable(self) -> None:
        """Raises ``TaskMissingError`` for a lost task that nobody starts again."""

    def call(
        self,
        method: str,
        request: Frame,
        *,
        timeout_s: float = 2 * CONTROL_S,
        begin_s: float | None = None,
        to: Address | None = None,
    ) -> Frame:
        """Calls a method that answers with one frame, at the master unless told.

        Args:
          method: its name.
          request: what to ask.
          timeout_s: limit for the answer.
          begin_s: how long a busy task is asked again; ``timeout_s`` unless given.
          to: whom.
        """
        self.check_open()
        address, master = to or self.address, self.master

        def ask(remaining_s: float) -> Frame:
            asking = self._transport.ask(
                address, method, request, timeout_s=remaining_s
            )
            return event_loop.run(asking)

        try:
            return retry_while_busy(ask, method, timeout_s, begin_s or timeout_s)
        except (ClusterUnreachableError, TaskLostError) as error:
            # The transport knows addresses; users know tasks.
            if str(error.details.get("task", "")).startswith("/job:"):
                raise
            tasks = (t for t in self.tasks() if self.spec.address(t) == address)
            # A master that has left the cluster is none of its tasks.
            task = next(tasks, address if to else master)
            text = f"{task} does not answer: {error.message}"
            raise type(error)(text, **{**error.details, "task": task}) from error

    def move_to(self, task: TaskName) -> None:
        """Makes another server the master of this client."""
        self.address, self.master = self.find(task), task

    @property
    def transport(self) -> GrpcTransport:
        """The client's transport, for streams of replies."""
        self.check_open()
        return self._transport

    @short_traceback
    def status(self) -> ClusterStatus:
        """Asks every task how it is; names those that do not answer."""
        return ClusterStatus.from_message(self.status_now())

    @short_traceback
    def reset(self, *containers: str) -> None:
        """Drops the variables of these containers; none named: all, and programs."""
        self.call("Master.Reset", reset_order(containers))

    def close(self) -> None:
        """Closes the connection; the servers go on."""
        if self._closed:
            return
        self.drop_held()
        _OPEN.discard(self)
        self._closed = True
        event_loop.run(self._transport.close())

    def drop_held(self) -> None:
        """Drops on the cluster what nobody needs without this client."""
        with suppress(JGError):  # one that does not answer is not asked again
            for drop in list(self.at_close.values()):
                drop()

    def check_open(self) -> None:
        """Raises ``ConfigError`` if it was closed; says what to make instead."""
        if self._closed:
            raise ConfigError(f"this cluster was closed; {self._again()}")

    def _again(self) -> str:
        return f"make a new jg.{type(self).__name__}"
