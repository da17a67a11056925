"""Models with parameters too large to be made where they are defined."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph import AsyncPS, fixed_size_partitioner
from jgraph.client.cluster import connect
from jgraph.errors import ConfigError, TooLargeError
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.train import fit
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.state.remote_arrays import check_sizes
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.train_step import TrainStep
from jgraph.train.trainer import Trainer
from tests.support.servers import Servers

ROWS = (16 << 20) // 64
IDS = np.arange(8, dtype=np.int32)
PS = TaskName("/job:ps/task:0")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        return nn.Dense(2)(nn.Embed(ROWS, 16)(ids))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rows: int = ROWS) -> None:
        self.table = nnx.Embed(rows, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.last(self.drop(self.table(ids)))


def linen_loss(params: Any, batch: Any) -> Any:
    out: Any = Linen().apply({"params": params}, batch)
    return jnp.mean(out**2)


def nnx_loss(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch) ** 2)


def adapters() -> dict[str, Any]:
    return {
        "linen": adapt(Linen(), linen_loss, seed=0, data=as_dataset(IDS)),
        "nnx": adapt(lambda: Nnx(nnx.Rngs(0)), nnx_loss, seed=0),
    }


@pytest.mark.parametrize(
    "kind", [pytest.param("linen", marks=pytest.mark.nightly), "nnx"]
)
def test_large_values_are_made_on_their_task_and_are_the_same(kind: str) -> None:
    adapter, tx = adapters()[kind], optax.adagrad(0.1)
    home = Arrangement(place=lambda sizes: dict.fromkeys(sizes, PS))
    there = TrainStep(adapter, tx, arrangement=home)
    here = TrainStep(adapter, tx)
    assert not any(isinstance(v, jax.Array) for v in there.initial_values)
    for variable, want in zip(there.variables, here.initial_values, strict=True):
        assert variable.init is not None
        np.testing.assert_allclose(jax.jit(variable.init)(), want, 1e-5, 1e-6)
    graph = there.graph(IDS)
    assert "travels by rows: at most 8 of" in graph.notes[0]


def test_a_function_may_make_a_small_model_too() -> None:
    trainer = Trainer(lambda: Nnx(nnx.Rngs(0), 100), nnx_loss, optax.sgd(0.1))
    run = trainer.fit(IDS, steps=2, batch_size=4, progress=False)
    assert isinstance(run.model(), Nnx)


def test_a_function_that_makes_something_else_is_refused() -> None:
    trainer: Any = Trainer(lambda: 3, nnx_loss, optax.sgd(0.1))  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="a function that returned a"):
        trainer.fit(IDS, steps=1, batch_size=4, progress=False)


def test_a_function_that_needs_arguments_makes_no_model() -> None:
    trainer: Any = Trainer(lambda p, x: p @ x, nnx_loss, optax.sgd(0.1))  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigError, match=r"needs arguments .*'p'.*lambda: Model"):
        trainer.fit(IDS, steps=1, batch_size=4, progress=False)


def test_a_variable_that_is_too_large_for_the_client_is_refused_by_name() -> None:
    variables = [Variable("b", jnp.zeros(2)), Variable("w", jnp.zeros((100, 10)))]
    check_sizes(variables)
    with pytest.raises(TooLargeError, match=r"'w' has 0.0 GB.*save\(path\)"):
        check_sizes(variables, 3999)
    check_sizes(variables, 4000)


def test_an_evaluator_evaluates_with_tables_that_are_too_large_for_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(ps=2, worker=1, evaluator=1)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        cut = AsyncPS(variable_partitioner=fixed_size_partitioner(2))
        tx, model = optax.sgd(0.1), Nnx(nnx.Rngs(0), 100)
        trainer = Trainer(model, nnx_loss, tx, cluster=cluster, strategy=cut)
        with monkeypatch.context() as patch:
            patch.setattr(check_sizes, "__defaults__", (6399,))
            patch.setattr(fit, "KEPT_BYTES", 100)
            run = trainer.fit(
                IDS, steps=2, batch_size=4, progress=False, eval_data=IDS, eval_every=1
            )
            with pytest.raises(TooLargeError, match=r"evaluators=1.*save"):
                trainer.evaluate(IDS)
        found = run.metrics("eval_loss")
        assert found["step"][-1] == 2
        here = trainer.evaluate(IDS)["loss"]
        assert found["value"][-1] == pytest.approx(here, rel=1e-5)
    servers.stop()


def test_a_run_leaves_a_large_model_on_its_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "KEPT_BYTES", 100)
    servers = Servers(ps=1, worker=1)
    with connect(servers.servers[-1].target, timeout_s=20) as cluster:
        model = Nnx(nnx.Rngs(0), 100)
        trainer = Trainer(model, nnx_loss, optax.sgd(0.1), cluster=cluster)
        run = trainer.fit(IDS, steps=2, batch_size=4, progress=False)
        first = run.model().table.embedding[...]
        trainer.fit(IDS, steps=2, batch_size=4, progress=False)
        assert not np.array_equal(run.model().table.embedding[...], first)
        assert run.evaluate(IDS) == trainer.evaluate(IDS)
        monkeypatch.setattr(check_sizes, "__defaults__", (6399,))
        for ask in (run.model, trainer.model, lambda: run.evaluate(IDS)):
            with pytest.raises(TooLargeError, match="'params/table/embedding' has"):
                ask()
        with pytest.raises(TooLargeError, match="eval_data need the whole model"):
            trainer.fit(IDS, steps=1, batch_size=4, progress=False, eval_data=IDS)
        assert trainer.fit(IDS, steps=1, batch_size=4, progress=False).steps == 5
    servers.stop()
