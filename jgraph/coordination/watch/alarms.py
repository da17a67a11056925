"""Alarms of a watched cluster in words: what, where, since when, and what to type."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from statistics import median
from typing import Any, Final, final

from jgraph.coordination.watch.facts import items, number, rows, text
from jgraph.coordination.watch.models import Models
from jgraph.coordination.watch.runs import Runs, RunSeen
from jgraph.coordination.watch.tasks import Tasks

LEVELS: Final = ("critical", "warning", "notice")
_RECENT_S: Final = 600.0
_STILL_S: Final = 60.0
_STUCK_S: Final = 30.0
_SLOW_OVER_S: Final = 300.0
_REFUSED: Final = 0.01
_ROOM: Final = 0.05
_REGAINED: Final = 0.1
"""Share of its fall, from which on a loss that grows is none that is noisy."""
_DAY_S: Final = 86_400.0
_SOON_S: Final = 30 * _DAY_S


@final
@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that somebody should look at.

    Attributes:
      id: the same as long as it lasts: ``"slow:RUN:TASK"``.
      level: "critical", "warning" or "notice".
      since: when it was noticed, in seconds since 1970.
      text: what is wrong, and where.
      type: what to type, to learn more or to mend it.
    """

    id: str
    level: str
    since: float
    text: str
    type: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}; type: {self.type}"


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """An alarm before anybody knows since when it lasts."""

    id: str
    level: str
    text: str
    type: str


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """All that the rules look at.

    Attributes:
      tasks: of the cluster.
      runs: of the cluster.
      models: that are served beside it.
      silent: why nobody answers; empty: somebody does.
      troubles: of who watches, by id.
      now: of the last fact.
    """

    tasks: Tasks
    runs: Runs
    models: Models
    silent: str
    troubles: Mapping[str, str]
    now: float


def findings(seen: Seen) -> list[Finding]:
    """Returns what is wrong, the most harmful first."""
    rules = (
        *(_silent, _lost_tasks, _failed_runs, _not_finite, _failed_saves, _still_runs),
        *(
            _old_checkpoints,
            _restarts,
            _versions,
            _stuck_steps,
            _slow_runs,
            _grown_loss,
        ),
        *(_silent_models, _refused_requests, _full_hosts, _certificates),
        *(_slow_workers, _evictions, _troubles, _errors, _bounds, _draining),
    )
    found = [finding for rule in rules for finding in rule(seen)]
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def _silent(seen: Seen) -> Iterator[Finding]:
    if seen.silent:
        what = f"the cluster does not answer: {seen.silent.rstrip('.')}"
        yield Finding("silent", "critical", what, "jgraph doctor ADDRESS")


def _lost_tasks(seen: Seen) -> Iterator[Finding]:
    needed = bool(seen.runs.running())
    for task in seen.tasks.seen.values():
        if task.missed >= 2:
            what = f"{task.name} does not answer"
            if needed:
                what += ", and a run goes on"
            level = "critical" if needed else "warning"
            yield Finding(f"lost:{task.name}", level, what, "jgraph events")


def _silent_models(seen: Seen) -> Iterator[Finding]:
    for server, why in seen.models.servers.items():
        if why:
            what = f"the model server {server} does not answer: {why.rstrip('.')}"
            how = f"curl {server}/v2/health/ready"
            yield Finding(f"models:{server}", "critical", what, how)


def _refused_requests(seen: Seen) -> Iterator[Finding]:
    for server, versions in seen.models.seen.items():
        for name, version in versions.items():
            if (share := version.refused_share) > _REFUSED:
                what = (
                    f"model '{name}' at {server} refused {100 * share:.0f} % of the "
                    "requests of the last minute"
                )
                how = f"curl {server}/metrics"
                yield Finding(f"refused:{server}:{name}", "warning", what, how)


def _failed_runs(seen: Seen) -> Iterator[Finding]:
    for run in seen.runs.seen.values():
        if text(run.facts, "state") == "failed":
            master = text(run.facts, "master")
            what = f"run '{run.name}' failed at step {number(run.facts, 'step'):,.0f}"
            yield Finding(
                f"failed:{run.name}", "critical", what, f"jgraph logs {master}"
            )


def _not_finite(seen: Seen) -> Iterator[Finding]:
    for run in seen.runs.seen.values():
        if run.odd:
            names = ", ".join(sorted(run.odd))
            what = f"run '{run.name}': {names} is NaN or infinite"
            how = "trainer.fit(…, callbacks=[jg.NanGuard()])"
            yield Finding(f"nan:{run.name}", "critical", what, how)


