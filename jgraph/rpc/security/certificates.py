"""Certificates of a cluster: a throw-away authority, a key pair per task, a token.

The key of the authority is not kept: nobody can add a member to the cluster later, and
there is one secret less. For more tasks all certificates are made again.
"""

import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jgraph.errors import CertificateError
from jgraph.graph.ir import TaskName
from jgraph.rpc.security.tls import ANY_TASK, file_stem, role_of
from jgraph.rpc.security.token import NAME, Token

VALID_DAYS: Final = 365.0
_SKEW: Final = timedelta(hours=1)
"""Clocks of hosts may be apart."""


def make_certificates(
    directory: str | os.PathLike[str],
    tasks: Iterable[TaskName],
    *,
    days: float = VALID_DAYS,
) -> list[Path]:
    """Writes ``ca.crt``, ``token``, and a ``.crt`` and ``.key`` per task and client.

    Only the owner may read the directory and the keys. A task needs its own two files,
    ``ca.crt`` and ``token``; clients share ``client.crt`` and ``client.key``.

    Args:
      directory: made if it is not there.
      tasks: the tasks of the cluster.
      days: how long the certificates are valid.

    Returns:
      The files.

    Raises:
      CertificateError: there are certificates already, or no files can be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as made:
      ...     files = make_certificates(made, [TaskName("/job:ps/task:0")])
      ...     print(*sorted(file.name for file in files))
      ca.crt client.crt client.key ps-0.crt ps-0.key token
    """
    path = Path(directory).expanduser()
    if (path / "ca.crt").exists():
        raise CertificateError(
            f"{path} has certificates already, which would no longer fit to those on "
            f"other hosts; give another directory, or remove this one first",
            directory=str(path),
        )
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key, days)
    files = {"ca.crt": authority.public_bytes(serialization.Encoding.PEM)}
    for task in (*tasks, None):
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = _leaf(key, task, authority, authority_key, days)
        files[f"{file_stem(task)}.crt"] = leaf.public_bytes(serialization.Encoding.PEM)
        files[f"{file_stem(task)}.key"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(os.open(path / name, flags, 0o600), "wb") as file:
                file.write(content)
        Token.make(path / NAME)
    except OSError as error:
        raise CertificateError(
            f"cannot write certificates into {path}: {error.strerror or error}; give a "
            f"directory that you may write to",
            directory=str(path),
        ) from error
    return [path / name for name in (*files, NAME)]


def _name(text: str) -> x509.Name:
    # The longest common name of X.509; what counts are the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW + min(timedelta(days=days), timedelta(0)))
        .not_valid_after(now + timedelta(days=days))
    )


def _authority(key: ec.EllipticCurvePrivateKey, days: float) -> x509.Certificate:
    usage = x509.KeyUsage(
        *(False, False, False, False, False, True, False, False, False)
    )
    return (
        _builder("jgraph cluster", key, days)
        .issuer_name(_name("jgraph cluster"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )


def _leaf(
    key: ec.EllipticCurvePrivateKey,
    task: TaskName | None,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: float,
) -> x509.Certificate:
    roles = [role_of(task)] if task is None else [role_of(task), ANY_TASK]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if task is not None:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(
        authority_key.public_key()
    )
    return (
        _builder(role_of(task), key, days)
        .issuer_name(authority.subject)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(role) for role in roles]),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
