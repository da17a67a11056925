"""Orders for the daemon of a cluster on this machine."""

import os
from pathlib import Path

import pytest

from jgraph.launch.local import daemon


def test_orders_are_carried_out_in_the_order_that_they_were_given_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that starts would be ended by the order to forget who left before."""
    monkeypatch.setenv("JGRAPH_HOME", str(tmp_path))
    directory = daemon.state_directory()
    given = ["mine.b.orders", "mine.c.orders", "mine.a.orders"]
    for at, name in enumerate([*given, "other.d.orders", "mine.e.new"]):
        (directory / name).write_text("start worker 1")
        os.utime(directory / name, ns=(at, at))
    assert [path.name for path in daemon._orders("mine")] == given
