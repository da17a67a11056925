"""A real model server is read as Prometheus reads it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgraph as jg
from jgraph.clock import WallClock
from jgraph.coordination.watch.board import Board
from jgraph.dashboard.model_poll import ModelPoller, check_url
from jgraph.errors import AddressError
from tests.support.free_port import free_port


def test_versions_and_refusals_of_a_server_reach_the_board(tmp_path: Path) -> None:
    jg.export(lambda x: 2 * x, np.zeros(1, np.float32), tmp_path / "models" / "twice")
    server = jg.serve(tmp_path / "models")
    try:
        facts: list[Any] = []
        token = server.token.value
        ModelPoller([server.url], token, facts.append, WallClock()).look()
        ModelPoller([f"{server.url}/"], "wrong", facts.append, WallClock()).look()
    finally:
        server.stop()
    known, refused = facts
    board = Board()
    board.take(known)
    (row,) = board.view()["models"][server.url]["versions"].values()
    assert (row["model"], row["version"]) == ("twice", "1")
    assert row["requests"] == 0
    assert "silent" in refused
    assert token not in str(facts)


def test_a_server_that_is_not_there_is_silent() -> None:
    facts: list[Any] = []
    url = f"http://127.0.0.1:{free_port()}"
    ModelPoller([url], "", facts.append, WallClock()).look()
    assert "refused" in facts[0]["silent"]


@pytest.mark.parametrize("url", ["", "localhost:8000", "file:///etc/passwd", "ftp://a"])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(AddressError, match="write http://host:8000"):
        check_url(url)
