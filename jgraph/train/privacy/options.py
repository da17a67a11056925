"""Privacy: options of training with differential privacy."""

import importlib.util
import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final, get_args

import numpy as np

from jgraph.counts import as_ints, is_count
from jgraph.errors import ConfigError
from jgraph.view import markup

Unit: TypeAlias = Literal["example", "client"]
"""Whose part in the data is protected: see ``Privacy``."""

UNITS: Final[tuple[Unit, ...]] = get_args(Unit)


@final
@dataclass(frozen=True, slots=True)
class Privacy:
    """Train with differential privacy: what one unit of the data adds is hidden.

    What a unit adds to an update is cut to the L2 norm ``clip``. The parameter servers
    sum that, add Gaussian noise of the standard deviation ``noise_multiplier * clip``,
    once per update, and divide by the expected number of units; then any optax
    optimizer makes the update. So the parameters after any number of updates are
    (epsilon, delta)-differentially private, for data that has one unit more or less,
    and ``run.epsilon`` says for what epsilon. That is computed by ``dp-accounting``
    (``pip install 'jgraph[privacy]'``).

    ``unit="example"`` (for ``Local`` and ``SyncPS``) is DP-SGD. Each update is of a
    Poisson sample: every example is in it with the same probability, so that
    ``batch_size`` is what a worker draws on average. ``unit="client"`` (for
    ``LocalSGD`` and ``Federated``): what a worker contributes to a round is a unit,
    whatever data it has, and each round counts for all workers.

    Noise and samples are drawn by the operating system's generator and never from
    ``seed=``: whoever knows a seed could take the noise away. So no two runs are alike.
    Not covered are the loss and the metrics, which have no noise: they are for the eyes
    of who trains.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016; McMahan et
    al., "Learning Differentially Private Recurrent Language Models", 2018.

    Args:
      noise_multiplier: standard deviation of the noise, in units of ``clip``.
      clip: the most that one unit adds to a sum, as L2 norm over all parameters.
      delta: probability with which the bound of epsilon may not hold; well below one
        over the number of units.
      target_epsilon: a run ends before an update that would pass it. None: it goes on.
      unit: whose part in the data is hidden.
      examples_at_once: of how many examples the gradients are in memory at a time.

    Raises:
      ConfigError: an option outside what is possible.

    Example:
      >>> Privacy(noise_multiplier=1.1, clip=1.0, delta=1e-5, target_epsilon=8).unit
      'example'
    """

    noise_multiplier: float
    clip: float
    delta: float | None = None
    target_epsilon: float | None = None
    unit: Unit = "example"
    examples_at_once: int = 32

    def __post_init__(self) -> None:
        if self.delta is None:
            raise ConfigError(
                "Privacy(delta=…) is missing: an epsilon alone says nothing; give a "
                "probability well below one over the number of examples, for example "
                "delta=1e-5"
            )
        self._check_positive("noise_multiplier", "for example 1.1; more hides more")
        self._check_positive("clip", "the L2 norm to cut to, for example 1.0")
        self._check_positive("delta", "for example 1e-5")
        if self.delta >= 1:
            raise ConfigError(
                f"Privacy(delta={self.delta!r}) is a probability; give one well below "
                "one over the number of examples, for example 1e-5"
            )
        if self.target_epsilon is not None:
            self._check_positive("target_epsilon", "for example 8.0, or leave it out")
        if self.unit not in UNITS:
            raise ConfigError(
                f"Privacy(unit={self.unit!r:.40}) is whose part in the data is hidden: "
                f"{' or '.join(map(repr, UNITS))}"
            )
        if not is_count(self.examples_at_once, 1):
            raise ConfigError(
                f"Privacy(examples_at_once={self.examples_at_once!r:.40}) is of how "
                "many examples the gradients are in memory at a time; give a whole "
                "number, 1 or more"
            )
        as_ints(self, "examples_at_once")

    def _check_positive(self, name: str, what: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float | np.number)
        is_number = is_number and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value > 0):
            raise ConfigError(
                f"Privacy({name}={value!r:.40}) is to be a number above 0, {what}"
            )

    @property
    def failure(self) -> float:
        """``delta``, which is there."""
        assert self.delta is not None  # __post_init__ refuses that
        return self.delta

    def _repr_html_(self) -> str:
        return markup.data(self)


def check_accountant() -> None:
    """Refuses to train privately where nothing keeps the account.

    Raises:
      ConfigError: says what to install.
    """
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            "privacy= needs the accountant dp-accounting, which is not installed here; "
            "type: pip install 'jgraph[privacy]'"
        )


def check_privacy(privacy: object, strategy: str, unit: Unit) -> None:
    """Refuses what is no ``Privacy``, or hides another unit than a strategy can.

    Args:
      privacy: what the user gave, or None.
      strategy: the name of that.
      unit: what it can hide.

    Raises:
      ConfigError: says what to write.
    """
    if privacy is None:
        return
    if not isinstance(privacy, Privacy):
        raise ConfigError(
            f"{strategy}(privacy={privacy!r:.40}) takes jg.Privacy(noise_multiplier="
            "1.1, clip=1.0, delta=1e-5)"
        )
    if privacy.unit != unit:
        raise ConfigError(
            f"{strategy} hides the part of one {unit}, and jg.Privacy(unit="
            f"{privacy.unit!r}) asks for that of one {privacy.unit}; write unit="
            f"{unit!r}, or train with "
            f"{'jg.Federated' if privacy.unit == 'client' else 'jg.SyncPS'}"
        )
    check_accountant()
