"""Transport options of users: TLS, token file, and how tensors travel.

Imports no gRPC: whoever starts tasks need not have loaded it.
"""

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, Union
from urllib.parse import parse_qs, quote

from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName

if TYPE_CHECKING:
    from jgraph.rpc.security.tls import TLS

TransportChoice: TypeAlias = Literal["auto", "network", "stream", "grpc"]
"""``auto`` reaches tasks of the same machine through shared memory and Unix sockets;
``network`` all of them as if they were on other machines (``grpc`` is its older name);
``stream`` too, with all bytes in gRPC's streams."""
DataEncryption: TypeAlias = Literal["records", "tls"]
"""What protects a data port where there is TLS."""
DataPort: TypeAlias = int | str
"""Where frames from other machines arrive: 0 takes a free port, ``off`` leaves them in
gRPC's streams."""

TLSFiles: TypeAlias = Union[str, os.PathLike[str], "TLS"]  # a name to come
"""The directory that ``jgraph certs`` wrote, or the three files."""


def as_tls(tls: TLSFiles | None, task: TaskName | None) -> "TLS | None":
    """Returns the certificate files of a task (None: of a client).

    Raises:
      ConfigError: it is neither a directory nor a ``TLS``.
    """
    from jgraph.rpc.security.tls import TLS

    if tls is None or isinstance(tls, TLS):
        return tls
    if isinstance(tls, str | os.PathLike):
        return TLS.of(tls, task)
    raise ConfigError(
        f"tls={tls!r:.60} is no option; give the directory that `jgraph certs` "
        "wrote, or jg.TLS(cert=…, key=…, ca=…)"
    )


def tls_directory_in(path: Path) -> Path | None:
    """Returns the certificates' directory that a cluster file names, if it does.

    Args:
      path: a file that ``ClusterSpec.from_toml`` has taken; the directory is relative
        to where it is.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("tls")
    return path.parent / Path(table["dir"]).expanduser() if table else None


def target_of(address: str, tls: object, token_file: Path | None = None) -> str:
    """Returns what ``jg.connect`` takes: ``jgraphs://`` says that it needs TLS.

    Args:
      address: ``host:port``.
      tls: certificates, or None.
      token_file: if the token is neither the user's own nor in the environment.

    Example:
      >>> target_of("localhost:8470", None, Path("run/token"))
      'jgraph://localhost:8470?token_file=run/token'
    """
    scheme = "jgraph" if tls is None else "jgraphs"
    query = f"?token_file={quote(str(token_file))}" if token_file else ""
    return f"{scheme}://{address}{query}"


def token_file_in(target: str) -> str | None:
    """Returns the file of the token that a target names, if it does.

    Example:
      >>> token_file_in("jgraph://localhost:8470?token_file=run/token")
      'run/token'
    """
    query = target.partition("?")[2]
    return parse_qs(query).get("token_file", [None])[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at ``host``.

    Example:
      >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
      (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may be of any address


def certificates_of(tls: "TLS | None") -> Path | None:
    """Returns the directory that the certificates of a task or client are in."""
    return tls.ca.parent if tls is not None else None


def address_of(target: str, tls: object) -> str:
    """Returns the address in a target.

    Raises:
      ConfigError: ``jgraphs://`` without certificates, or ``jgraph://`` with some.

    Example:
      >>> address_of("jgraph://localhost:8470", None)
      'localhost:8470'
    """
    scheme, separator, address = target.partition("?")[0].rpartition("://")
    if separator and scheme not in {"jgraph", "jgraphs"}:
        raise ConfigError(
            f"'{target}' is no address of a cluster; write jgraph://host:port, or "
            "jgraphs://host:port for one with TLS"
        )
    if scheme == "jgraphs" and tls is None:
        raise ConfigError(
            f"{target} needs certificates; give the directory that `jgraph certs` "
            f"wrote: jg.connect('{target}', tls='DIR'), or --tls-dir DIR"
        )
    if scheme == "jgraph" and tls is not None:
        raise ConfigError(
            f"{target} is plain text, and certificates were given; write "
            f"jgraphs://{address}"
        )
    return address


def check_transport(choice: str) -> None:
    """Refuses a choice that there is not.

    Raises:
      ConfigError: it is none of ``TransportChoice``.
    """
    if choice not in {"auto", "network", "stream", "grpc"}:
        raise ConfigError(
            f"transport='{choice}' is not an option; write transport='auto' (shared "
            "memory between tasks of one machine), transport='network' (sockets "
            "between all), or transport='stream' (gRPC between all)"
        )


def check_data_encryption(choice: str) -> None:
    """Refuses a choice that there is not.

    Raises:
      ConfigError: it is neither ``"records"`` nor ``"tls"``.
    """
    if choice not in {"records", "tls"}:
        raise ConfigError(
            f"data_encryption='{choice}' is not an option; write "
            "data_encryption='records' or data_encryption='tls'"
        )


def bound_data_port(choice: TransportChoice, data_port: DataPort) -> int | None:
    """Returns the port to listen at for frames (0: a free one); None: at none.

    Args:
      choice: of the task.
      data_port: what the user gave.

    Raises:
      ConfigError: that is neither a port nor ``"off"``.

    Example:
      >>> bound_data_port("auto", "8472"), bound_data_port("auto", "off")
      (8472, None)
    """
    if data_port == "off":
        return None
    try:
        port = int(data_port)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"data_port={data_port!r:.40} is no port; give a number up to 65535 (0 "
            "takes a free one), or 'off'"
        )
    return None if choice == "stream" else port
