"""Inception-v3: as many parameters and channels as published, and training."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgraph import cli
from jgraph.errors import ConfigError
from jgraph.examples.inception import (
    Conv,
    Inception,
    digits_loss,
    loss_fn,
    parameters,
    run,
)
from jgraph.examples.options import Options

# Of torchvision's Inception3, which the published weights are for.
CHANNELS = [256, 288, 288, 768, 768, 768, 768, 768, 1280, 2048, 2048]
SIDES = [35, 35, 35, 17, 17, 17, 17, 17, 8, 8, 8]


class Noted(nnx.Module):
    """A block that notes the shapes of what it gives."""

    def __init__(self, block: Any, found: list[tuple[int, ...]]) -> None:
        self.block = block
        self.found = nnx.static(found)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.block(x)
        self.found.append(x.shape)
        return x


def test_the_network_has_the_parameters_and_shapes_that_were_published() -> None:
    model = nnx.eval_shape(lambda: Inception(rngs=nnx.Rngs(0)))
    assert parameters(model) == 27_161_264
    assert model.auxiliary is not None
    assert parameters(model) - parameters(model.auxiliary) == 23_834_568
    assert [block.width for block in model.blocks] == CHANNELS
    model.eval()  # type: ignore[no-untyped-call]
    found: list[tuple[int, ...]] = []
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Noted(block, found)  # type: ignore[assignment]
    picture = jax.ShapeDtypeStruct((2, 299, 299, 3), jnp.float32)
    both = nnx.eval_shape(lambda model, x: model.both(x), model, picture)
    assert found == [
        (2, side, side, width) for side, width in zip(SIDES, CHANNELS, strict=True)
    ]
    assert [logits.shape for logits in both] == [(2, 1000), (2, 1000)]


def test_a_convolution_is_normalized_over_the_batch_and_has_no_bias() -> None:
    conv = Conv(2, (3, 1, 1, 1), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(4, 5, 5, 2)).astype(np.float32)
    plain = x @ np.asarray(conv.conv.kernel[...])[0, 0]
    mean, variance = plain.mean((0, 1, 2)), plain.var((0, 1, 2))
    wanted = np.maximum((plain - mean) / np.sqrt(variance + 0.001), 0)
    np.testing.assert_allclose(conv(jnp.asarray(x)), wanted, atol=1e-5)


def test_the_loss_counts_the_auxiliary_classifier_and_smooths_labels() -> None:
    class Fixed:
        def __init__(self, beside: Any) -> None:
            self.beside = beside

        def both(self, x: Any) -> Any:
            return jnp.zeros((len(x), 10)), self.beside

    batch = {"image": jnp.zeros((4, 1)), "label": jnp.arange(4)}
    alone, figures = loss_fn(Fixed(None), batch)  # type: ignore[arg-type]
    both, _ = loss_fn(Fixed(jnp.zeros((4, 10))), batch)  # type: ignore[arg-type]
    assert float(alone) == pytest.approx(np.log(10), rel=1e-5)
    assert float(both) == pytest.approx(1.4 * np.log(10), rel=1e-5)
    assert float(figures["accuracy"]) == 0.25  # the first of equals is chosen
    sure, _ = loss_fn(_Sure(), batch)  # type: ignore[arg-type]
    assert float(sure) > 1.0  # a tenth of the weight is on the other classes


class _Sure:
    def both(self, x: Any) -> Any:
        return 20 * jax.nn.one_hot(jnp.arange(len(x)), 10), None


def test_digits_are_enlarged_and_coloured() -> None:
    class Looks:
        def both(self, x: Any) -> Any:
            assert x.shape == (2, 75, 75, 3)
            assert float(x.min()) == pytest.approx(-1)
            return jnp.zeros((2, 10)), None

    batch = {"image": jnp.zeros((2, 8, 8, 1)), "label": jnp.zeros(2, jnp.int32)}
    digits_loss(75)(Looks(), batch)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"size": 60}, "size is 60"), ({"width": 0.0}, "width is 0.0")],
)
def test_a_network_that_cannot_be_is_refused(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(None, Options(1), **options)


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_command_trains_a_cluster_and_prints_one_line_of_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = ["--ps", "1", "--width", "0.03", "--steps", "4"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "inception", *size, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["example"], found["steps"]) == ("inception", 4)
    assert 0 <= found["accuracy"] <= 1
    assert found["parameters"] > 10_000
