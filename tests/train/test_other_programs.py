"""Checkpoints of programs without jgraph: read, never touched; and read by such."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import CheckpointError, CheckpointForeignError
from jgraph.runtime.files.manifest import FILE
from jgraph.runtime.files.step_files import TEMPORARY, our_steps, steps_in
from jgraph.train.checkpoint import checkpoint
from jgraph.train.checkpoint.checkpoints import (
    Checkpoints,
    CheckpointWriter,
    newest_good,
)
from jgraph.train.checkpoint.flax_checkpoints import find, match
from jgraph.train.trainer import Trainer
from tests.support import flax_program
from tests.support.saved_steps import filled, tree

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("nothing_is_left")]
STEPS, MORE = flax_program.STEPS, flax_program.MORE


def linen_loss(variables: Any, batch: Any) -> Any:
    x, y = batch
    out, new = flax_program.Linen().apply(
        variables, x, train=True, mutable=["batch_stats"]
    )
    return jnp.mean((out - y) ** 2), new


def nnx_loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch[0]) - batch[1]) ** 2)


def linen(tx: optax.GradientTransformation | None = None) -> Trainer:
    model = flax_program.Linen()
    variables = model.init(jax.random.key(9), flax_program.data()[0])
    return Trainer(model, linen_loss, tx or flax_program.tx(), variables=variables)


def of_nnx() -> Trainer:
    return Trainer(flax_program.Nnx(nnx.Rngs(9)), nnx_loss, flax_program.tx())


def fit(
    trainer: Trainer, steps: int, where: Checkpoints | None = None, **options: Any
) -> Any:
    data = flax_program.data()
    wanted = {"batch_size": 16, "checkpoint": where, "progress": False, **options}
    return trainer.fit(data, steps=steps, **wanted)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Flax program that has saved, and its directory."""
    directory = tmp_path_factory.mktemp("flax")
    child = subprocess.Popen(
        [sys.executable, flax_program.__file__, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        yield directory, child
    assert child.returncode == 0


@pytest.fixture(scope="module")
def saved(program: Any) -> Path:
    directory: Path = program[0]
    return directory


@pytest.mark.parametrize(
    ("name", "has_optimizer"),
    [
        ("linen_standard", True),
        ("linen_manager", True),
        ("linen_legacy", True),
        ("nnx_both", True),
        ("nnx_pure", False),
        pytest.param("linen_pytree", True, marks=pytest.mark.nightly),
        pytest.param("linen_items", True, marks=pytest.mark.nightly),
        pytest.param("linen_flax", True, marks=pytest.mark.nightly),
        pytest.param("nnx_split", True, marks=pytest.mark.nightly),
        pytest.param("nnx_manager", True, marks=pytest.mark.nightly),
        pytest.param("linen_params", False, marks=pytest.mark.nightly),
        pytest.param("linen_variables", False, marks=pytest.mark.nightly),
        pytest.param("nnx_model", False, marks=pytest.mark.nightly),
    ],
)
def test_a_trainer_goes_on_from_what_a_flax_program_saved(
    saved: Path, name: str, has_optimizer: bool
) -> None:
    kind = name.partition("_")[0]
    trainer = linen() if kind == "linen" else of_nnx()
    before = sorted(path for path in (saved / name).rglob("*"))
    trainer.restore(saved / name)
    assert trainer.imported is not None
    missing = trainer.imported.missing
    assert any(n.startswith("opt/") for n in missing) != has_optimizer
    if has_optimizer:
        assert not missing
        assert fit(trainer, MORE).steps == STEPS + MORE
        predicted = trainer.predict(flax_program.data()[0])
        np.testing.assert_allclose(
            predicted, np.load(saved / "later.npz")[kind], rtol=1e-4, atol=1e-5
        )
    assert sorted(path for path in (saved / name).rglob("*")) == before


def test_the_table_says_what_went_where_and_what_is_missing(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = of_nnx().restore(saved / "nnx_model")
    assert trainer.imported is not None
    assert trainer.imported.sources["params/layers/0/kernel"] == "layers/0/kernel"
    text = str(trainer.imported)
    assert "state/norm/mean" in text
    assert "opt/1/0/mu/head/kernel" in text
    assert "is not there, stays as it was" in text
    assert "dropout/rngs/count" in trainer.imported.unused
    assert text in caplog.text


def test_a_flax_checkpoint_of_another_model_changes_nothing(saved: Path) -> None:
    trainer = of_nnx()
    before = trainer.current_values()
    with pytest.raises(CheckpointError, match="has no 'params/head/bias' under any"):
        trainer.restore(saved / "linen_standard")
    wide = Trainer(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    with pytest.raises(CheckpointError, match=r"the model wants float32\[1\]"):
        wide.restore(_nnx_linear(saved))
    for a, b in zip(before, trainer.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)


def _nnx_linear(saved: Path) -> Path:
    path = saved / "linear"
    tree = nnx.to_pure_dict(nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))
    with ocp.StandardCheckpointer() as standard:
        standard.save(path, tree)
    return path


def test_a_flax_checkpoint_goes_to_the_tasks_of_a_cluster(
    saved: Path, cluster: Cluster
) -> None:
    model = flax_program.Nnx(nnx.Rngs(9))
    there = Trainer(model, nnx_loss, flax_program.tx(), cluster=cluster)
    here = of_nnx().restore(saved / "nnx_both")
    there.restore(saved / "nnx_both")
    for a, b in zip(here.current_values(), there.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)
    fit(there, 1)
    assert there.run is not None
    assert there.run.steps == STEPS + 1


def test_state_of_another_optimizer_is_not_taken_in_parts(saved: Path) -> None:
    trainer = linen(optax.sgd(0.1, momentum=0.9)).restore(saved / "linen_standard")
    assert trainer.imported is not None
    assert trainer.imported.missing
    assert all(name.startswith("opt/") for name in trainer.imported.missing)


def test_of_several_copies_of_the_parameters_those_of_the_model_are_taken() -> None:
    w = np.ones((2, 3), np.float32)
    stored = {("ema_params", "w"): w, ("params", "w"): w * 2, ("old", "params", "w"): w}
    found, _ = match(Path("4"), stored, {"params/w": w, "global_step": np.int32(0)})
    assert found["params/w"][0, 0] == 2
    assert found["global_step"] == 4


def test_what_orbax_has_not_finished_is_not_read(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "linen_manager" / "4", tmp_path / f"9{TEMPORARY}-1")
    assert find(tmp_path) is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        linen().restore(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "linen_manager",
        "nnx_both",
        pytest.param("linen_standard", marks=pytest.mark.nightly),
        pytest.param("linen_legacy", marks=pytest.mark.nightly),
    ],
)
def test_import_makes_a_checkpoint_of_jgraph(
    saved: Path, tmp_path: Path, run: Any, name: str
) -> None:
    code, text = run("import", saved / name, tmp_path / "4")
    assert code == 0, text
    assert run("verify", tmp_path / "4")[0] == 0
    trainer, other = (linen(), linen()) if "linen" in name else (of_nnx(), of_nnx())
    trainer.restore(tmp_path / "4")
    assert trainer.imported is None
    other.restore(saved / name)
    for a, b in zip(trainer.current_values(), other.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_import_of_what_only_its_model_can_explain_says_so(
    saved: Path, tmp_path: Path, run: Any
) -> None:
    code, text = run("import", saved / "nnx_model", tmp_path / "4")
    assert (code, "restore it with its model" in text) == (1, True)
    code, text = run("import", tmp_path, tmp_path / "4")
    assert (code, "no checkpoint of Orbax or Flax" in text) == (1, True)


def test_a_flax_program_restores_steps_with_a_checkpoint_manager(
    program: Any, tmp_path: Path
) -> None:
    trainer = linen()
    fit(trainer, 2, Checkpoints(tmp_path / "run"))
    fit(trainer, 1, Checkpoints(tmp_path / "run"))
    child = program[1]
    child.stdin.write(f"{tmp_path / 'run'} {tmp_path / 'out.npz'}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "read\n"
    read = np.load(tmp_path / "out.npz")
    assert (list(read["steps"]), read["step"], read["same"]) == ([2, 3], 3, True)
    predicted = trainer.predict(flax_program.data()[0])
    np.testing.assert_allclose(read["predicted"], predicted, rtol=1e-6)
    kernel = trainer.model()["params"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(read["kernel"], kernel)


# Steps of other programs are left alone.


@pytest.fixture
def others(saved: Path, tmp_path: Path) -> Path:
    """Steps 1 and 4 of Orbax's manager."""
    return Path(shutil.copytree(saved / "linen_manager", tmp_path / "others"))


def everything(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    ours = ("jgraph_writer", ".jgraph_writer")
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in files
        if not p.name.startswith(ours)
    }


@pytest.mark.bad_input_row(26)
def test_nothing_renames_or_deletes_steps_of_another_program(
    others: Path, run: Any
) -> None:
    (others / f"5{TEMPORARY}-7").mkdir()
    (others / f"5{TEMPORARY}-7" / "begun").write_text("by somebody else")
    before = everything(others)
    linen().restore(others)
    with pytest.raises(CheckpointForeignError, match="are of another program: 1, 4"):
        newest_good(others, checkpoint.verify)
    for args in (["ls"], ["verify"], ["prune", "--keep", 1]):
        code, text = run(*args, others)
        assert code == 0
        assert ("of another program" in text) == (args != ["prune", "--keep", 1])
    assert not [*others.glob("jgraph_*")]
    with CheckpointWriter(others, keep=1):
        pass
    with pytest.raises(CheckpointForeignError, match="has step 4 of another program"):
        fit(linen(), 1, Checkpoints(others))
    with pytest.raises(CheckpointForeignError, match="is not of jgraph"):
        checkpoint.save(others / "4", tree(4), overwrite=True)
    assert everything(others) == before
    with ocp.CheckpointManager(others) as manager:
        assert list(manager.all_steps()) == [1, 4]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_another_program_calls_best_stays_and_is_told_before_training(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model").write_text("good")
    best = tmp_path / "best"
    if kind == "directory":
        (tmp_path / "mine").rename(best)
    elif kind == "file":
        best.write_text("good")
    else:
        best.symlink_to("mine")
    before = everything(tmp_path)
    where, data = Checkpoints(tmp_path, best="eval_loss"), flax_program.data()
    with pytest.raises(CheckpointForeignError, match="/best is of another program"):
        fit(of_nnx(), 1, where, eval_data=data)
    assert everything(tmp_path) == before
    assert best.is_symlink() == (kind == "link")
    fit(linen(), 1, Checkpoints(tmp_path))


def test_a_run_saves_beside_steps_of_another_program_and_prunes_its_own(
    others: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = everything(others)
    trainer = linen().restore(others)
    where = Checkpoints(others, keep=1)
    fit(trainer, 2, where)
    fit(trainer, 1, where)
    assert (steps_in(others), our_steps(others)) == ([1, 4, 7], [7])
    assert everything(others).items() >= before.items()
    shutil.copytree(others / "4", others / "9")
    assert fit(linen().restore(others), 1).steps == 8
    assert "newer steps of another program, which are left alone: 9" in caplog.text


def test_prune_keeps_good_steps_where_the_newest_are_not(
    tmp_path: Path, run: Any
) -> None:
    filled(tmp_path, 6)
    (tmp_path / "6" / FILE).unlink()
    (tmp_path / "5" / FILE).write_text("{}")
    file = max((tmp_path / "4").glob("*/[0-9]*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)
    code, text = run("prune", tmp_path, "--keep", 2, "--json")
    assert (code, json.loads(text)["deleted"]) == (0, [1])
    assert steps_in(tmp_path) == [2, 3, 4, 5, 6]
    with CheckpointWriter(tmp_path, keep=2) as writer:
        assert writer.prune() == [2]  # a run looks at the files, not at their content


def test_a_step_that_lost_its_manifest_is_put_aside_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 2)
    (tmp_path / "2" / FILE).unlink()
    assert newest_good(tmp_path, checkpoint.verify)[0] == 1
    assert f"It is now {tmp_path / '2.corrupt'}" in caplog.text


def test_restore_on_the_command_line_says_that_a_damaged_step_stays(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path / "run", 2)
    (tmp_path / "run" / "2" / FILE).unlink()
    assert run("restore", tmp_path / "run", tmp_path / "copy")[0] == 0
    assert "It stays where it is; the step before is used" in caplog.text
    assert steps_in(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("there", ["a file", "a directory"])
def test_overwrite_replaces_checkpoints_of_jgraph_only(
    tmp_path: Path, there: str
) -> None:
    target = tmp_path / "model"
    if there == "a directory":
        target.mkdir()
        (target / "thesis.tex").write_text("three years")
    else:
        target.write_text("three years")
    with pytest.raises(CheckpointForeignError, match="it is not replaced"):
        checkpoint.save(target, tree(1), overwrite=True)
    assert "three years" in next(
        p.read_text() for p in [target, *target.glob("*")] if p.is_file()
    )
