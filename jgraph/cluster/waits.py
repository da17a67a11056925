"""Step waits: the values and tasks that unfinished steps of a task wait for."""

from collections import Counter
from collections.abc import Iterator

from jgraph.cluster.driver import StepDriver
from jgraph.coordination.explain import STEPS_TOLD, StepWait
from jgraph.errors import InvalidProgramError
from jgraph.graph.ir import TaskName
from jgraph.plan.nodes import RecvNode
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.task import TaskRuntime


def waits_of(runtime: TaskRuntime, driver: StepDriver) -> Iterator[pb.StepWait]:
    """Yields what the oldest steps of each program wait for on a task."""
    told = Counter[str]()
    for step in dict.fromkeys([*runtime.steps, *driver.steps]):
        told[step[0]] += 1
        if told[step[0]] <= STEPS_TOLD:
            yield _wait(runtime, driver, step)


def _wait(runtime: TaskRuntime, driver: StepDriver, step: StepKey) -> pb.StepWait:
    run, driven = runtime.steps.get(step), driver.steps.get(step)
    began = run.times.started if run is not None else 0.0
    if driven is not None:
        began = driven.asked_s
    try:
        program = runtime.program(step[0])
    except InvalidProgramError:  # removed, and its steps are ending
        return pb.StepWait(handle=step[0], step_id=step[1])
    lacking = set(runtime.waiting_for(step))
    lacks = [
        node
        for node in program.partition(runtime.task).nodes
        if isinstance(node, RecvNode) and node.key in lacking
    ]
    return pb.StepWait(
        handle=step[0],
        step_id=step[1],
        program=program.name,
        age_s=runtime.now() - began if began else 0.0,
        state="queued" if run is not None and not run.times.started else "running",
        keys=[node.key for node in lacks],
        senders=[node.src for node in lacks],
        drives=driven is not None,
        pending=driven.tracker.pending if driven is not None else (),
    )


def wait_of(message: pb.StepWait) -> StepWait:
    """Returns what a task told of a step."""
    senders = map(TaskName, message.senders)
    return StepWait(
        handle=message.handle,
        step_id=message.step_id,
        program=message.program,
        age_s=message.age_s,
        state=message.state,
        values=tuple(zip(message.keys, senders, strict=True)),
        drives=message.drives,
        pending=tuple(map(TaskName, message.pending)),
    )
