"""What must hold after every fault: nothing is left of it but what the log says."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jgraph.cluster.options import RECORDS_DIR
from jgraph.runtime.files.writer_lease import newest
from tests.support.fault import Fault
from tests.support.left import nothing_left
from tests.support.small_tables import rows_travel_of_small_tables_too

__all__ = ["rows_travel_of_small_tables_too"]

_LEFT = (
    *("*.orbax-checkpoint-tmp*", "*.going", "*.new-*", "*.old-*"),
    ".jgraph_writer.*",
)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """After each test here, not only after each file."""
    with nothing_left(tmp_path / "temporary"):
        yield


@pytest.fixture
def fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fault]:
    with caplog.at_level(logging.INFO, logger="jgraph"), ExitStack() as stack:
        fault = Fault(tmp_path, stack)
        monkeypatch.setenv(RECORDS_DIR, str(fault.records))
        yield fault
    # Only of a client that died would logs stay: here each Trainer was closed.
    assert not [path for path in fault.records.rglob("*") if path.is_file()]
    if fault.path.exists():
        assert not [p for pattern in _LEFT for p in fault.path.rglob(pattern)]
        assert newest(fault.path).released
    logs = [path.read_text(errors="replace") for path in fault.logs.glob("*.log")]
    logs += [r.getMessage() for r in caplog.get_records("call")]
    assert bool(fault.names) == fault.is_noticed
    if not fault.is_noticed:
        assert not [text for text in logs if "was lost" in text]
    for name in fault.names:
        assert any(name in text for text in logs), f"no log says {name}"
