"""Check for NaN and infinity in a step's results; one that fails ends the loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.errors import NonFiniteError


@final
@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """The fetch of a step that says which of its results are finite.

    Attributes:
      fetch: its place among the fetches; it is an array of bool.
      leaves: what each of its values stands for; ``"loss"`` is the loss, other names
        are parameters.

    Example:
      >>> check = FiniteCheck(0, ("loss", "params/w"))
      >>> fetches = [np.array([True, False]), np.float32(0.5)]
      >>> print(check.take(fetches, step=3, where="of replica 1").message)
      the gradient of 'params/w' is NaN or infinite at step 3 of replica 1; ...
      >>> len(fetches)
      1
    """

    fetch: int
    leaves: tuple[str, ...]

    def take(
        self, fetches: list[Any], step: int, where: str, replica: int = 0
    ) -> NonFiniteError | None:
        """Removes that fetch; returns the error of a step that was not applied.

        Args:
          fetches: of one step.
          step: its number.
          where: says for a message whose step it was.
          replica: who computed it.
        """
        return not_finite(self.leaves, fetches.pop(self.fetch), step, where, replica)


def not_finite(
    leaves: Sequence[str], finite: Any, step: int, where: str, replica: int = 0
) -> NonFiniteError | None:
    """Returns the error of a step that was not applied; None: all is finite.

    Args:
      leaves: see ``FiniteCheck``.
      finite: whether each of them is.
      step: number of the step.
      where: says for a message whose step it was.
      replica: who computed it.
    """
    if np.all(finite):
        return None
    bad = [name for name, ok in zip(leaves, finite, strict=True) if not ok]
    what = "the loss" if bad[0] == "loss" else f"the gradient of '{bad[0]}'"
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return NonFiniteError(
        f"{what}{more} is NaN or infinite at step {step} {where}; this update was not "
        "applied, and the run ends with those before it. Try a smaller learning rate "
        "or optax.clip_by_global_norm, or look at the batch",
        step=step,
        replica=replica,
        leaves=bad,
    )
