"""AutoScale: options of a policy that says how many tasks an elastic run has."""

from dataclasses import dataclass
from typing import Final, Protocol, final

from jgraph.coordination.run.autoscale import (
    AutoScaler,
    RunSample,
    Scale,
    ScaleRules,
)
from jgraph.counts import check_flags, is_number
from jgraph.errors import ConfigError
from jgraph.view import markup

WINDOW_S: Final = 30.0


class ScalePolicy(Protocol):
    """Decides how many workers, and ps, a run should have."""

    def handle(self, sample: RunSample) -> Scale | None:
        """Takes what a run told; returns what to do now, or None."""


@final
@dataclass(frozen=True, slots=True)
class AutoScale:
    """Let a run find out how many workers and ps pay, and have as many.

    While the workers of a run do not change, this process counts how many batches they
    do in ``window_s``. As long as added workers pay, it makes them twice as many; when
    they do not, it goes back half of the way. Then it rests, until the run becomes much
    faster or slower by itself, or somebody else changes the number of workers. Each act
    is an event, with the numbers that it was decided by: ``cluster.events()``.

    With ``jg.Elastic(ps=…)`` it adds a ps where one keeps a core busy, and takes it
    back if the run is not a tenth faster then; it adds one for good where a ps has
    little memory left.

    It runs in the process that began the run, which must be able to start workers:
    that of ``jg.LocalCluster(elastic=True)`` or ``jg.RayCluster``.

    Args:
      window_s: how long the run is measured between two decisions, in seconds.
      pause_s: between two acts, at least, in seconds.
      least_gain: a worker pays if it adds so much of what one does on average.
      hysteresis: the part of its rate by which the run has to change until a new search
        begins.
      most_input: where workers wait for data for a larger part of their time, none is
        added.
      most_busy: a ps is added where one keeps more of a core busy than this.
      most_memory: likewise where one has more of the memory of its host, or container,
        in use.
      dry_run: say what would be done, and do nothing.

    Raises:
      ConfigError: a number outside what is possible, or ``dry_run`` that is no bool.

    Example:
      >>> AutoScale(window_s=60).least_gain
      0.5
    """

    window_s: float = WINDOW_S
    pause_s: float = 120.0
    least_gain: float = 0.5
    hysteresis: float = 0.2
    most_input: float = 0.2
    most_busy: float = 0.8
    most_memory: float = 0.8
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_flags(dry_run=self.dry_run)
        limits = {
            "window_s": (0.1, 86400.0),
            "pause_s": (0.0, 86400.0),
            "least_gain": (0.01, 1.0),
            "hysteresis": (0.01, 1.0),
            "most_input": (0.0, 1.0),
            "most_busy": (0.01, 1024.0),
            "most_memory": (0.01, 1.0),
        }
        for name, (least, most) in limits.items():
            value: object = getattr(self, name)
            if not (is_number(value) and least <= value <= most):
                raise ConfigError(
                    f"AutoScale({name}={value!r:.40}): give a number from {least:g} to "
                    f"{most:g}"
                )

    def begin(
        self, least: int, most: int | None, ps: tuple[int, int] | None = None
    ) -> ScalePolicy:
        """Returns what decides for one run.

        Args:
          least: workers that it may have.
          most: likewise; None: any number.
          ps: least and most ps that it may have; None: it keeps its own.
        """
        rules = ScaleRules(
            *(self.pause_s, self.least_gain, self.hysteresis, self.most_input),
            *(self.most_busy, self.most_memory),
        )
        return AutoScaler(least, most, rules, ps)

    def _repr_html_(self) -> str:
        return markup.data(self)


def check_policy(policy: object) -> None:
    """Refuses what decides nothing.

    Raises:
      ConfigError: says what to write.
    """
    if policy is None or isinstance(policy, AutoScale):
        return
    if not callable(getattr(policy, "handle", None)):
        raise ConfigError(
            f"Elastic(policy={policy!r:.60}) decides nothing: write policy="
            "jg.AutoScale(), or give an object whose handle(sample) returns a Scale or "
            "None"
        )
