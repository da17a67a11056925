"""A directory of steps: saved while training, the newest good one restored."""

import json
import logging
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  # names of small types
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint.checkpoint_managers import EveryNSteps

from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointSpaceError,
    CheckpointWriterError,
    ConfigError,
)
from jgraph.failpoints import armed, fail
from jgraph.runtime.files.manifest import Manifest, read_manifest
from jgraph.runtime.files.shard_files import make_proof
from jgraph.runtime.files.step_files import (
    TEMPORARY,
    begin_step,
    best_in,
    commit_step,
    steps_in,
)
from jgraph.runtime.files.writer_lease import newest
from jgraph.train.checkpoint import checkpoint, checkpoints
from jgraph.train.checkpoint.checkpoints import (
    Checkpoints,
    CheckpointWriter,
    copy,
    is_checkpoint,
    newest_good,
)
from jgraph.train.checkpoint.commit import reading
from jgraph.train.checkpoint.saver import Saver, Snapshot
from jgraph.train.evaluation.evaluations import Copy
from jgraph.train.run.report import Report
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss
from tests.support.saved_steps import check_kept, damage, filled, tree

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def trainer(seed: int = 0) -> Trainer:
    return Trainer(NnxMLP(rngs=nnx.Rngs(seed)), nnx_loss, optax.adam(1e-2))


def fit(one: Trainer, steps: int, where: Checkpoints | None = None) -> Any:
    return one.fit(data(), steps=steps, batch_size=8, checkpoint=where, progress=False)


