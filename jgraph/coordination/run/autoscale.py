"""Autoscaling of a run: how many workers and ps it should have, from what it told.

A search over the number of workers by trial. As long as each trial pays, the next one
has twice as many. One that does not pay is taken back half of the way, until the
numbers that pay and those that do not meet. Then it rests, until the run goes much
faster or slower with as many workers as before.

    growing --the added workers pay--> growing, with twice as many
    growing --they do not--> narrowing: half of the way back
    narrowing --nothing between is left, or would be gained--> resting
    resting --much faster or slower than it was--> growing
    any --workers came or went otherwise--> growing, from what there is

A worker pays if it adds at least half of what one of them does on average.

Where no more workers pay, and the busiest ps keeps a core busy, a ps is added, as a
trial too: it goes again if that makes the run no tenth faster. One is also added, for
good, where the fullest ps has little memory left: a ps that its kernel kills loses what
it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final


@final
@dataclass(frozen=True, slots=True)
class RunSample:
    """What a run told over a while in which the same workers took part.

    Attributes:
      time_s: when, in seconds since the run began.
      workers: how many took part.
      batches_per_s: that they did, all together.
      input_share: of the time of their steps: waiting for data.
      ps: how many the run has; 0: that does not change.
      ps_busy: cores that the busiest ps kept busy.
      ps_memory: share of the memory of the fullest ps's host, or container, in use.
    """

    time_s: float
    workers: int
    batches_per_s: float
    input_share: float = 0.0
    ps: int = 0
    ps_busy: float = 0.0
    ps_memory: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Scale:
    """Let a run have so many workers, or ps.

    Attributes:
      workers: how many.
      why: a part of a sentence.
      numbers: what it was decided by, by name.
      ps: how many; None: as many as now.
    """

    workers: int
    why: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    ps: int | None = None


@final
@dataclass(frozen=True, slots=True)
class ScaleRules:
    """When a worker or a ps pays, and what is between two acts.

    Attributes:
      pause_s: between two acts, at least.
      least_gain: what an added worker has to add, of what one does on average.
      hysteresis: part of the rate by which it has to change before a rest ends.
      most_input: with a larger share of waiting for data, no worker is added.
      most_busy: a ps that keeps more of a core busy gets another one beside it.
      most_memory: likewise one with more of its memory in use.
    """

    pause_s: float = 120.0
    least_gain: float = 0.5
    hysteresis: float = 0.2
    most_input: float = 0.2
    most_busy: float = 0.8
    most_memory: float = 0.8


_WORTH: Final = 1.1
"""What is not so many times as fast is about as fast."""


@final
class AutoScaler:
    """State machine of one run.

    Args:
      least: workers that the run may have.
      most: likewise; None: any number.
      rules: when a worker or a ps pays.
      ps: how many ps it may have: least and most; None: it keeps those that it has.

    Attributes:
      reason: why the last sample brought nothing; empty: it did.

    Example:
      >>> machine = AutoScaler(1, 8, ScaleRules(pause_s=0))
      >>> machine.handle(RunSample(10.0, workers=1, batches_per_s=5.0)).workers
      2
      >>> machine.handle(RunSample(20.0, workers=2, batches_per_s=9.8)).workers
      4
      >>> back = machine.handle(RunSample(30.0, workers=4, batches_per_s=9.9))
      >>> back.workers, back.why
      (2, 'each added worker made 0.05 batches/s, of 2.5 of all on average')
    """

    def __init__(
        self,
        least: int,
        most: int | None,
        rules: ScaleRules | None = None,
        ps: tuple[int, int] | None = None,
    ) -> None:
        self._least, self._most = least, most
        self._ps = ps
        self._trial: RunSample | None = None  # before the last ps was added
        self._enough: RunSample | None = None  # one more ps did not pay
        self._rules = rules or ScaleRules()
        self._rates: dict[int, float] = {}
        self._pays = 0  # the most workers known to pay; 0: none were measured
        self._too_many: int | None = None  # the fewest known not to
        self._wanted: int | None = None
        self._acted_s: float | None = None
        self._rests = False
        self.reason = ""

    def handle(self, sample: RunSample) -> Scale | None:
        """Takes what a run told; returns what to do now, or None."""
        act = self._decide(sample)
        if act is not None:
            self._wanted, self._acted_s = act.workers, sample.time_s
            self.reason = ""
        return act

    def _decide(self, sample: RunSample) -> Scale | None:
        now, rate = sample.workers, sample.batches_per_s
        if now < max(1, self._least) or rate <= 0:
            self.reason = f"the run waits: {now} of {self._least} workers take part"
            return None
        if self._wanted not in {None, now}:
            self._begin_anew()  # somebody else scaled, or a worker was lost
        waits_s = 0.0
        if self._acted_s is not None:
            waits_s = self._acted_s + self._rules.pause_s - sample.time_s
        if waits_s <= 0 and (act := self._look_at_ps(sample)) is not None:
            self._begin_anew()
            return act
        last = self._rates.get(now)
        if self._rests and last and abs(rate / last - 1) > self._rules.hysteresis:
            self._begin_anew()
        if self._rests:
            self.reason = f"{now} workers are as many as pay"
            return None
        self._rates[now] = rate
        if waits_s > 0:
            self.reason = f"the last act was {self._rules.pause_s - waits_s:.0f} s ago"
            return None
        return self._look(sample)

    def _begin_anew(self) -> None:
        self._rates.clear()
        self._pays, self._too_many, self._rests = 0, None, False
        self._wanted = None

    # ------------------------------------------------------------ ps

    def _look_at_ps(self, sample: RunSample) -> Scale | None:
        if self._ps is None or not sample.ps:
            return None
        (least, most), now, rate = self._ps, sample.ps, sample.batches_per_s
        numbers = {"ps_busy": sample.ps_busy, "ps_memory": sample.ps_memory}
        before, self._trial = self._trial, None
        if before is not None and before.ps < now and before.workers == sample.workers:
            self._enough = before
            if rate < _WORTH * before.batches_per_s and before.ps >= least:
                rates = f"{rate:.3g} batches/s, of {before.batches_per_s:.3g} before"
                why = f"one ps more made {rates}"
                return Scale(sample.workers, why, numbers, before.ps)
            self._enough = None
        if now >= most:
            return None
        if sample.ps_memory > self._rules.most_memory:
            why = f"a ps has {sample.ps_memory:.0%} of its memory in use"
            return Scale(sample.workers, why, numbers, now + 1)
        enough = self._enough
        is_enough = enough is not None and (
            enough.ps <= now and sample.workers <= enough.workers
        )
        is_busy = sample.ps_busy > self._rules.most_busy and not is_enough
        if not (is_busy and self._is_limited(sample)):
            return None
        self._trial = sample
        why = f"a ps keeps {sample.ps_busy:.2g} cores busy"
        return Scale(sample.workers, why, numbers, now + 1)

    def _is_limited(self, sample: RunSample) -> bool:
        """Whether more workers would not make the run faster, or cannot be had."""
        now, rate = sample.workers, sample.batches_per_s
        if self._rests or (self._most is not None and now >= self._most):
            return True
        self._rates[now] = rate
        return self._gain(now) < self._rules.least_gain * rate / now

    # ------------------------------------------------------------ the search

    def _look(self, sample: RunSample) -> Scale | None:
        now, rate = sample.workers, sample.batches_per_s
        gain, mean = self._gain(now), rate / now
        numbers = {"workers": now, "batches_per_s": rate, "gain_per_worker": gain}
        if gain < self._rules.least_gain * mean:
            self._too_many = now
            why = (
                f"each added worker made {gain:.3g} batches/s, of {mean:.2g} of all on "
                "average"
            )
            return self._between(now, why, numbers)
        self._pays = max(self._pays, now)
        if self._too_many is not None:
            why = f"{now} workers pay, and {self._too_many} do not"
            return self._between(now, why, numbers)
        if self._most is not None and now >= self._most:
            self._rest(f"{now} workers are the most that it may have")
            return None
        if sample.input_share > self._rules.most_input:
            self.reason = (
                f"workers wait for data for {sample.input_share:.0%} of a step, which "
                "more of them would not shorten"
            )
            return None
        more = 2 * now if self._most is None else min(2 * now, self._most)
        why = f"{now} workers make {rate:.3g} batches/s, {mean:.2g} each"
        return Scale(more, why, numbers)

    def _gain(self, workers: int) -> float:
        """Returns what each worker adds beyond the most that are known to pay."""
        before = max((n for n in self._rates if n < workers), default=0)
        if self._pays and self._pays < workers:
            before = self._pays
        rate = self._rates[workers]
        return (rate - self._rates.get(before, 0.0)) / (workers - before)

    def _between(
        self, now: int, why: str, numbers: Mapping[str, float]
    ) -> Scale | None:
        """Tries the middle of what pays and what does not, or ends at what pays."""
        assert self._too_many is not None
        pays = self._pays or self._least
        middle = (pays + self._too_many) // 2
        # Where both make nearly as many batches, what is between them does so too.
        many, few = self._rates[self._too_many], self._rates.get(pays, 0.0)
        if middle == pays or few < _WORTH * many < _WORTH**2 * few:
            middle = pays
        if middle == now:
            self._rest(f"{now} workers are as many as pay")
            return None
        self._rests = middle == pays and pays in self._rates
        return Scale(middle, why, numbers)

    def _rest(self, reason: str) -> None:
        self._rests, self.reason = True, reason
