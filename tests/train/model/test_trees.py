"""Names of the parts of a model."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.errors import ConfigError
from jgraph.train.trainer import Trainer


class Two(nnx.Module):
    """Has parts whose names, with a slash between them, are one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Dict({"b": nnx.Linear(3, 3, rngs=rngs)})
        setattr(self, "a/b", nnx.Linear(3, 1, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        return getattr(self, "a/b")(self.a["b"](x))


def test_two_parameters_of_one_name_are_refused() -> None:
    """On a cluster the second would be a view of the first one."""

    def loss(model: Any, x: Any) -> Any:
        return model(x).mean()

    trainer = Trainer(Two(nnx.Rngs(0)), loss, optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"two variables would be called 'params/.*b"):
        trainer.fit(np.ones((8, 3), np.float32), steps=1, batch_size=8, progress=False)