def _failed_saves(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        if failures := task.saves.sums().get("failures"):
            times = "once" if failures == 1 else f"{failures:.0f} times"
            what = f"{task.name} could not write its part of a checkpoint, {times}"
            how = f"jgraph logs {task.name}"
            yield Finding(f"unsaved:{task.name}", "critical", what, how)


def _still_runs(seen: Seen) -> Iterator[Finding]:
    for run in seen.runs.running():
        still = seen.now - (run.advanced or seen.now)
        usual = run.rate.after(seen.now - _SLOW_OVER_S)
        slowest = max((1 / rate for _, rate in usual if rate), default=0.0)
        if still > max(_STILL_S, 10 * slowest):
            what = f"run '{run.name}' goes on and makes no step"
            how = "jgraph status --explain"
            yield Finding(f"still:{run.name}", "critical", what, how)


def _old_checkpoints(seen: Seen) -> Iterator[Finding]:
    saved = sorted(max(t.saved) for t in seen.tasks.seen.values() if t.saved)
    gaps = [
        later - earlier
        for task in seen.tasks.seen.values()
        for earlier, later in zip(task.saved, list(task.saved)[1:], strict=False)
    ]
    for run in seen.runs.running():
        if not text(run.facts, "checkpoints") or not saved or not gaps:
            continue
        age, usual = seen.now - saved[-1], median(gaps)
        if age > max(3 * usual, 5.0):
            what = (
                f"the newest checkpoint of run '{run.name}' is {_time(age)} old; they "
                f"came every {_time(usual)}"
            )
            how = f"jgraph ckpt ls {quote(text(run.facts, 'checkpoints'))}"
            yield Finding(f"old:{run.name}", "warning", what, how)


def _restarts(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        recent = [t for t in task.restarts if t > seen.now - _RECENT_S]
        if recent:
            times = "once" if len(recent) == 1 else f"{len(recent)} times"
            what = f"{task.name} was started again, {times} in ten minutes"
            yield Finding(f"restarts:{task.name}", "warning", what, "jgraph events")


def _full_hosts(seen: Seen) -> Iterator[Finding]:
    for name, what, how in (
        ("memory_free", "memory", "jgraph top"),
        ("disk_free", "disk of temporary files and records", "df -h"),
    ):
        hosts: dict[str, list[tuple[float, str]]] = {}
        for task in seen.tasks.seen.values():
            host = text(task.facts, "address").rpartition(":")[0]
            free = number(task.facts, name, 1.0)
            if free < _ROOM and not task.missed:
                hosts.setdefault(host, []).append((free, task.name))
        for host, full in hosts.items():
            least, first = min(full)
            more = f" and {len(full) - 1} more" if len(full) > 1 else ""
            where = (
                f"the host of {first}{more} has {100 * least:.0f} % of its {what} left"
            )
            yield Finding(f"{name}:{host}", "warning", where, how)


def _certificates(seen: Seen) -> Iterator[Finding]:
    ends = {
        task.name: at - seen.now
        for task in seen.tasks.seen.values()
        if (at := number(task.facts, "certificate_ends_s"))
    }
    soon = sorted((span, name) for name, span in ends.items() if span < _SOON_S)
    if soon:
        span, first = soon[0]
        more = f" and {len(soon) - 1} more" if len(soon) > 1 else ""
        when = f"ends in {span / _DAY_S:.0f} days" if span > 0 else "has ended"
        what = f"the certificate of {first}{more} {when}; no connection is made then"
        yield Finding("certificates", "warning", what, "jgraph certs")


def _versions(seen: Seen) -> Iterator[Finding]:
    for package in ("jgraph", "jax"):
        by_task = {
            task.name: version
            for task in seen.tasks.seen.values()
            if (version := text(task.facts, package))
        }
        versions = sorted(set(by_task.values()))
        if len(versions) > 1:
            counts = list(by_task.values())
            rare, *_, usual = sorted(versions, key=counts.count)
            where = ", ".join(sorted(t for t, v in by_task.items() if v == rare))
            what = f"{where} has {package} {rare}, and others have {usual}"
            yield Finding(
                f"versions:{package}",
                "warning",
                what,
                f"pip install {package}=={usual}",
            )


def _stuck_steps(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        ages = [
            (number(step, "age_s"), text(step, "program"))
            for step in items(task.facts, "steps")
            if isinstance(step, Mapping) and step.get("drives")
        ]
        age, program = max(ages, default=(0.0, ""))
        if age > _STUCK_S and not task.missed:
            what = f"a step of '{program}', driven by {task.name}, is {_time(age)} old"
            how = "jgraph status --explain"
            yield Finding(f"stuck:{task.name}", "warning", what, how)


def _slow_runs(seen: Seen) -> Iterator[Finding]:
    for run in seen.runs.running():
        before = [r for _, r in run.rate.after(seen.now - _SLOW_OVER_S)]
        if len(before) < 40:
            continue
        now, usual = sum(before[-10:]) / 10, sum(before[:-10]) / (len(before) - 10)
        if 0 < now < usual / 2:  # one that stands still is told of elsewhere
            what = (
                f"run '{run.name}' makes {now:.3g} steps/s, and {usual:.3g} in the "
                f"minutes before{_why_slow(run)}"
            )
            yield Finding(f"slower:{run.name}", "warning", what, "jgraph top")


def _why_slow(run: RunSeen) -> str:
    parts: dict[str, float] = {}
    for worker in run.workers.values():
        for part, seconds in worker.parts.items():
            parts[part] = parts.get(part, 0.0) + seconds
    if not parts:
        return ""
    most = max(parts, key=lambda part: parts[part])
    return f"; most of a step goes to '{most}'"


def _grown_loss(seen: Seen) -> Iterator[Finding]:
    for run in seen.runs.running():
        series = run.metrics.get("loss")
        if series is None or len(series) < 4:
            continue
        (high, low), last = series.fall or (0.0, 0.0), series.last or 0.0
        # Close to zero ten times as much is noise: it has to lose some of its fall.
        if low > 0 and last > 10 * low and last - low > _REGAINED * (high - low):
            what = (
                f"the loss of run '{run.name}' is {last:.3g}, more than ten times the "
                f"{low:.3g} that it was"
            )
            how = "trainer.restore(DIRECTORY), with a smaller learning rate"
            yield Finding(f"loss:{run.name}", "warning", what, how)


def _slow_workers(seen: Seen) -> Iterator[Finding]:
    for run in seen.runs.running():
        for task, times in run.slow_workers():
            what = f"{task} takes {times:.1f} times as long for a step as the median"
            how = f"jgraph logs {task}"
            yield Finding(f"slow:{run.name}:{task}", "warning", what, how)


def _evictions(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        for name, window in task.evicted.items():
            shard = rows(task.facts, "hash_tables").get(name, {})
            held, losses = number(shard, "rows"), window.sums().get("evicted", 0)
            if held and losses > held / 100:
                what = (
                    f"hash table {name} on {task.name} gave up {losses:,.0f} rows in a "
                    f"minute, and holds {held:,.0f}"
                )
                how = "jg.HashTable(capacity_bytes=…), with more bytes"
                yield Finding(f"evicts:{task.name}:{name}", "warning", what, how)


def _troubles(seen: Seen) -> Iterator[Finding]:
    for name, what in seen.troubles.items():
        yield Finding(f"trouble:{name}", "warning", what, "jgraph dashboard --help")


def _errors(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        for method, window in task.calls.items():
            sums = window.sums()
            errors = sums.pop("errors", 0)
            calls = sum(sums.values())
            if calls >= 10 and errors > calls / 10:
                what = (
                    f"{errors:.0f} of {calls:.0f} calls of {method} to {task.name} "
                    "failed in a minute"
                )
                how = f"jgraph logs {task.name}"
                yield Finding(f"errors:{task.name}:{method}", "warning", what, how)


def _bounds(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        for name, window in task.ages.items():
            sums = window.sums()
            updates, at_bound = sums.get("updates", 0), sums.get("at_bound", 0)
            gate = rows(task.facts, "gates").get(name, {})
            bound = int(number(gate, "max_staleness"))
            waits = task.waits[name].sums().get("wait_s", 0.0)
            if updates >= 20 and at_bound > updates / 2 and bound:
                what = (
                    f"{at_bound / updates:.0%} of the updates on {task.name} are "
                    f"{bound} updates old, the most that max_staleness={bound} "
                    f"allows; workers waited {waits:.1f} s in a minute"
                )
                how = f"jg.AsyncPS(max_staleness={2 * bound})"
                yield Finding(f"bound:{task.name}:{name}", "notice", what, how)


def _draining(seen: Seen) -> Iterator[Finding]:
    for task in seen.tasks.seen.values():
        if text(task.facts, "state") == "draining" and not task.missed:
            what = f"{task.name} was told to end and takes no new work"
            yield Finding(f"drains:{task.name}", "notice", what, "jgraph events")


def _time(seconds: float) -> str:
    """Returns a length of time in words.

    Example:
      >>> _time(41), _time(600)
      ('41 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def plain(alarm: Alarm) -> dict[str, Any]:
    """Returns an alarm as JSON."""
    return {name: getattr(alarm, name) for name in Alarm.__slots__}
