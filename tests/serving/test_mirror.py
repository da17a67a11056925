"""A version gets copies of the requests of another one, and differences are counted."""

import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgraph as jg
from jgraph.serving.labels import Labels
from tests.support.waiting import wait_until

X = np.ones((2, 4), np.float32)


def constant(models: Path, value: float, **options: Any) -> None:
    w = np.full(4, value, np.float32)
    jg.export(lambda w, x: x + w, X, models / "m", params=w, **options)


def counted(counts: dict[str, int], wanted: int) -> bool:
    return sum(counts.values()) == wanted


@pytest.mark.parametrize(
    ("value", "outcome"), [(1.0, "same"), (1.0 + 1e-7, "same"), (1.1, "different")]
)
def test_a_mirror_is_asked_the_same_and_changes_no_answer(
    tmp_path: Path, value: float, outcome: str
) -> None:
    constant(tmp_path, 1.0, label="stable")
    constant(tmp_path, value, label="canary")
    labels = {"stable": 1, "canary": 2, "split": {"stable": 100, "canary": 0}}
    file = tmp_path / "m" / "labels.json"
    file.write_text(json.dumps(labels | {"mirror": "canary"}))
    with jg.serve(tmp_path, grpc_port=None) as server:
        model = server._models.model("m")
        counts = model.versions[2].statistics.mirrored
        for number in range(3):
            assert server.predict("m", X)["y"].tolist() == (X + 1).tolist()
            wait_until(partial(counted, counts, number + 1))
        assert counts == {outcome: 3}
        assert not model.versions[1].statistics.mirrored
        server.predict("m", X, version="label:canary")  # no copy of its own requests
        assert sum(counts.values()) == 3
        asked = urllib.request.Request(
            f"{server.url}/metrics",
            headers={"Authorization": f"Bearer {server.token.value}"},
        )
        with urllib.request.urlopen(asked, timeout=20) as answer:
            text = answer.read().decode()
        wanted = f'mirrored_total{{model="m",outcome="{outcome}",version="2"}} 3.0'
        assert wanted in text
        server.set_label("m", "old", 1)  # what else is in the file stays
    assert json.loads(file.read_text())["mirror"] == "canary"


def test_a_mirror_that_takes_other_inputs_fails_alone(tmp_path: Path) -> None:
    constant(tmp_path, 1.0, label="stable")
    jg.export(lambda x: x[:, :1], X[:, :3], tmp_path / "m", label="canary")
    labels = {"stable": 1, "canary": 2, "mirror": "canary"}
    (tmp_path / "m" / "labels.json").write_text(json.dumps(labels))
    with jg.serve(tmp_path, http_port=None) as server:
        counts = server._models.model("m").versions[2].statistics.mirrored
        found = server.predict("m", X, version="label:stable")["y"]
        assert found.tolist() == (X + 1).tolist()
        wait_until(lambda: counts)
        assert counts == {"failed": 1}


@pytest.mark.parametrize("mirror", ["other", 7, None, ["canary"]])
def test_a_mirror_is_a_label_of_the_file(mirror: Any) -> None:
    with pytest.raises(ValueError, match="mirror"):
        Labels.of(json.dumps({"canary": 2, "mirror": mirror}))
