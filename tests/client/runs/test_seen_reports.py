"""What another master tells again is taken once."""

import numpy as np

from jgraph.client.runs.seen_reports import ReportDeduplicator
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame


def report(loop: str, number: int, *steps: int, state: str = "running") -> Frame:
    body = pb.LoopReport(loop=loop, number=number, state=state)
    at = np.array(steps, np.int64)
    return frame(loop_report=body, tensors=[at, at.astype(float), 10 * at])


def steps_of(seen: ReportDeduplicator, *reports: Frame) -> list[list[int] | None]:
    new = [seen.unseen(one) for one in reports]
    return [None if one is None else one.tensors[0].tolist() for one in new]


def test_steps_that_another_master_tells_again_are_not_counted_again() -> None:
    seen = ReportDeduplicator()
    told = [report("a", 0), report("a", 1, 0, 1), report("a", 2, 2)]
    assert steps_of(seen, *told) == [[], [0, 1], [2]]
    # The standby had not heard of report 2: an account tells of it and of the rest.
    account = report("a", 4, 2, 3, 4)
    assert steps_of(seen, *told[:2], account, report("a~2.1", 0)) == [
        *(None, None),
        [3, 4],
        [],
    ]
    new = seen.unseen(report("a~2.1", 1, 5))
    assert new is not None
    assert new.tensors[2].tolist() == [50]
    assert steps_of(seen, *told, account, report("a~2.1", 1, 5)) == [None] * 5


def test_loss_of_a_worker_is_told_of_once() -> None:
    seen = ReportDeduplicator()
    lost = report("a", 0, state="lost")
    assert steps_of(seen, report("a", 1, 0), lost, lost, report("a", 1, 0)) == [
        *([0], []),
        *(None, None),
    ]
    # A loop that began anew numbers its steps from the last one that was known.
    assert steps_of(seen, report("b", 1, 0, 1)) == [[0, 1]]


def test_a_rescale_that_was_given_up_hides_no_later_one() -> None:
    seen = ReportDeduplicator()

    def told(number: int, why: str = "") -> bool:
        rescaled = pb.RunRescaled(number=number, ps=2, why=why)
        body, none = pb.LoopReport(rescaled=rescaled), np.zeros(0)
        return seen.unseen(frame(loop_report=body, tensors=[none, none])) is not None

    by_the_second_master = (2 << 32) + 1
    assert told(1)
    assert told(by_the_second_master, "it does not answer")
    assert told(2)
    assert not told(by_the_second_master, "it does not answer")
    assert not told(1)
