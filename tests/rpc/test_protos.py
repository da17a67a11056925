"""The committed protobuf code is what the .proto file says."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from jgraph.rpc._pb import jgraph_pb2
from jgraph.rpc.frames import PROTOCOL

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    script = ROOT / "protos" / "generate.py"
    subprocess.run([sys.executable, script, "--into", tmp_path], check=True, timeout=60)
    made = sorted(tmp_path.iterdir())
    homes = {
        "inference": ROOT / "jgraph/serving/_pb",
        "jgraph": ROOT / "jgraph/rpc/_pb",
    }
    wanted = [f"{one}_pb2{end}" for one in homes for end in (".py", ".pyi")]
    assert [path.name for path in made] == wanted
    for path in made:
        committed = homes[path.name.partition("_")[0]] / path.name
        assert path.read_text() == committed.read_text(), f"run {script.name} again"


def test_other_messages_are_another_protocol(rewrite: bool) -> None:
    """Raise ``PROTOCOL`` where a release has the number; then run with --rewrite."""
    path = Path(__file__).parent / "protocol.txt"
    digest = hashlib.sha256(jgraph_pb2.DESCRIPTOR.serialized_pb).hexdigest()
    told = f"{PROTOCOL} {digest}\n"
    if rewrite:
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")
