"""The check of all logs for tokens and keys finds them, and nothing else."""

import secrets
from pathlib import Path

import pytest

from jgraph.rpc.security.token import Token
from tests.support.leaks import Leaks

KEY = "-----BEGIN {}PRIVATE KEY-----\nMHcCAQEEIA=="


def told(tmp_path: Path, text: str) -> str:
    leaks = Leaks()
    log = tmp_path / "worker-0.log"
    log.write_text(text)
    leaks.look_into(tmp_path)
    log.unlink()  # before it is looked for after this test as well
    return leaks.told()


@pytest.mark.parametrize(
    "around", ["{}", "Bearer {}", "b'{}'", "0{}0", "f" * 64 + "{}"]
)
def test_a_token_is_found_in_a_log(tmp_path: Path, around: str) -> None:
    token = Token.make(tmp_path / "home" / "token")
    text = f"a line\n{around.format(token.value)}\n"
    assert told(tmp_path, text) == "worker-0.log has the token of a cluster"


@pytest.mark.parametrize("kind", ["", "EC ", "RSA "])
def test_a_private_key_is_found_in_a_log(tmp_path: Path, kind: str) -> None:
    text = f"loaded {KEY.format(kind).encode()!r}"
    assert told(tmp_path, text) == "worker-0.log has a private key"


def test_a_digest_and_a_certificate_are_no_secrets(tmp_path: Path) -> None:
    Token.make(tmp_path / "token")
    text = f"{secrets.token_hex(32)} -----BEGIN CERTIFICATE-----"
    assert told(tmp_path, text) == ""
