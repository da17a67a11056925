"""What is known of the speed of a cluster."""

import json
from pathlib import Path

import pytest

from jgraph.errors import ConfigError
from jgraph.plan.auto.cost_model import CostModel, Link, TaskSpeed
from jgraph.plan.auto.work import Work
from tests.support.costs import model
from tests.support.plans import WORKERS


def test_a_saved_model_is_read_as_it_was(tmp_path: Path) -> None:
    made = model(WORKERS, crowding=2.0)
    made.save(tmp_path / "costs.json")
    assert CostModel.load(tmp_path / "costs.json") == made


@pytest.mark.parametrize(
    ("text", "told"),
    [("[]", "no cost model"), ("{", "cannot read"), ('{"format": 9}', "format 9")],
)
def test_a_file_that_is_no_cost_model_is_refused(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        CostModel.load(file)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        model(WORKERS).save(tmp_path / "no" / "costs.json")


def test_a_model_of_another_cluster_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="task:3"):
        model(WORKERS[:3]).check(WORKERS)


def test_a_missing_link_is_refused_by_name() -> None:
    made = model(WORKERS[:2]).to_dict()
    made["links"].pop()
    pair = f"{WORKERS[1]} to {WORKERS[0]}"
    with pytest.raises(ConfigError, match=pair):
        CostModel.from_dict(json.loads(json.dumps(made))).check(WORKERS[:2])


def test_tasks_of_a_host_are_slowed_down_by_each_that_computes() -> None:
    crowded = model(WORKERS[:3], crowding=3.0)
    assert [crowded.slowdown("host", n) for n in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_what_is_computed_and_moved_at_once_takes_the_longer_of_the_two() -> None:
    speed = TaskSpeed("host", 1.0, 1.0, 1.0, 1.0, kernel_s=0.0)
    assert speed.seconds(Work(elements=2.0, nbytes=3.0)) == 3.0
    assert speed.seconds(Work(flops=1.0, elements=2.0, slow=2.0)) == 5.0


def test_it_prints_as_a_table_of_tasks_and_links() -> None:
    text = str(model(WORKERS[:2], Link(1e-4, 2e9)))
    assert f"{WORKERS[0]} to {WORKERS[1]}: 100 us, 2.00 GB/s" in text
