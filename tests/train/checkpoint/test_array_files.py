"""Each ps writes and reads its own shards of a checkpoint."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.values import VariableValues
from jgraph.errors import CheckpointCorruptError
from jgraph.train.checkpoint import array_files, checkpoint
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def trainer(cluster: Cluster | None, seed: int, strategy: Any = None) -> Trainer:
    return Trainer(
        NnxMLP(rngs=nnx.Rngs(seed)),
        nnx_loss,
        optax.adam(1e-2),
        cluster=cluster,
        strategy=strategy,
    )


def cut(kind: str, shards: int = 2) -> jg.AsyncPS:
    partitioner = jg.fixed_size_partitioner(shards)
    return jg.AsyncPS(variable_partitioner=partitioner, partition_strategy=kind)


def variable_bytes(cluster: Cluster) -> int:
    return sum(t["variable_bytes"] for t in cluster.status().to_dict()["tasks"])


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_ps_write_and_read_and_nothing_but_scalars_passes_through_the_client(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = trainer(cluster, 1), trainer(cluster, 2)
    values = one.current_values()
    moved: list[tuple[int, ...]] = []
    read, write = VariableValues.read, VariableValues.write

    def reading(self: Any, variables: Any) -> Any:
        moved.extend(v.shape for v in variables)
        return read(self, variables)

    def writing(self: Any, variables: Any, given: Any) -> None:
        moved.extend(v.shape for v in variables)
        write(self, variables, given)

    with monkeypatch.context() as patched:
        patched.setattr(VariableValues, "read", reading)
        patched.setattr(VariableValues, "write", writing)
        two.restore(one.save(tmp_path / "1"))
    assert set(moved) == {()}
    assert_equal(two.current_values(), values)
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (cut("div"), cut("mod")),
        (cut("mod"), None),
        pytest.param(jg.SyncPS(), cut("div", 3), marks=pytest.mark.nightly),
        pytest.param(cut("mod", 3), jg.SyncPS(), marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_some_shards_restores_into_others_and_by_orbax_alone(
    cluster: Cluster, tmp_path: Path, saved: Any, restored: Any
) -> None:
    one = trainer(cluster, 1, saved)
    one.fit(data(), steps=3, batch_size=8, progress=False)
    path = one.save(tmp_path / "1")
    alone = ocp.StandardCheckpointer().restore(path)
    model = one.model()
    assert_equal(alone["params"]["layers"]["0"]["kernel"], model.layers[0].kernel[...])
    two = trainer(cluster if restored else None, 2, restored).restore(path)
    assert_equal(two.current_values(), one.current_values())
    checkpoint.verify(path)
    one.close()
    two.close()


@pytest.mark.row(27)
@pytest.mark.parametrize("how", ["a bit", "cut off"])
def test_what_a_ps_reads_is_compared_before_anything_changes(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    one, two = trainer(cluster, 1), trainer(cluster, 2)
    before = two.current_values()
    path = one.save(tmp_path / "1")
    file = path / "params.layers.0.kernel" / "0.0"
    content = bytearray(file.read_bytes())
    content[17] ^= 4
    file.write_bytes(bytes(content) if how == "a bit" else content[:-1])
    with pytest.raises(CheckpointCorruptError, match=r"layers|bytes instead of"):
        two.restore(path)
    assert_equal(two.current_values(), before)
    one.close()
    two.close()


def test_the_client_writes_and_reads_for_tasks_with_another_disk(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = trainer(cluster, 1, cut("mod")), trainer(cluster, 2)
    # As for a task that finds another file there, or none.
    monkeypatch.setattr(array_files, "make_proof", lambda directory: bytes(32))
    with caplog.at_level(logging.INFO, "jgraph.checkpoint"):
        two.restore(one.save(tmp_path / "1"))
    assert_equal(two.current_values(), one.current_values())
    told = [r.getMessage() for r in caplog.records if r.name == "jgraph.checkpoint"]
    wanted = "is not the same directory for /job:ps/task:0, /job:ps/task:1"
    assert [wanted in line for line in told] == [True, True]  # saving, restoring
    one.close()
    two.close()


def test_a_save_while_training_is_of_one_moment_and_leaves_no_copies(
    cluster: Cluster, tmp_path: Path
) -> None:
    one = trainer(cluster, 1)
    one.fit(
        data(),
        steps=60,
        batch_size=8,
        progress=False,
        checkpoint=jg.Checkpoints(tmp_path / "run", every=20, keep=9),
    )
    assert (tmp_path / "run" / "60").exists()
    held = variable_bytes(cluster)
    one.close()
    own = sum(np.asarray(v).nbytes for v in trainer(None, 1).current_values())
    assert held - variable_bytes(cluster) == own


def test_what_is_cut_along_another_axis_comes_to_the_client(
    cluster: Cluster, tmp_path: Path
) -> None:
    def columns(shape: Any, dtype: Any) -> list[int]:
        return [1, 2] if len(shape) == 2 else [1] * len(shape)

    one = trainer(cluster, 1, jg.AsyncPS(variable_partitioner=columns))
    two = trainer(cluster, 2, jg.AsyncPS(variable_partitioner=columns))
    two.restore(one.save(tmp_path / "1"))
    assert_equal(two.current_values(), one.current_values())
    one.close()
    two.close()
