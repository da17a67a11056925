import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.train.run.profile import make_profile
from jgraph.train.state.runner import Chunk
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, data, nnx_loss


def chunk(replica: int, steps: int, **times: float) -> Chunk:
    numbers = np.arange(steps)
    return Chunk(replica, numbers, numbers.astype(float), {}, times)


def test_profile_sums_the_reports_of_each_replica_in_the_order_of_a_step() -> None:
    profile = make_profile(
        [
            chunk(1, 2, compute=0.006, input=0.002),
            chunk(0, 4, compute=0.004, pull=0.004),
            chunk(1, 2, compute=0.008, input=0.0),
        ]
    )
    assert profile.parts == ("input", "pull", "compute")
    first, second = profile.replicas
    assert (first.replica, first.steps) == (0, 4)
    assert first.ms_per_step == pytest.approx(2)
    assert second.share("compute") == pytest.approx(14 / 16)
    assert str(profile).splitlines() == [
        "replica  steps  ms/step  input  pull  compute",
        "      0      4     2.00     0%   50%      50%",
        "      1      4     4.00    12%    0%      88%",
    ]
    assert "<td>50%</td>" in profile._repr_html_()


def test_profile_of_a_run_without_reports_is_empty() -> None:
    assert str(make_profile([])) == "replica  steps  ms/step"


def test_profile_of_a_local_run_tells_input_and_compute() -> None:
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    run = trainer.fit(data(), steps=6, batch_size=8, progress=False)
    profile = run.profile()
    assert profile.parts == ("input", "compute")
    assert [row.steps for row in profile.replicas] == [6]
    assert sum(map(profile.replicas[0].share, profile.parts)) == pytest.approx(1)
