"""Mutual TLS between the tasks and clients of a cluster: roles by certificate.

Every certificate is signed by the one authority of the cluster. The name in it (a DNS
name among the subject's alternative names) says whose it is: ``worker-0.jgraph`` for
``/job:worker/task:0``, ``client.jgraph`` for a client. Tasks have ``task.jgraph`` as
well, which is what a caller checks who knows an address and no task.
"""

import logging
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import grpc

from jgraph.errors import CertificateError, RoleError
from jgraph.graph.device import TaskName
from jgraph.rpc.transport import Address
from jgraph.view import markup

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

ANY_TASK: Final = "task.jgraph"
CLIENT: Final = "client.jgraph"
LAUNCHER: Final = "launcher.jgraph"
"""Who starts tasks on other hosts and watches them; neither a task nor a client."""
_SOON: Final = timedelta(days=30)
_logger = logging.getLogger(__name__)


def file_stem(task: TaskName | None) -> str:
    """Returns how the files of a task (None: of a client) are called.

    Example:
      >>> file_stem(TaskName("/job:worker/task:0"))
      'worker-0'
    """
    if task is None:
        return "client"
    job, index = task.removeprefix("/job:").split("/task:")
    return f"{job}-{index}"


def role_of(task: TaskName | None) -> str:
    """Returns the name in the certificate of a task, or of a client.

    Example:
      >>> role_of(None)
      'client.jgraph'
    """
    return f"{file_stem(task)}.jgraph"


@final
@dataclass(frozen=True, slots=True)
class TLS:
    """Where the certificate of a task or client is, its key, and its authority.

    ``jgraph certs`` makes such files.

    Attributes:
      cert: PEM file of the certificate.
      key: PEM file of its private key.
      ca: PEM file of the certificate of the authority that signed all.

    Example:
      >>> files = TLS(Path("worker-0.crt"), Path("worker-0.key"), Path("ca.crt"))
      >>> files.cert.name
      'worker-0.crt'
    """

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, directory: str | os.PathLike[str], task: TaskName | None) -> "TLS":
        """Returns the files of a task (None: of a client) in a directory.

        Example:
          >>> TLS.of("certs", None).cert.name
          'client.crt'
        """
        path, stem = Path(directory).expanduser(), file_stem(task)
        return cls(path / f"{stem}.crt", path / f"{stem}.key", path / "ca.crt")

    def load(self, task: TaskName | None) -> "Identity":
        """Reads the files, and checks that they prove to be ``task`` (None: a client).

        Raises:
          CertificateError: a file is missing or is no PEM; the key or the authority is
            of another certificate; it has expired, or is not valid yet.
          RoleError: it is the certificate of another task.
        """
        # Only when it is needed: most clusters of one machine do without.
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        cert, key, ca = (_read(path) for path in (self.cert, self.key, self.ca))
        try:
            leaf = x509.load_pem_x509_certificate(cert)
            authority = x509.load_pem_x509_certificate(ca)
            private = load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:
            raise CertificateError(
                f"{self.cert}, {self.key} or {self.ca} is not PEM as `jgraph certs` "
                f"writes it ({error}); make them again",
            ) from error
        if private.public_key() != leaf.public_key():
            raise CertificateError(
                f"{self.key} is not the key of {self.cert}; take the two files that "
                f"were made together",
                cert=str(self.cert),
            )
        try:
            leaf.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise CertificateError(
                f"{self.cert} was not signed by {self.ca}; take the files of one run "
                f"of `jgraph certs`",
                cert=str(self.cert),
            ) from error
        _check_dates(self.cert, leaf)
        names = _names(leaf)
        if role_of(task) not in names:
            raise RoleError(
                f"{self.cert} is the certificate of {', '.join(names) or 'nobody'}, "
                f"and {task or 'a client'} needs one of {role_of(task)}; give the "
                f"file {file_stem(task)}.crt",
                cert=str(self.cert),
            )
        return Identity(self, cert, key, ca)

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """The contents of the files of a ``TLS``, checked.

    Attributes:
      files: where they were.
      cert: the certificate.
      key: its key.
      ca: the authority.
    """

    files: TLS
    cert: bytes
    key: bytes
    ca: bytes

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns what a server shows, and demands of those that dial it."""
        pair = [(self.key, self.cert)]
        return grpc.ssl_server_credentials(pair, self.ca, require_client_auth=True)

    def data_context(self, *, accepts: bool) -> ssl.SSLContext:
        """Returns what is shown and demanded at a data port.

        Names are checked by whoever connects: what is expected depends on the stream.
        """
        side = ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(side)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.ca.decode())
        context.load_cert_chain(self.files.cert, self.files.key)
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns what a caller shows and demands; the name is checked besides."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def check_caller(names: Iterable[bytes], task: TaskName | None) -> None:
    """Refuses a caller whose certificate is not of the role that it claims.

    Args:
      names: the alternative names of its certificate.
      task: the task that it says to be; None where it may be any task or client.

    Raises:
      RoleError: it may not be that.
    """
    found = [name.decode(errors="replace") for name in names]
    allowed = {ANY_TASK, CLIENT} if task is None else {role_of(task)}
    if not allowed & set(found):
        raise RoleError(
            f"the caller's certificate is of {', '.join(found)[:200] or 'nobody'}, not "
            f"of {task or 'a task or client of this cluster'}; start it with the "
            f"files that `jgraph certs` made for it",
            task=task or "",
        )


def may_be_task(names: Iterable[bytes] | None) -> bool:
    """Whether a caller may be a task.

    Args:
      names: the alternative names of its certificate; None without TLS: who has the
        token then may.

    Example:
      >>> may_be_task([b"ps-0.jgraph", b"task.jgraph"]), may_be_task([b"client.jgraph"])
      (True, False)
    """
    return names is None or ANY_TASK.encode() in names


def expected_at(task: TaskName | str) -> str:
    """Returns the name that the server of ``task`` (empty: of any) must have."""
    return role_of(TaskName(task)) if task else ANY_TASK


def wrong_role(address: Address, task: str, names: Iterable[str]) -> RoleError:
    """Returns the error of a server whose certificate is another task's."""
    return RoleError(
        f"{address} should be {task or 'a task'}, but has the certificate of "
        f"{', '.join(names)[:200] or 'nobody'}; correct the cluster description, or "
        f"start that server with the files that `jgraph certs` made for it",
        address=address,
        task=task,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"cannot read {path}: {error.strerror or error}; make certificates with "
            f"`jgraph certs`, and copy to each host its own and ca.crt",
            path=str(path),
        ) from error


def _check_dates(path: Path, leaf: "Certificate") -> None:
    now = datetime.now(UTC)
    if now > leaf.not_valid_after_utc:
        why = f"expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    elif now < leaf.not_valid_before_utc:
        why = f"is valid only from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
    else:
        if leaf.not_valid_after_utc - now < _SOON:
            _logger.warning(
                "The certificate %s expires at %s UTC; then no new connection is made. "
                "Make new ones with `jgraph certs`, and start the cluster again.",
                path,
                f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M}",
            )
        return
    raise CertificateError(
        f"the certificate {path} {why}; make new ones with `jgraph certs`, or set this "
        f"host's clock",
        cert=str(path),
    )


def _names(leaf: "Certificate") -> list[str]:
    from cryptography import x509

    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.DNSName)
