"""``jgraph simulate``: what a cluster would do with a plan."""

import json
from pathlib import Path

import pytest

from jgraph import cli
from jgraph.testing import dense_step


@pytest.fixture
def plan(tmp_path: Path) -> str:
    dense_step(4_000_000).save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_it_says_what_it_simulated_and_of_what(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"simulate --workers 20 --ps 2 --plan {plan} --compute-ms 100 --gbit 10"
    with pytest.raises(SystemExit, match="0"):
        cli.main(typed.split())
    text = capsys.readouterr().out
    assert text.startswith("simulated: sync, 20 workers, 2 ps: ")
    for said in (
        "for 100 ms",
        "and 1.25 GB/s of each task",
        "measured 20",
        "not model",
    ):
        assert said in text


def test_it_finds_how_many_ps_are_enough(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"simulate --workers 4 --plan {plan} --compute-ms 9000 --sharded"
    with pytest.raises(SystemExit, match="0"):
        cli.main(typed.split())
    text = capsys.readouterr().out
    assert "1 ps: " in text.splitlines()[0]
    assert "1 ps are the fewest within 5 % of the fastest tried" in text
    assert "jg.min_max_variable_partitioner(1)" in text


def test_a_program_reads_the_same(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"simulate --workers 4 --ps 1 --plan {plan} --mode async --json"
    with pytest.raises(SystemExit, match="0"):
        cli.main(typed.split())
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert found["steps_per_s"] > 0
    assert found["costs"]["date"]


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("--workers 0 --ps 1 --plan {plan}", "workers is 0; give 1 or more"),
        ("--workers 1 --ps 1 --plan none.json", "cannot read a plan from none.json"),
        ("--workers 1 --ps 1 --plan {plan} --costs {plan}", "has no costs"),
        ("--workers 1 --ps 1 --plan {plan} --gbit 0", "the link has"),
        ("--workers 1 --ps 1 --plan {plan} --compute-ms -1", "seconds from 0 on"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_sentence(
    typed: str, sentence: str, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["simulate", *typed.format(plan=plan).split()])
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
