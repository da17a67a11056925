"""``jgraph predict`` against servers of models, and against what is none."""

import datetime
import http.server
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

import jgraph as jg
from jgraph.cli import app, exit_code
from jgraph.cli.options import FORBIDDEN, UNREACHABLE
from jgraph.errors import (
    AddressError,
    CertificateError,
    ClusterUnreachableError,
    DeadlineError,
    JGError,
    ModelInputError,
    ModelNotFoundError,
    TokenError,
)
from jgraph.rpc.security.token import Token


def predict(*words: str, stdin: str = "") -> str:
    done = CliRunner().invoke(app, ["predict", *words], input=stdin)
    if isinstance(done.exception, JGError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("model", "x", "y"),
    [
        ("half_plus_three", [1.0, 2.0, 5.0], [3.5, 4.0, 5.5]),
        ("half_plus_three", {"x": [1.0]}, [3.5]),
        ("half_plus_three", {"instances": [2.0]}, [4.0]),
        (
            "ctr",
            {"user": [3], "dense": [[0.0, 1.0, 0.0]]},
            {"score": [4.0], "twice": [6]},
        ),
    ],
)
def test_a_batch_is_answered(
    model: str, x: object, y: object, server: jg.ModelServer, tmp_path: Path
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(x))
    assert json.loads(predict(server.url, model, str(file))) == y


@pytest.mark.parametrize("version", ["1", "label:stable"])
def test_a_version_is_asked_by_number_and_by_label(
    version: str, server: jg.ModelServer
) -> None:
    words = [server.url, "half_plus_three", "-", "--version", version]
    assert json.loads(predict(*words, stdin="[1.0]")) == [3.5]


def test_a_benchmark_tells_rates_and_failures(server: jg.ModelServer) -> None:
    words = [server.url, "half_plus_three", "-", "--bench", "0.3", "--clients", "3"]
    found = json.loads(predict(*words, "--json", stdin="[1.0]"))
    assert found["answers"] > 3
    assert found["failures"] == {}
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert "answers/s, p50 " in predict(*words, stdin="[1.0]")


@pytest.mark.parametrize(
    ("words", "stdin", "error", "match"),
    [
        (["nothing"], "[1.0]", ModelNotFoundError, "nothing"),
        (["half_plus_three", "--version", "7"], "[1.0]", ModelNotFoundError, "7"),
        (["half_plus_three"], '["a"]', ModelInputError, "x"),
        (["half_plus_three"], "{1}", ModelInputError, "standard input is no JSON"),
        (["half_plus_three"], "", ModelInputError, "standard input is no JSON"),
    ],
)
def test_what_cannot_be_answered_is_said(
    words: list[str],
    stdin: str,
    error: type[JGError],
    match: str,
    server: jg.ModelServer,
) -> None:
    with pytest.raises(error, match=match):
        predict(server.url, words[0], "-", *words[1:], stdin=stdin)


def test_a_file_that_is_not_there_is_named(server: jg.ModelServer) -> None:
    with pytest.raises(ModelInputError, match=r"no\.json is no JSON .*No such file"):
        predict(server.url, "half_plus_three", "no.json")
    words = ("--token-file", "no.token")
    with pytest.raises(TokenError, match="the file that `jgraph serve` names"):
        predict(server.url, "half_plus_three", "-", *words, stdin="[1.0]")


def test_another_token_is_refused(server: jg.ModelServer, tmp_path: Path) -> None:
    other = str(Token.make(tmp_path / "token").path)
    with pytest.raises(TokenError):
        predict(
            *(server.url, "half_plus_three", "-", "--token-file", other), stdin="[1.0]"
        )


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://a:b", "", "//"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(AddressError, match="is no URL of a model server"):
        predict(url, "m", "-", stdin="[1.0]")


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ClusterUnreachableError, match="nobody answers at") as raised:
        predict(f"http://127.0.0.1:{port}", "m", "-", stdin="[1.0]")
    assert exit_code(raised.value) == UNREACHABLE


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=r"did not answer within 0\.2 s"):
            predict(url, "m", "-", "--timeout", "0.2", stdin="[1.0]")


class Pages(http.server.BaseHTTPRequestHandler):
    """A server of something else."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}" if "json" in self.path else b"<html>")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def pages() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("model", ["json", "html"])
def test_a_server_of_something_else_is_no_model_server(pages: str, model: str) -> None:
    with pytest.raises(ClusterUnreachableError, match="is no model server"):
        predict(pages, model, "-", stdin="[1.0]")


def test_a_port_of_grpc_is_told_from_that_of_rest() -> None:
    """What comes from there is no text, and nothing for a screen."""

    def frames() -> None:
        pipe, _ = port.accept()
        with pipe:
            pipe.recv(1 << 16)
            pipe.sendall(b"\0\0\0\4\0\0\0\0\0\x1b[2J\n")

    with socket.create_server(("127.0.0.1", 0)) as port:
        answering = threading.Thread(target=frames)
        answering.start()
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        with pytest.raises(ClusterUnreachableError, match="port of REST") as raised:
            predict(url, "m", "-", stdin="[1.0]")
        answering.join()
    assert str(raised.value).isprintable()


def own_certificate(path: Path) -> tuple[Path, Path]:
    """Makes a certificate of 127.0.0.1 that it signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "models")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([here]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (path / "tls.crt").write_bytes(certificate.public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (path / "tls.key").write_bytes(key.private_bytes(pem, *form))
    return path / "tls.crt", path / "tls.key"


def test_a_certificate_is_checked(models: Path, tmp_path: Path) -> None:
    tls = own_certificate(tmp_path)
    with jg.serve(models, tls=tls) as server:
        words = [server.url, "half_plus_three", "-"]
        with pytest.raises(CertificateError, match="is not trusted") as raised:
            predict(*words, stdin="[1.0]")
        assert exit_code(raised.value) == FORBIDDEN
        with pytest.raises(CertificateError, match="is no certificate"):
            predict(*words, "--ca", str(tmp_path / "no"), stdin="[1.0]")
        assert predict(*words, "--ca", str(tls[0]), stdin="[1.0]") == "[3.5]\n"
