"""Copies of what each ps holds: equal bit by bit, and enough to go on from."""

import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.state.table_calls import state_of_shard
from jgraph.clock import SystemClock
from jgraph.cluster.options import RECORDS_DIR
from jgraph.errors import ConfigError, CopyLostError
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.launch.local.cluster import LocalCluster
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import NodeRan, Record
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.wire.record_codec import record_to
from jgraph.runtime.store.store import VariableStore
from jgraph.server.replication.follower import ChangeApplier
from jgraph.server.runs.copies import RunCopies
from jgraph.train.state.durability import Durability
from jgraph.train.strategies.async_runner import AsyncPS, AsyncRunner
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.strategies.sync_runner import SyncPS, SyncRunner
from jgraph.train.trainer import Trainer
from tests.support.models import NnxDeep, NnxMLP, data, nnx_loss
from tests.support.servers import connected

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def end_records(
    cluster: Cluster, stream: str, task: TaskName, version: int | None = None
) -> range:
    """Makes a copy final, as the master of a run does; returns its versions."""
    order = pb.EndRecords(stream=stream, version=version)
    address = cluster.spec.address(task)
    reply = cluster.call("EndRecords", frame(end_records=order), to=address)
    return range(body_of(reply).first, body_of(reply).end)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(logs: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORDS_DIR, str(logs))
        with connected(ps=2, worker=2) as cluster:
            yield cluster


