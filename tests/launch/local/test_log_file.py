"""End of a log file."""

from pathlib import Path

import pytest

from jgraph.launch.local import log_file
from jgraph.launch.local.log_file import last_lines


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_last_lines_are_those_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, end: str
) -> None:
    monkeypatch.setattr(log_file, "_BLOCK", block)
    lines = [f"line {n} …\x0b{'x' * (n % 5)}" for n in range(20)]
    path = tmp_path / "ps-0.log"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    for count in (1, 3, 20, 50):
        with path.open("rb") as file:
            assert last_lines(file, count) == lines[-count:]
            assert not file.read()


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "ps-0.log").touch()
    with (tmp_path / "ps-0.log").open("rb") as file:
        assert last_lines(file, 20) == []
