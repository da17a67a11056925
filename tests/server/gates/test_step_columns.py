"""Names of steps in messages: by numbers where all know them, else by handles."""

from typing import Any

import pytest

from jgraph.coordination.sync.aggregation import Contributed
from jgraph.coordination.sync.roster import Roster
from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame
from jgraph.runtime.gate import Gate
from jgraph.server.gates.gates import Decides, Gates
from jgraph.server.gates.step_columns import columns_of, slots_in, slots_of, steps_of
from jgraph.server.gates.sync_gate import SyncGateShell

FIRST, OTHER = TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")
ROSTER = Roster(["a", "b"])
STEPS = (("b", 7), ("a", 2**40))


@pytest.mark.parametrize("steps", [STEPS, (), (("b", 1), ("c", 2)), (("a", 2**63),)])
def test_steps_arrive_as_they_were(steps: tuple[tuple[str, int], ...]) -> None:
    known = all(name in "ab" and number < 2**63 for name, number in steps)
    columns = columns_of(ROSTER, steps)
    assert bool(columns.handles) != known or not steps
    there = pb.Steps.FromString(columns.SerializeToString())
    assert steps_of(Roster(["a", "b"]), there) == steps


def column(*values: int) -> bytes:
    return slots_in(values)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (pb.Steps(replicas=column(0, 1), ids=column(1)), "columns of 2 and 1 values"),
        (pb.Steps(ids=column(1)), "columns of 0 and 1 values"),
        (pb.Steps(replicas=b"1234567", ids=column(1)), "a column of 7 bytes"),
        (pb.Steps(replicas=column(2), ids=column(1)), "of a run with 2 replicas"),
        (pb.Steps(replicas=column(-1), ids=column(1)), "number -1"),
        (pb.Steps(replicas=column(0), ids=column(-4)), "number -4"),
        (pb.Steps(handles=["a"]), "columns of 1 and 0 values"),
    ],
)
def test_columns_that_name_nobody_are_refused(columns: pb.Steps, said: str) -> None:
    with pytest.raises(MalformedMessageError, match=said):
        steps_of(ROSTER, columns)


def test_slots_that_are_cut_off_are_refused() -> None:
    assert list(slots_of(slots_in([4, -1, 2**60]))) == [4, -1, 2**60]
    with pytest.raises(MalformedMessageError, match="a column of 9 bytes"):
        slots_of(bytes(9))


@pytest.mark.parametrize("handles", [["a", "b"], []])
def test_a_ps_tells_and_hears_of_steps_whoever_is_named(handles: list[str]) -> None:
    posted: list[Frame] = []

    class Noting:
        def post(self, dst: TaskName, frame: Frame) -> None:
            posted.append(frame)

    transport: Any = Noting()
    later: Any = lambda seconds, callback: None
    both: list[dict[str, Gate]] = [{}, {}]
    here, there = (
        Gates(task, transport, opened, later)
        for task, opened in zip((FIRST, OTHER), both, strict=True)
    )
    heard: list[Contributed] = []
    for gates in (here, there):
        gates.open(
            pb.OpenGate(
                gate="g", synchronous=True, shards=[FIRST, OTHER], handles=handles
            )
        )
    here.listen("g", Decides(heard.append, lambda task: None))
    for gate in (opened["g"] for opened in both):
        assert isinstance(gate, SyncGateShell)
        for step in STEPS:
            gate.ask(step, lambda: None, lambda error: None)
        for number, step in enumerate(STEPS):
            gate.contribute(step, 40 + number, {})
    (told,) = posted
    here.received(OTHER, body_of(told))
    assert [event.shard for event in heard] == [FIRST, OTHER]
    for event in heard:
        assert (event.steps, list(event.slots), event.version) == (STEPS, [40, 41], 0)
    here.decide("g", STEPS[::-1])
    there.received(FIRST, body_of(posted[-1]))
    for gate in (opened["g"] for opened in both):
        assert isinstance(gate, SyncGateShell)
        assert len(gate.chosen().contributions) == 2
