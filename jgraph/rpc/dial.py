"""Dialing: gRPC options and channels, and the cause of a failed connection."""

import asyncio
import errno
import ipaddress
import re
import socket
from typing import Final, TypeAlias

import grpc

from jgraph.errors import (
    AddressError,
    ClusterUnreachableError,
    DeadlineError,
    JGError,
    PortInUseError,
    TaskLostError,
)
from jgraph.rpc.dial_only.address import is_dial_only
from jgraph.rpc.security.auth import check_token
from jgraph.rpc.security.tls import Identity, expected_at
from jgraph.rpc.security.tls_probe import encryption_problem
from jgraph.rpc.security.token import Token
from jgraph.rpc.transport import Address

Channel: TypeAlias = grpc.aio.Channel
CONNECT_TIMEOUT_S: Final = 2.0
SHUTTING_DOWN: Final = "shutting down"
"""What a server says that ends its streams on purpose."""
_DIAGNOSIS_TIMEOUT_S: Final = 0.5
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})\Z")

_COMMON_OPTIONS: Final = (
    # Chunks are at most 1 MiB; nothing larger is ours.
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    # A frozen peer is noticed in 15 s only with all of these (the kernel takes 15
    # minutes, keepalive without ping_timeout_ms takes 70 s).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    # Without this a second server on the port silently takes half of the traffic.
    ("grpc.so_reuseport", 0),
    # Otherwise a connection that says nothing for a minute is ended: too many pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
)
CHANNEL_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # A retry of gRPC's own could repeat a call that already took effect.
    ("grpc.enable_retries", 0),
    # Otherwise channels to one address share connections and back-off times.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 200),
)


def split_address(address: Address) -> tuple[str, int]:
    """Returns (host, port) of ``host:port``.

    Raises:
      AddressError: it is not of that form.

    Example:
      >>> split_address("[::1]:8470")
      ('::1', 8470)
    """
    match = _ADDRESS.match(address)
    if match is None or int(match[2]) > 65535:
        raise AddressError(
            f"'{address}' is not an address; write host:port, for example "
            f"'localhost:8470'",
            address=address,
        )
    return match[1].strip("[]"), int(match[2])


async def open_channel(
    address: Address,
    *,
    timeout_s: float,
    patient: bool,
    task: str = "",
    identity: Identity | None = None,
    token: Token | None = None,
) -> Channel:
    """Returns a channel that is connected to ``address``, and may be used.

    Args:
      address: ``host:port``.
      timeout_s: how long to try at most.
      patient: keep trying for that time when the connection is refused.
      task: the task expected there; empty for any.
      identity: certificates to show and to check with; None speaks plain text.
      token: what the server asks for; None: nothing.

    Raises:
      AddressError: not an address, or the host name does not resolve.
      CertificateError: a certificate of one side means nothing to the other.
      PlainTextError: only one side speaks TLS.
      RoleError: the certificate there is not of ``task``.
      TokenError: the server is of a cluster with another token.
      ClusterUnreachableError: nothing that speaks our protocol answers.
    """
    if is_dial_only(address):
        raise ClusterUnreachableError(
            f"{address} is a task that only dials: nothing listens there; connect to "
            "another task of its cluster",
            address=address,
            task=task,
        )
    await _resolve(address, timeout_s)
    channel = _channel(address, task, identity)
    connected = False
    try:
        async with asyncio.timeout(timeout_s):
            connected = await _connect(channel, patient=False)
            if not connected and patient:
                if problem := await encryption_problem(
                    *split_address(address), identity, task
                ):
                    raise problem
                connected = await _connect(channel, patient=True)
    except TimeoutError:
        pass
    finally:
        if not connected:
            await channel.close(None)
    if not connected:
        raise await diagnose(address, timeout_s=timeout_s, task=task, identity=identity)
    if token is not None:
        try:
            await check_token(channel, address, token, timeout_s)
        except BaseException:
            await channel.close(None)
            raise
    return channel


def _channel(address: Address, task: str, identity: Identity | None) -> Channel:
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = ("grpc.ssl_target_name_override", expected_at(task))
    return grpc.aio.secure_channel(
        address, identity.channel_credentials(), options=(*CHANNEL_OPTIONS, name)
    )


async def _connect(channel: grpc.aio.Channel, patient: bool) -> bool:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not patient:
            return False
        changing = asyncio.ensure_future(channel.wait_for_state_change(state))
        try:
            await asyncio.shield(changing)
        except asyncio.CancelledError:
            # gRPC goes on waiting, and tells a loop that may be closed by then.
            await channel.close(None)
            await asyncio.wait([changing], timeout=_DIAGNOSIS_TIMEOUT_S)
            changing.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )
            raise
        state = channel.get_state(try_to_connect=True)
    return True


async def _resolve(address: Address, timeout_s: float) -> None:
    host, port = split_address(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, TimeoutError, UnicodeError) as error:
        raise AddressError(
            f"cannot resolve host '{host}' of '{address}'; check its spelling in the "
            f"cluster description (a new host may need some seconds to be known)",
            address=address,
        ) from error


