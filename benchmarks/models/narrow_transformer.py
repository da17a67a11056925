"""A transformer of any depth that is narrow: many small variables, little to compute.

Adam keeps two arrays for each parameter and a count, and the Trainer one for the number
of updates: 305 variables of 8 layers, 881 of 24.
"""

from pathlib import Path
from typing import Any, final

from flax import nnx

from benchmarks.models.characters import loss_fn, make_data as make_text
from benchmarks.models.transformer import Sizes, Transformer

__all__ = [
    "BATCH",
    "Narrow",
    "count",
    "loss_fn",
    "make_data",
    "make_model",
]

BATCH = 4
LENGTH = 8


def make_model(layers: int) -> Transformer:
    sizes = Sizes(16, heads=2, layers=layers, length=LENGTH, hidden=2, bias=False)
    return Transformer(sizes, rngs=nnx.Rngs(0))


def make_data(examples: int = 1024, source: Path | None = None) -> tuple[Any]:
    """Pieces int32[n, LENGTH + 1] of random characters, or of a text file."""
    (text,) = make_text(examples, source)
    return (text[:, : LENGTH + 1].copy(),)


def count(layers: int) -> int:
    """Returns how many variables training has, with Adam's and the Trainer's."""
    parameters = 12 * layers + 5
    return 3 * parameters + 2


@final
class Narrow:
    """The model of one depth, as ``benchmarks.models.Work``."""

    BATCH = BATCH
    loss_fn = staticmethod(loss_fn)
    make_data = staticmethod(make_data)

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def make_model(self) -> Transformer:
        return make_model(self._layers)
