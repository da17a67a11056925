"""Runs of a watched cluster: progress, curves of metrics, step times of each worker."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, final

from jgraph.coordination.step.step_metrics import CONTRIBUTIONS
from jgraph.coordination.sync.rounds import NOT_FINITE
from jgraph.coordination.watch.facts import Fact, items, number, numbers, rows, text
from jgraph.coordination.watch.series import Series

_STEPS: Final = 256
"""Of which a worker's quantiles are."""
_NAMES: Final = 64
"""Metrics of one run, at most."""
_RUNS: Final = 16
_ROUNDS: Final = 50
"""The newest, of which a run has rows."""
_CLIENTS: Final = 16
"""Names in one of these, at most."""


@final
class WorkerSeen:
    """What one worker did in a run.

    Attributes:
      steps: how many.
      step_s: seconds of its newest ones.
      parts: seconds of the last report, per step, by what they went to.
      dropped: its contributions that came too late.
    """

    def __init__(self) -> None:
        self.steps = 0.0
        self.step_s: deque[float] = deque(maxlen=_STEPS)
        self.parts: dict[str, float] = {}
        self.dropped = 0.0

    @property
    def median_s(self) -> float | None:
        """Of its newest steps; None before there are eight."""
        return median(self.step_s) if len(self.step_s) >= 8 else None

    def view(self) -> dict[str, Any]:
        """Returns it as the page shows it."""
        ordered = sorted(self.step_s)
        return {
            "steps": self.steps,
            "step_ms": {
                f"p{share}": round(1000 * ordered[len(ordered) * share // 100], 3)
                for share in (50, 95, 99)
                if ordered
            },
            "parts": {name: round(s, 6) for name, s in self.parts.items()},
            "dropped": self.dropped,
        }


@final
class RunSeen:
    """One run.

    Attributes:
      told: what its master said last.
      metrics: a curve over steps for each.
      rate: steps per second, over time.
      advanced: when it made a step last.
      rounds: of a federated run, by number: who took part, and who was dropped.
      recoveries: how often it went back to a checkpoint.
      odd: names of metrics that were not finite.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: Fact = {}
        self.metrics: dict[str, Series] = {}
        self.rate = Series()
        self.advanced: float | None = None
        self.rounds: dict[int, dict[str, Any]] = {}
        self.clients: dict[str, Counter[str]] = {}
        self.recoveries = 0
        self.odd: set[str] = set()
        self.workers: dict[str, WorkerSeen] = {}
        self._reported = self._back = 0.0
        self._looked: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it goes on."""
        return text(self.facts, "state") == "running"

    def take(self, fact: Fact, now: float) -> None:
        """Takes how it stands."""
        step, before = number(fact, "step"), number(self.facts, "step")
        since = None if self._looked is None else now - self._looked
        if since and self.is_running and step >= before:
            self.rate.add(now, (step - before) / since)
        if self.advanced is None or step != before:
            self.advanced = now
        self.facts, self._looked = fact, now

    def report(self, fact: Fact) -> None:
        """Takes what a loop of it tells."""
        if fact.get("anew"):
            self._begin_anew()
        back = fact.get("back_to")
        if isinstance(back, int | float):
            self._go_back(back)
        steps, task = number(fact, "steps"), text(fact, "task")
        is_sync = bool(self.facts.get("synchronous"))
        decides = task.startswith("/job:ps/")
        if task and not decides:
            self._take_worker(task, steps, fact)
        for late, count in numbers(fact, "dropped").items():
            self.workers.setdefault(late, WorkerSeen()).dropped = count
        for one in items(fact, "rounds"):
            if isinstance(one, Mapping):
                self._take_round(one)
        if steps and (decides or not is_sync):
            self._reported += steps
            self._take_metrics(fact)
        self._take_own_rounds(task, fact)

    def _take_worker(self, task: str, steps: float, fact: Fact) -> None:
        worker = self.workers.setdefault(task, WorkerSeen())
        worker.steps += steps
        seconds = items(fact, "step_s")
        worker.step_s += [s for s in seconds if isinstance(s, int | float) and s >= 0]
        if steps:
            parts = numbers(fact, "times").items()
            worker.parts = {name: total / steps for name, total in parts}

    def _take_round(self, fact: Fact) -> None:
        members = [name for name in items(fact, "members") if isinstance(name, str)]
        reasons = fact.get("dropped")
        dropped = {
            task: str(why)
            for task, why in (reasons.items() if isinstance(reasons, Mapping) else ())
        }
        at, void = int(number(fact, "number")), text(fact, "void")
        tries = self.rounds[at]["void"] if at in self.rounds else ()
        wait_s = round(number(fact, "wait_s"), 3)
        row = _round(members, dropped, wait_s, [*tries, *([void] * bool(void))])
        self._count(row, 1)
        self.rounds[at] = row
        self._cut_rounds()

    def _take_own_rounds(self, task: str, fact: Fact) -> None:
        """Takes rounds of one client each; their numbers are in order of their time."""
        own = [one for one in items(fact, "own_rounds") if isinstance(one, Mapping)]
        if not own:
            return
        new = []
        for one in own:
            members, dropped = [task], {}
            if not one.get("finite"):
                members, dropped = [], {task: NOT_FINITE}
            row = _round(members, dropped, 0.0) | {"at": number(one, "seconds")}
            self._count(row, 1)
            new.append(row)
        # What was told before the run went back keeps its numbers.
        since = max(self._back, number(self.facts, "first_step"))
        old = {n: row for n, row in self.rounds.items() if n <= since}
        new += [row for n, row in self.rounds.items() if n > since]
        new.sort(key=lambda row: row["at"])
        last = int(number(self.facts, "first_step") + self._reported)
        self.rounds = old | dict(enumerate(new, last + 1 - len(new)))
        self._cut_rounds()

    def _count(self, row: Mapping[str, Any], by: int) -> None:
        """Counts what a round was to its clients, or takes that back."""
        for task in row["members"]:
            self.clients.setdefault(task, Counter())["members"] += by
        for task, why in row["dropped"].items():
            self.clients.setdefault(task, Counter())[why] += by

    def _cut_rounds(self) -> None:
        for old in sorted(self.rounds)[:-_ROUNDS]:
            del self.rounds[old]

    def _take_metrics(self, fact: Fact) -> None:
        at = number(self.facts, "first_step") + self._reported
        for name, value in rows(fact, "metrics").items():
            if name not in self.metrics and len(self.metrics) >= _NAMES:
                continue
            series = self.metrics.setdefault(name, Series())
            before = series.odd
            low, mean, high = (value.get(key) for key in ("min", "mean", "max"))
            series.add(at, mean, low, high)  # type: ignore[arg-type]  # or it is odd
            if series.odd > before:
                self.odd.add(name)

    def _begin_anew(self) -> None:
        """All of it is told again."""
        self.metrics, self.workers, self.recoveries = {}, {}, 0
        self.rounds, self.clients = {}, {}
        self._reported = self._back = 0.0

    def _go_back(self, step: float) -> None:
        self.recoveries += 1
        self._reported = max(0.0, step - number(self.facts, "first_step"))
        self._back = step
        for again in [n for n in self.rounds if n > step]:
            self._count(self.rounds.pop(again), -1)
        for series in self.metrics.values():
            series.cut(step)

    def slow_workers(self) -> list[tuple[str, float]]:
        """Returns who takes more than twice the median of all, and how many times."""
        medians = {task: w.median_s for task, w in self.workers.items()}
        known = {task: s for task, s in medians.items() if s is not None}
        if len(known) < 3:
            return []
        usual = median(known.values())
        slow = [
            (task, s / usual) for task, s in known.items() if usual and s > 2 * usual
        ]
        return sorted(slow, key=lambda one: -one[1])

    def view(self) -> dict[str, Any]:
        """Returns it as the page shows it."""
        fact, rate = self.facts, self.rate.last if self.is_running else None
        batch, each = number(fact, "batch_size"), 1.0
        if fact.get("synchronous") and CONTRIBUTIONS in self.metrics:
            each = self.metrics[CONTRIBUTIONS].last or 1.0
        return {
            **{n: fact.get(n) for n in ("state", "step", "steps", "first_step")},
            **{n: fact.get(n) for n in ("seconds", "master", "term", "synchronous")},
            "checkpoints": fact.get("checkpoints"),
            "steps_per_s": None if rate is None else round(rate, 3),
            "examples_per_s": None if rate is None else round(rate * batch * each, 1),
            "metrics": {name: series.last for name, series in self.metrics.items()},
            "not_finite": sorted(self.odd),
            "workers": {task: w.view() for task, w in sorted(self.workers.items())},
            "recoveries": self.recoveries,
            "rounds": {str(n): _shown(one) for n, one in sorted(self.rounds.items())},
            "clients": {task: dict(n) for task, n in sorted(self.clients.items())},
            "members": items(fact, "workers"),
            "bounds": items(fact, "bounds") or None,
        }


def _round(
    members: Sequence[str],
    dropped: Mapping[str, str],
    wait_s: float,
    void: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns a round: its clients, and why tries of it were given up."""
    return {
        "members": members,
        "dropped": dropped,
        "wait_s": wait_s,
        "void": list(void),
    }


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a round as the page shows it."""
    return {
        "clients": len(row["members"]),
        "who": row["members"][:_CLIENTS],
        "dropped": len(row["dropped"]),
        "why": dict(list(row["dropped"].items())[:_CLIENTS]),
        "wait_s": row["wait_s"],
        "void": row["void"],
    }


@final
class Runs:
    """All runs of a cluster.

    Attributes:
      seen: by name; the newest 16.
    """

    def __init__(self) -> None:
        self.seen: dict[str, RunSeen] = {}

    def take(self, fact: Fact, now: float) -> None:
        """Takes how they stand."""
        for name, row in rows(fact, "runs").items():
            self.seen.setdefault(name, RunSeen(name)).take(row, now)
        over = [name for name, run in self.seen.items() if not run.is_running]
        for name in over[: max(0, len(self.seen) - _RUNS)]:
            del self.seen[name]

    def report(self, fact: Fact) -> None:
        """Takes what a loop of one tells."""
        run = self.seen.get(text(fact, "run"))
        if run is not None:
            run.report(fact)

    def running(self) -> Sequence[RunSeen]:
        """Returns those that go on."""
        return [run for run in self.seen.values() if run.is_running]
