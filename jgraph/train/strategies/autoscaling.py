"""Autoscaling of a run by its client: measures, asks the policy, starts workers."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, final

from jgraph.client.cluster import Cluster
from jgraph.client.runs.scaling import SCALE_S
from jgraph.clock import Clock, SystemClock
from jgraph.coordination.run.autoscale import RunSample, Scale
from jgraph.errors import ConfigError, JGError
from jgraph.graph.device import is_ps
from jgraph.graph.ir import TaskName
from jgraph.train.run.members import RunMember
from jgraph.train.state.runner import Chunk
from jgraph.train.strategies.autoscale import WINDOW_S, AutoScale, ScalePolicy
from jgraph.train.strategies.elastic import Elastic

_LOG = logging.getLogger("jgraph.policy")
_LOOK_S: Final = 1.0
_END_S: Final = SCALE_S + 10.0
"""An act that is under way ends within its own time."""


@final
class RunMeter:
    """Counts what a run does while the same workers take part; for two threads.

    Example:
      >>> import numpy as np
      >>> meter, steps = RunMeter(), np.arange(40)
      >>> meter.take(Chunk(0, steps, steps, {}), ["w0"], now=0.0)
      >>> meter.take(Chunk(0, steps, steps, {}, {"input": 1.0}), ["w0"], now=2.0)
      >>> meter.sample(now=10.0, window_s=20.0)
      >>> found = meter.sample(now=20.0, window_s=20.0)
      >>> found.workers, found.batches_per_s, found.input_share
      (1, 2.0, 1.0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: list[str] = []
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._since, self._batches = now, 0.0
        self._input_s = self._all_s = 0.0

    def begin(self, now: float) -> None:
        """Counts anew from now on."""
        with self._lock:
            self._begin(now)

    def take(self, chunk: Chunk, workers: Sequence[str], now: float) -> None:
        """Takes what was told, and who takes part."""
        with self._lock:
            if list(workers) != self._workers:
                # What this chunk tells of was done by others as well.
                self._workers = list(workers)
                self._begin(now)
                return
            self._batches += len(chunk) * chunk.batches_per_step
            for times in (chunk.times, *(one.times for one in chunk.of_workers)):
                self._input_s += times.get("input", 0.0)
                self._all_s += sum(times.values())

    def sample(self, now: float, window_s: float) -> RunSample | None:
        """Returns what was counted and counts anew, once the time has passed."""
        with self._lock:
            seconds = now - self._since
            if seconds < window_s or not self._batches:
                return None
            share = self._input_s / self._all_s if self._all_s > 0 else 0.0
            rate, count = self._batches / seconds, len(self._workers)
            self._begin(now)
        return RunSample(now, count, rate, share)


@final
class PsMeter:
    """Looks at the ps of a run now and then.

    Args:
      cluster: where they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._cpu_s: dict[tuple[TaskName, int], float] = {}
        self._since = 0.0

    def added(self, sample: RunSample) -> RunSample:
        """Returns a sample with what the ps have done since the one before."""
        try:
            tasks = self._cluster.status().tasks
        except JGError:  # a task is lost, which the run tells
            return sample
        there = [one for one in tasks if is_ps(one.task)]
        cpu_s = {(one.task, one.pid): one.busy_s.get("process", 0.0) for one in there}
        seconds = max(sample.time_s - self._since, 1e-3)
        busy = [
            (now_s - self._cpu_s[process]) / seconds
            for process, now_s in cpu_s.items()
            if process in self._cpu_s
        ]
        memory = [1 - one.memory_free for one in there if one.memory_free is not None]
        self._cpu_s, self._since = cpu_s, sample.time_s
        return replace(
            sample,
            ps=len(there),
            ps_busy=max(busy, default=0.0),
            ps_memory=max(memory, default=0.0),
        )


@final
class AutoScaling:
    """Does for one run what a policy says; a thread of this process.

    Args:
      cluster: where it runs; workers are started there.
      elastic: says how many there may be, and the policy.
      run: its name.
      clock: the time.
    """

    def __init__(
        self, cluster: Cluster, elastic: Elastic, run: str, clock: Clock | None = None
    ) -> None:
        self._cluster, self._run = cluster, run
        self._least, self._most = elastic.workers
        self._clock = clock or SystemClock()
        policy, self._window_s, self._dry_run = elastic.policy, WINDOW_S, False
        if isinstance(policy, AutoScale):
            self._window_s, self._dry_run = policy.window_s, policy.dry_run
            policy = policy.begin(self._least, self._most, elastic.ps)
        assert policy is not None  # who makes this has one
        self._policy: ScalePolicy = policy
        self._reason = ""
        self._meter = RunMeter()
        self._ps_bounds = elastic.ps
        self._ps_meter = None if elastic.ps is None else PsMeter(cluster)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._work, name=f"jgraph-policy-{run}", daemon=True
        )
        self._thread.start()

    def take(self, chunk: Chunk, members: Sequence[RunMember]) -> None:
        """Takes what the run told, and who takes part."""
        workers = [one.task for one in members if one.state == "takes part"]
        self._meter.take(chunk, workers, self._clock.now())

    def close(self) -> None:
        """Ends it, after an act that is under way."""
        self._stop.set()
        self._thread.join(_END_S)

    def _work(self) -> None:
        while not self._stop.wait(min(_LOOK_S, self._window_s / 4)):
            sample = self._meter.sample(self._clock.now(), self._window_s)
            if sample is not None:
                self._decide(sample)

    def _decide(self, sample: RunSample) -> None:
        if self._ps_meter is not None:
            sample = self._ps_meter.added(sample)
        try:
            act = self._policy.handle(sample)
            wanted, ps = sample.workers, sample.ps
            if act is not None and int(act.workers) != wanted:
                wanted = _within(int(act.workers), self._least, self._most)
            if act is not None and act.ps is not None and ps and self._ps_bounds:
                ps = _within(int(act.ps), *self._ps_bounds)
        except Exception:  # noqa: BLE001  # of the user's own policy
            _LOG.exception(
                "the policy of run '%s' failed; it decides no more", self._run
            )
            self._stop.set()
            return
        if act is not None and ps != sample.ps:
            self._act(act, "ps", sample.ps, ps)
            return
        if act is not None and wanted != sample.workers:
            self._act(act, "workers", sample.workers, wanted)
            return
        reason = str(getattr(self._policy, "reason", ""))
        if reason != self._reason:
            self._reason = reason
            text = "run '%s' keeps its %d workers: %s"
            _LOG.info(text, self._run, sample.workers, reason)

    def _act(self, act: Scale, what: str, now: int, wanted: int) -> None:
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in act.numbers.items())
        would = "would be" if self._dry_run else "is"
        text = (
            f"run '{self._run}' {would} scaled from {now} to {wanted} {what}: "
            f"{act.why}{f' ({numbers})' if numbers else ''}"
        )
        self._cluster.notes.note("scaled", text)
        if self._dry_run:
            return
        try:
            if what == "ps":
                self._cluster.scale(ps=wanted, timeout_s=SCALE_S)
            else:
                self._cluster.scale(workers=wanted, timeout_s=SCALE_S)
        except JGError as error:
            if not self._stop.is_set():
                text = f"run '{self._run}' was not scaled to {wanted} {what}: {error}"
                self._cluster.notes.note("scaled", text, level=logging.WARNING)
        self._meter.begin(self._clock.now())


def _within(count: int, least: int, most: int | None) -> int:
    count = max(count, least)
    return count if most is None else min(count, most)


def scaling_of(
    cluster: Cluster, elastic: Elastic | None
) -> Callable[[str], AutoScaling] | None:
    """Returns what begins to scale a run, given its name; None: nobody does.

    Args:
      cluster: where it runs.
      elastic: of its strategy.

    Raises:
      ConfigError: this process cannot start workers.
    """
    if elastic is None or elastic.policy is None:
        return None
    policy = elastic.policy
    is_dry = isinstance(policy, AutoScale) and policy.dry_run
    if not cluster.starts_workers and not is_dry:
        raise ConfigError(
            f"jg.Elastic(policy=…) starts workers, and {cluster!r} does not start any "
            "from here; use jg.LocalCluster(elastic=True), or jg.AutoScale("
            "dry_run=True), which says what it would do"
        )
    return lambda run: AutoScaling(cluster, elastic, run)
