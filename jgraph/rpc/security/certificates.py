"""Certificates of a cluster: a throw-away authority, a key pair per task, a token.

``make_certificates`` does not keep the key of the authority: nobody can add a member
to the cluster later, and there is one secret less. For more tasks all certificates are
made again. A launcher whose tasks make their keys has the ``Authority`` in memory.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jgraph.errors import CertificateError
from jgraph.graph.ir import TaskName
from jgraph.rpc.security.tls import ANY_TASK, LAUNCHER, file_stem, role_of
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
    authority = Authority(days)
    files = {"ca.crt": authority.certificate}
    for task in (*tasks, None):
        files |= authority.files_of(task)
    return write_certificates(path, files)


def write_certificates(path: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files that only their owner may read, and a token beside them.

    Returns:
      The files.

    Raises:
      CertificateError: they cannot be written.
    """
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
    name: str, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW + min(timedelta(days=days), timedelta(0)))
        .not_valid_after(now + timedelta(days=days))
    )


@final
class Authority:
    """Who signs the certificates of one cluster; its key is in memory alone.

    Args:
      days: how long what it signs is valid.

    Example:
      >>> authority, task = Authority(), TaskName("/job:ps/task:0")
      >>> sorted(authority.files_of(task))
      ['ps-0.crt', 'ps-0.key']
      >>> key, request = signing_request(task)
      >>> authority.sign(request, task).startswith(b"-----BEGIN CERTIFICATE-----")
      True
    """

    def __init__(self, days: float = VALID_DAYS) -> None:
        self._days = days
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._own = _authority(self._key, days)
        self.certificate = self._own.public_bytes(serialization.Encoding.PEM)
        """PEM of its own certificate, ``ca.crt``."""

    def files_of(self, task: TaskName | None) -> dict[str, bytes]:
        """Makes a key and its certificate for a task, or a client; by file name."""
        key = ec.generate_private_key(ec.SECP256R1())
        stem = file_stem(task)
        return {
            f"{stem}.crt": self._signed(key.public_key(), task),
            f"{stem}.key": _pem_of(key),
        }

    def sign(self, request: bytes, task: TaskName) -> bytes:
        """Returns the certificate of a task that made its key itself, as PEM.

        Args:
          request: of ``signing_request``; the names in it do not count.
          task: whose it is.

        Raises:
          CertificateError: that is none.
        """
        try:
            asked = x509.load_pem_x509_csr(request)
            key = asked.public_key()
        except (ValueError, TypeError, InvalidSignature) as error:
            raise CertificateError(
                f"{task} asked for a certificate in a form that nobody reads "
                f"({error}); run the same version of jgraph everywhere"
            ) from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not (
            asked.is_signature_valid
        ):
            raise CertificateError(
                f"{task} asked for a certificate of a key that it does not have; run "
                "the same version of jgraph everywhere"
            )
        return self._signed(key, task)

    def files_of_launcher(self) -> dict[str, bytes]:
        """Makes a key and its certificate for who starts tasks; by file name."""
        key = ec.generate_private_key(ec.SECP256R1())
        names, uses = [LAUNCHER], [ExtendedKeyUsageOID.SERVER_AUTH]
        leaf = _leaf(key.public_key(), names, uses, self._own, self._key, self._days)
        pem = leaf.public_bytes(serialization.Encoding.PEM)
        return {"launcher.crt": pem, "launcher.key": _pem_of(key)}

    def _signed(self, key: ec.EllipticCurvePublicKey, task: TaskName | None) -> bytes:
        names = [role_of(task)] if task is None else [role_of(task), ANY_TASK]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if task is not None:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        leaf = _leaf(key, names, uses, self._own, self._key, self._days)
        return leaf.public_bytes(serialization.Encoding.PEM)


def signing_request(task: TaskName) -> tuple[bytes, bytes]:
    """Returns a new private key and what asks to sign it, both as PEM.

    Args:
      task: who asks; the authority knows that by other means.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(role_of(task)))
    request = builder.sign(key, hashes.SHA256())
    return _pem_of(key), request.public_bytes(serialization.Encoding.PEM)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _authority(key: ec.EllipticCurvePrivateKey, days: float) -> x509.Certificate:
    usage = x509.KeyUsage(
        *(False, False, False, False, False, True, False, False, False)
    )
    return (
        _builder("jgraph cluster", key.public_key(), days)
        .issuer_name(_name("jgraph cluster"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )


def _leaf(
    key: ec.EllipticCurvePublicKey,
    names: Sequence[str],
    uses: Sequence[x509.ObjectIdentifier],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: float,
) -> x509.Certificate:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(
        authority_key.public_key()
    )
    return (
        _builder(names[0], key, days)
        .issuer_name(authority.subject)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