def stored(
    cluster: Cluster, container: str, columns: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the values of all variables of a container but columns of hash tables."""
    query = frame(variable_query=pb.VariableQuery(containers=[container]))
    rows = body_of(cluster.call("Master.Variables", query)).variables
    there = [
        Variable(
            row.name,
            (tuple(row.type.shape), np.dtype(row.type.dtype), None),
            device=row.task,
            container=container,
        )
        for row in rows
        if row.name not in columns
    ]
    return cluster.session().read(there)


class Embedding(nnx.Module):
    """Rows of an array, of a hash table, and statistics that a worker writes."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(1000, 4, rngs=rngs)
        self.ads = jg.HashTable(4, 1 << 14, admission=jg.Admission(sightings=2))
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.norm(self.words(ids) + self.ads(ids)).sum()


def embedding_loss(model: Embedding, ids: Any) -> Any:
    return jnp.mean((model(ids) - 1.0) ** 2)


def trainer_of(cluster: Cluster, strategy: Strategy, kind: str) -> Trainer:
    if kind == "dense":
        model: tuple[Any, Any] = NnxMLP(rngs=nnx.Rngs(0)), nnx_loss
    elif kind == "deep":
        model = NnxDeep(rngs=nnx.Rngs(0)), nnx_loss
    else:
        model = Embedding(), embedding_loss
    return Trainer(
        *model, optax.adam(1e-2), cluster=cluster, strategy=strategy, sparse="lazy"
    )


def data_of(kind: str) -> Any:
    ids = np.random.default_rng(0).zipf(1.3, 400) % 1000
    return ids.astype(np.int32) if kind == "rows" else data()


OFTEN = {
    (AsyncPS, "rows", "replica"),
    (SyncPS, "deep", "log"),
}


async def stay(_: RunCopies) -> None:
    """Leaves what is kept of a run where it is, to be looked at."""


@pytest.mark.row(13)
@pytest.mark.parametrize(
    ("strategy", "kind", "durability"),
    [
        pytest.param(
            *(strategy, kind, durability),
            id=f"{strategy.__name__}-{kind}-{durability}",
            marks=() if (strategy, kind, durability) in OFTEN else pytest.mark.nightly,
        )
        for strategy in (AsyncPS, SyncPS)
        for kind in ("dense", "deep", "rows")
        for durability in ("replica", "log")
    ],
)
def test_records_make_what_each_ps_holds_again_bit_by_bit(
    cluster: Cluster,
    logs: Path,
    strategy: type[AsyncPS] | type[SyncPS],
    kind: str,
    durability: Durability,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After updates by two workers, which no two runs apply in the same order.

    A replica has applied them by then; of a log they are applied now.
    """
    monkeypatch.setattr(RunCopies, "close", stay)
    trainer = trainer_of(cluster, strategy(durability=durability), kind)
    for _ in range(2):  # of which only the second one is kept
        trainer.fit(data_of(kind), steps=30, batch_size=8, progress=False)
    step, runner, _ = trainer._parts.build()
    assert isinstance(runner, AsyncRunner | SyncRunner)
    kept = runner.state.copies
    assert kept is not None
    streams = {stream: number for number, stream in enumerate(kept.streams)}
    tasks = cluster.tasks("ps")
    if durability == "log":
        homes = tasks
        for task in tasks:
            kept._take(task, task)
    else:
        homes = tasks[::-1]
    for home, stream in zip(homes, streams, strict=True):
        newest = end_records(cluster, stream, home)[-1]
        assert newest == (30 if strategy is SyncPS else 0)
        end_records(cluster, stream, home, newest)
    shards = [spec for table in step.tables for _, spec in table.shards]
    columns = {column.name for spec in shards for column in spec.columns}
    own = stored(cluster, step.container, columns)
    copies = [stored(cluster, stream, columns) for stream in streams]
    assert all(copies)
    found = {**copies[0], **copies[1]}
    assert own.keys() == found.keys()
    for name, value in own.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    for table in step.tables:
        for number, (task, spec) in enumerate(table.shards):
            there = state_of_shard(cluster, task, step.container, spec)
            copy = state_of_shard(cluster, homes[number], kept.streams[number], spec)
            assert len(there["keys"]) > 10
            for name, value in there.items():
                np.testing.assert_array_equal(copy[name], value, err_msg=name)
    due = 2 if durability == "log" else 0
    wait_until(lambda: len(list(logs.rglob("*.log"))) == due)
    trainer.close()
    assert not stored(cluster, kept.streams[0])
    wait_until(lambda: not list(logs.rglob("*.*")))


def wait_until(done: Callable[[], bool]) -> None:
    """Waits for threads of the servers."""
    clock = SystemClock()
    deadline = clock.now() + 10
    while not done():
        assert clock.now() < deadline
        threading.Event().wait(0.01)


def test_replica_on_one_ps_is_refused() -> None:
    with (
        connected(ps=1, worker=1) as alone,
        pytest.raises(ConfigError, match="keeps a copy of each ps on another one"),
    ):
        trainer_of(alone, AsyncPS(durability="replica"), "dense").fit(
            data(), steps=1, batch_size=8
        )


def test_log_without_a_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORDS_DIR, raising=False)
    with (
        connected(ps=1, worker=1) as alone,
        pytest.raises(ConfigError, match="needs a directory for the log of /job:ps"),
    ):
        trainer_of(alone, AsyncPS(durability="log"), "dense").fit(
            data(), steps=1, batch_size=8, progress=False
        )


@pytest.mark.procs
def test_processes_of_one_machine_have_a_temporary_directory_for_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECORDS_DIR, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LocalCluster(ps=1, workers=1, restarts=1) as servers:
        trainer = trainer_of(servers, AsyncPS(durability="log"), "dense")
        trainer.fit(data(), steps=2, batch_size=8, progress=False)
        assert list(tmp_path.glob("jgraph-updates-*/*"))
    assert not list(tmp_path.glob("*"))


def test_unknown_level_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="may be 'checkpoint', 'replica' or 'log'"):
        AsyncPS(durability="raid")  # type: ignore[arg-type]


@pytest.mark.row(17)
def test_copy_that_took_the_place_of_its_ps_takes_nothing_more_from_it(
    cluster: Cluster,
) -> None:
    """No step of the old one is acknowledged from then on: its run ends."""
    trainer = trainer_of(cluster, AsyncPS(durability="replica"), "dense")
    replaced: list[int] = []

    def replace(run: Any, report: Any) -> None:
        if not replaced:
            runner = trainer._parts.build()[1]
            assert isinstance(runner, AsyncRunner)
            assert runner.state.copies is not None
            ps = cluster.tasks("ps")[1]
            end = end_records(cluster, runner.state.copies.streams[0], ps)
            replaced.append(len(end))

    with pytest.raises(CopyLostError, match="has taken the place of what /job:ps/task"):
        trainer.fit(
            data(), steps=10**6, batch_size=8, progress=False, callbacks=[replace]
        )
    assert replaced[0] > 0
    trainer.close()


def test_copy_without_one_of_its_records_is_none() -> None:
    store = VariableStore(TaskName("/job:ps/task:1"))
    copier = ChangeApplier("copy", [None], store)
    copier.apply(record_to("copy", Record(1, "w", [np.array([1, 2], np.float32)])))
    with pytest.raises(CopyLostError, match="record 3 of 'copy' came after 1"):
        copier.apply(record_to("copy", Record(3, "w", [np.array([3, 4], np.float32)])))
    with pytest.raises(CopyLostError, match="of program 0, which is not known here"):
        copier.apply(record_to("copy", Record(2, NodeRan(0, 0), [])))
    assert copier.number == 1
    w = StoredVariable("w", ValueType((2,), "float32"), "copy")
    assert store.read([w])[0].tolist() == [1, 2]
