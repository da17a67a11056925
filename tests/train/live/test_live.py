"""Answers from parameters while these are trained, by servers of this process."""

import asyncio
import json
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.client.cluster import Cluster, connect
from jgraph.cluster import event_loop
from jgraph.errors import (
    ArtifactError,
    ConfigError,
    ModelNotFoundError,
    RowIdError,
    TaskLostError,
)
from jgraph.runtime.files.step_files import steps_in
from jgraph.serving._pb import inference_pb2 as pb
from jgraph.train.live.live_model import LiveModel
from jgraph.train.live.model_call import ModelCall
from jgraph.train.model.served import Example
from tests.support.rescaled import Rescaled, begun
from tests.support.servers import Servers

USERS, ITEMS = 200, 50


class Ctr(nnx.Module):
    """Two tables of which rows are looked up, and a dense part."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.user = nnx.Embed(USERS, 4, rngs=rngs)
        self.item = nnx.Embed(ITEMS, 4, rngs=rngs)
        self.out = nnx.Linear(10, 1, rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        rows = [self.user(batch["user"]), self.item(batch["items"]).mean(1)]
        return self.out(jnp.concatenate([*rows, batch["dense"]], -1))[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch) - batch["dense"].sum(1)) ** 2)


def score(model: Any, batch: Any) -> Any:
    return {"score": model(batch)}


def batch(rows: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, USERS, rows).astype(np.int32),
        "items": rng.integers(0, ITEMS, (rows, 3)).astype(np.int32),
        "dense": rng.normal(size=(rows, 2)).astype(np.float32),
    }


def trained(cluster: Cluster | None, **options: Any) -> jg.Trainer:
    strategy = None if cluster is None else jg.AsyncPS(**options)
    trainer = jg.Trainer(
        Ctr(nnx.Rngs(0)), loss, optax.adagrad(0.1), cluster=cluster, strategy=strategy
    )
    trainer.fit(batch(64), steps=3, batch_size=16, progress=False)
    return trainer


def served(trainer: jg.Trainer, **options: Any) -> LiveModel:
    options = {"refresh_s": 3600, "max_rows": 4, "http_port": None} | options
    live: LiveModel = trainer.serve("ctr", batch(2), fn=score, **options)
    return live


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=2, worker=1)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> Iterator[Cluster]:
    with connect(servers.server("/job:worker/task:0").target, timeout_s=20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Iterator[jg.Trainer]:
    with trained(cluster) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def live(trainer: jg.Trainer) -> Iterator[LiveModel]:
    with served(trainer, http_port=0) as live:
        yield live


def change(trainer: jg.Trainer, cluster: Cluster, name: str, value: float) -> None:
    """What an update is to who reads: other values under the same name."""
    step = trainer._parts.build()[0]
    variable = next(v for v in step.variables if v.name == name)
    with cluster.session() as session:
        session.write({variable: np.full(variable.shape, value, np.float32)})


def test_answers_are_those_of_the_trained_model(
    live: LiveModel, trainer: jg.Trainer
) -> None:
    x = batch(11, seed=1)  # cut into executions of four, and padded
    expected = trainer.predict(x, fn=score)["score"]
    np.testing.assert_allclose(live.refresh().predict(x)["score"], expected, rtol=1e-6)


def test_a_line_asks_the_model_whether_it_is_named_or_not(live: LiveModel) -> None:
    asked = subprocess.run(
        live.curl("ctr"), shell=True, capture_output=True, timeout=30, check=True
    )
    assert json.loads(asked.stdout)["model_name"] == "ctr"
    assert live.curl() == live.curl("ctr")
    with pytest.raises(ModelNotFoundError, match="cvr"):
        live.curl("cvr")


def test_ids_that_are_inputs_are_not_computed_and_others_are(
    trainer: jg.Trainer,
) -> None:
    def shifted(model: Any, batch: Any) -> Any:
        return {"score": model(batch | {"user": (batch["user"] + 1) % USERS})}

    step, example = trainer._parts.build()[0], Example.of(batch(2), "b")
    tables = ("params/item/embedding", "params/user/embedding")
    plain = ModelCall(step, example, score, rows_of=tables).compiled(4)
    inputs = {table.name: table.inputs for table in plain.tables}
    assert inputs == {tables[0]: (1,), tables[1]: (0,)}
    other = ModelCall(step, example, shifted, rows_of=tables).compiled(4)
    assert {t.name: t.inputs for t in other.tables} == {tables[0]: (1,), tables[1]: ()}
    with served(trainer) as live:
        x = batch(3, seed=4)
        expected = trainer.predict(x, fn=score)["score"]
        np.testing.assert_allclose(live.predict(x)["score"], expected, rtol=1e-6)


@pytest.mark.parametrize("how", [pytest.param("div", marks=pytest.mark.nightly), "mod"])
def test_rows_of_sharded_tables_are_asked_for_where_they_are(
    cluster: Cluster, how: Any
) -> None:
    sharded = {
        "variable_partitioner": lambda shape, _: [
            2 if shape[0] >= ITEMS else 1,
            *[1] * (len(shape) - 1),
        ],
        "partition_strategy": how,
    }
    x = batch(9, seed=2)
    with trained(cluster, **sharded) as trainer, served(trainer, max_rows=64) as live:
        expected = trainer.predict(x, fn=score)["score"]
        np.testing.assert_allclose(live.predict(x)["score"], expected, rtol=1e-6)


def test_an_update_of_rows_is_in_the_next_answer_and_a_dense_one_after_a_refresh(
    live: LiveModel, trainer: jg.Trainer, cluster: Cluster
) -> None:
    one = batch(1)
    change(trainer, cluster, "params/out/kernel", 1.0)
    change(trainer, cluster, "params/out/bias", 0.0)
    live.refresh()
    base = float(one["dense"].sum())
    for user in (2.0, 3.0):
        change(trainer, cluster, "params/user/embedding", user)
        change(trainer, cluster, "params/item/embedding", 0.0)
        assert live.predict(one)["score"][0] == pytest.approx(4 * user + base, rel=1e-5)
    change(trainer, cluster, "params/out/bias", 10.0)
    assert live.predict(one)["score"][0] == pytest.approx(12 + base, rel=1e-5)
    live.refresh()
    assert live.predict(one)["score"][0] == pytest.approx(22 + base, rel=1e-5)


def test_every_answer_says_of_which_update_it_is_and_how_old(live: LiveModel) -> None:
    inputs = [
        {"name": n, "shape": v.shape, "datatype": d, "data": v.ravel().tolist()}
        for (n, v), d in zip(batch(1).items(), ["INT32", "INT32", "FP32"], strict=True)
    ]
    asked = urllib.request.Request(
        f"{live.url}/v2/models/ctr/infer",
        json.dumps({"inputs": inputs}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {live.server.token.value}",
        },
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        told = json.loads(answer.read())["parameters"]
    assert (told["jgraph_step"], told["jgraph_rows"]) == (3, "live")
    assert 0 <= told["jgraph_age_ms"] < 3_600_000
    request = pb.ModelInferRequest(model_name="ctr")
    for one, value in zip(inputs, batch(1).values(), strict=True):
        request.inputs.add(**{n: one[n] for n in ("name", "shape", "datatype")})
        request.raw_input_contents.append(value.tobytes())
    with grpc.insecure_channel(live.grpc_target) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        token = (("authorization", f"Bearer {live.server.token.value}"),)
        parameters = method(request, metadata=token, timeout=20).parameters
    assert parameters["jgraph_step"].int64_param == 3
    assert parameters["jgraph_rows"].string_param == "live"


def test_an_id_that_no_row_has_fails_only_its_own_request(live: LiveModel) -> None:
    models = live.server._models
    bad = batch(1) | {"user": np.array([USERS], np.int32)}

    async def ask() -> list[Any]:
        with models.model("ctr").routed() as version:
            answers = [
                models.answer(models.asked(version, "", values))
                for values in (batch(1), batch(2), bad, batch(1))
            ]
            return await asyncio.gather(*answers, return_exceptions=True)

    first, second, third, fourth = event_loop.run(ask())
    assert isinstance(third, RowIdError)
    assert f"the id {USERS}" in str(third)
    assert [len(a.outputs[0][1]) for a in (first, second, fourth)] == [1, 2, 1]


def test_a_model_in_this_process_is_served_while_it_is_trained() -> None:
    trainer, x = trained(None), batch(5)
    with served(trainer, grpc_port=None, max_rows=1, refresh_s=3600) as live:
        before = live.predict(x)["score"]
        trainer.fit(batch(64), steps=3, batch_size=16, progress=False)
        after = trainer.predict(x, fn=score)["score"]
        assert live.predict(x)["score"].tolist() == before.tolist()
        np.testing.assert_allclose(live.refresh().predict(x)["score"], after, rtol=1e-5)
        assert live.freshness().step == 6


def test_what_cannot_be_served_so_is_refused_before_anything_starts(
    trainer: jg.Trainer, live: LiveModel
) -> None:
    for options in (
        {"refresh_s": 0},
        {"on_loss": "ignore"},
        {"max_share": 2},
        {"max_rows": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            served(trainer, **options)
    with pytest.raises(ArtifactError, match="a row for each example"):
        trainer.serve("ctr", batch(2), fn=lambda model, x: model(x).mean())
    with pytest.raises(ArtifactError, match="cannot be the name"):
        trainer.serve("a/b", batch(2), fn=score)
    with pytest.raises(ArtifactError, match="no versions"):
        live.server.set_label("ctr", "stable", 1)


class Lost:
    """A cluster of its own, of which the ps with the users goes and comes back."""

    def __init__(self) -> None:
        self.servers = Servers(ps=2, worker=1)
        target = self.servers.server("/job:worker/task:0").target
        self.cluster = connect(target, timeout_s=20)
        self.trainer = trained(self.cluster)
        variables = self.trainer._parts.build()[0].variables
        users = next(v for v in variables if v.name == "params/user/embedding")
        self.ps = str(users.device.task_name)

    def come_back(self) -> None:
        """The ps is started again, and gets what it had."""
        step = self.trainer._parts.build()[0]
        self.servers.start_again(self.ps)
        assert self.cluster.wait_for_tasks(20)
        with self.cluster.session() as session:
            session.write({v: np.zeros(v.shape, v.dtype) for v in step.variables})

    def close(self) -> None:
        self.cluster.close()
        self.servers.stop()


@pytest.fixture
def lost() -> Iterator[Lost]:
    lost = Lost()
    yield lost
    lost.close()


def test_answers_go_on_without_a_ps_and_are_of_now_when_it_is_back(lost: Lost) -> None:
    known = batch(3)
    unknown = batch(1) | {"user": np.array([USERS - 1], np.int32)}
    assert USERS - 1 not in known["user"]
    unknown["items"] = known["items"][:1]
    with (
        served(lost.trainer, max_share=1.0) as stale,
        served(lost.trainer, max_share=1.0, on_loss="error") as strict,
    ):
        before = stale.predict(known)["score"]
        strict.predict(known)
        lost.servers.lose(lost.ps)
        assert stale.predict(known)["score"].tolist() == before.tolist()
        assert stale.freshness().lost == (lost.ps,)
        assert stale.refresh().freshness().lost == (lost.ps,)
        assert stale.predict(known)["score"].tolist() == before.tolist()
        with pytest.raises(TaskLostError, match="does not answer"):
            stale.predict(unknown)  # nobody has asked for this row before
        with pytest.raises(TaskLostError, match=lost.ps):
            strict.predict(known)
        lost.come_back()
        for live in (stale, strict):
            live.refresh()
            assert live.freshness().lost == ()
            assert live.predict(known)["score"].tolist() == [0.0, 0.0, 0.0]


def test_a_model_is_served_on_when_it_trains_again_after_a_task_was_lost() -> None:
    servers, worker = Servers(ps=1, worker=2), "/job:worker/task:1"
    target = servers.server("/job:worker/task:0").target
    with connect(target, timeout_s=20) as cluster:
        trainer = trained(cluster)
        with served(trainer) as live:
            servers.lose(worker)
            servers.start_again(worker)
            assert cluster.wait_for_tasks(20)
            run = trainer.fit(batch(64), steps=3, batch_size=16, progress=False)
            assert live.refresh().freshness().step == run.steps
            x = batch(3)
            expected = trainer.predict(x, fn=score)["score"]
            assert np.allclose(live.predict(x)["score"], expected, rtol=1e-5)
            trainer.close()
            assert live.refresh().freshness().lost == ("/job:ps/task:0",)
            with pytest.raises(TaskLostError, match="its Trainer was closed"):
                live.predict(x | {"user": (x["user"] + 1) % USERS})
        with pytest.raises(ConfigError, match="this Trainer was closed"):
            served(trainer)
    servers.stop()


def test_a_model_is_served_on_when_its_run_has_more_parameter_servers() -> None:
    strategy = jg.AsyncPS(elastic=jg.Elastic(ps=(1, 2)))
    servers = Servers(ps=1, worker=1)
    with connect(servers.server("/job:ps/task:0").target, timeout_s=20) as cluster:
        trainer = jg.Trainer(
            Ctr(nnx.Rngs(0)),
            loss,
            optax.adagrad(0.1),
            cluster=cluster,
            strategy=strategy,
        )
        run = begun(cluster, trainer, batch(64), 16)
        rescaled = Rescaled(cluster, run)
        with served(trainer, cache_rows=0) as live:
            rescaled.to(2)
            rescaled.end()
            assert live.refresh().freshness().lost == ()
            x = batch(3)
            expected = trainer.predict(x, fn=score)["score"]
            assert np.allclose(live.predict(x)["score"], expected, rtol=1e-5)
        trainer.close()
        rescaled.stop()
    servers.stop()


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(300)
def test_answers_go_on_while_a_run_loses_a_ps_and_goes_back_to_a_checkpoint(
    tmp_path: Path,
) -> None:
    known, runs, over = batch(3), list[Any](), threading.Event()
    users = "params/user/embedding"

    def stop(run: Any, report: Any) -> None:
        if over.is_set():
            run.stop()

    def fit(trainer: jg.Trainer) -> None:
        saved = jg.Checkpoints(tmp_path / "saved", every=50)
        options: dict[str, Any] = {"checkpoint": saved, "callbacks": [stop]}
        data, steps = batch(512), 10**6
        runs.append(
            trainer.fit(data, steps=steps, batch_size=32, progress=False, **options)
        )

    def until(holds: Callable[[], bool]) -> None:
        for _ in range(1200):
            if holds():
                return
            threading.Event().wait(0.05)
        raise AssertionError("it did not come in a minute")

    refused = 0

    def is_back(stale: LiveModel, strict: LiveModel) -> bool:
        nonlocal refused
        assert np.isfinite(stale.predict(known)["score"]).all()
        try:
            strict.predict(known)
        except TaskLostError:
            refused += 1
            return False
        return refused > 0

    with jg.LocalCluster(ps=2, workers=1, restarts=3) as cluster:
        trainer = trained(cluster)
        step = trainer._parts.build()[0]
        place = next(v for v in step.variables if v.name == users)
        ps = str(place.device.task_name)
        often: dict[str, Any] = {"refresh_s": 0.1, "max_share": 1.0}
        with (
            served(trainer, **often) as stale,
            served(trainer, **often, on_loss="error") as strict,
        ):
            stale.predict(known)
            training = threading.Thread(target=fit, args=(trainer,))
            training.start()
            try:
                until(lambda: bool(steps_in(tmp_path / "saved")))
                cluster.kill(ps)
                until(lambda: is_back(stale, strict))
                began = stale.freshness().step
                until(lambda: stale.freshness().step > began)
            finally:
                over.set()
                training.join(60)
            stale.refresh()
            assert stale.freshness().lost == ()
            answers = stale.predict(known)["score"]
        (run,) = runs
        assert [list(one.lost) for one in run.recoveries()] == [[ps]]
        np.testing.assert_allclose(answers, run.model()(known), rtol=1e-4, atol=1e-5)
