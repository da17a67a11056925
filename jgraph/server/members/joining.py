"""Joining: a process becomes a task of a cluster that is up, under a number of its.

It knocks at any task and gets an index, serves as that task, and says so. Until then no
other task has heard of it.
"""

import asyncio
import re
import secrets
import socket
from pathlib import Path
from typing import Any, Final

from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import (
    address_of,
    as_tls,
    certificates_of,
    is_loopback,
    token_file_in,
)
from jgraph.errors import (
    AddressError,
    CertificateError,
    ClusterUnreachableError,
    ConfigError,
    DeadlineError,
    RescaleError,
    TaskLostError,
)
from jgraph.failpoints import failpoint
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.dial import split_address
from jgraph.rpc.dial_only.address import dial_only_address
from jgraph.rpc.frames import body_of
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.tls import TLS
from jgraph.rpc.security.token import Token, find_token
from jgraph.rpc.transport import Address
from jgraph.server.members.messages import join_request
from jgraph.server.server import Server

JOIN_S: Final = 60.0
"""So long a process tries to reach the cluster that it joins."""
_AGAIN_S: Final = 0.5
_ASK_S: Final = 20.0


def join_cluster(
    target: str,
    job: str,
    *,
    host: str | None = None,
    port: int = 0,
    tls: Path | None = None,
    token_file: Path | None = None,
    timeout_s: float = JOIN_S,
    dial_only: bool = False,
    **options: Any,
) -> Server:
    """Returns a server that has joined a cluster as a new task.

    Args:
      target: any task of the cluster, ``"jgraph://host:port"``, also with
        ``?token_file=…``, as ``Cluster.target`` has it.
      job: of which it is a task; only workers join.
      host: where the other tasks reach this host; how it reaches theirs unless given.
      port: to listen at; 0 takes a free one.
      tls: directory with the certificates of the indices that it may have, see
        ``jgraph certs --spare``.
      token_file: see ``Server``; of the target unless given.
      timeout_s: the cluster may be starting, or without its registrar, for so long.
      dial_only: listen nowhere, and dial all tasks that do, as behind a firewall that
        lets nobody in. ``host`` and ``port`` mean nothing then.
      options: of ``Server``.

    Raises:
      ClusterUnreachableError: nothing of ours is there.
      ConfigError: a task of that job must be dialled.
      RescaleError: the cluster takes no such task.
      CertificateError, TokenError, VersionError: it does not take this process.
    """
    if dial_only and job != "worker":
        raise ConfigError(
            f"--dial-only does not go with --job {job:.80}: all workers dial a "
            f"{job:.80}, so it has to listen; leave --dial-only out, or join as "
            "--job worker"
        )
    bind = str(options.get("bind", "127.0.0.1"))
    if host is not None and is_loopback(bind) and not is_loopback(host):
        raise ConfigError(
            f"--host {host:.80} is where other tasks dial this one, and it listens on "
            f"{bind} alone, where no other host reaches it; add --bind 0.0.0.0, and "
            "--tls-dir, or leave --host out if all tasks are on this host"
        )
    indices = _indices(tls, job)
    task = TaskName(f"/job:{job}/task:{indices[0]}") if indices else None
    files = as_tls(tls, task)
    address = address_of(target, files)
    split_address(address)
    if token_file is None and (named := token_file_in(target)):
        token_file = Path(named)
    token = find_token(token_file, certificates_of(files))
    incarnation = secrets.randbits(64) or 1
    asking = _knock(address, job, incarnation, indices, token, files, task, timeout_s)
    reply: pb.JoinReply = event_loop.run(asking)
    failpoint("member.invited")
    name = TaskName(reply.task)
    index = int(name.rpartition(":")[2])
    here = f"{host or _host_towards(address)}:{port}"
    if dial_only:
        here = dial_only_address(name, incarnation)
    server = Server(
        ClusterSpec({job: {index: here}}, port_zero=True),
        job,
        index,
        tls=as_tls(tls, name),
        token_file=token_file,
        incarnation=incarnation,
        dial_only=dial_only,
        **options,
    )
    try:
        failpoint("member.serves")
        server.join_as(address, {TaskName(t.task): t.address for t in reply.tasks})
    except BaseException:
        server.stop(0.0)
        raise
    return server


async def _knock(
    address: Address,
    job: str,
    incarnation: int,
    indices: list[int],
    token: Token,
    files: TLS | None,
    task: TaskName | None,
    timeout_s: float,
) -> pb.JoinReply:
    """Asks for an index, again while the cluster is not there."""
    clock = SystemClock()
    deadline = clock.now() + timeout_s
    request = join_request(TaskName(""), incarnation, job=job)
    body_of(request).indices.extend(indices)
    while True:
        transport = GrpcTransport(task, tls=files, token=token, data_port=None)
        try:
            reply = await transport.ask(
                address, "Master.Join", request, timeout_s=_ASK_S
            )
            welcome: pb.JoinReply = body_of(reply)
        except (
            AddressError,  # of a host whose name is not known yet
            ClusterUnreachableError,
            DeadlineError,  # it may be busy, or hang and be started again
            TaskLostError,
            RescaleError,
        ) as error:
            waits = not isinstance(error, RescaleError) or "task" in error.details
            if not waits or clock.now() + _AGAIN_S >= deadline:
                raise
        else:
            return welcome
        finally:
            await transport.close()
        await asyncio.sleep(_AGAIN_S)


def _indices(tls: Path | None, job: str) -> list[int]:
    """Returns the indices that certificates in a directory are of; none without TLS.

    Raises:
      CertificateError: it has none for the job.
    """
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_]*", job):
        raise ConfigError(f"'{job:.80}' is no job; write --job worker")
    if tls is None:
        return []
    names = re.compile(rf"{job}-(\d+)\.crt")
    found = [names.fullmatch(path.name) for path in tls.expanduser().glob("*.crt")]
    indices = sorted(int(match[1]) for match in found if match is not None)
    if not indices:
        raise CertificateError(
            f"{tls} has no certificate of a {job}, and a process that joins a cluster "
            f"with TLS needs one of its own, such as {job}-2.crt; make some that no "
            "task has yet: jgraph certs --spare 8",
            path=str(tls),
        )
    return indices


def _host_towards(address: Address) -> str:
    """Returns this host's address on the way to another; nothing is sent."""
    host, port = split_address(address)
    family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found
