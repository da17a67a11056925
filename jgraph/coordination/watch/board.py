"""Board of a cluster: facts in, what there is to see and what is wrong out."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, final

from jgraph.coordination.watch.alarms import Alarm, Seen, findings, plain
from jgraph.coordination.watch.facts import (
    Fact,
    clean,
    items,
    number,
    numbers,
    rows,
    text,
)
from jgraph.coordination.watch.models import Models
from jgraph.coordination.watch.runs import Runs, RunSeen
from jgraph.coordination.watch.tasks import Tasks

VERSION: Final = 1
_EVENTS: Final = 500
_SHOWN: Final = 200
_TRAFFIC: Final = (
    *("frames_sent", "bytes_sent", "frames_received", "bytes_received"),
    *("shared_bytes_sent", "shared_bytes_received"),
)
_ALIKE: Final = ("max_staleness", "waiting", "oldest_s", "staleness")


@final
class Board:
    """All that is known of a cluster, from facts in the order of their times.

    The same facts give the same board: a file of them shows what was seen live.

    Attributes:
      tasks: of the cluster.
      runs: of the cluster.
      models: that are served beside it.
      now: of the last fact, in seconds since 1970.

    Example:
      >>> board = Board()
      >>> task = {"incarnation": "1", "state": "ready"}
      >>> board.take({"kind": "status", "time": 1.0, "master": "/job:ps/task:0",
      ...     "tasks": {"/job:ps/task:0": task}, "missing": ["/job:worker/task:0"]})
      >>> board.view()["cluster"]["sentence"]
      'no run goes on, 1 of 2 tasks answer'
    """

    def __init__(self) -> None:
        self.tasks = Tasks()
        self.runs = Runs()
        self.models = Models()
        self.now = 0.0
        self._answer_s: float | None = None
        self._silent = ""
        self._troubles: dict[str, str] = {}
        self._shards: Mapping[str, Any] = {}
        self._events: deque[Fact] = deque(maxlen=_EVENTS)
        self._alarms: dict[str, Alarm] = {}

    def take(self, fact: Fact) -> None:
        """Takes a fact, as ``facts.checked`` returns it."""
        self.now = max(self.now, number(fact, "time"))
        match fact.get("kind"):
            case "status":
                self._silent, self._answer_s = "", self.now
                self.tasks.take(fact, self.now)
            case "silent":
                self._silent = text(fact, "text") or "no answer"
            case "runs":
                self.runs.take(fact, self.now)
            case "report":  # many come; alarms are looked for at the next look
                self.runs.report(fact)
                return
            case "models":
                self.models.take(fact, self.now)
            case "variables":
                self._shards = rows(fact, "shards")
            case "events":
                events = items(fact, "events")
                self._events += [e for e in events if isinstance(e, Mapping)]
            case "trouble":
                self._trouble(text(fact, "id"), text(fact, "text"))
        self._look()

    def _trouble(self, name: str, what: str) -> None:
        if what:
            self._troubles[name] = what
        else:
            self._troubles.pop(name, None)

    def _look(self) -> None:
        seen = Seen(
            self.tasks, self.runs, self.models, self._silent, self._troubles, self.now
        )
        before = self._alarms
        self._alarms = {
            found.id: Alarm(
                found.id,
                found.level,
                before[found.id].since if found.id in before else self.now,
                found.text,
                found.type,
            )
            for found in findings(seen)
        }

    def alarms(self) -> list[Alarm]:
        """Returns what is wrong now, the most harmful first."""
        return list(self._alarms.values())

    def sentence(self) -> str:
        """Returns in one sentence how the cluster is."""
        count = len(self.tasks.seen)
        runs = self.runs.running()
        if not count:
            return self._silent or "nothing is known yet"
        answer = f"{sum(not t.missed for t in self.tasks.seen.values())} of {count}"
        if self._silent:
            return "the cluster does not answer; this is what was seen last"
        if not runs:
            return f"no run goes on, {answer} tasks answer"
        return "; ".join(f"{self._of_run(run)}, {answer} tasks answer" for run in runs)

    def _of_run(self, run: RunSeen) -> str:
        step, steps = number(run.facts, "step"), number(run.facts, "steps")
        what = f"run '{run.name}' is at step {step:,.0f} of {steps:,.0f}"
        if run.rate.last is not None:
            what += f", {run.rate.last:.3g} steps/s"
        saved = [task.saved[-1] for task in self.tasks.seen.values() if task.saved]
        if saved and text(run.facts, "checkpoints"):
            what += f", newest checkpoint {self.now - max(saved):.0f} s old"
        return what

    def view(self) -> dict[str, Any]:
        """Returns what there is to see, as JSON."""
        tasks = self.tasks.seen
        view = {
            "version": VERSION,
            "time": self.now,
            "answered": self._answer_s,
            "silent": self._silent,
            "cluster": {
                "master": self.tasks.master,
                "ready": self.tasks.ready,
                "tasks": len(tasks),
                "sentence": self.sentence(),
            },
            "alarms": list(map(plain, self.alarms())),
            "tasks": {name: task.view() for name, task in sorted(tasks.items())},
            "runs": {name: run.view() for name, run in self.runs.seen.items()},
            "traffic": self._traffic(),
            "calls": {
                name: row
                for task in tasks.values()
                for name, row in sorted(task.views_of_calls().items())
            },
            "gates": self._gates(),
            "saves": {
                name: {**numbers(task.facts, "saves"), "last": task.saved[-1]}
                for name, task in tasks.items()
                if task.saved and isinstance(task.facts.get("saves"), Mapping)
            },
            "models": self.models.view(),
        }
        cleaned: dict[str, Any] = clean(view)
        # These are parts of facts, and so they are clean.
        return {
            **cleaned,
            "shards": self._shards,
            "tables": {
                name: rows(task.facts, "hash_tables") for name, task in tasks.items()
            },
            "events": list(self._events)[-_SHOWN:],
        }

    def curves(self) -> dict[str, Any]:
        """Returns all series, as JSON: of runs by metric, and of tasks."""
        runs = {
            name: {
                "metrics": {n: s.columns() for n, s in run.metrics.items()},
                "rate": run.rate.columns(),
            }
            for name, run in self.runs.seen.items()
        }
        tasks = {
            name: {"busy": task.busy.columns(), "memory": task.memory.columns()}
            for name, task in sorted(self.tasks.seen.items())
        }
        return {"runs": runs, "tasks": tasks}

    def _traffic(self) -> dict[str, Any]:
        return {
            f"{name} {peer}": {
                "from": name,
                "to": peer,
                "bytes_per_s": round(rates.get("bytes_sent", 0.0)),
                "shared_bytes_per_s": round(rates.get("shared_bytes_sent", 0.0)),
                "frames_per_s": round(rates.get("frames_sent", 0.0), 1),
                **{key: number(sums, key) for key in _TRAFFIC},
            }
            for name, task in sorted(self.tasks.seen.items())
            for peer, sums in sorted(rows(task.facts, "traffic").items())
            for rates in (task.traffic.get(peer, {}),)
        }

    def _gates(self) -> dict[str, Any]:
        found = {}
        for name, task in sorted(self.tasks.seen.items()):
            for gate, facts in rows(task.facts, "gates").items():
                waits = task.waits[gate].sums() if gate in task.waits else {}
                found[f"{name} {gate}"] = {
                    "task": name,
                    "gate": gate,
                    **{key: facts.get(key) for key in _ALIKE},
                    "waits": waits.get("waits"),
                    "wait_s": waits.get("wait_s"),
                }
        return found
