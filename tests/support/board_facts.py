"""Facts of an imagined cluster, second by second, for boards."""

from collections.abc import Mapping
from typing import Any

from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact

PS, PS1 = "/job:ps/task:0", "/job:ps/task:1"
WORKERS = [f"/job:worker/task:{index}" for index in range(4)]
START = 1_790_000_000.0


def task(**told: Any) -> dict[str, Any]:
    """What a task says of itself: as usual, but for what is given."""
    usual = {
        "state": "ready",
        "incarnation": "01",
        "jgraph": "0.1.0",
        "jax": "0.10.2",
        "rss_bytes": 5e8,
        "busy_s": {"process": 1.0},
        "up_s": 9.0,
    }
    return {**usual, **told}


def status(
    second: float, tasks: Mapping[str, Any] | None = None, *missing: str
) -> Fact:
    """The answer of a master; without ``tasks`` all are as usual."""
    told = {PS: task(), WORKERS[0]: task()} if tasks is None else tasks
    told = {name: row for name, row in told.items() if name not in missing}
    return {
        "kind": "status",
        "time": START + second,
        "master": PS,
        "tasks": told,
        "missing": list(missing),
    }


def run(second: float, step: float, **told: Any) -> Fact:
    """How the run "mlp" stands."""
    usual = {
        "state": "running",
        "step": step,
        "steps": 10_000,
        "first_step": 0,
        "batch_size": 32,
        "master": PS,
        "synchronous": False,
        "checkpoints": "",
    }
    row = {**usual, **told}
    return {"kind": "runs", "time": START + second, "runs": {"mlp": row}}


def report(second: float, worker: int = 0, steps: int = 10, **told: Any) -> Fact:
    """What the loop of a worker tells of its steps."""
    usual = {
        "run": "mlp",
        "task": WORKERS[worker],
        "steps": steps,
        "step_s": [0.02] * min(steps, 16),
        "times": {"compute": 0.015 * steps, "pull": 0.005 * steps},
        "metrics": {"loss": {"min": 0.4, "mean": 0.5, "max": 0.6}},
    }
    return {"kind": "report", "time": START + second, **usual, **told}


def board_of(*facts: Fact) -> Board:
    """A board that was told these facts."""
    board = Board()
    for fact in facts:
        board.take(fact)
    # Alarms are looked for with the next look after a report.
    board.take({"kind": "events", "time": board.now, "events": []})
    return board


def said(board: Board) -> list[str]:
    """What is wrong, in words."""
    return [f"{alarm.level}: {alarm.text}" for alarm in board.alarms()]
