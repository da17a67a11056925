"""A linen model without ``variables`` is initialized with the data, or says why not."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import linen as nn

from jgraph.errors import ConfigError
from jgraph.train.trainer import Trainer

X = np.ones((8, 4), np.float32)
WIDE = np.ones((8, 6), np.float32)


class One(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(x)


class Two(nn.Module):
    """Two inputs, of which one has another size."""

    @nn.compact
    def __call__(self, inputs: Any, targets: Any, *, scale: float = 1.0) -> Any:
        return scale * nn.Dense(2)(inputs) + nn.Dense(2)(targets)


class Training(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(2)(x))


class Structured(nn.Module):
    @nn.compact
    def __call__(self, graph: Any) -> Any:
        return nn.Dense(2)(graph["nodes"])


def shapes(model: nn.Module, data: Any) -> Any:
    trainer = Trainer(
        model, lambda params, batch: optax.tree.norm(params), optax.sgd(0.1)
    )
    trainer.plan(data, batch_size=4)
    params: Any = trainer.model()
    return {name: layer["kernel"].shape for name, layer in params.items()}


def test_of_a_dict_the_field_that_is_written_first_is_the_input() -> None:
    assert shapes(One(), {"observed": X, "actions": WIDE}) == {"Dense_0": (4, 2)}


def test_fields_that_are_named_as_the_inputs_are_given_by_name() -> None:
    data = {"targets": WIDE, "weights": X[:, 0], "inputs": X}
    assert shapes(Two(), data) == {"Dense_0": (4, 2), "Dense_1": (6, 2)}


def test_of_a_tuple_the_first_field_is_the_input() -> None:
    assert shapes(One(), (X, WIDE)) == {"Dense_0": (4, 2)}


@pytest.mark.parametrize(
    ("model", "data", "told"),
    [
        (Two(), (X, WIDE), r"Two cannot be initialized with data\[0\]: TypeError"),
        (Two(), {"inputs": X, "y": WIDE}, r"initialized with data\['inputs'\]"),
        (Training(), (X, X), "missing 1 required positional argument: 'train'"),
        (Structured(), {"nodes": X, "edges": WIDE}, r"with data\['nodes'\]"),
    ],
)
def test_a_model_that_cannot_be_initialized_with_the_data_names_variables(
    model: nn.Module, data: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        shapes(model, data)
    assert "variables=model.init(jax.random.key(0), …)" in str(caught.value)
