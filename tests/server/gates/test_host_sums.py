"""Sums on hosts at the gates of a collector and of an owner."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jgraph.coordination.sync.roster import Roster
from jgraph.errors import JGError, MalformedMessageError, RunOverError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.status import to_status
from jgraph.rpc.transport import Frame
from jgraph.runtime.gate import Gate
from jgraph.server.gates.gates import Gates
from jgraph.server.gates.step_columns import columns_of, steps_of
from jgraph.server.gates.sync_gate import SyncGateShell

HERE, AWAY = (TaskName(f"/job:worker/task:{n}") for n in (0, 2))
OWN, ITS = ("c", "mean/own"), ("c", "mean/its")
NOBODY = Roster([])
A, B, C = ("a", 1), ("b", 1), ("c", 1)


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


class Threads:
    """Keeps work until it is told to run it, in any order."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []

    def submit(self, work: Any, done: Any, cost: Any) -> None:
        self.works.append(lambda: done(work()))


class Later:
    """A timer that never goes off."""

    def cancel(self) -> None:
        """It does not anyway."""


class There:
    """The gate of ``HERE``, which owns one variable; ``AWAY`` owns the other."""

    def __init__(self, **by: str) -> None:
        self.posted: list[Frame] = []
        self.opened: dict[str, Gate] = {}
        self.threads = Threads()
        told: Any = self
        later: Any = lambda seconds, callback: Later()
        options: Any = {"submit": self.threads.submit, "call_later": later}
        self.gates = Gates(HERE, told, self.opened, **options)
        self.by = {f"/job:worker/task:{task[1:]}": owner for task, owner in by.items()}
        self.open("first")

    def post(self, dst: TaskName, frame: Frame) -> None:
        self.posted.append(frame)

    def open(self, opening: str) -> None:
        parts = [
            pb.GroupPart(task=task, variables=[name], elements=[2])
            for task, (_, name) in ((HERE, OWN), (AWAY, ITS))
        ]
        self.opening = opening
        self.gates.open(
            pb.OpenGate(
                gate="c",
                synchronous=True,
                shards=[HERE, AWAY],
                opening=opening,
                host_sums=pb.HostSums(parts=parts, by=self.by),
            )
        )

    @property
    def gate(self) -> SyncGateShell:
        gate = self.opened["c"]
        assert isinstance(gate, SyncGateShell)
        return gate

    def contribute(self, step: Any, slot: int, **values: float) -> None:
        self.gate.ask(step, lambda: None, lambda error: None)
        given = {
            ("c", f"mean/{name}"): np.full(2, value, np.float32)
            for name, value in values.items()
        }
        self.gate.contribute(step, slot, given)

    def hear(self, event: pb.GateEvent, *tensors: Any, src: TaskName = AWAY) -> None:
        event.gate, event.opening = "c", self.opening
        self.gates.received(src, event, tensors)

    def decide(self, *steps: Any) -> None:
        self.hear(pb.GateEvent(decided=columns_of(NOBODY, steps)))

    def sum(self, steps: Any, *tensors: Any, version: int = 0) -> None:
        news = pb.HostSum(version=version, steps=columns_of(NOBODY, steps), part=HERE)
        self.hear(pb.GateEvent(host_sum=news), *tensors)

    def sums(self) -> list[tuple[int, tuple[Any, ...], list[float]]]:
        """Returns the sums that were posted so far."""
        events = [(f.header.gate_event, f.tensors) for f in self.posted]
        return [
            (
                e.host_sum.version,
                tuple(steps_of(NOBODY, e.host_sum.steps)),
                t[0].tolist(),
            )
            for e, t in events
            if e.HasField("host_sum")
        ]


def test_what_two_replicas_gave_leaves_as_one_sum() -> None:
    there = There()
    there.contribute(B, 1, own=2, its=20)
    there.contribute(A, 0, own=1, its=10)
    there.decide(A, B)
    (work,) = there.threads.works
    work()
    assert there.sums() == [(0, (A, B), [30.0, 30.0])]


def test_an_update_waits_for_the_sums_of_what_was_decided() -> None:
    there = There()
    for number, step in enumerate((A, B, C)):
        there.contribute(step, number, **({"own": 3.0} if step == A else {}))
    begun: list[str] = []
    refuse: Callable[[JGError], None] = lambda error: begun.append("refused")
    there.gate.ask_update(lambda: begun.append("begun"), refuse)
    there.decide(A, B, C)
    assert not begun
    there.sum([B, C], floats(9, 12))
    assert begun == ["begun"]
    chosen = there.gate.chosen()
    assert len(chosen.contributions) == 3
    assert np.sum(chosen.of(OWN), 0).tolist() == [12.0, 15.0]


def test_an_update_that_waits_ends_with_its_gate() -> None:
    there = There()
    refused: list[JGError] = []
    there.gate.ask_update(lambda: None, refused.append)
    over = to_status(RunOverError("the run is over"))
    there.hear(pb.GateEvent(closed=over), src=HERE)
    (error,) = refused
    assert isinstance(error, RunOverError)


def test_a_sum_that_is_overtaken_by_a_newer_one_does_not_leave() -> None:
    """The first was made of what came the time before, and one of that is late."""
    there = There()
    there.contribute(A, 0, its=1)
    there.contribute(B, 1, its=1)
    there.decide(A, B)
    there.threads.works.pop()()
    there.gate.applied()
    there.contribute(("a", 2), 2, its=10)
    there.contribute(("b", 2), 3, its=10)
    there.decide(("a", 2))
    early, newer = there.threads.works
    newer()
    early()
    assert there.sums()[1:] == [(1, (("a", 2),), [10.0, 10.0])]


def test_a_sum_of_a_gate_that_was_opened_again_does_not_leave() -> None:
    there = There()
    there.contribute(A, 0, its=1)
    there.decide(A)
    there.open("second")
    (work,) = there.threads.works
    work()
    assert not there.sums()


def test_who_stands_in_for_an_owner_gets_its_sums_and_has_its_part() -> None:
    there = There(t2=HERE)
    there.contribute(A, 0, own=1, its=2)
    there.decide(A)
    assert not there.threads.works
    chosen = there.gate.chosen()
    assert [chosen.of(key)[0].tolist() for key in (OWN, ITS)] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    "tensors",
    [(), (floats(1, 2, 3),), (np.array([1, 2]),), (floats(1, 2),) * 2],
    ids=["none", "another size", "another type", "one too many"],
)
def test_a_sum_that_is_none_of_the_own_variables_is_refused(tensors: Any) -> None:
    with pytest.raises(MalformedMessageError, match="not gradients of the 1 variables"):
        There().sum([A], *tensors)
