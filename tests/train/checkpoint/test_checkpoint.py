"""Checkpoints: plain Orbax reads them, and only the same model takes them back."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jgraph.errors import CheckpointCorruptError, CheckpointError
from jgraph.train.checkpoint import checkpoint
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, NnxNorm, data, nnx_loss

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def trainer(model: Any = None, tx: Any = TX) -> Trainer:
    return Trainer(model or NnxNorm(rngs=nnx.Rngs(0)), nnx_loss, tx)


def fit(trainer: Trainer, steps: int = 5) -> Any:
    return trainer.fit(data(), steps=steps, batch_size=8, progress=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an MLP after 5 steps."""
    run = fit(trainer(NnxMLP(rngs=nnx.Rngs(0))))
    path: Path = run.save(tmp_path_factory.mktemp("saved") / "checkpoint")
    return path


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    tmp_path: Path,
) -> None:
    whole, first, second = trainer(), trainer(), trainer(NnxNorm(rngs=nnx.Rngs(0)))
    fit(whole, 8)
    path = fit(first, 5).save(tmp_path / "checkpoint")
    fit(second, 2)
    run = fit(second.restore(path), 3)
    assert_equal(whole.current_values(), second.current_values())
    assert run.metrics("loss")["step"].tolist() == [6, 7, 8]


def test_plain_orbax_reads_a_checkpoint(tmp_path: Path) -> None:
    run = fit(trainer())
    tree = ocp.StandardCheckpointer().restore(run.save(tmp_path / "checkpoint"))
    assert set(tree) == {"params", "opt_state", "state", "global_step"}
    assert int(tree["global_step"]) == 5
    model = run.model()
    assert_equal(tree["params"]["first"]["kernel"], model.first.kernel[...])
    assert_equal(tree["state"]["norm"]["mean"], model.norm.mean[...])


def test_plain_optax_takes_the_optimizer_state(saved: Path) -> None:
    tree = ocp.StandardCheckpointer().restore(saved)
    like = {**tree, "opt_state": TX.init(tree["params"])}
    state = ocp.StandardCheckpointer().restore(saved, target=like)["opt_state"]
    assert int(optax.tree_utils.tree_get(state, "count")) == 5
    TX.update(tree["params"], state, tree["params"])


def test_random_keys_survive(tmp_path: Path) -> None:
    tree = {
        "params": {"w": jnp.ones(2)},
        "opt": (jax.random.key(7), optax.EmptyState()),
        "state": {},
        "global_step": jnp.zeros((), jnp.int32),
    }
    path = checkpoint.save(tmp_path / "checkpoint", tree)
    restored = checkpoint.restore(path, tree)
    assert isinstance(restored["opt"][1], optax.EmptyState)
    assert (restored["opt"][0] == jax.random.key(7)).all()


def test_relative_path_is_taken_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = trainer(NnxMLP(rngs=nnx.Rngs(0)))
    assert small.save("here") == tmp_path / "here"
    small.restore("here")


def test_what_is_there_is_replaced_only_when_told(tmp_path: Path) -> None:
    one, two = (trainer(NnxMLP(rngs=nnx.Rngs(seed))) for seed in (0, 1))
    path = one.save(tmp_path / "checkpoint")
    run = fit(one, 1)
    with pytest.raises(CheckpointError, match="exists; choose another path"):
        run.save(path)
    run.save(path, overwrite=True)
    two.restore(path)
    assert_equal(one.current_values(), two.current_values())


class Wide(NnxMLP):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.layers[1] = nnx.Linear(8, 3, rngs=rngs)


class Half(NnxMLP):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.layers[1] = nnx.Linear(8, 2, param_dtype=jnp.bfloat16, rngs=rngs)


@pytest.mark.bad_input_row(9)
@pytest.mark.parametrize(
    ("model", "tx", "message"),
    [
        (
            Wide,
            TX,
            r"1/bias float32\[2\], the model wants float32\[3\]; 6 of 14",
        ),
        (Half, TX, r"layers/1/bias float32\[2\], the model wants bfloat16\[2\]"),
        (NnxNorm, TX, "has no 'opt_state/1/0/mu/first/bias': 20 leaves are missing"),
        (NnxMLP, optax.sgd(0.1), "has 'opt_state/1/0/count' besides"),
        (NnxMLP, optax.adam(1e-2), "has no 'opt_state/0/count'"),
    ],
)
def test_checkpoint_of_another_model_is_refused_by_leaf(
    saved: Path, model: Any, tx: Any, message: str
) -> None:
    other = trainer(model(rngs=nnx.Rngs(1)), tx)
    before = other.current_values()
    with pytest.raises(CheckpointError, match=message) as caught:
        other.restore(saved)
    assert caught.value.code == "JG-301"
    assert_equal(other.current_values(), before)


def test_damaged_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "damaged")
    (path / "_METADATA").unlink()
    with pytest.raises(CheckpointCorruptError, match="is damaged"):
        trainer(NnxMLP(rngs=nnx.Rngs(0))).restore(path)


@pytest.mark.parametrize("content", ["nothing", "a file"])
def test_directory_without_a_checkpoint_is_refused(
    tmp_path: Path, content: str
) -> None:
    if content == "a file":
        (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        trainer().restore(tmp_path)
