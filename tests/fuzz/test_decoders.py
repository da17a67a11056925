"""Decoders of what comes from the network or from files, by coverage.

``make fuzz`` installs atheris where it can be had; ``JGRAPH_FUZZ_SECONDS`` for each.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = os.environ.get("JGRAPH_FUZZ_SECONDS", "10")
ROOT = Path(__file__).parents[2]
CODE = (ROOT / "tests/support/fuzz/decoders.py").read_text(encoding="utf-8")
NAMES = re.findall(r"^    \"(\w+)\": \(", CODE, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_bytes_come_a_decoder_returns_or_raises_an_error_of_ours(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("atheris", reason="pip install 'jgraph[fuzz]'")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.fuzz.decoders", name, SECONDS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = re.search(r"Done (\d+) runs", ended.stderr)
    assert done is not None
    assert int(done[1]) > 100
