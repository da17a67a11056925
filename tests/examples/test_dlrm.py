"""DLRM: clicks that are made up, what scores are worth, and training."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jgraph import cli
from jgraph.client.cluster import Cluster
from jgraph.errors import DataError
from jgraph.examples import dlrm
from jgraph.examples.clicks import (
    BAG,
    BAGS,
    FEATURES,
    ONE_HOT,
    PLACES,
    draw_keys,
    load_criteo,
    make_clicks,
)
from jgraph.examples.options import Options
from jgraph.graph.rows.hash_keys import NO_KEY, Keys, join_keys
from tests.support.example_data import write_criteo


@pytest.fixture(scope="module")
def keys() -> Keys:
    return draw_keys(np.random.default_rng(0), 400)


def test_a_key_is_of_one_feature_and_a_few_keys_are_frequent(keys: Keys) -> None:
    homes = {key: place for place in range(ONE_HOT) for key in keys[:, place].tolist()}
    for place in range(ONE_HOT):
        assert {homes[key] for key in keys[:, place].tolist()} == {place}
        (_, most), *_ = Counter(keys[:, place].tolist()).most_common(1)
        assert most > 100
    assert len(homes) > 10 * ONE_HOT


def test_a_bag_has_an_id_and_its_other_places_have_none(keys: Keys) -> None:
    assert keys.shape == (400, PLACES)
    assert (keys[:, :ONE_HOT] != NO_KEY).all()
    there = keys[:, ONE_HOT:].reshape(-1, BAGS, BAG) != NO_KEY
    assert there[..., 0].all()
    assert not (there[..., 1:] & ~there[..., :-1]).any()
    assert set(there.sum(axis=-1).ravel().tolist()) == set(range(1, BAG + 1))


def test_a_seed_decides_all_of_the_clicks() -> None:
    one, same, other = (make_clicks(50, seed) for seed in (1, 1, 2))
    for name, values in one.items():
        assert np.array_equal(values, same[name])
        assert not np.array_equal(values, other[name])


@pytest.mark.parametrize(
    ("scores", "worth"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], 0.0), ([5, 5, 5, 5], 0.5)],
)
def test_scores_are_worth_how_often_clicks_are_above(
    scores: list[int], worth: float
) -> None:
    assert dlrm.auc(scores, [0, 0, 1, 1]) == worth


def test_criteo_lines_are_laid_out_as_what_is_made_up(tmp_path: Path) -> None:
    train, test = load_criteo(write_criteo(tmp_path))
    made = make_clicks(1, 0)
    for name, values in train.items():
        assert values.dtype == made[name].dtype
        assert values.shape == (360, *made[name].shape[1:])
        assert len(test[name]) == 40
    keys = join_keys(train["ids"])
    where = (keys[:, 0] >> 5 == 0x05DB9164).astype(np.float32)
    assert np.array_equal(where, train["label"])
    there = keys != NO_KEY
    assert (keys[there] & 31).tolist() == [*range(FEATURES - 1)] * 360
    bags = there[:, ONE_HOT:].reshape(-1, BAGS, BAG)
    assert (bags.sum(axis=2) == [1, 1, 0]).all()
    assert bags[:, :2, 0].all()
    log = np.float32(np.log(124))
    first = "\t".join(["1", "-123", "123", *[""] * 37])
    (tmp_path / "train.txt").write_text(f"{first}\n0{first[1:]}\n" * 10)
    numbers = load_criteo(tmp_path)[0]["numbers"]
    assert numbers[0].tolist() == [-log, log, *[0] * 11]


LINE = ["1", *["5"] * 13, *["68fd1e64"] * 26]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LINE[1:], r"train.txt:2 has 39 fields with tabs between; there must be 40"),
        (["2", *LINE[1:]], r"train.txt:2 has the label '2'; it is 0 or 1"),
        (["1", "1.5", *LINE[2:]], r"train.txt:2 has '1.5' as number 1; it is a whole"),
        ([*LINE[:-1], "ring"], r"train.txt:2 has 'ring' as category 26; it is a num"),
        ([*LINE[:-1], "-1"], r"train.txt:2 has '-1' as category 26"),
        ([*LINE[:-1], "123456789"], r"train.txt:2 has '123456789' as category 26"),
        (LINE, r"train.txt has 2 examples; clicks and others must be among"),
    ],
)
def test_lines_that_are_not_criteo_s_are_named(
    tmp_path: Path, fields: list[str], message: str
) -> None:
    lines = ["\t".join(line) for line in (LINE, fields)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        load_criteo(tmp_path)


def test_a_directory_without_clicks_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.txt is not there; give --data the dir"):
        load_criteo(tmp_path)


@pytest.mark.slow
def test_it_learns_clicks_of_a_file(cluster: Cluster, tmp_path: Path) -> None:
    data = write_criteo(tmp_path)
    figures = dlrm.run(cluster, Options(steps=60), data, width=4)
    assert figures["accuracy"] > 0.9
    assert figures["rows"] > 2


@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns_clicks_within_the_memory_of_its_table(cluster: Cluster) -> None:
    said: list[str] = []
    figures = dlrm.run(
        cluster,
        Options(steps=150, say=said.append),
        examples=8000,
        width=8,
        capacity_bytes=256 << 10,
    )
    # What is evicted, and so forgotten, depends on which worker is ahead.
    assert figures["accuracy"] > figures["majority"] + 0.05
    assert figures["auc"] > 0.7
    assert figures["admitted"] - figures["evicted"] == figures["rows"] > 1000
    assert figures["evicted"] > 0
    plan, *events = said
    assert "params/table/rows is a hash table in 2 shards" in plan
    assert [text.split(": ")[0] for text in events] == cluster.tasks("ps")


@pytest.mark.nightly
@pytest.mark.procs
def test_the_command_prints_one_line_of_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = ["--ps", "1", "--workers", "1", "--steps", "3"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "dlrm", *size, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert {"accuracy", "majority", "auc", "rows", "evicted"} <= set(figures)
    assert (figures["example"], figures["ps"], figures["steps"]) == ("dlrm", 1, 3)
