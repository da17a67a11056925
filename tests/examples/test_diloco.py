"""The transformer whose workers seldom talk: its data, and its figures."""

import json
from pathlib import Path

import numpy as np
import pytest

from jgraph import cli
from jgraph.errors import ConfigError, DataError
from jgraph.examples.diloco import LENGTH, read_characters, run, sequences
from jgraph.examples.options import Options
from tests.support.example_data import write_text


def test_a_text_is_cut_into_pieces_that_lie_so_far_apart(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text("abca" * 2000)
    text, count = read_characters(path)
    assert (count, text[:5].tolist()) == (3, [0, 1, 2, 0, 0])
    pieces = sequences(text, 3)
    assert pieces.shape[1] == LENGTH + 1
    np.testing.assert_array_equal(pieces[2], text[6 : 6 + LENGTH + 1])


def test_what_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --workers 4"):
        run(tmp_path, None, Options(steps=1))
    with pytest.raises(DataError, match="cannot be read"):
        read_characters(tmp_path / "input.txt")
    (tmp_path / "input.txt").write_text("short")
    with pytest.raises(DataError, match="has 5 characters"):
        read_characters(tmp_path / "input.txt")


@pytest.mark.nightly
@pytest.mark.procs
def test_the_command_prints_what_each_way_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(write_text(tmp_path)), "--workers", "2", "--steps", "100"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "diloco", *options, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert (figures["example"], figures["workers"]) == ("diloco", 2)
    assert figures["every_50_loss"] > 0
    assert "every_500_loss" not in figures
    assert figures["every_50_more"] == pytest.approx(
        figures["every_50_loss"] / figures["sync_loss"] - 1, abs=1e-3
    )
