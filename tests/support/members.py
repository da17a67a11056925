"""Workers that join a synchronous run and leave it, on servers of this process."""

from jgraph.server.members.joining import join_cluster
from jgraph.server.server import Server
from jgraph.train.run.run import Run
from tests.support.waiting import wait_until


def two_join_and_one_leaves(target: str, run: Run) -> list[Server]:
    """Waits until updates are of one worker, three, and two; returns who joined."""

    def of(contributions: int) -> bool:
        told = "contributions" in run.metric_names
        return told and run.metrics("contributions")["value"][-1] == contributions

    wait_until(lambda: of(1))
    joined = [join_cluster(target, "worker") for _ in range(2)]
    wait_until(lambda: of(3))
    joined.pop().stop()
    wait_until(lambda: of(2))
    return joined
