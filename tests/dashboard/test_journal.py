"""Journals: what was seen live is seen again, and strange files break nothing."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.clock import WallClock
from jgraph.coordination.watch.board import Board
from jgraph.dashboard.journal import HEAD, JournalReader, JournalWriter, parts_of
from jgraph.dashboard.journaled_board import JournaledBoard, ReplayedBoard
from jgraph.dashboard.merge_patch import difference, patched
from jgraph.dashboard.sources import ReplaySource
from jgraph.errors import HttpRequestError, JournalError
from tests.support.board_facts import START, status
from tests.support.dashboards import scene

PLAIN = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=3), PLAIN, max_size=5)


@given(OBJECTS, OBJECTS)
def test_an_object_and_what_changed_give_the_other(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    change = difference(before, after)
    assert patched(before, change) == after
    assert difference(before, before) == {}


def test_a_replay_shows_what_was_seen_live(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    live, facts = JournaledBoard(WallClock(), path), scene()
    halfway, at = {}, 0.0
    for number, fact in enumerate(facts):
        live.take(fact)
        if fact["kind"] == "runs" and number < len(facts) // 2:
            halfway, at = dict(live.view()), fact["time"]
    live.close()
    replay = ReplayedBoard(path)
    assert replay.at().view() == live.view()
    assert replay.at().curves() == live.curves()
    assert replay.at(at).view() == halfway
    assert replay.at(START - 1).view()["tasks"] == {}
    assert (replay.first, replay.skipped) == (START, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_replay_has_no_logs_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    JournalWriter(path).close()
    source = ReplaySource(path)
    with pytest.raises(HttpRequestError, match="not their logs"):
        source.log("/job:ps/task:0", 0, 10)
    assert source.config()["kind"] == "replay"


def test_statuses_are_written_as_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    writer = JournalWriter(path)
    for second in range(3):
        writer.write(status(second))
    writer.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert len(lines[3]) < len(lines[1]) / 3
    assert list(JournalReader(path)) == [status(second) for second in range(3)]


def test_a_journal_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    writer = JournalWriter(path, part_bytes=4000, all_bytes=2000)
    for second in range(400):
        writer.write(status(second))
    writer.close()
    parts = parts_of(path)
    assert 1 <= sum(part.stat().st_size for part in parts) <= 2000
    assert path.stat().st_size <= 4500
    seconds = [fact["time"] - START for fact in JournalReader(path)]
    assert seconds == list(range(400 - len(seconds), 400))
    assert 20 < len(seconds) < 400


def test_a_journal_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    for second in range(2):
        writer = JournalWriter(path)
        writer.write(status(second))
        writer.close()
    assert list(JournalReader(path)) == [status(0), status(1)]


def test_the_directory_of_a_journal_is_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mlp" / "board.jsonl"
    JournalWriter(path).close()
    assert path.stat().st_size


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    writer = JournalWriter(path, part_bytes=10)
    writer.write(status(0))  # another file is begun
    with pytest.raises(JournalError, match="another dashboard writes"):
        JournalWriter(path)
    writer.write(status(1))
    assert list(JournalReader(path)) == [status(0), status(1)]
    writer.close()
    JournalWriter(path).close()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "board.jsonl"
    writer = JournalWriter(path)
    for second in range(5):
        writer.write(status(second))
    writer.close()
    return path


def test_a_line_that_was_cut_off_is_skipped(journal: Path) -> None:
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    reader = JournalReader(journal)
    assert len(list(reader)) == 4
    assert reader.skipped == 1


def test_what_follows_a_line_that_was_cut_off_is_whole(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-20])
    for second in (5, 6):
        writer = JournalWriter(journal)
        writer.write(status(second))
        writer.close()
    reader = JournalReader(journal)
    assert list(reader)[4:] == [status(5), status(6)]
    assert reader.skipped == 1


def test_a_damaged_packed_part_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    writer = JournalWriter(path, part_bytes=4000)
    while len(parts_of(path)) < 2:
        writer.write(status(0))
    writer.write(status(1))
    writer.close()
    part = parts_of(path)[0]
    packed = bytearray(part.read_bytes())
    at = len(packed) // 2
    packed[at : at + 20] = bytes(255 - byte for byte in packed[at : at + 20])
    part.write_bytes(packed)
    reader = JournalReader(path)
    assert list(reader)[-1] == status(1)
    assert reader.skipped >= 1


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "change", "time": 5}',
        '{"kind": "change", "change": ' + '{"a": ' * 5000 + "5" + "}" * 5001,
        '{"kind": "runs", "time": 1' + "0" * 400 + "}",
        '{"kind": "change", "change": {"time": 1' + "0" * 400 + "}}",
    ],
    ids=["no change", "deep change", "large time", "change to a large time"],
)
def test_a_strange_line_breaks_no_replay(journal: Path, line: str) -> None:
    with journal.open("a") as file:
        file.write(line + "\n")
    replay = ReplayedBoard(journal)
    assert replay.at().view()["cluster"]["tasks"] == 2
    assert replay.last == START + 4


def test_a_damaged_line_is_skipped_and_counted(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"kind": "stat\xff\n'
    lines.append(b"[" * 100_000 + b"\n")
    lines.append(b'{"kind": "change", "time": 5, "change": 7}\n')
    journal.write_bytes(b"".join(lines))
    reader = JournalReader(journal)
    found = list(reader)
    assert [fact["time"] for fact in found] == [START + s for s in (0, 2, 3, 4)]
    assert reader.skipped == 3


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", '{"jgraph": "board", "version": 2}\n', "[]\n", "\x00" * 5000],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(JournalError, match="is not a journal"):
        JournalReader(path)
    with pytest.raises(JournalError, match="is not a journal"):
        JournalWriter(path)
    assert path.read_text() == text


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    path.touch()
    with pytest.raises(JournalError, match=r"board\.jsonl is empty and so is not a"):
        JournalWriter(path)


def test_a_link_and_a_missing_file_are_refused(journal: Path) -> None:
    link = journal.with_name("link")
    link.symlink_to(journal)
    for path in (link, journal.with_name("none")):
        with pytest.raises(JournalError, match="cannot read the journal"):
            JournalReader(path)
    with pytest.raises(OSError, match="link"):
        JournalWriter(link)


def test_a_bomb_is_read_no_further_than_a_bound(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jgraph.dashboard.journal._READ", 1 << 20)
    with gzip.open(journal.with_name(f"{journal.name}.000001.gz"), "wb") as bomb:
        bomb.write(json.dumps(HEAD).encode() + b"\n")
        for _ in range(8):
            bomb.write(b" " * (1 << 20))
    with pytest.raises(JournalError, match="no more is read"):
        list(JournalReader(journal))


def test_where_a_disk_is_full_the_page_goes_on_and_says_so(tmp_path: Path) -> None:
    board = JournaledBoard(WallClock(), tmp_path / "board.jsonl")
    journal: Any = board._journal
    journal.close()
    journal._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
    board.take(status(0))
    (alarm,) = board.view()["alarms"]
    assert alarm["text"] == (
        "the journal is not written any more: No space left on device"
    )
    board.take(status(1))
    assert board.view()["time"] >= START
    board.close()


def test_an_empty_board_has_a_view() -> None:
    assert Board().view()["cluster"]["sentence"] == "nothing is known yet"