async def diagnose(
    address: Address,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    task: str = "",
    identity: Identity | None = None,
) -> JGError:
    """Returns the error that says why no server of ours answers at ``address``."""
    host, port = split_address(address)
    if problem := await encryption_problem(host, port, identity, task):
        return problem
    what = (
        f"no jgraph server for {task} at {address}"
        if task
        else (f"no jgraph server at {address}")
    )
    try:
        async with asyncio.timeout(_DIAGNOSIS_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        why = (
            f"(something listens there, but does not answer as a jgraph server within "
            f"{timeout_s:g} s); check that the port is that of a jgraph server"
        )
    except ConnectionRefusedError:
        why = (
            "(connection refused); the host answered, so the port is wrong or the "
            "server is not up. Check: jgraph status; start: jgraph up"
        )
    except TimeoutError:
        why = (
            f"(no answer within {timeout_s:g} s); the host is down or a firewall "
            f"drops the connection. Check the address and that the host is up"
        )
    except OSError as error:
        why = f"({error.strerror or error}); check the address and the network"
    # Whoever can wait does: the server may be starting.
    return ClusterUnreachableError(
        f"{what} {why}", address=address, task=task, may_be_starting=True
    )


async def is_refused(address: Address) -> bool:
    """Whether the host of an address says that nobody listens there.

    Example:
      >>> asyncio.run(is_refused("127.0.0.1:1"))
      True
    """
    if is_dial_only(address):
        return False  # it has no host that could say so
    try:
        async with asyncio.timeout(_DIAGNOSIS_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*split_address(address))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False  # perhaps it is there, but the network is not
    writer.close()
    return False


def bind_error(bind: Address) -> JGError:
    """Returns why gRPC could not listen, which it does not tell by itself."""
    host, port = split_address(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return AddressError(
                    f"cannot listen at {bind} ({error.strerror or error}); bind to an "
                    f"address of this machine, for example '127.0.0.1:0'",
                    address=bind,
                )
    return PortInUseError(
        f"port {port} of {host} is taken by another process, perhaps an old server; "
        f"stop it (jgraph down) or choose another port (0 takes a free one)",
        address=bind,
        port=port,
    )


def is_cancelled() -> bool:
    """Whether the running asyncio task was asked to stop.

    gRPC raises ``asyncio.CancelledError`` also when the other side cancels.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def lost_its_end(code: grpc.StatusCode, details: str) -> bool:
    """Whether a stream is over, and grpc.aio does not know why.

    So it is if a write meets the end of the stream. What matters is known to whoever
    asks again.

    Example:
      >>> lost_its_end(grpc.StatusCode.INTERNAL, "Internal error from Core")
      True
    """
    return code is grpc.StatusCode.INTERNAL and details == "Internal error from Core"


def unanswered(
    code: grpc.StatusCode, address: Address, task: str = ""
) -> ClusterUnreachableError | None:
    """Returns why a stream ended before the other side said who it is.

    Args:
      code: how it ended.
      address: where the other side is.
      task: which task should be there.

    Returns:
      None if the connection broke, or the server is shutting down.
    """
    if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
        return None
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        message = (
            f"the server at {address} has too many calls at once and refused another; "
            f"try again later"
        )
    else:
        where = task and f" where {task} should be"
        message = (
            f"a gRPC server answers at {address}{where}, but it is not a jgraph server "
            f"({code.name}); check the port"
        )
    return ClusterUnreachableError(message, address=address, task=task)


def lost_call(
    method: str, address: Address, why: str = "", closed_here: bool = False
) -> TaskLostError:
    """Returns the error of a call whose connection ended."""
    if closed_here:
        message = f"'{method}' at {address} was given up, because this side closed"
    else:
        message = (
            f"the server at {address} went away during '{method}' "
            f"({why or 'connection lost'}); look at its log, then start it again"
        )
    return TaskLostError(message, method=method, address=address)


def deadline_error(method: str, address: Address, timeout_s: float) -> DeadlineError:
    """Returns the error of a call that did not end in time."""
    return DeadlineError(
        f"'{method}' at {address} did not finish within {timeout_s:g} s; look at the "
        f"server's log, or allow more time",
        method=method,
        address=address,
        timeout_s=timeout_s,
    )


def ended_stream(task: str, why: str) -> TaskLostError:
    """Returns the error that a receiver of frames gets when the sender is gone."""
    return TaskLostError(
        f"{task} {why}; what it sent before may be incomplete", task=task
    )


def ended_link(task: str, address: Address, why: str = "") -> TaskLostError:
    """Returns the error that a sender of frames gets when the receiver is gone."""
    return TaskLostError(
        f"lost the connection to {task} at {address}{why and f' ({why})'}; look at "
        f"the log of that task",
        task=task,
        address=address,
    )
