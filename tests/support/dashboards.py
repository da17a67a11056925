"""A dashboard of an imagined cluster, at a port of this process."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jgraph.client.watching import events_fact
from jgraph.clock import WallClock
from jgraph.cluster.events import Event
from jgraph.coordination.watch.facts import Fact
from jgraph.dashboard.app import Source
from jgraph.dashboard.journaled_board import JournaledBoard
from jgraph.dashboard.serve import DashboardServer, Options
from jgraph.dashboard.timeline_view import timeline_view
from jgraph.errors import TaskLostError
from tests.support.board_facts import PS, START, WORKERS, report, run, status, task
from tests.support.flights import imagined_trace

EVIL = "<img src=x onerror=alert(1)>\u202e\x1b[31m"


class Imagined:
    """A source that is told facts, and has one log."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.board = JournaledBoard(WallClock())
        self.lines = ["one", f"two {EVIL}", "three " + "x" * 20_000]
        for fact in facts:
            self.board.take(fact)

    @property
    def changes(self) -> int:
        return self.board.changes

    def config(self) -> Mapping[str, Any]:
        return {"kind": "live", "address": "jgraph://head:8470"}

    def is_ready(self) -> bool:
        return self.changes > 0

    def view(self, at: float | None) -> Mapping[str, Any]:
        return self.board.view()

    def curves(self, at: float | None) -> Mapping[str, Any]:
        return self.board.curves()

    def timeline(self) -> Mapping[str, Any]:
        return timeline_view(imagined_trace())

    def trace(self, last_s: float) -> bytes:
        return imagined_trace().to_perfetto()

    def log(self, task: str, after: int, lines: int) -> tuple[int, list[str]]:
        if task != PS:
            raise TaskLostError(f"{task} does not answer", task=task)
        return len(self.lines), self.lines[after:][:lines]


def scene(first: float = 0.0, *, evil: bool = False) -> list[Fact]:
    """A run of two minutes on a ps and three workers, with a bit of everything."""
    start = first
    facts: list[Fact] = []
    workers = WORKERS[:3]
    for second in range(0, 120, 2):
        traffic = {
            w: {
                "frames_sent": 80 * second,
                "bytes_sent": 40_000 * second,
                "shared_bytes_sent": 900_000 * second * (at + 1),
                "frames_received": 80 * second,
                "bytes_received": 0,
                "shared_bytes_received": 800_000 * second,
            }
            for at, w in enumerate(workers)
        }
        back = {PS: {"frames_sent": 80 * second, "bytes_sent": 9_000_000 * second}}
        ages = {w: {0: 30 * second, 1: 9 * second, 2: second} for w in workers}
        calls = {"RunStep": {"buckets": [0, 0, second, 3, 0], "errors": 0}}
        ps = task(
            busy_s={"process": 0.7 * second, "update": 0.4 * second, "copy": 0.1},
            traffic=traffic,
            calls=calls,
            gates={"g": {"max_staleness": 8, "waiting": 1, "staleness": ages}},
            saves={"saves": 1 + second // 30, "age_s": second % 30, "nbytes": 4e6},
            hash_tables={
                "users": {
                    "rows": 9000 + second,
                    "nbytes": 6e7,
                    "capacity_bytes": 1e8,
                    "evicted": 0,
                }
            },
            platform="cpu",
            device_count=1,
            address="127.0.0.1:8470",
            pid=4711,
        )
        busy = {
            w: task(
                busy_s={"process": 0.9 * second, "compute": 0.8 * second},
                rss_bytes=6e8 + 1e6 * second,
                traffic=back,
                platform="cpu",
                device_count=1,
            )
            for w in workers
        }
        facts.append(status(start + second, {PS: ps, **busy}))
        name = EVIL if evil else "loss"
        if second == 0:
            facts.append(run(start, 0, checkpoints="runs/mlp"))
        for at in range(3):
            mean = 2.0 / (1 + second / 30) + 0.02 * at
            value = {"min": 0.9 * mean, "mean": mean, "max": 1.1 * mean}
            seconds = [0.02 if at < 2 else 0.05] * 8
            facts.append(
                report(start + second, at, 27, metrics={name: value}, step_s=seconds)
            )
        step = 81 * (second // 2 + 1)
        facts.append(run(start + second + 0.1, step, checkpoints="runs/mlp"))
        version = {
            "model": name,
            "version": "3",
            "requests": 50 * second,
            "rows": 400 * second,
            "executions": 25 * second,
            "seconds": {"success": 0.2 * second, "queue": 0.05 * second},
            "queued_rows": 3,
        }
        served = {"server": "http://127.0.0.1:8000", "models": {"a 3": version}}
        facts.append({"kind": "models", "time": START + start + second + 0.2, **served})
    shards = {
        PS: {
            f"params/{name}": {"nbytes": nbytes, "version": 4860}
            for name, nbytes in {
                EVIL if evil else "embedding": 4e7,
                "dense_0/kernel": 8e6,
                "dense_1/kernel": 3e6,
                "dense_0/bias": 4e3,
            }.items()
        }
    }
    facts.append({"kind": "variables", "time": facts[-1]["time"], "shards": shards})
    now = facts[-1]["time"]
    text = EVIL if evil else "run 'mlp' began: 10,000 steps"
    events = [
        Event(now - 119, "joined", f"{PS} serves at 127.0.0.1:8470", PS, PS),
        Event(now - 118, "began", text, PS, "mlp"),
    ]
    return [*facts, events_fact(events, now)]


@contextmanager
def serving(source: Source, **options: Any) -> Iterator[DashboardServer]:
    """Serves until the block ends, in a thread."""
    server = DashboardServer(source, Options(port=0, **options))
    thread = threading.Thread(target=server.run, name="dashboard")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()
