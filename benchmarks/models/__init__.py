"""Models that the benchmarks train, in plain Flax, each with its loss and its data.

A module has ``make_model()``, ``loss_fn(model, batch)``, ``make_data(examples,
source)`` with data made up where ``source`` is unset, and ``BATCH``.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

NAMES = ("mlp", "cnn", "resnet18", "lstm", "transformer", "wide_deep")


class Work(Protocol):
    """What a module of a model has."""

    BATCH: int
    """Examples of one step, unless told otherwise."""

    def make_model(self) -> Any:
        """Returns a new model; the same each time."""

    def loss_fn(self, model: Any, batch: Any) -> Any:
        """Returns the mean loss of a batch."""

    def make_data(
        self, examples: int = 4096, source: Path | None = None
    ) -> tuple[Any, ...]:
        """Returns arrays with examples along axis 0."""


def get(name: str) -> Work:
    """Returns the module of a model; the others are not imported."""
    return cast(Work, import_module(f"benchmarks.models.{name}"))
