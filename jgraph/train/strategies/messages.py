"""Messages about a run and its data, from a Trainer to the master."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from jgraph.client.cluster import Cluster
from jgraph.client.values import assign_initial, in_pieces
from jgraph.cluster.loop_messages import DealtData, Detached
from jgraph.graph.device import DeviceSpec
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.train.state.runner import Order, Position, position_in


def dealt_data(
    order: Order,
    position: Position,
    done: Sequence[int],
    updates: Callable[[], int],
    detached: Detached | None,
    halt_s: float,
) -> DealtData:
    """Returns what is dealt out.

    Args:
      order: what to train.
      position: where in the data to begin.
      done: steps so far, by worker.
      updates: says how many updates are applied to the model.
      detached: what the master is told of a run that outlives its client.
      halt_s: how long workers stand still at most while the run is saved.
    """
    plan = order.dataset.plan(order.batch_size, order.seed)
    return DealtData(
        plan,
        order.steps,
        len(done),
        position_in(plan, position, sum(done)),
        updates=updates,
        wait_s=order.wait_s,
        stop=order.stop,
        detached=detached,
        first=updates(),
        halt_every=order.halts,
        halt_s=halt_s,
    )


def run_info(
    order: Order,
    first: int,
    container: str,
    names: Sequence[str],
    *,
    sync: bool,
    saves: pb.RunSaves | None,
    copies: pb.RunCopies | None,
    programs: Sequence[Frame],
    gate: pb.OpenGate | None,
) -> Detached:
    """Returns what the master is told of a detached run; see ``RunInfo``.

    Args:
      order: what to train.
      first: updates before it.
      container: of the variables.
      names: of the metrics of a step.
      sync: training is synchronous.
      saves: what the master saves.
      copies: what is kept of the ps; None: nothing.
      programs: see ``restart_programs``.
      gate: of asynchronous training.
    """
    about = {
        "first_step": first,
        "steps": first + order.steps,
        "batch_size": order.batch_size,
        "metrics": list(names),
        "container": container,
        "synchronous": sync,
        "checkpoints": "" if saves is None else saves.directory,
    }
    return Detached(
        about,
        saves,
        order.dataset.source,
        copies,
        programs,
        gate,
        wait_s=order.wait_s,
    )


def restart_programs(
    cluster: Cluster,
    programs: Mapping[str, Program],
    begun: Mapping[TaskName, Sequence[Variable]],
) -> Iterator[Frame]:
    """Yields what the master keeps for tasks that are started again.

    Args:
      cluster: of the run.
      programs: of the workers, and of ps, by handle.
      begun: variables that begin anew with their task.
    """
    for handle, program in programs.items():
        yield _kept(handle, program)
    for task, variables in begun.items():
        for piece in in_pieces(variables):
            graph, _ = trace(
                partial(assign_initial, piece), variables=piece, name="initialize"
            )
            planned = plan(
                graph,
                tasks=cluster.tasks(),
                driver=task,
                default=DeviceSpec.from_string(task),
                platforms=cluster.platforms,
            )
            yield _kept("", planned.program)


def _kept(handle: str, program: Program) -> Frame:
    message, tensors = encode_program(program)
    body = pb.RegisterProgram(handle=handle, program=message)
    return frame(register_program=body, tensors=tensors)
