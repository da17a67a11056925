"""TLS diagnosis: the cause of a failed handshake, which gRPC does not tell."""

import asyncio
import ssl
from typing import Final, TypeAlias

from jgraph.errors import CertificateError, JGError, PlainTextError
from jgraph.rpc.security.tls import Identity, expected_at, wrong_role
from jgraph.rpc.transport import Address

PROBE_TIMEOUT_S: Final = 1.0
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
"""Numbers of OpenSSL's X509_V_ERR_…"""
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
_SETTINGS: Final = 4
_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def encryption_problem(
    host: str, port: int, identity: Identity | None, task: str = ""
) -> JGError | None:
    """Returns why TLS between here and a server fails; None if that is not why.

    Args:
      host: of the server.
      port: of the server.
      identity: what this side has; None if it speaks plain text.
      task: which task should be there.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if identity is None:
                return await _demands_tls(host, port, address, task)
            return await _handshake(host, port, address, identity, task)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None


async def _demands_tls(
    host: str, port: int, address: Address, task: str
) -> JGError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only whether it speaks TLS; nothing is sent
    _, writer = await _open(host, port, context)
    writer.transport.abort()
    return PlainTextError(
        f"the server at {address} speaks TLS, and this side plain text; give "
        f"certificates: jg.connect('jgraphs://{address}', tls='DIR'), or --tls-dir DIR",
        address=address,
        task=task,
    )


async def _handshake(
    host: str, port: int, address: Address, identity: Identity, task: str
) -> JGError | None:
    files = identity.files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # done below, to tell whose it is
    context.load_verify_locations(cadata=identity.ca.decode())
    context.load_cert_chain(files.cert, files.key)
    try:
        streams = await _open(host, port, context)
    except ssl.SSLCertVerificationError as error:
        return _refused(error, address, identity, task)
    except (ssl.SSLError, ConnectionError):
        if not await _answers_http2(await asyncio.open_connection(host, port)):
            return None
        return PlainTextError(
            f"the server at {address} speaks plain text, and this side TLS; start it "
            f"with --tls-dir DIR, or dial jgraph://{address} without certificates",
            address=address,
            task=task,
        )
    certificate = streams[1].get_extra_info("peercert") or {}
    names = [
        name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"
    ]
    if expected_at(task) not in names:
        streams[1].transport.abort()
        return wrong_role(address, task, names)
    if await _answers_http2(streams):
        return None
    return CertificateError(
        f"the server at {address} refused the certificate {files.cert}; it may be of "
        f"another run of `jgraph certs`, or expired by the clock of that host",
        address=address,
        task=task,
    )


def _refused(
    error: ssl.SSLCertVerificationError, address: Address, identity: Identity, task: str
) -> JGError:
    if error.verify_code in {_EXPIRED, _NOT_YET_VALID}:
        why = (
            "has expired, or is not valid yet by the clock of this host; make new ones "
            "with `jgraph certs`, or set the clock"
        )
    else:
        why = (
            f"was not signed by {identity.files.ca} ({error.verify_message}); use the "
            f"files of one run of `jgraph certs` on all hosts"
        )
    return CertificateError(
        f"the certificate of the server at {address} {why}", address=address, task=task
    )


async def _open(host: str, port: int, context: ssl.SSLContext) -> _Streams:
    context.set_alpn_protocols(["h2"])
    return await asyncio.open_connection(host, port, ssl=context, server_hostname="")


async def _answers_http2(streams: _Streams) -> bool:
    """Whether the other side sends what HTTP/2 begins with; closes the connection."""
    reader, writer = streams
    try:
        writer.write(_HTTP2_PREFACE)
        frame_header = await reader.readexactly(9)
    except (OSError, asyncio.IncompleteReadError):
        return False  # in TLS 1.3 a refused certificate is told only now
    finally:
        writer.transport.abort()
    return frame_header[3] == _SETTINGS
