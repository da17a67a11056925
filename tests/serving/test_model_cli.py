"""``jgraph model`` and ``jgraph export`` do to a directory what they say."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jgraph.cli import app
from jgraph.cli.options import USAGE
from jgraph.cli.show import object_at
from jgraph.errors import ArtifactError, ConfigError
from jgraph.serving.labels import read_labels, set_label
from tests.support.exported import half_plus_three

TRAIN = """
import jax.numpy as jnp, numpy as np, optax, jgraph as jg
from flax import nnx
X = np.ones((4, 3), np.float32)
BATCH = {"x": X}
def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)
def trainer():
    return jg.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), loss, optax.sgd(0.1))
def double(model, x):
    return {"double": model(x) * 2}
"""


def typed(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output + repr(done.exception)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for _ in range(3):
        half_plus_three(path)
    return path


@pytest.fixture
def models(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "models"))


def test_versions_are_listed_shown_labelled_and_pruned(models: Path) -> None:
    model = models / "half_plus_three"
    assert [row["version"] for row in typed("model", "ls", models)] == [1, 2, 3]
    assert typed("model", "label", model, "stable", 1)["labels"] == {"stable": 1}
    assert typed("model", "ls", model)[0]["labels"] == ["stable"]
    assert "serving_default" in typed("model", "show", model)["signatures"]
    wanted = {"deleted": [2], "dry_run": True}
    assert typed("model", "prune", model, "--keep", 1, "--dry-run") == wanted
    assert typed("model", "prune", model, "--keep", 1)["deleted"] == [2]
    assert [row["version"] for row in typed("model", "ls", model)] == [1, 3]


def test_what_cannot_be_read_is_not_kept_in_place_of_a_version(models: Path) -> None:
    model = models / "half_plus_three"
    (model / "9" / "arrays").mkdir(parents=True)
    assert typed("model", "prune", model, "--keep", 1)["deleted"] == [1, 2]
    assert sorted(path.name for path in model.iterdir()) == ["3", "9"]


def test_a_prune_that_was_killed_is_ended_by_the_next_one(models: Path) -> None:
    model = models / "half_plus_three"
    (model / ".1.gone" / "arrays").mkdir(parents=True)
    (model / ".2.0a1b2c3d.gone").mkdir()
    assert typed("model", "prune", model, "--keep", 1)["deleted"] == [1, 2]
    assert [path.name for path in model.iterdir()] == ["3"]


def test_labels_that_are_given_at_the_same_time_are_all_there(models: Path) -> None:
    model = models / "half_plus_three"
    names = [f"label{number}" for number in range(16)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: set_label(model, name, 1), names))
    assert set(read_labels(model).targets) == set(names)


@pytest.mark.parametrize("command", [["prune", "--keep", "2"], ["verify"], ["show"]])
def test_a_model_without_versions_is_told_with_its_path(
    command: list[str], tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["model", *command, str(tmp_path / "nope")])
    assert isinstance(done.exception, ArtifactError)
    assert f"no version of a model in {tmp_path}/nope" in str(done.exception)


def test_verify_names_what_is_damaged_and_exits_with_one(tmp_path: Path) -> None:
    version = half_plus_three(tmp_path).path
    assert typed("model", "verify", version)[0]["problem"] == ""
    (version / "example.npz").write_bytes(b"")
    (row,) = typed("model", "verify", version.parent, code=1)
    assert "example.npz" in row["problem"]


def test_a_model_is_exported_to_no_path_that_is_empty() -> None:
    words = ["export", "saved", "train_it.py:trainer", "--example", "X", "-o", ""]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == USAGE
    assert "it is empty" in done.output


@pytest.mark.slow
def test_a_checkpoint_is_exported_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "train_it.py"
    file.write_text(TRAIN)
    object_at(f"{file}:trainer")[1]().save(tmp_path / "saved")
    facts = typed(
        *("export", tmp_path / "saved", f"{file}:trainer", "--example", "X"),
        *("--fn", "double", "-o", tmp_path / "m", "--label", "stable"),
    )
    assert facts["version"] == 1
    (row,) = typed("model", "ls", tmp_path / "m")
    assert row["labels"] == ["stable"]
    words = ("export", tmp_path / "saved", f"{file}:trainer", "--example", "BATCH")
    done = CliRunner().invoke(app, [*map(str, words), "-o", str(tmp_path / "n")])
    assert isinstance(done.exception, ConfigError)
    assert "the model failed on the example 'BATCH'" in str(done.exception)
    assert "--fn" in str(done.exception)
    assert not (tmp_path / "n").exists()
    words = ("export", tmp_path / "saved", f"{file}:loss", "--example", "X")
    done = CliRunner().invoke(app, [*map(str, words), "-o", str(tmp_path / "n")])
    assert isinstance(done.exception, ConfigError)
    assert "loss' cannot be called without arguments" in str(done.exception)
