"""Orders to run a loop, and a clock that is set, for tests of a master."""

from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb


class SetClock:
    """Says what it is told."""

    at_s = 0.0

    def now(self) -> float:
        """Returns that."""
        return self.at_s


PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")


def deciding(name: str) -> pb.RunLoop:
    return pb.RunLoop(loop=name, task=PS, replica=1, sync=pb.SyncOrder(gate="g"))


def contributing(name: str) -> pb.RunLoop:
    return pb.RunLoop(loop=name, task=WORKER, batch_feed="slot")
