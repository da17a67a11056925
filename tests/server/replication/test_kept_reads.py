"""What a worker keeps of what it reads, and what is made of it."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from jgraph.errors import CopyLostError, MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType, packed_type
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.row_values import packed
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.runtime.store.store import VariableStore
from jgraph.runtime.task import TaskRuntime
from jgraph.server.replication.kept_reads import KeptReads
from jgraph.server.steps.task_host import TaskHost

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TASK = TaskName("/job:worker/task:1")
V, W = (StoredVariable(n, ValueType((3,), "float32"), "run") for n in ("v", "w"))


class Here:
    """A task whose steps take what the test says, and that runs work at once."""

    def __init__(self) -> None:
        self.task, self.store = TASK, VariableStore(TASK)
        self.take: Callable[[str, Sequence[Any]], None] = lambda key, values: None

    def keep(self, handle: str, keep: Callable[[str, Sequence[Any]], None]) -> None:
        self.take = keep

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


def made() -> tuple[Here, KeptReads]:
    here = Here()
    return here, KeptReads(cast(TaskRuntime, here), cast(TaskHost, here))


def call(kept: KeptReads, method: str, request: Frame) -> Any:
    async def first() -> Any:
        return body_of(await anext(kept.methods[method](request)))

    return asyncio.run(first())


def keep(kept: KeptReads, handle: str = "h") -> None:
    order = pb.KeepReads(container="run", handle=handle, keys=["m0"])
    call(kept, "KeepReads", frame(keep_reads=order))


def of(count: int, *variables: StoredVariable, key: str = "m0") -> pb.GiveReads:
    order = pb.GiveReads(container="run")
    value = order.messages.add(key=key, count=count).values.add(place=0)
    for each in variables:
        type_ = pb.TensorType(dtype=each.type.dtype, shape=each.type.shape)
        value.variables.add(container="run", name=each.name, type=type_)
    return order


def counts(kept: KeptReads) -> dict[str, int]:
    request = frame(give_reads=pb.GiveReads(container="run"))
    return dict(call(kept, "GiveReads", request).counts)


@pytest.mark.row(62)
def test_what_came_last_becomes_variables_if_it_is_of_the_update_asked_for() -> None:
    here, kept = made()
    keep(kept)
    for step in range(3):
        here.take("m0", [np.full(3, step, np.float32)])
        here.take("m1", [np.zeros(3, np.float32)])  # nobody asked for that
    assert counts(kept) == {"m0": 3}
    for other in (2, 4):
        with pytest.raises(CopyLostError, match="the"):
            call(kept, "GiveReads", frame(give_reads=of(other, W)))
    assert not here.store.table()
    call(kept, "GiveReads", frame(give_reads=of(3, W)))
    np.testing.assert_array_equal(here.store.read([W])[0], [2, 2, 2])


def test_variables_that_lie_in_one_flat_array_are_made_apart() -> None:
    here, kept = made()
    keep(kept)
    each = [np.arange(3, dtype=np.float32), np.full(3, 9, np.float32)]
    flat = packed(each, [V.type, W.type])
    assert flat.shape == packed_type([V.type, W.type]).shape
    here.take("m0", [flat])
    call(kept, "GiveReads", frame(give_reads=of(1, V, W)))
    np.testing.assert_array_equal(here.store.read([V, W]), each)


def test_what_the_caller_has_becomes_a_variable() -> None:
    here, kept = made()
    request = frame(give_reads=of(0, W, key=""), tensors=[np.full(3, 7, np.float32)])
    call(kept, "GiveReads", request)
    np.testing.assert_array_equal(here.store.read([W])[0], [7, 7, 7])


@pytest.mark.parametrize(
    ("variables", "tensors"),
    [
        ((), [np.zeros(3, np.float32)]),
        ((W,), []),
        ((W,), [np.zeros(4, np.float32)]),
        ((W,), [np.zeros(3, np.int32)]),
        ((V, W), [np.zeros(3, np.float32)]),
    ],
    ids=["no variable", "no value", "another shape", "another type", "too few"],
)
def test_what_does_not_fit_its_variables_is_refused(
    variables: tuple[StoredVariable, ...], tensors: list[np.ndarray[Any, Any]]
) -> None:
    here, kept = made()
    request = frame(give_reads=of(0, *variables, key=""), tensors=tensors)
    with pytest.raises(MalformedMessageError):
        call(kept, "GiveReads", request)
    assert not here.store.table()


@pytest.mark.parametrize("end", ["reset", "nothing", "anew"])
def test_what_was_kept_before_is_forgotten(end: str) -> None:
    here, kept = made()
    keep(kept)
    values, take = [np.zeros(3, np.float32)], here.take
    take("m0", values)
    held = weakref.ref(values[0])
    del values
    match end:
        case "reset":
            kept.drop(["run"])
        case "nothing":
            keep(kept, handle="")
        case _:
            keep(kept)
    take("m0", [])  # of a step that is still under way
    assert held() is None
    assert counts(kept) == {}
    with pytest.raises(CopyLostError):
        call(kept, "GiveReads", frame(give_reads=of(1, W)))
