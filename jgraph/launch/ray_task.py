"""Ray actor of one task: its server and its log.

Ray makes an actor that died again with the arguments that it had, so they say all that
there is to know: the whole cluster, with the task's own address in it. Imports no JAX,
which has to be told of its platforms first.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from jgraph.cluster.spec import ClusterSpec
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.errors import StartError
from jgraph.graph.device import TaskName
from jgraph.rpc.security.token import NAME

if TYPE_CHECKING:
    from jgraph.server.server import Server


@final
@dataclass(frozen=True, slots=True)
class RayOrder:
    """What an actor is made from.

    Attributes:
      task: which it is.
      cluster: the cluster, as JSON.
      files: its certificates and the token, by name.
      log: where its log goes, below the directory for temporary files of its host.
      cpu_only: whether it leaves accelerators to others.
      transport: see ``Server``.
      allow_sources: see ``Server``.
      joins: a cluster that is up, which it joins; ``cluster`` is empty then.
    """

    task: TaskName
    cluster: str
    files: Mapping[str, bytes]
    log: str
    cpu_only: bool
    transport: TransportChoice
    allow_sources: Sequence[str]
    joins: str = ""


@final
class RayTask:
    """One task of a cluster, serving while the actor lives.

    Args:
      order: all about it.

    Raises:
      StartError: Ray put it on another host than that of its address.
    """

    def __init__(self, order: RayOrder) -> None:
        _log_to(order.log)
        try:
            self._server = _serving(order)
        except BaseException:
            logging.getLogger("jgraph.server").exception("%s cannot serve", order.task)
            raise

    def address(self) -> str:
        """Returns where it listens."""
        return self._server.address

    def node(self) -> str:
        """Returns the id of the node that it is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def pid(self) -> int:
        """Returns its process id."""
        return os.getpid()

    def stop(self, grace_s: float) -> None:
        """Ends the server; steps in flight get ``grace_s``."""
        self._server.stop(grace_s)


def _serving(order: RayOrder) -> "Server":
    import jax

    if order.cpu_only:
        jax.config.update("jax_platforms", "cpu")
    from jgraph.server.process_setup import set_up_process

    set_up_process()
    job, _, index = order.task.removeprefix("/job:").partition("/task:")
    with tempfile.TemporaryDirectory(prefix="jgraph-") as directory:  # for us alone
        for name, content in order.files.items():
            path = Path(directory) / name
            path.touch(0o600)
            path.write_bytes(content)
        # It has read them when it has started.
        options: dict[str, Any] = {
            "bind": own_host(),
            "transport": order.transport,
            "token_file": Path(directory) / NAME,
            "allow_sources": order.allow_sources,
        }
        if order.joins:
            from jgraph.server.members.joining import join_cluster

            host, tls = own_host(), Path(directory)
            return join_cluster(order.joins, job, host=host, tls=tls, **options)
        return _described(order, job, int(index), directory, options)


def _described(
    order: RayOrder, job: str, index: int, directory: str, options: Mapping[str, Any]
) -> "Server":
    """Returns the server of a task that the cluster began with."""
    from jgraph.server.server import Server

    spec = ClusterSpec.from_json(order.cluster)
    listed, here = spec.address(order.task).rpartition(":")[0], own_host()
    if listed != here:
        raise StartError(
            f"Ray started {order.task} on {here}, and others know it on {listed}; a "
            "task that loses its node cannot move: make the jg.RayCluster anew",
            task=order.task,
        )
    return Server(spec, job, index, tls=directory, **options)


def _log_to(name: str) -> None:
    from jgraph.server.main import configure_logging

    path = _log_here(name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    configure_logging()  # to standard error, which Ray shows in the client
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    logging.getLogger().addHandler(handler)


def own_host() -> str:
    """Returns the address of this host, as Ray's nodes know each other."""
    import ray

    return str(ray.util.get_node_ip_address())


def free_address() -> str:
    """Returns an address of this host at which nothing listens."""
    host = own_host()
    with socket.socket() as free:
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"


def end_of_log(name: str, lines: int) -> str:
    """Returns the last lines of a log on this host."""
    file = _log_here(name)
    text = file.read_text(errors="replace") if file.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def forget_log(name: str) -> None:
    """Removes a log from this host, and its directory with the last one."""
    path = _log_here(name)
    path.unlink(missing_ok=True)
    try:
        path.parent.rmdir()
    except OSError:
        return  # another task of this host still has its log there


def _log_here(name: str) -> Path:
    return Path(tempfile.gettempdir()) / name
