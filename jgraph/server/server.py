"""Server: one task of a cluster, with its transport, service and master."""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, final

import jax

from jgraph._compat import add_cpu_platform
from jgraph.clock import BootClock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.in_process import add_service, remove_service
from jgraph.cluster.log_tail import log_tail
from jgraph.cluster.methods import ROLES
from jgraph.cluster.options import RECORDS_DIR, check_sources
from jgraph.cluster.signals import wait_signalled
from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import (
    DataEncryption,
    DataPort,
    TLSFiles,
    TransportChoice,
    as_tls,
    bound_data_port,
    certificates_of,
    check_data_encryption,
    check_transport,
    is_loopback,
    target_of,
)
from jgraph.coordination.liveness.members import LEASE_S
from jgraph.counts import check_flags
from jgraph.errors import (
    ConfigError,
    FencedError,
    InsecureError,
    JGError,
    StartError,
    TaskLostError,
)
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.grpc.health import HealthServer
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import Token, find_token
from jgraph.rpc.transport import Address
from jgraph.server.host_room import certificate_ends_s
from jgraph.server.master import Master
from jgraph.server.members.messages import arrangement_in, join_request
from jgraph.server.overdue import OverdueWatch
from jgraph.server.self_fencing import FencedHandler
from jgraph.server.task_context import TaskContext
from jgraph.server.task_service import TaskService
from jgraph.view import markup

_LOG = logging.getLogger("jgraph.server")
_STOP_GRACE_S = 5.0
_LAST_WORDS_S = 1.0
_LEAVE_S = 1.0
_JOIN_S = 20.0