def test_training_goes_on_from_the_directory_as_if_never_interrupted(
    tmp_path: Path,
) -> None:
    whole, first, second = trainer(), trainer(), trainer(1)
    where = Checkpoints(tmp_path / "run", every=2, keep=2)
    fit(whole, 9)
    fit(first, 5, where)
    assert steps_in(tmp_path / "run")[-1] == 5
    fit(second.restore(tmp_path / "run"), 4, where)
    for a, b in zip(whole.current_values(), second.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert newest(tmp_path / "run").released


@pytest.mark.parametrize(("first", "steps"), [(6, [2, 4, 6]), (1, [1, 2, 4, 6, 7])])
def test_a_run_in_one_process_saves_at_each_multiple_and_at_its_end(
    tmp_path: Path, first: int, steps: list[int]
) -> None:
    one, where = trainer(), Checkpoints(tmp_path, every=2, keep=10)
    fit(one, first, where)
    if first == 1:  # a run that begins between two of them
        fit(one, 6, where)
    assert steps_in(tmp_path) == steps
    whole = trainer()
    fit(whole, 4)
    fit(other := trainer(1).restore(tmp_path / "4"), 1)
    fit(whole, 1)
    for a, b in zip(whole.current_values(), other.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.row(27)
def test_a_damaged_step_is_put_aside_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    damage(tmp_path / "3")
    with caplog.at_level(logging.ERROR):
        step, restored = newest_good(
            tmp_path, lambda path: checkpoint.restore(path, tree(0))
        )
    assert step == 2
    assert int(restored["params"]["w"][0, 0]) == 2
    assert (tmp_path / "3.corrupt").is_dir()
    assert "JG-302" in caplog.text
    assert "the step before is used" in caplog.text


@pytest.mark.row(27)
def test_a_trainer_takes_the_step_before_one_with_a_flipped_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, where = trainer(), trainer(1), Checkpoints(tmp_path, every=2)
    fit(first, 2, where)
    before = first.current_values()
    fit(first, 2, where)
    damage(tmp_path / "4")
    second.restore(tmp_path)
    for a, b in zip(before, second.current_values(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert steps_in(tmp_path) == [2]
    assert (tmp_path / "4.corrupt").is_dir()
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"JG-302 the checkpoint at {tmp_path / '4'} is damaged" in said
    assert "layers/0/kernel" in said
    fit(second, 2, where)
    assert steps_in(tmp_path) == [2, 4]


@pytest.mark.bad_input_row(22)
def test_no_good_step_is_an_error_that_names_the_damaged(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    for step in ("1", "2"):
        damage(tmp_path / step)
    with pytest.raises(CheckpointCorruptError, match="2, 1 are damaged"):
        newest_good(tmp_path, checkpoint.verify)
    assert sorted(path.name for path in tmp_path.glob("*.corrupt")) == [
        "1.corrupt",
        "2.corrupt",
    ]


def test_a_step_that_its_writer_deletes_meanwhile_is_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 1)

    def read(path: Path) -> Any:
        if path.name == "1":  # now the writer goes on, and keeps the newest only
            with CheckpointWriter(tmp_path, keep=1) as writer:
                writer.save(2, tree(2))
        return checkpoint.verify(path)

    step, manifest = newest_good(tmp_path, read)
    assert (step, manifest.step) == (2, 2)
    assert "JG-302" not in caplog.text


def test_a_step_that_cannot_be_read_here_is_not_called_damaged(tmp_path: Path) -> None:
    """This process has no more files, or no memory."""
    filled(tmp_path, 2)
    checkpoint.verify(tmp_path / "2")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def read(path: Path) -> Any:
        os.close(first := os.open(path, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (first, hard))
        try:
            return checkpoint.verify(path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with pytest.raises(CheckpointError, match=r"may be good.*Too many open") as files:
        newest_good(tmp_path, read)
    with (
        pytest.raises(CheckpointError, match="may be good") as memory,
        reading(tmp_path),
    ):
        raise MemoryError
    for caught in (files, memory):
        assert not isinstance(caught.value, CheckpointCorruptError)
    assert steps_in(tmp_path) == [1, 2]


def test_a_directory_that_a_master_saves_to_is_one_of_steps(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    make_proof(tmp_path)
    assert not is_checkpoint(tmp_path)
    assert newest_good(tmp_path, checkpoint.verify)[0] == 2


def test_a_step_of_another_model_is_not_put_aside(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    with pytest.raises(CheckpointError, match="use the model and optimizer"):
        trainer().restore(tmp_path)
    assert steps_in(tmp_path) == [1]


def test_orbax_decides_what_stays_and_the_newest_always_does(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=2) as writer:
        for step in range(1, 4):
            writer.save(step, tree(step))
    assert steps_in(tmp_path) == [2, 3]
    with CheckpointWriter(tmp_path, keep=EveryNSteps(4)) as writer:
        for step in (4, 5):
            writer.save(step, tree(step))
    assert steps_in(tmp_path) == [4, 5]


def test_plain_orbax_lists_and_reads_the_steps(tmp_path: Path) -> None:
    filled(tmp_path)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [1, 2, 3]
    alone = ocp.StandardCheckpointer().restore(tmp_path / "2")
    assert int(alone["params"]["w"][0, 0]) == 2


def test_what_a_writer_left_unfinished_is_removed_by_the_next(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    of_others = {"notes", f"2{TEMPORARY}", "4.old-2024", "4.old-20241231"}
    for name in (f"2.new-0123abcd{TEMPORARY}", "3.going", *of_others):
        (tmp_path / name / "inside").mkdir(parents=True)
    with CheckpointWriter(tmp_path):
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {"1", *of_others, "jgraph_writer.2.json"}


def test_a_writer_that_could_not_begin_leaves_the_directory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "clear_unfinished", lambda _: fail())
        with pytest.raises(CheckpointError, match="cannot write"):
            CheckpointWriter(tmp_path).__enter__()
    with CheckpointWriter(tmp_path):
        pass


@pytest.mark.row(20)
def test_who_was_replaced_as_writer_commits_nothing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, tree(1))

        def taken_over() -> None:
            (tmp_path / "jgraph_writer.9.json").write_text("{}")
            writer._lease.check()

        with pytest.raises(CheckpointWriterError, match="must not"):
            checkpoint.save(tmp_path / "2", tree(2), before_commit=taken_over)
        with pytest.raises(CheckpointWriterError, match="must not"):
            writer.save(3, tree(3))
    assert steps_in(tmp_path) == [1]


def test_two_runs_may_not_save_to_one_directory(tmp_path: Path) -> None:
    where = Checkpoints(tmp_path)
    refused = pytest.raises(CheckpointWriterError, match="has a writer already")
    with CheckpointWriter(tmp_path), refused:
        fit(trainer(), 1, where)
    fit(trainer(), 1, where)


def test_a_new_run_does_not_write_among_the_steps_of_another(tmp_path: Path) -> None:
    fit(trainer(), 3, Checkpoints(tmp_path))
    with pytest.raises(CheckpointError, match="has step 3, and this Trainer is at 0"):
        fit(trainer(), 3, Checkpoints(tmp_path))


class Source:
    """Snapshots of a made-up run."""

    def __init__(self) -> None:
        self.step = 0
        self.huge = False

    def __call__(self, _: object = None) -> Snapshot:
        state = tree(self.step)
        if self.huge:
            state["params"]["w"] = np.broadcast_to(np.float32(0), (1 << 25, 1 << 25))
        return Snapshot(self.step, state, None)


@pytest.mark.row(30)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
def test_client_that_was_away_is_content_with_what_the_master_has_saved(
    tmp_path: Path, *, saved: bool
) -> None:
    """Its lease had ended, so the master became the writer, and was about to save."""
    source = Source()

    def save_elsewhere() -> None:
        if saved:
            checkpoint.save(tmp_path / "7", tree(7))

    saving = Saver(Checkpoints(tmp_path), source, 0, wait_elsewhere=save_elsewhere)
    with saving:
        (tmp_path / "jgraph_writer.9.json").write_text("{}")
        source.step = 7
        if saved:
            saving.finish()
        else:
            with pytest.raises(CheckpointWriterError, match="must not"):
                saving.finish()
    assert steps_in(tmp_path) == ([7] if saved else [])


@pytest.mark.row(26)
def test_training_goes_on_when_a_save_fails_and_the_second_is_loud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    with Saver(Checkpoints(tmp_path, every=10), source, 0, in_process=True) as saving:
        for source.step in range(0, 60, 10):
            source.huge = source.step in (20, 30)
            saving.note(source.step)
            if saving._under_way is not None:  # else the next would only be skipped
                saving._under_way.exception()
        source.step = 60
        saving.finish()
    levels = [
        record.levelname
        for record in caplog.records
        if "JG-304" in record.msg % record.args
    ]
    assert levels == ["WARNING", "ERROR"]
    assert steps_in(tmp_path) == [40, 50, 60]


def test_training_goes_on_when_the_directory_of_its_steps_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, where = Source(), tmp_path / "run"
    with Saver(Checkpoints(where, every=10), source, 0, in_process=True) as saving:
        shutil.rmtree(where)
        for source.step in (10, 20):
            saving.note(source.step)
        with pytest.raises(CheckpointError, match=r"to .*run: No such file"):
            saving.finish()
    told = [r.levelname for r in caplog.records if "No such file" in r.getMessage()]
    assert told[:2] == ["WARNING", "ERROR"]


@pytest.mark.parametrize("end", [Saver.finish, Saver.save], ids=["end", "at rest"])
def test_a_step_that_was_saved_under_way_says_at_rest_where_the_run_is(
    tmp_path: Path, end: Callable[[Saver], None]
) -> None:
    """Its position was asked for before its state: batches of it would come again."""
    done = iter([7, 10])
    take = lambda _: Snapshot(10, tree(10), {"done": next(done)})
    with Saver(Checkpoints(tmp_path, every=5), take, 0) as saving:
        saving.save_halted(lambda: True)
        saving.wait()
        assert read_manifest(tmp_path / "10").position == {"done": 7}
        end(saving)
        assert checkpoint.verify(tmp_path / "10").position == {"done": 10}
    assert not [path for path in tmp_path.iterdir() if TEMPORARY in path.name]


@pytest.mark.parametrize("is_live", [False, True], ids=["copied", "live"])
@pytest.mark.parametrize("stood", [False, True])
def test_what_went_on_while_it_was_copied_is_not_saved(
    tmp_path: Path, *, stood: bool, is_live: bool
) -> None:
    there = list[list[str]]()

    def go_on() -> bool:
        there.append([p.name for p in tmp_path.iterdir() if "10" in p.name])
        return stood

    def take(taken: Callable[[], None] | None) -> Snapshot:
        if taken is not None and not is_live:
            taken()
        return Snapshot(10, tree(10), None, is_live=is_live)

    with Saver(Checkpoints(tmp_path, every=5), take, 0) as saving:
        saving.save_halted(go_on)
    assert steps_in(tmp_path) == ([10] if stood else [])
    assert [bool(names) for names in there] == [is_live], "written before it went on"


def test_what_comes_out_in_the_end_and_cannot_be_saved_is_an_error(
    tmp_path: Path,
) -> None:
    source = Source()
    source.huge = True
    full = pytest.raises(CheckpointSpaceError)
    with Saver(Checkpoints(tmp_path), source, 0) as saving, full:
        saving.finish()
    assert newest(tmp_path).released


def evaluated(step: int, loss: float) -> Report:
    """A report with a copy of a made-up run that was evaluated."""
    copy = Copy((), tree(step), {"done": step})
    found = {"loss": loss}
    return Report(step, 100, 1.0, 1.0, 1.0, {}, found, step, copy=copy)


def test_a_best_copy_that_could_not_be_saved_is_not_the_best(tmp_path: Path) -> None:
    given = Checkpoints(tmp_path, best="eval_loss")
    with Saver(given, Source(), 0) as saving:
        saving.save_best(evaluated(10, 3.0))
        saving.wait()
        with armed("checkpoint.arrays_written", fail):
            saving.save_best(evaluated(20, 1.0))
            saving.wait()
        assert best_in(tmp_path) == 10
        saving.save_best(evaluated(30, 4.0))
        saving.save_best(evaluated(40, 1.0))
        saving.save_best(evaluated(50, 2.0))  # that of 40 may still be under way
    assert best_in(tmp_path) == 40
    assert steps_in(tmp_path) == [10, 40]


@pytest.mark.parametrize("end", [Saver.finish, Saver.save], ids=["end", "at rest"])
def test_a_best_copy_that_is_saved_again_at_rest_is_still_known_as_the_best(
    tmp_path: Path, end: Callable[[Saver], None]
) -> None:
    given, source = Checkpoints(tmp_path, best="eval_loss"), Source()
    with Saver(given, source, 0) as saving:
        saving.save_best(evaluated(10, 3.0))
        source.step = 10
        end(saving)
    assert best_in(tmp_path) == 10
    assert read_manifest(tmp_path / "10").evaluation == {"eval_loss": 3.0}


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_options_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        Checkpoints("here", **wrong)


@pytest.mark.parametrize("name", ["every", "keep"])
@pytest.mark.parametrize("value", ["best", 2.5, None, True, [3]])
def test_what_is_no_number_of_steps_is_refused_before_the_run(
    name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .* must be a whole number"):
        Checkpoints("here", **{name: value})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a/b", "a slash, a backslash"),
        ("a\\b", "a slash, a backslash"),
        ("a" * 250, "longer than 255 bytes"),
    ],
)
def test_a_name_that_is_none_of_a_directory_is_refused_before_training(
    name: str, why: str, tmp_path: Path
) -> None:
    class Named(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.parts = nnx.Dict({name: nnx.Linear(3, 1, rngs=rngs)})

        def __call__(self, x: Any) -> Any:
            return self.parts[name](x)

    def loss(model: Any, x: Any) -> Any:
        return model(x).mean()

    trainer = Trainer(Named(nnx.Rngs(0)), loss, optax.sgd(0.1))
    x = np.ones((8, 3), np.float32)
    with pytest.raises(CheckpointError, match=why):
        trainer.fit(
            x, steps=1, batch_size=8, checkpoint=Checkpoints(tmp_path), progress=False
        )
    run = trainer.fit(x, steps=1, batch_size=8, progress=False)
    with pytest.raises(CheckpointError, match=why):
        run.save(tmp_path / "saved")
    assert run.steps == 1
    assert list(tmp_path.iterdir()) == []


def test_names_that_orbax_would_store_in_one_place_are_refused_before_training(
    tmp_path: Path,
) -> None:
    ones = np.ones((2, 3), np.float32)
    two = {"params": {"a": {"b": ones}, "a.b": ones}, "opt": (), "state": {}}
    refused = pytest.raises(CheckpointError, match="Orbax stores both as")
    with refused:
        checkpoint.save(tmp_path / "1", {**two, "global_step": np.int32(1)})
    assert list(tmp_path.iterdir()) == []

    class Dotted(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            inner = nn.Dense(3, name="a", use_bias=False)(x)
            return inner + self.param("a.kernel", nn.initializers.ones, (3,))

    x = np.ones((8, 2), np.float32)

    def loss(params: Any, batch: Any) -> Any:
        out: Any = Dotted().apply({"params": params}, batch)
        return jnp.mean(out)

    trainer = Trainer(Dotted(), loss, optax.sgd(0.1))
    with pytest.raises(CheckpointError, match="a name without dots"):
        trainer.fit(x, steps=1, batch_size=8, checkpoint=Checkpoints(tmp_path))
    assert trainer.fit(x, steps=1, batch_size=8, progress=False).steps == 1


@pytest.mark.parametrize("dtype", ["uint4", "uint2", "int4", "float6_e2m3fn"])
def test_numbers_of_less_than_a_byte_come_back(tmp_path: Path, dtype: str) -> None:
    w = (np.arange(24) % 4).reshape(4, 6).astype(dtype)
    state = {"params": {"w": w}, "opt": (), "state": {}, "global_step": np.int32(1)}
    path = checkpoint.save(tmp_path / "1", state)
    restored = checkpoint.restore(path, state)["params"]["w"]
    np.testing.assert_array_equal(restored.view(np.uint8), w.view(np.uint8))
    assert restored.dtype == w.dtype
    checkpoint.verify(path)
    alone = ocp.StandardCheckpointer().restore(path)["params"]["w"]
    assert np.array_equal(
        np.asarray(alone).astype(np.float32), w.astype(np.float32)
    ) or (alone.dtype == np.uint8)


SAVES = """
import json, sys
import numpy as np
from jgraph.train.checkpoint.checkpoints import CheckpointWriter

def tree(step):
    w = np.full((64, 1024), step, np.float32)
    return {"params": {"w": w}, "opt": (), "state": {}, "global_step": np.int32(step)}

with CheckpointWriter(sys.argv[1], keep=3) as writer:
    first = int(sys.argv[2])
    for step in range(first, first + 10_000):
        writer.save(step, tree(step))
        print(json.dumps(step), flush=True)
"""


@pytest.mark.row(25)
@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(1, 20))]
)
def test_a_writer_killed_at_any_moment_loses_no_saved_step(
    tmp_path: Path, seed: int
) -> None:
    moment = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(tmp_path), "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    told = [int(child.stdout.readline()) for _ in range(moment.randint(1, 5))]
    # Meanwhile nobody else may write; afterwards anybody, at once.
    with pytest.raises(CheckpointWriterError, match=f"process {child.pid} on "):
        CheckpointWriter(tmp_path).__enter__()
    with suppress(subprocess.TimeoutExpired):
        child.wait(moment.uniform(0, 0.1))
    child.kill()
    told += [json.loads(line) for line in child.stdout.read().splitlines()]
    child.wait()
    child.stdout.close()
    check_kept(tmp_path, told, keep=3)
    step, restored = newest_good(
        tmp_path, lambda path: checkpoint.restore(path, tree(0))
    )
    # It may have been killed before it could tell.
    assert step in (told[-1], told[-1] + 1)
    np.testing.assert_array_equal(restored["params"]["w"], tree(step)["params"]["w"])
    with CheckpointWriter(tmp_path, keep=3) as writer:
        names = [path.name for path in tmp_path.iterdir()]
        assert not any(TEMPORARY in name or "going" in name for name in names)
        writer.save(step + 1, tree(step + 1))
    assert not list(tmp_path.glob("*.corrupt"))


def test_all_of_a_step_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what libraries wrote, and what is written by the master and copied."""
    synced: dict[int, tuple[int, int]] = {}
    fsync = os.fsync

    def note(fd: int) -> None:
        about = os.fstat(fd)
        synced[about.st_ino] = about.st_size, about.st_mtime_ns
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    checkpoint.save(tmp_path / "1", tree(1))
    made, like = begin_step(tmp_path)
    commit_step(made, Manifest(2, like.leaves), lambda: None)
    copy(tmp_path / "1", tmp_path / "3")
    for step in "123":
        for path in (tmp_path / step).rglob("*"):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                assert synced[about.st_ino] == (about.st_size, about.st_mtime_ns), path
            assert path.is_symlink() or about.st_ino in synced, path
