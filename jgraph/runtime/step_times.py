"""Stage times of a task's part of a step."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np


@final
@dataclass(slots=True)
class StepTimes:
    """When the stages of a step were over on one task, by the shell's clock.

    Attributes:
      started: the partition began.
      received: the last value of another task came; 0 if none was due.
      computed: the last node that computes was done.
      over: the partition was done.
      nodes: when each node ran, as in ``PartTimes``; None if the step is not traced.
    """

    started: float = 0.0
    received: float = 0.0
    computed: float = 0.0
    over: float = 0.0
    nodes: np.ndarray[Any, Any] | None = None

    def parts(self) -> dict[str, float]:
        """Returns the seconds spent on each stage: pull, compute, push."""
        ready = max(self.received, self.started)
        done = max(self.computed, ready)
        return {
            "pull": ready - self.started,
            "compute": done - ready,
            "push": self.over - done,
        }
