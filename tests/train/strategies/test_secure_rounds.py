"""Secure sums over federated rounds: the ps see sums alone, and these are exact."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError, NonFiniteError
from jgraph.plan.program import accumulate
from jgraph.runtime import gate
from jgraph.runtime.data.client_rounds import steps_of
from jgraph.train.data.source import Source
from jgraph.train.privacy.options import Privacy
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.strategies.federated import Federated
from jgraph.train.trainer import Trainer
from tests.support.models import NnxMLP, cross_entropy, data
from tests.support.servers import connected

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SIZES, BATCH, ROUNDS = (9, 13, 10, 8), 4, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(ps=2, worker=len(SIZES)) as cluster:
        yield cluster


@pytest.fixture
def source(tmp_path: Path) -> Source:
    x, y = data()
    first = 0
    for number, size in enumerate(SIZES):
        rows = slice(first, first + size)
        np.savez(tmp_path / f"{number}.npz", x=x[rows], y=y[rows])
        first += size
    return Source.npz(str(tmp_path / "{task}.npz"))


def loss(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    right = (logits.argmax(-1) == batch["y"]).sum()
    return cross_entropy(logits, batch["y"]), {"right": right}


def trained(cluster: Cluster, source: Source, **options: Any) -> tuple[Any, list[Any]]:
    """A run, and the parameters that it came to."""
    tx = optax.sgd(0.1, momentum=0.5)
    there = Trainer(
        NnxMLP(rngs=nnx.Rngs(0)),
        loss,
        tx,
        cluster=cluster,
        strategy=Federated(local_epochs=2, **options),
    )
    run = there.fit(source, steps=ROUNDS, batch_size=BATCH, progress=False)
    state = nnx.to_pure_dict(nnx.state(run.model(), nnx.Param))
    there.close()
    return run, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    "weight", ["examples", pytest.param("equal", marks=pytest.mark.nightly)]
)
def test_a_round_of_secure_sums_is_that_of_plain_ones(
    cluster: Cluster, source: Source, weight: Any
) -> None:
    plain, due = trained(cluster, source, weight=weight)
    run, found = trained(cluster, source, weight=weight, secure_sum=SecureSum())
    for value, wanted in zip(found, due, strict=True):
        # Off by half a step of 2 * 8 / 2**20 in each round, at most.
        np.testing.assert_allclose(value, wanted, atol=2e-4)
    for name in ("loss", "right", "local_steps"):
        np.testing.assert_allclose(
            run.metrics(name)["value"], plain.metrics(name)["value"], atol=1e-3
        )
    names = set(cluster.tasks("worker"))
    steps = sum(steps_of(size, 2, BATCH) for size in SIZES)
    assert [(set(r.members), r.steps, r.void) for r in run.rounds()] == [
        (names, steps, "")
    ] * ROUNDS


def test_what_the_ps_have_of_a_client_are_random_words(
    cluster: Cluster, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def total(values: Any) -> Any:
        seen.extend(np.array(value) for value in values)
        return plain(values)

    plain = accumulate.total
    monkeypatch.setattr(gate, "total", total)
    trained(cluster, source, secure_sum=SecureSum())
    words = np.concatenate([value.reshape(-1) for value in seen])
    assert words.size > 500
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 32)
    # Of values that were not masked the highest bits would be zeros.
    assert (np.abs(bits.mean(0) - 0.5) < 0.13).all()
    assert len(np.unique(words)) > 0.99 * words.size


@pytest.mark.bad_input_row(33)
def test_a_client_whose_loss_is_not_finite_adds_nothing_and_nobody_knows_who(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    with np.load(tmp_path / "1.npz") as own:
        x, y = own["x"], own["y"]
    _, due = trained(cluster, source, weight="examples")
    np.savez(tmp_path / "1.npz", x=np.full_like(x, np.nan), y=y)
    run, found = trained(cluster, source, secure_sum=SecureSum())
    assert all(np.isfinite(value).all() for value in found)
    assert np.isfinite(run.metrics("loss")["value"]).all()
    assert {len(r.members) for r in run.rounds()} == {len(SIZES)}
    assert any((a != b).any() for a, b in zip(found, due, strict=True))
    assert [r.not_finite for r in run.rounds()] == [1] * ROUNDS
    assert "; 1 not finite, and nobody sees who" in str(run.rounds())


@pytest.mark.bad_input_row(33)
def test_a_run_ends_where_nobody_in_a_sum_is_finite(
    cluster: Cluster, source: Source, tmp_path: Path
) -> None:
    for client in range(len(SIZES)):
        with np.load(tmp_path / f"{client}.npz") as own:
            x, y = own["x"], own["y"]
        np.savez(tmp_path / f"{client}.npz", x=np.full_like(x, np.nan), y=y)
    with pytest.raises(NonFiniteError, match="the loss is NaN or infinite at step 0"):
        trained(cluster, source, secure_sum=SecureSum())


def test_noise_is_added_to_a_secure_sum(cluster: Cluster, source: Source) -> None:
    def private(noise: float, **options: Any) -> list[Any]:
        hidden = Privacy(unit="client", noise_multiplier=noise, clip=0.5, delta=1e-5)
        return trained(cluster, source, weight="equal", privacy=hidden, **options)[1]

    due = private(1e-9)
    secret = SecureSum(bits=22, clip=0.5)
    for value, wanted in zip(private(1e-9, secure_sum=secret), due, strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-4)
    noisy = private(3.0, secure_sum=secret)
    assert max(np.abs(a - b).max() for a, b in zip(noisy, due, strict=True)) > 0.1


@pytest.mark.bad_input_row(31)
def test_what_needs_the_contributions_of_each_client_is_refused(
    cluster: Cluster, source: Source
) -> None:
    wrong: Any
    for option, wrong in [
        ("gradient_dtype", "int8"),
        ("inner_state", "average"),
        ("durability", "replica"),
    ]:
        with pytest.raises(ConfigError, match=f"with {option}='.*the ps see the sum"):
            Federated(secure_sum=SecureSum(), **{option: wrong})
    wrong = 3
    with pytest.raises(ConfigError, match=r"secure_sum is 3; give jg.SecureSum"):
        Federated(secure_sum=wrong)
    for name, wrong, words in [
        ("threshold", 0, "threshold is 0; give the neighbours"),
        ("neighbours", 3, "neighbours is 3; each client has as many"),
        ("neighbours", "all", "neighbours is 'all'; give the clients"),
        ("bits", 24, "bits is 24; a float32 has no more than 22"),
        ("clip", 0, "clip is 0; give the most"),
        ("max_weight", 1.5, "max_weight is 1.5; give the most"),
    ]:
        with pytest.raises(ConfigError, match=words):
            SecureSum(**{name: wrong})
    for options, words in [
        ({"threshold": 1}, "write threshold=2 or more"),
        ({"threshold": 4}, "each has 3; write threshold=2"),
        ({"bits": 22, "max_weight": 1 << 10}, "write bits=20, or a smaller weight"),
    ]:
        with pytest.raises(ConfigError, match=words):
            trained(cluster, source, secure_sum=SecureSum(**options))
    with pytest.raises(ConfigError, match="give rounds of 3 clients or more"):
        trained(cluster, source, fraction=0.5, secure_sum=SecureSum())
