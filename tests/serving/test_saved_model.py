"""SavedModels: made of exported models by TensorFlow, where there is one."""

import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from typer.testing import CliRunner

import jgraph as jg
from jgraph.cli import app
from jgraph.errors import ArtifactError
from jgraph.serving.saved_model.convert import PYTHON, write_saved_model
from tests.support.exported import ROOT, half_plus_three

ASK = """
import json, sys
import numpy as np
import tensorflow as tf

loaded = tf.saved_model.load(sys.argv[1])
inputs = {n: tf.constant(v) for n, v in np.load(sys.argv[2]).items()}
found = loaded.signatures[sys.argv[3]](**inputs)
np.savez(sys.argv[4], **{n: v.numpy() for n, v in found.items()})
"""
"""A caller of TensorFlow alone."""


def tensorflow_python() -> str:
    """A Python with TensorFlow, of ``make peers-tensorflow``; else skips."""
    usual = ROOT / ".venv-peers-tensorflow" / "bin" / "python"
    python = Path(os.environ.get(PYTHON, usual))
    if not python.exists():
        pytest.skip(
            f"no TensorFlow: make peers-tensorflow, or name a Python by {PYTHON}"
        )
    return str(python)


def asked(
    saved: Path, inputs: dict[str, np.ndarray], tmp_path: Path, signature: str
) -> dict[str, np.ndarray]:
    """What TensorFlow answers, in a process without jgraph."""
    np.savez(tmp_path / "in.npz", **inputs)  # type: ignore[arg-type]
    files = [str(saved), str(tmp_path / "in.npz"), signature, str(tmp_path / "out.npz")]
    subprocess.run([tensorflow_python(), "-c", ASK, *files], check=True, timeout=300)
    with np.load(tmp_path / "out.npz") as found:
        return dict(found)


class Ctr(nn.Module):
    """Rows by id, and a dense part with several dtypes."""

    @nn.compact
    def __call__(self, user: jnp.ndarray, dense: jnp.ndarray) -> dict[str, jnp.ndarray]:
        rows = nn.Embed(50, 4)(user)
        hidden = nn.relu(nn.Dense(8)(jnp.concatenate([rows, dense], 1)))
        score = nn.Dense(1)(hidden)[:, 0]
        return {
            "score": score,
            "likes": score > 0,
            "row": rows.sum(1).astype(jnp.int32),
        }


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_tensorflow_gives_the_answers_of_the_model(tmp_path: Path) -> None:
    python = tensorflow_python()
    module, rng = Ctr(), np.random.default_rng(0)
    x = {
        "user": rng.integers(0, 50, 4, np.int32),
        "dense": rng.normal(size=(4, 3)).astype(np.float32),
    }
    variables = module.init(jax.random.key(0), x["user"], x["dense"])
    call = lambda values, x: module.apply(values, x["user"], x["dense"])
    twice = lambda values, x: {"twice": x["dense"] * 2}
    both = {"twice": twice}
    saved = jg.export(
        (module, variables),
        x,
        tmp_path / "saved" / "ctr",
        format="saved_model",
        tensorflow=python,
        version=3,
        fn=call,
        signatures=both,
    )
    assert saved == tmp_path / "saved" / "ctr" / "3"
    assert [path.name for path in saved.parent.iterdir()] == ["3"], "no drafts stay"
    ours = (module, variables)
    model = jg.export(ours, x, tmp_path / "ctr", fn=call, signatures=both)
    many = {
        "user": rng.integers(0, 50, 9, np.int32),
        "dense": rng.normal(size=(9, 3)).astype(np.float32),
    }
    for signature in ("serving_default", "twice"):
        wanted = model.predict(many, signature=signature)
        found = asked(saved, many, tmp_path, signature)
        assert sorted(found) == sorted(wanted)
        for name, value in found.items():
            assert value.dtype == wanted[name].dtype
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_version_is_converted_by_the_command(tmp_path: Path) -> None:
    python = tensorflow_python()
    half_plus_three(tmp_path / "models")
    path, saved = tmp_path / "models" / "half_plus_three", tmp_path / "saved"
    words = [str(path), "-o", str(saved), "--tensorflow", python]
    command = ["model", "saved-model", *words]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    x = {"x": np.array([1, 2, 5], np.float32)}
    found = asked(saved / "1", x, tmp_path, "serving_default")
    assert found["y"].tolist() == [3.5, 4.0, 5.5]
    again = CliRunner().invoke(app, command)
    assert "versions never change" in str(again.exception)


@pytest.fixture
def model(tmp_path: Path) -> jg.ExportedModel:
    return half_plus_three(tmp_path / "models")


def python_that(says: str, path: Path) -> str:
    """An interpreter that only writes to stderr and fails."""
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_without_tensorflow_it_is_said_how_to_have_it(
    model: jg.ExportedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ArtifactError, match=r"pip install 'jgraph\[tf\]', or name"):
        write_saved_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_tensorflow_says_is_told_and_nothing_stays(
    model: jg.ExportedModel, tmp_path: Path
) -> None:
    python = python_that("OSError: it is broken", tmp_path / "python")
    with pytest.raises(ArtifactError, match="did not write the SavedModel: OSError"):
        write_saved_model(model, tmp_path / "saved", tensorflow=python)
    assert not list((tmp_path / "saved").iterdir())


def test_a_python_that_is_not_there_is_refused(
    model: jg.ExportedModel, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="there is no Python at nowhere"):
        write_saved_model(model, tmp_path / "saved", tensorflow="nowhere")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "onnx"}, "format='onnx'"),
        ({"tensorflow": "python"}, "takes tensorflow="),
        ({"format": "saved_model", "label": "stable"}, "has no labels"),
    ],
)
def test_options_of_an_export_that_mean_nothing_are_refused(
    options: dict[str, str], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=match):
        half_plus_three(tmp_path, **options)
    assert not list(tmp_path.iterdir())
