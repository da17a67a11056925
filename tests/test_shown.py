"""How public objects show themselves: in a sentence, and as HTML with nothing in it."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.dashboard_process import Frame
from jgraph.client.placement.auto import AutoReport
from jgraph.client.runs.runs import RunInfo
from jgraph.client.status import ClusterStatus, HashTableStatus
from jgraph.cluster.events import Event
from jgraph.errors import FeedError
from jgraph.graph.ir import TaskName
from jgraph.plan.auto.chain import Balance, StageCost
from jgraph.plan.auto.cost_model import CostModel, Link, TaskSpeed
from jgraph.train.checkpoint.flax_checkpoints import Imported
from jgraph.train.run.members import RunMember, RunMembers
from jgraph.train.run.notebook import CellView
from jgraph.train.run.report import Report
from jgraph.train.run.rounds import Round, Rounds
from jgraph.train.run.standings import WorkerStanding
from tests.support.shown_html import EVIL, Tags

X = np.ones((8, 2), np.float32)


def told_by_a_wrong_master(status: ClusterStatus) -> ClusterStatus:
    """Addresses in a cluster description are checked; what tasks tell is not."""
    (task,) = status.tasks
    table = HashTableStatus(EVIL, EVIL, 1, 2, 3, 4)
    wrong = replace(task, address=EVIL, state=EVIL, platform=EVIL, jax=EVIL)
    wrong = replace(wrong, hash_tables=(table,))
    return replace(status, tasks=(wrong,))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What users hold, by the public name that made it; named as badly as it may be."""

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch) - 1) ** 2)

    loss.__name__ = EVIL
    table = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    trainer = jg.Trainer(table, loss, optax.sgd(0.1), metrics={EVIL: loss})
    run = trainer.fit(X, steps=2, batch_size=4, progress=False)
    variable = jg.Variable(EVIL, jnp.ones(2))
    models = tmp_path_factory.mktemp("models")
    exported = jg.export(lambda x: {EVIL: x}, X, models / "evil")
    models_server = jg.serve(models)
    live = run.serve("live", X, http_port=None, max_rows=1)

    def step(x: Any) -> Any:
        variable[...] = variable[...] * x
        return {EVIL: variable[...].sum()}

    step.__name__ = EVIL
    function = jg.function(step)
    graph = function.graph(X[0])
    mean = lambda y, t: jnp.mean((y - t) ** 2)
    pipe = jg.Pipeline([jnp.matmul, jnp.matmul], mean, microbatches=2)
    server = jg.Server({"worker": ["localhost:0"]})
    cluster = jg.connect(server.target)
    session = cluster.session(container=EVIL)
    session.run(lambda x: x, 1.0, trace=True)
    task = TaskName("/job:worker/task:0")
    measured = CostModel(
        {task: TaskSpeed(EVIL, 1e9, 1e9, 1e9, 1e9)}, {}, Link(1e-4, 1e9), {}
    )
    yield {
        "Admission": jg.Admission(sightings=2),
        "AsyncPS": jg.AsyncPS(variable_partitioner=jg.fixed_size_partitioner(2)),
        "Checkpoints": jg.Checkpoints(EVIL),
        "ClusterSpec": jg.ClusterSpec({"ps": ["localhost:1"]}),
        "CostModel": measured,
        "DeviceSpec": jg.DeviceSpec.from_string("/job:ps/task:0"),
        "Graph": graph,
        "AutoScale": jg.AutoScale(),
        "Elastic": jg.Elastic(workers=(1, 4)),
        "Run.members": RunMembers([RunMember(TaskName(EVIL), EVIL, 0.0, 3, 1.0)]),
        "Run.rounds": Rounds(
            [Round(1, (TaskName(EVIL),), {TaskName(EVIL): EVIL}, 9, 4096, 0.5)]
        ),
        "EarlyStopping": jg.EarlyStopping(EVIL),
        "NanGuard": jg.NanGuard(),
        "StopAtStep": jg.StopAtStep(10),
        "TensorBoard": jg.TensorBoard(EVIL),
        "MLflow": jg.MLflow(EVIL),
        "WandB": jg.WandB(EVIL),
        "GreedyLoadBalancing": jg.GreedyLoadBalancing(),
        "HashTable": jg.HashTable(dim=2, capacity_bytes=1 << 20),
        "Initial": jg.Initial(scale=0.5),
        "JGError": FeedError(EVIL),
        "Local": jg.Local(),
        "LocalSGD": jg.LocalSGD(sync_every=20),
        "Federated": jg.Federated(local_epochs=5, fraction=0.1, min_clients=8),
        "Pipeline": pipe,
        "Pipeline.balance": Balance(
            (StageCost(TaskName(EVIL), 0, 1, 1e6, 1e9, 1e-3, 0.0, 9),), 1e-3
        ),
        "Privacy": jg.Privacy(noise_multiplier=1.1, clip=1.0, delta=1e-5),
        "RoundRobin": jg.RoundRobin(),
        "SecureSum": jg.SecureSum(threshold=3),
        "Server": server,
        "Session": session,
        "Session.make_callable": session.make_callable(lambda x: x, 1.0),
        "Session.run_metadata": session.run_metadata,
        "Cluster.trace": cluster.trace(last=60),
        "Session.plan": session.plan(function, X[0]),
        "Source": jg.Source.npz(EVIL),
        "SyncPS": jg.SyncPS(),
        "ExportedModel": exported,
        "ModelServer": models_server,
        "serve": models_server,
        "export": exported,
        "TLS": jg.TLS(Path(EVIL), Path("key"), Path("ca")),
        "Trainer": trainer,
        "Trainer.plan": trainer.plan(),
        "Run.profile": run.profile(),
        "Run": run,
        "Run.serve": live,
        "Variable": variable,
        "auto": jg.auto(cluster, measured),
        "auto.report": AutoReport(
            [
                {
                    "name": EVIL,
                    "tasks": [EVIL],
                    "predicted_s": 1.0,
                    "alone_s": None,
                    "runs": 0,
                    "measured_s": None,
                }
            ]
        ),
        "connect": cluster,
        "Cluster.dashboard": cluster.dashboard(),
        "Dashboard.show": Frame(EVIL, 500),
        "Cluster.status": told_by_a_wrong_master(cluster.status()),
        "Cluster.events": Event(1.0, EVIL, EVIL, EVIL, EVIL),
        "Cluster.runs": RunInfo(
            *(EVIL, EVIL, 1, 2, 3.0, TaskName(EVIL), 0, 4, (EVIL,), EVIL, EVIL),
            synchronous=False,
            checkpoints=EVIL,
            term=1,
        ),
        "Graph.show": graph.show(),
        "Pipeline.schedule": pipe.schedule,
        "Trainer.imported": Imported(Path(EVIL), {EVIL: EVIL}, (EVIL,), (EVIL,)),
        "a run in a cell": CellView(
            Report(
                *(30, 100, 1.0, 10.0, 320.0, {EVIL: 0.25}),
                curve=(3.0, 2.0),
                workers=[WorkerStanding(EVIL, 15, 5.0, {"compute": 0.6}, {0: 3})],
            ),
            said=EVIL,
            logs=[(EVIL, EVIL)],
        ),
        "doctor": jg.doctor(),
        "fixed_size_partitioner": jg.fixed_size_partitioner(2),
        "function": function,
        "min_max_variable_partitioner": jg.min_max_variable_partitioner(2),
        "variable_axis_size_partitioner": jg.variable_axis_size_partitioner(8),
    }
    cluster.close()
    server.stop()
    models_server.stop()
    live.stop()


