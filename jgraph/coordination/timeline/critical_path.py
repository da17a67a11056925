"""Critical path of steps across tasks, in words.

From the end of a step one goes back: the node that was over last began when it had its
turn, and was ready when the node before it was done, or a message came; that was sent
by a node of another task, and so on, to the beginning of the step. What lies on this
path is what the step took its time for: anything else could be longer without making
the step longer.

Source: Böhme et al., "Scalable Critical-Path Based Performance Analysis", 2012; here
one path for each step, as each has a beginning and an end.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.coordination.timeline.node_times import NodeTime
from jgraph.coordination.timeline.step_parts import StepPart
from jgraph.graph.device import TaskName

_LINES: Final = 5
_MOST: Final = 1_000
_Stretch: TypeAlias = tuple[str, float, float]
"""What it is, when it begins, and when it ends."""


@final
@dataclass(frozen=True, slots=True)
class CriticalPath:
    """What steps waited for, one thing after the other.

    Attributes:
      steps: how many of them were looked at.
      seconds: their mean length.
      shares: of that length, by what it went to; the largest first.

    Example:
      >>> path = CriticalPath(10, 0.02, {"ps:0 computes 'sgd'": 0.75})
      >>> print(path)
      a step takes 20.000 ms (mean of 10):
         75 %  ps:0 computes 'sgd'
    """

    steps: int
    seconds: float
    shares: Mapping[str, float]

    def __str__(self) -> str:
        if not self.steps:
            return "no step was driven from its beginning to its end in that time"
        rows = [
            f"  {100 * share:3.0f} %  {what}"
            for what, share in list(self.shares.items())[:_LINES]
        ]
        rest = sum(list(self.shares.values())[_LINES:])
        if rest >= 0.005:
            rows.append(f"  {100 * rest:3.0f} %  the rest")
        head = f"a step takes {1e3 * self.seconds:.3f} ms (mean of {self.steps:,}):"
        return "\n".join([head, *rows])


def critical_path(parts: Sequence[StepPart]) -> CriticalPath:
    """Returns what steps waited for, of the last 1,000 that are there as a whole.

    Args:
      parts: of steps, by the time at which they were over.
    """
    of_step: dict[tuple[str, int], dict[TaskName, StepPart]] = {}
    for part in parts:
        of_step.setdefault((part.handle, part.step), {})[part.task] = part
    whole = [step for step in of_step.values() if _is_whole(step)][-_MOST:]
    seconds: defaultdict[str, float] = defaultdict(float)
    for step in whole:
        for what, began, ended in path_of(step):
            seconds[what] += ended - began
    total = sum(seconds.values())
    if not whole or total <= 0:
        return CriticalPath(0, 0.0, {})
    ordered = sorted(seconds.items(), key=lambda row: -row[1])
    shares = {what: took / total for what, took in ordered}
    return CriticalPath(len(whole), total / len(whole), shares)


def _is_whole(step: Mapping[TaskName, StepPart]) -> bool:
    """Whether the driver's part is there, and all that anybody heard from."""
    parts = step.values()
    driver = next(iter(parts)).driver
    began = all(part.began_s == part.began_s for part in parts)
    peers = {node.peer for part in parts for node in part.nodes if node.peer}
    return began and driver in step and peers <= step.keys()


def path_of(step: Mapping[TaskName, StepPart]) -> list[_Stretch]:
    """Returns the path of one step, the last thing first.

    Args:
      step: all its parts.
    """
    sends = {
        node.key: (part, node)
        for part in step.values()
        for node in part.nodes
        if node.kind == "send"
    }
    driver = step[next(iter(step.values())).driver]
    part = max(step.values(), key=lambda p: p.over_s)
    found: list[_Stretch] = []
    now, node = part.over_s, _last(part.nodes, part.over_s)
    for _ in range(sum(len(p.nodes) for p in step.values()) + 1):
        if node is None:
            break
        key = sends.get(node.key) if node.kind == "recv" else None
        if key is not None and node.start_s > node.ready_s:
            sender, send = key
            found += _cut(now, (_way(node), send.start_s))
            part, now, ready = sender, min(now, send.start_s), send.ready_s
            found += _cut(now, (_waits(part.task, send), ready))
        else:
            found += _cut(now, (_does(part.task, node), node.start_s))
            now, ready = min(now, node.start_s), node.ready_s
            if node.kind != "recv":
                found += _cut(now, (_waits(part.task, node), ready))
        now = min(now, ready)
        node = _last(part.nodes, now)
    where = _short(part.task)
    if part is not driver:
        found += _cut(now, (f"{where} begins when it is told to", driver.began_s))
        now, where = min(now, driver.began_s), _short(driver.task)
    else:
        found += _cut(now, (f"{where} begins", driver.began_s))
        now = min(now, driver.began_s)
    found += _cut(now, (f"{where} waits for its turn, or its gate", driver.asked_s))
    return found


def _last(nodes: Iterable[NodeTime], before_s: float) -> NodeTime | None:
    """Returns the node that was done last before a time: what it was waited for."""
    done = [n for n in nodes if n.end_s <= before_s and n.ready_s < before_s]
    return max(done, key=lambda n: (n.end_s, n.start_s), default=None)


def _cut(ended: float, began: tuple[str, float]) -> Iterator[_Stretch]:
    what, when = began
    if when < ended:
        yield what, when, ended


def _short(task: TaskName) -> str:
    return task.removeprefix("/job:").replace("/task:", ":")


def _way(node: NodeTime) -> str:
    src = "another task" if node.peer is None else _short(node.peer)
    return f"{_short(node.task)} waits for what {src} sends: it is on its way"


def _does(task: TaskName, node: NodeTime) -> str:
    if node.kind == "segment":
        return f"{_short(task)} computes '{node.label}'"
    if node.kind == "recv":
        return f"{_short(task)} takes what came"
    label = node.label.replace("/job:", "").replace("/task:", ":")
    return f"{_short(task)}: {node.kind} {label}".rstrip()


def _waits(task: TaskName, node: NodeTime) -> str:
    what = f"'{node.label}'" if node.kind == "segment" else node.kind
    return f"{_short(task)} has no core, or lock, for {what} yet"
