"""What the tasks of an imagined cluster noted of twenty steps."""

from collections.abc import Sequence

import numpy as np

from jgraph.coordination.timeline.clocks import RoundTrip
from jgraph.coordination.timeline.cluster_trace import (
    ClusterTrace,
    ProgramFlight,
    TaskFlight,
    assemble,
)
from jgraph.coordination.timeline.node_times import NodeFacts
from jgraph.coordination.timeline.step_parts import Note
from jgraph.graph.device import TaskName

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
STEPS = 20


def flights(ahead_s: float = 0.0) -> dict[TaskName, TaskFlight]:
    """Steps of 10 ms: the ps reads and sends, the worker computes and sends back.

    Args:
      ahead_s: how far the clock of the ps is ahead.
    """
    on_ps = [
        NodeFacts("read", "w", 8),
        NodeFacts("send", f"to {WORKER}", 8, WORKER, "m0"),
        NodeFacts("recv", f"from {WORKER}", 8, WORKER, "m1"),
        NodeFacts("segment", "sgd", 8),
    ]
    on_worker = [
        NodeFacts("recv", f"from {PS}", 8, PS, "m0"),
        NodeFacts("segment", "gradient", 8),
        NodeFacts("send", f"to {PS}", 8, PS, "m1"),
    ]
    of_ps = [
        *((0.5, 0.5, 1.0), (1.0, 1.0, 1.1), (0.5, 6.5, 6.5), (6.5, 7.0, 9.0)),
        (0.4, 0.5, 9.0),
    ]
    of_worker = [(0.2, 1.5, 1.5), (1.5, 1.5, 6.0), (6.0, 6.0, 6.1), (0.0, 0.2, 6.1)]
    begins = 1000 + 0.01 * np.arange(STEPS)
    steps = np.arange(1, STEPS + 1)

    def program(
        nodes: list[NodeFacts], rows: Sequence[tuple[float, ...]], plus_s: float
    ) -> ProgramFlight:
        times = begins[:, None, None] + 1e-3 * np.array(rows) + plus_s
        return ProgramFlight("h", "train", WORKER, nodes, steps, times)

    trips = [RoundTrip(t, t + 1e-4, t + 1.5e-4, t + 3e-4) for t in (999.0, 1000.0)]
    of = [
        RoundTrip(t.sent_s, t.received_s + ahead_s, t.answered_s + ahead_s, t.back_s)
        for t in trips
    ]
    return {
        PS: TaskFlight([program(on_ps, of_ps, ahead_s)], trips=of, clock="one"),
        WORKER: TaskFlight(
            [program(on_worker, of_worker, 0.0)],
            [Note(WORKER, "register", "train", 999.5, 999.9)],
            trips=trips,
            clock="two",
        ),
    }


def imagined_trace() -> ClusterTrace:
    """These steps by the clock of the worker, which is a hundred seconds behind."""
    return assemble(flights(ahead_s=100.0), "two")