NO_OBJECTS = {
    "NO_KEY": "a number",
    "__version__": "a string",
    "errors": "a module",
    "spark": "a module",
    "testing": "a module",
    "check": "returns nothing",
    "colocate_with": "a block",
    "device": "a block",
    "embedding_bag": "an array of JAX",
    "split_keys": "an array of numpy",
    "mesh": "an AbstractMesh of JAX",
    "tap": "what it is given",
    "towers": "a function",
    "LocalCluster": "as what connect returns: it has processes beside",
    "RayCluster": "as what connect returns: it has actors beside",
    "SparkCluster": "as what connect returns: it has tasks of Spark beside",
}
"""Public names that give nothing of ours to look at, and what they give."""
SHOWN = [
    *sorted(set(jg.__all__) - NO_OBJECTS.keys()),
    *("Session.make_callable", "Session.run_metadata", "Session.plan", "Run"),
    *(
        "Run.members",
        "Run.rounds",
        "Run.profile",
        "Run.serve",
        "Trainer.plan",
        "Cluster.status",
        "Cluster.events",
    ),
    *(
        "Cluster.dashboard",
        "Cluster.runs",
        "Cluster.trace",
        "Dashboard.show",
        "Graph.show",
        "Pipeline.balance",
        "Pipeline.schedule",
        "Trainer.imported",
        "auto.report",
        "a run in a cell",
    ),
]


def test_every_public_name_is_shown_here_or_gives_nothing_to_show(
    made: dict[str, Any],
) -> None:
    assert set(SHOWN) == made.keys()
    assert NO_OBJECTS.keys() < set(jg.__all__)
    for cluster in (jg.LocalCluster, jg.RayCluster, jg.SparkCluster):
        assert issubclass(cluster, Cluster)


@pytest.mark.parametrize("name", SHOWN)
def test_a_public_object_says_what_it_is(name: str, made: dict[str, Any]) -> None:
    text = repr(made[name])
    assert not re.search(r"0x[0-9a-f]{6}", text), "an address says nothing"
    assert 3 < len(text) < 3000


@pytest.mark.bad_input_row(25)
@pytest.mark.parametrize("name", SHOWN)
def test_an_object_is_html_in_a_notebook_and_runs_nothing_of_what_it_shows(
    name: str, made: dict[str, Any]
) -> None:
    page = Tags(made[name]._repr_html_())
    assert page.open == [], "elements that nobody closed"
    assert page.seen
    assert "alert" not in page.runs
    assert "onerror" not in page.runs


@pytest.mark.bad_input_row(25)
def test_every_class_that_is_html_in_a_notebook_is_shown_here(
    made: dict[str, Any],
) -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(jg.__path__, "jgraph.")
        if not found.name.endswith(("__main__", "_pb2", "tensorflow_writer"))
    ]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and "_repr_html_" in vars(value)
    }
    shown = {kind for value in made.values() for kind in type(value).__mro__}
    assert len(classes) > 40
    assert classes <= shown, "make one with EVIL in all that it shows"


def test_closed_ones_show_that_they_are(made: dict[str, Any]) -> None:
    server = jg.Server({"ps": ["localhost:0"]})
    with jg.connect(server.target) as cluster:
        session = cluster.session()
    server.stop()
    assert "closed" in cluster._repr_html_()
    assert "closed" in session._repr_html_()
    assert "ended" in server._repr_html_()
