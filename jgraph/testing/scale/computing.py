"""Computing times of workers: as fast as each other, spread, or with stragglers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jgraph.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class Computing:
    """How long a worker computes for a step.

    A step takes ``seconds``, times a factor with a log-normal distribution of median 1;
    with probability ``straggling`` it takes ``delay_s`` more on average, exponentially
    distributed. ``samples``, measured times, take the place of all that.

    Attributes:
      seconds: median of a step.
      sigma: of the logarithm of the factor.
      straggling: how likely a step is late.
      delay_s: by how much, on average.
      slow: times as long, of workers by number.
      samples: measured seconds, drawn with replacement.

    Example:
      >>> Computing(0.5).draw(random.Random(0), worker=0)
      0.5
    """

    seconds: float = 0.0
    sigma: float = 0.0
    straggling: float = 0.0
    delay_s: float = 0.0
    slow: tuple[float, ...] = ()
    samples: Sequence[float] = ()

    def __post_init__(self) -> None:
        numbers = [self.seconds, self.sigma, self.straggling, self.delay_s]
        numbers += [*self.slow, *self.samples]
        if not all(math.isfinite(n) and n >= 0 for n in numbers) or self.straggling > 1:
            raise ConfigError(
                "computing takes seconds from 0 on, and straggling is a probability; "
                f"these are {self}"
            )

    def __str__(self) -> str:
        if self.samples:
            text = f"one of {len(self.samples)} measured times"
        else:
            text = f"for {1e3 * self.seconds:.4g} ms, sigma {self.sigma:g}"
        if self.straggling:
            late = f"{100 * self.straggling:g} % of steps late by {self.delay_s:g} s"
            text += f", {late} on average"
        return text + (f", the first ones {self.slow} times as long" * bool(self.slow))

    def draw(self, chance: random.Random, worker: int) -> float:
        """Returns the seconds of a step."""
        if self.samples:
            seconds = chance.choice(self.samples)
        else:
            seconds = self.seconds
            if self.sigma:
                seconds *= math.exp(chance.gauss(0.0, self.sigma))
            if self.straggling and chance.random() < self.straggling:
                seconds += chance.expovariate(1.0 / self.delay_s)
        return seconds * (self.slow[worker] if worker < len(self.slow) else 1.0)
