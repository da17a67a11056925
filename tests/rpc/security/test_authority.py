"""Certificates of tasks that make their keys themselves."""

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from jgraph.errors import CertificateError, RoleError
from jgraph.graph.device import TaskName
from jgraph.rpc.security.certificates import Authority, signing_request
from jgraph.rpc.security.tls import LAUNCHER, TLS

PS = TaskName("/job:ps/task:0")
WORKER = TaskName("/job:worker/task:1")


def written(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def test_a_signed_request_is_a_certificate_of_that_task_and_no_other(
    tmp_path: Path,
) -> None:
    authority = Authority()
    key, request = signing_request(WORKER)  # what it asks for does not count
    signed = authority.sign(request, PS)
    files = {"ca.crt": authority.certificate, "ps-0.crt": signed, "ps-0.key": key}
    directory = written(tmp_path, files)
    TLS.of(directory, PS).load(PS)
    with pytest.raises(RoleError):
        TLS.of(directory, PS).load(WORKER)


def test_what_is_no_request_is_not_signed() -> None:
    authority = Authority()
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([])
    built = x509.CertificateSigningRequestBuilder().subject_name(name)
    other = built.sign(key, hashes.SHA256())
    for request in (b"", b"x", other.public_bytes(serialization.Encoding.PEM)):
        with pytest.raises(CertificateError, match=r"/job:ps/task:0 asked for a cert"):
            authority.sign(request, PS)


def test_a_request_of_a_key_that_nobody_showed_is_not_signed() -> None:
    _, request = signing_request(PS)
    der = bytearray(
        x509.load_pem_x509_csr(request).public_bytes(serialization.Encoding.DER)
    )
    der[-1] ^= 1  # of the signature
    try:
        changed = x509.load_der_x509_csr(bytes(der))
        pem = changed.public_bytes(serialization.Encoding.PEM)
    except ValueError:
        pem = bytes(der)
    with pytest.raises(CertificateError):
        Authority().sign(pem, PS)


def test_the_certificate_of_a_launcher_is_neither_of_a_task_nor_of_a_client() -> None:
    files = Authority().files_of_launcher()
    leaf = x509.load_pem_x509_certificate(files["launcher.crt"])
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == [LAUNCHER]