@final
class TaskServer:
    """The coroutine form of a server: a task's service, master and transport.

    Args:
      task: the task's name.
      bind: ``host:port`` to listen on; port 0 lets the system choose. None: nowhere;
        it dials all other tasks, which reach it over the streams that it offers them.
      token: what whoever calls must show.
      health_bind: the same for the health service, which has a port of its own so
        that it answers when the task is busy. None: there is none.
      transport, data_port, data_encryption: how tensors travel; see ``Server``.
      tls: certificates of the task; None speaks plain text.
      allow_sources, max_request_bytes, overdue_s, incarnation, insecure_i_accept: see
        ``Server``.
      lease_s: see ``Registrar``.

    Raises:
      ConfigError: ``transport`` or ``data_port`` is something else.
    """

    def __init__(
        self,
        task: TaskName,
        bind: str | None,
        token: Token,
        *,
        health_bind: str | None = "127.0.0.1:0",
        transport: TransportChoice = "auto",
        data_port: DataPort = 0,
        data_encryption: DataEncryption = "records",
        tls: TLS | None = None,
        allow_sources: Sequence[str] = (),
        max_request_bytes: int | None = None,
        overdue_s: float | None = None,
        incarnation: int | None = None,
        insecure_i_accept: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        check_transport(transport)
        self.task = task
        self._overdue_s = overdue_s
        self._overdue: OverdueWatch | None = None
        self.address = ""
        self.stopped = asyncio.Event()
        self._bind = bind
        self._health_bind = health_bind
        self._transport = GrpcTransport(
            task,
            bind=bind,
            same_machine="auto" if transport == "auto" else "off",
            data_port=bound_data_port(transport, data_port),  # dialled, without bind
            data_encryption=data_encryption,
            max_request_bytes=max_request_bytes,
            token=token,
            roles=ROLES,
            tls=tls,
            incarnation=incarnation,
        )
        self._health = HealthServer()
        records_dir = os.environ.get(RECORDS_DIR)
        self.context = TaskContext(
            task,
            self._transport,
            SystemClock(),
            self._transport.incarnation,
            health_port=lambda: self._health.port,
            data_port=lambda: self._transport.data_port,
            check_place=lambda: self._fence.check(),  # noqa: PLW0108  # made below
            allow_sources=tuple(allow_sources),
            records_dir=Path(records_dir) if records_dir else None,
            certificate_ends_s=certificate_ends_s(tls),
            insecure_i_accept=insecure_i_accept,
        )
        self.service = TaskService(self.context, self._shutdown_asked)
        self._fence = FencedHandler(
            self.context, self.service, BootClock(), self._transport
        )
        self.master = Master(self.service, lease_s)
        self.context.rearranged.append(self._rearranged)
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens; returns the bound ``host:port``.

        Raises:
          PortInUseError: the address is taken.
          StartError: JAX cannot open its devices.
        """
        log_tail()
        _open_devices(self.task)
        self.address = await self._transport.start(self._fence)
        self._fence.begin()
        if self._health_bind is not None:
            await self._health.start(self._health_bind)
        await self._health.set_serving(serving=True)
        add_service(self.address, self.service)
        if self._overdue_s is not None:
            runtime, shell = self.service.runtime, self.service.shell
            self._overdue = OverdueWatch(runtime, shell, self._overdue_s)
        return self.address

    async def join_as(
        self,
        registrar: Address,
        address: Address,
        others: Mapping[TaskName, Address],
    ) -> None:
        """Says that this process serves the task that it was given; see ``Server``."""
        if self._bind is None:  # who would check that reaches it over what it dials
            self._transport.set_peers({**others, self.task: address})
        request = join_request(self.task, self.context.incarnation, address)
        ask = self._transport.ask
        reply = await ask(registrar, "Master.Join", request, timeout_s=_JOIN_S)
        self.context.arrange(arrangement_in(body_of(reply).members))

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Lets steps in flight end (at most ``grace_s``), then closes everything."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(grace_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        remove_service(self.address)
        if self.address:
            self.service.events.note("left", f"{self.task} was told to end")
        await self._health.set_serving(serving=False)
        if self.service.replaced is not None:
            await asyncio.sleep(_LAST_WORDS_S)  # whoever asks meanwhile hears of that
        self.master.runs.hand_over()
        leaving = asyncio.ensure_future(self.master.registrar.say_left(ended=False))
        ends_s = self.context.clock.now() + grace_s
        await self.service.drain(grace_s)
        await self.master.runs.wait_handed_over(ends_s - self.context.clock.now())
        await leaving
        await self.master.registrar.say_left(ended=True)
        self.master.runs.leave()
        loss = TaskLostError(f"{self.task} was stopped")
        self.service.driver.close(loss)
        self.master.dealers.close_all()
        self.master.runs.close()
        self.master.registrar.close()
        await self._transport.close()
        self._fence.close()
        await self._health.close()
        self.service.records.close()
        self.service.gates.drop_all()
        self.service.shell.close()
        if self._overdue is not None:
            await asyncio.to_thread(self._overdue.close)
        self.stopped.set()

    def _rearranged(self) -> None:
        """Ends where the cluster has this process no more, or it is told to leave."""
        arrangement, task = self.context.arrangement, self.task
        if self._stopping is not None:
            return
        if not arrangement.is_of(task, self.context.incarnation):
            why = (
                f"{task} was given up as lost, and is no member of its cluster any "
                "more, or another process has joined as that"
            )
            self.service.peer_lost(task, FencedError(why, task=task))
        elif (
            arrangement.number
            and arrangement.members[task].leaves
            and not is_ps(task)  # whoever told it to ends it, once it holds nothing
        ):
            # Who told it to says first how long what runs has.
            loop = asyncio.get_running_loop()
            loop.call_later(_LEAVE_S, self._shutdown_asked, _STOP_GRACE_S)

    def _shutdown_asked(self, grace_s: float) -> None:
        asyncio.get_running_loop().create_task(self.stop(grace_s))


class Server:
    """One task of a cluster: its variables, its partitions, and a master.

    Every server is alike; a ``ps`` is one whose partitions hold variables. Any server
    can be a client's master.

    Args:
      cluster: a ``ClusterSpec``, or what makes one: ``{"ps": ["host:port"], …}``.
      job_name: this task's job; may be left out when the cluster has one task only.
      task_index: this task's index in the job.
      bind: host to listen on. Loopback unless told otherwise; ``"0.0.0.0"`` listens
        on every interface, and is refused without ``tls``.
      health_port: port of the gRPC health service on the same host (0: any).
      transport: ``"auto"`` reaches tasks of the same machine through shared memory and
        Unix sockets; ``"network"`` all of them as if they were on other machines;
        ``"stream"`` too, with all bytes in gRPC's streams.
      data_port: where frames from other machines arrive, beside the task's own port
        (0: any); ``"off"`` leaves them in gRPC's streams, which is slower.
      data_encryption: with ``tls``, what protects the data port: ``"records"``, sealed
        with keys that travel in the encrypted stream, or ``"tls"``, which is slower.
      tls: the directory that ``jgraph certs`` wrote, or the ``TLS`` files of this
        task: whoever connects must have a certificate too. None speaks plain text.
      token_file: the token that every caller must show, in a file that other users may
        not read; if unset, the file that the environment variable ``JGRAPH_TOKEN_FILE``
        names, the one beside the certificates, or the user's own in ``~/.jgraph``.
      insecure_i_accept: listen beyond loopback without ``tls``, and let the child
        processes of ``SyncPS(dense="xla")`` do so in any case: whoever can read the
        network sees the token, and with it may run programs here.
      allow_sources: functions that a ``jg.Source.grain`` may call here, as patterns of
        ``"package.module:function"``.
      max_request_bytes: how many bytes of requests the server holds at once; a client
        that sends more waits for its turn. A quarter of the free memory unless given.
      overdue_s: a computation that still runs so many seconds after the deadline of its
        step ends this process, with exit code 76, so that a launcher starts it again.
        None: never; nothing else can end a computation.
      incarnation: of this start of the task; random unless given.
      dial_only: listen nowhere: this task, which joins a cluster, dials all others, and
        they reach it over these connections. ``bind`` and the ports mean nothing then.
      start: whether to start at once.

    Raises:
      CertificateError, RoleError: the certificates cannot be used, or are another's.
      ConfigError: ``transport``, ``data_port`` or ``allow_sources`` is something else,
        or which task this is was not told.
      InsecureError: ``bind`` is not loopback, and there is no ``tls``.
      PortInUseError: the task's port is taken.
      TokenError: the token cannot be read or made.
      UnknownDeviceError: the cluster has no such task.

    Example:
      >>> server = Server({"ps": ["localhost:0"]}, "ps", 0)
      >>> server.task
      '/job:ps/task:0'
      >>> server.stop()
    """

    @short_traceback
    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        bind: str = "127.0.0.1",
        health_port: int = 0,
        transport: TransportChoice = "auto",
        data_port: DataPort = 0,
        data_encryption: DataEncryption = "records",
        tls: TLSFiles | None = None,
        token_file: str | os.PathLike[str] | None = None,
        insecure_i_accept: bool = False,
        allow_sources: Sequence[str] = (),
        max_request_bytes: int | None = None,
        overdue_s: float | None = None,
        incarnation: int | None = None,
        dial_only: bool = False,
        start: bool = True,
    ) -> None:
        check_flags(
            insecure_i_accept=insecure_i_accept, dial_only=dial_only, start=start
        )
        check_transport(transport)
        bound_data_port(transport, data_port)
        check_data_encryption(data_encryption)
        self._allow_sources = check_sources(allow_sources)
        if tls is None and not insecure_i_accept:
            _check_bind(bind)
        self.cluster = ClusterSpec(cluster, port_zero=True)
        self.task = own_task(self.cluster, job_name, task_index)
        self._bind = bind
        self._health_port = health_port
        self._transport: TransportChoice = transport
        self._data_port: DataPort = data_port
        self._data_encryption: DataEncryption = data_encryption
        self._tls = as_tls(tls, self.task)
        self._token = find_token(token_file, certificates_of(self._tls))
        self._max_request_bytes = max_request_bytes
        self._overdue_s = overdue_s
        self._incarnation = incarnation
        self._insecure_i_accept = insecure_i_accept
        self._dial_only = dial_only
        self._server: TaskServer | None = None
        self._stopped = threading.Event()
        if start:
            self.start()

    @property
    def address(self) -> str:
        """Where others reach it, ``host:port``; empty before the start."""
        return self.cluster.address(self.task) if self._server is not None else ""

    @property
    def target(self) -> str:
        """What ``jg.connect`` takes."""
        return target_of(self.address, self._tls)

    @property
    def tls(self) -> TLS | None:
        """Its certificate; None: it speaks plain text."""
        return self._tls

    @property
    def replaced(self) -> FencedError | None:
        """Who told that another process of this task has its place; it has ended."""
        return None if self._server is None else self._server.service.replaced

    @property
    def computes(self) -> bool:
        """Whether something computes that nothing can end but the process's end."""
        if self._server is None:
            return False
        runtime = self._server.service.runtime
        return bool(runtime.computing() or runtime.overdue_computations())

    def status_message(self) -> pb.ClusterStatus:
        """Returns what the task tells of itself, as of a cluster of one."""
        server = self._server
        assert server is not None  # it serves

        async def ask() -> pb.TaskStatus:
            return await server.service.status()

        return pb.ClusterStatus(
            master=self.task,
            cluster_json=self.cluster.to_json(),
            tasks=[event_loop.run(ask())],
        )

    def start(self) -> None:
        """Starts listening; does nothing if started."""
        if self._server is None:
            self._server = event_loop.run(self._start())

    async def _start(self) -> TaskServer:
        port = self.cluster.address(self.task).rpartition(":")[2]
        listens = not self._dial_only
        server = TaskServer(
            self.task,
            f"{self._bind}:{port}" if listens else None,
            self._token,
            health_bind=f"{self._bind}:{self._health_port}" if listens else None,
            transport=self._transport,
            data_port=self._data_port,
            data_encryption=self._data_encryption,
            tls=self._tls,
            allow_sources=self._allow_sources,
            max_request_bytes=self._max_request_bytes,
            overdue_s=self._overdue_s,
            incarnation=self._incarnation,
            insecure_i_accept=self._insecure_i_accept,
        )
        try:
            await server.start()
        except JGError:
            await server.stop(0.0)
            raise
        address = server.address
        if listens:
            address = dialled(self.cluster.address(self.task), address)
        self.cluster = with_address(self.cluster, self.task, address)
        server.context.set_cluster(self.cluster)
        asyncio.ensure_future(server.stopped.wait()).add_done_callback(
            lambda _: self._stopped.set()
        )
        text = f"{self.task} only dials, and listens nowhere"
        if listens:
            text = f"{self.task} listens on {server.address}"
        server.service.events.note("joined", text)
        if listens and self._tls is None and not is_loopback(self._bind):
            _LOG.warning(
                "%s speaks plain text with other hosts: whoever reads the network may "
                "run programs here",
                self.task,
            )
        return server

    @property
    def listens(self) -> bool:
        """Whether others dial it; else it dials them."""
        return not self._dial_only

    def join_as(
        self,
        registrar: Address,
        others: Mapping[TaskName, Address] = MappingProxyType({}),
    ) -> None:
        """Takes part in a cluster as the task that its registrar has given this one.

        Args:
          registrar: any task of the cluster.
          others: where the tasks of the cluster are, for one that only dials.

        Raises:
          JGError: it is not that task any more, or is not reached there.
        """
        assert self._server is not None  # it serves
        event_loop.run(self._server.join_as(registrar, self.address, others))
        self.cluster = self._server.context.spec

    def set_cluster(self, cluster: ClusterSpec) -> None:
        """Replaces the addresses of the other tasks."""
        if self._server is not None:
            tell = self._server.context.set_cluster
            self.cluster = cluster
            event_loop.event_loop().call_soon_threadsafe(tell, cluster)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until the server has stopped.

        Args:
          timeout_s: give up after this long; None waits as long as it takes.

        Returns:
          Whether it has stopped.
        """
        return wait_signalled(self._stopped, timeout_s)

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Ends the server and frees its port; steps in flight get ``grace_s``."""
        if self._server is not None:
            event_loop.run(self._server.stop(grace_s))
        self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = f"at {self.address}" if self.address else "not started"
        return f"<Server {self.task} {where}>"

    def _facts(self) -> dict[str, object]:
        state = "ended" if self._stopped.is_set() else "serves"
        return {
            "task": self.task,
            "state": state if self.address else "not started",
            "address": self.address,
            "encrypted": "no" if self._tls is None else "TLS",
            "cluster": ", ".join(self.cluster.tasks()),
        }

    def _repr_html_(self) -> str:
        return markup.facts("Server", self._facts())


def _check_bind(bind: str) -> None:
    if not is_loopback(bind):
        raise InsecureError(
            f"bind='{bind}' lets other hosts in, and without certificates whoever can "
            "read the network may run programs here; make some with `jgraph certs` and "
            "give tls=… (--tls-dir), or say --insecure-i-accept in a network that is "
            "yours alone",
            bind=bind,
        )


def _open_devices(task: TaskName) -> None:
    # At the start, so that a missing driver is not found in the middle of a run.
    add_cpu_platform()  # on which rows of tables are looked up
    try:
        jax.devices()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise StartError(
            f"{task}: JAX cannot open its devices: {first}; set JAX_PLATFORMS to what "
            "this host has, for example JAX_PLATFORMS=cpu",
            task=task,
        ) from error


def dialled(listed: str, bound: str) -> str:
    """Returns where others reach a task; 0.0.0.0 is no address that one can dial."""
    host, port = bound.rpartition(":")[::2]
    return bound if is_loopback(host) else f"{listed.rpartition(':')[0]}:{port}"


def with_address(spec: ClusterSpec, task: TaskName, address: str) -> ClusterSpec:
    """Returns the spec with the address that a task really listens on."""
    jobs: dict[str, dict[int, str]] = {}
    for name in spec.tasks():
        job, index = name.removeprefix("/job:").split("/task:")
        where = address if name == task else spec.address(name)
        jobs.setdefault(job, {})[int(index)] = where
    return ClusterSpec(jobs, port_zero=True)


def own_task(
    cluster: ClusterSpec, job_name: str | None, task_index: int | None
) -> TaskName:
    """Returns the task that a server is told to be; it may be left out if it is clear.

    Raises:
      ConfigError: it is not.
      UnknownDeviceError: the cluster has no such task.
    """
    tasks = cluster.tasks()
    if job_name is None and len(tasks) == 1:
        return tasks[0]
    if job_name is None or (task_index is None and cluster.num_tasks(job_name) != 1):
        raise ConfigError(
            "which task of the cluster is this server? Give job_name and task_index, "
            "on the command line --job and --task; "
            f"the cluster has {', '.join(tasks)}"
        )
    index = cluster.task_indices(job_name)[0] if task_index is None else task_index
    cluster.task_address(job_name, index)
    return TaskName(f"/job:{job_name}/task:{index}")
