"""Tasks of a watched cluster: what each told last, its rates, restarts and silence."""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any, Final, final

from jgraph.coordination.watch.facts import Fact, items, number, numbers, rows, text
from jgraph.coordination.watch.histogram import quantile
from jgraph.coordination.watch.rates import Window, grown
from jgraph.coordination.watch.series import Series

WINDOW_S: Final = 60.0
_POINTS: Final = 240
_PLAIN: Final = (
    *("address", "state", "incarnation", "pid", "platform", "device_count"),
    *("rss_bytes", "variable_bytes", "compilations", "jgraph", "jax", "python", "up_s"),
)


@final
class TaskSeen:
    """One task, over all of its processes.

    Attributes:
      name: of the task.
      told: what it said last.
      seen: when.
      missed: looks in a row in which it did not answer.
      restarts: when another process of it answered for the first time.
      cores: of each kind of work, in CPU seconds per second.
      traffic: per peer, bytes and frames per second.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: Fact = {}
        self.seen = 0.0
        self.missed = 0
        self.restarts: deque[float] = deque(maxlen=100)
        self.cores: dict[str, float] = {}
        self.traffic: dict[str, dict[str, float]] = {}
        self.busy = Series(_POINTS)
        self.memory = Series(_POINTS)
        self.calls: dict[str, Window] = {}
        self.ages: dict[str, Window] = {}
        """Of each gate: updates, and those at the bound."""
        self.waits: dict[str, Window] = {}
        self.evicted: dict[str, Window] = {}
        self.saves = Window(10 * WINDOW_S)
        self.saved: deque[float] = deque(maxlen=20)
        """When it wrote its part of a checkpoint."""

    def take(self, fact: Fact, now: float) -> None:
        """Takes what the task says of itself."""
        before, seconds = self.facts, now - self.seen
        self.missed = 0
        if before and text(fact, "incarnation") != text(before, "incarnation"):
            self.restarts.append(now)
            before = {}
            self._begin_anew()
        self.facts, self.seen = fact, now
        self.memory.add(now, number(fact, "rss_bytes"))
        if before:
            busy, was = numbers(fact, "busy_s"), numbers(before, "busy_s")
            self.cores = {k: round(v, 3) for k, v in grown(was, busy, seconds).items()}
            self.busy.add(now, self.cores.get("process", 0.0))
            self._take_traffic(rows(before, "traffic"), rows(fact, "traffic"), seconds)
        self._take_windows(fact, now)

    def _begin_anew(self) -> None:
        self.cores, self.traffic = {}, {}
        for windows in (self.calls, self.ages, self.waits, self.evicted):
            windows.clear()
        self.saves = Window(10 * WINDOW_S)

    def _take_traffic(
        self,
        before: Mapping[str, Fact],
        now_by_peer: Mapping[str, Fact],
        seconds: float,
    ) -> None:
        counters = ("frames_sent", "bytes_sent", "shared_bytes_sent")
        for peer, row in now_by_peer.items():
            was = before.get(peer, {})
            now_, then = ({n: number(r, n) for n in counters} for r in (row, was))
            self.traffic[peer] = grown(then, now_, seconds)

    def _take_windows(self, fact: Fact, now: float) -> None:
        for method, row in rows(fact, "calls").items():
            counts = {str(at): n for at, n in enumerate(items(row, "buckets"))}
            counts = {at: n for at, n in counts.items() if isinstance(n, int)}
            window = self.calls.setdefault(method, Window(WINDOW_S))
            window.add(now, {**counts, "errors": number(row, "errors")})
        for name, gate in rows(fact, "gates").items():
            bound = number(gate, "max_staleness", inf)
            ages = {"updates": 0.0, "at_bound": 0.0}
            for worker in rows(gate, "staleness").values():
                for age, updates in worker.items():
                    if isinstance(updates, int | float) and str(age).isdecimal():
                        ages["updates"] += updates
                        ages["at_bound"] += updates if int(age) >= bound else 0
            self.ages.setdefault(name, Window(WINDOW_S)).add(now, ages)
            waits = {"waits": number(gate, "waits"), "wait_s": number(gate, "wait_s")}
            self.waits.setdefault(name, Window(WINDOW_S)).add(now, waits)
        for name, shard in rows(fact, "hash_tables").items():
            count = {"evicted": number(shard, "evicted")}
            self.evicted.setdefault(name, Window(WINDOW_S)).add(now, count)
        self._take_saves(fact, now)

    def _take_saves(self, fact: Fact, now: float) -> None:
        saves = fact.get("saves")
        if not isinstance(saves, Mapping):
            return
        counts = {n: number(saves, n) for n in ("saves", "failures")}
        if counts["saves"]:
            at = now - number(saves, "age_s")
            if not self.saved or at > self.saved[-1] + 0.5:
                self.saved.append(at)
        self.saves.add(now, counts)

    def view(self) -> dict[str, Any]:
        """Returns it as the page shows it."""
        return {
            **{name: self.facts.get(name) for name in _PLAIN},
            "missed": self.missed,
            "seen": self.seen if self.missed else None,
            "restarts": len(self.restarts),
            "programs": len(items(self.facts, "programs")),
            "cores": dict(self.cores),
            "busy_s": numbers(self.facts, "busy_s"),
        }

    def views_of_calls(self) -> dict[str, dict[str, Any]]:
        """Returns each method that was called: rate, quantiles of a minute, errors."""
        found = {}
        for method, window in self.calls.items():
            sums, span = window.sums(), window.span
            errors = sums.pop("errors", 0)
            buckets = [sums[at] for at in sorted(sums, key=int)]
            call = rows(self.facts, "calls").get(method, {})
            counts = [n for n in items(call, "buckets") if isinstance(n, int)]
            found[f"{self.name} {method}"] = {
                "task": self.name,
                "method": method,
                "per_s": round(sum(buckets) / span, 3) if span else None,
                "p50_ms": _ms(quantile(buckets, 0.5)),
                "p99_ms": _ms(quantile(buckets, 0.99)),
                "count": sum(counts),
                "seconds": number(call, "seconds"),
                "errors": number(call, "errors"),
                "new_errors": errors,
            }
        return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


@final
class Tasks:
    """All tasks of a cluster.

    Attributes:
      seen: by name.
      master: who asked them.
    """

    def __init__(self) -> None:
        self.seen: dict[str, TaskSeen] = {}
        self.master = ""

    def take(self, fact: Fact, now: float) -> None:
        """Takes what a master says of all of them; who is not named is gone."""
        self.master = text(fact, "master")
        answers = rows(fact, "tasks")
        missing = [n for n in items(fact, "missing") if isinstance(n, str)]
        for name in [*answers, *missing]:
            if name not in self.seen:
                self.seen[name] = TaskSeen(name)
        for name in list(self.seen):
            if name in answers:
                self.seen[name].take(answers[name], now)
            elif name in missing:
                self.seen[name].missed += 1
            else:
                del self.seen[name]

    @property
    def ready(self) -> int:
        """How many answer and take work."""
        seen = self.seen.values()
        return sum(not t.missed and text(t.facts, "state") == "ready" for t in seen)
