"""Messages about a run and its data, from a Trainer to the master."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from jgraph.client.cluster import Cluster
from jgraph.client.values import assign_initial, in_pieces
from jgraph.cluster.loop_messages import DealtData, RunRequest, source_info
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import encode_program
from jgraph.train.checkpoint.checkpoint import absolute
from jgraph.train.checkpoint.remote_saver import saves_order, why_unsaved
from jgraph.train.data.data import Dataset
from jgraph.train.state.placement import plan_on
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Order, position_in
from jgraph.train.strategies.prepared import Prepared, PsCuts


def dealt_data(state: RemoteState, order: Order) -> DealtData:
    """Returns what is dealt out.

    Args:
      state: what is trained; it says where in the data to begin.
      order: what to train.
    """
    plan = order.dataset.plan(order.batch_size, order.seed)
    return DealtData(
        plan,
        order.steps,
        len(state.cluster.tasks("worker")),
        position_in(plan, state.position, sum(state.done)),
    )


def about_run(
    state: RemoteState,
    order: Order,
    prepared: Prepared,
    *,
    synchronous: bool,
    elastic: pb.RunElastic | None,
    cuts: PsCuts | None = None,
) -> RunRequest:
    """Returns what the master is told of a run.

    Args:
      state: what is trained.
      order: what to train.
      prepared: the step, registered.
      synchronous: whether each step is one of all workers.
      elastic: how many workers it may have.
      cuts: the step for each number of ps; None: that is fixed.
    """
    cluster, saves, options = state.cluster, None, order.checkpoint
    each = prepared.programs(cluster.tasks("worker"))
    programs = dict(zip(prepared.handles, each, strict=True))
    reason = "" if options is None else why_unsaved(options, state.step)
    if cuts is not None:
        reason = reason or "its parameter servers join and leave"
    if options is not None and not reason:
        saves, program = saves_order(state.step, state.session, cluster, options)
        if order.lease_s is None:  # else the master does, once the client is gone
            (saves.snapshot,) = state.session.register_all([program])
        programs[saves.snapshot] = program
    directory = "" if options is None else str(absolute(options.directory))
    client = None
    state.session.let_go()  # the Trainer closes it, unless a run goes on
    if order.lease_s is not None:
        client = pb.RunClient(
            lease_s=order.lease_s,
            halt_every=order.halts,
            halt_s=state.halt_s,
            directory=directory,
            unsaved=reason,
            gives_data=not order.dataset.source,
        )
    first = state.global_step()
    about = {
        "first_step": first,
        "steps": first + order.steps,
        "batch_size": order.batch_size,
        "metrics": list(prepared.names),
        "container": state.step.container,
        "synchronous": synchronous,
        "checkpoints": directory,
        "tables": state.step.tables_apart,
        "privacy": order.privacy,
        "workers": None if elastic is None else [elastic.least, elastic.most or None],
        "ps": None if cuts is None else [min(cuts.programs), max(cuts.programs)],
    }
    zeros = defaultdict[TaskName, list[Variable]](list)
    for variable in state.residuals(prepared.graph):
        zeros[TaskName(str(variable.device))].append(variable)
    return RunRequest(
        about,
        saves,
        order.dataset.source,
        _source_info(order.dataset),
        state.copies and state.copies.about(prepared.recorded),
        [*_restart_programs(cluster, programs, zeros, cuts)],
        wait_s=order.wait_s,
        client=client,
        elastic=elastic,
        owners=state.step.owners,
        ps=None if cuts is None else cuts.order,
    )


def _source_info(dataset: Dataset) -> pb.SourceInfo | None:
    """Returns what workers find in their source; of data of their own no examples."""
    if not dataset.source or dataset.facts is None:
        return None
    info = source_info(dataset.facts)
    if dataset.of is not None:
        del info.parts[:], info.examples[:]
    return info


def _restart_programs(
    cluster: Cluster,
    programs: Mapping[str, Program],
    new_variables: Mapping[TaskName, Sequence[Variable]],
    cuts: PsCuts | None,
) -> Iterator[Frame]:
    """Yields what the master keeps for tasks that are started again.

    Args:
      cluster: of the run.
      programs: of the workers, and of ps, by handle.
      new_variables: variables that begin anew with their task.
      cuts: the programs for each number of ps; None: that is fixed.
    """
    each = {0: programs} if cuts is None else cuts.programs
    for ps, by_handle in each.items():
        for handle, program in by_handle.items():
            yield _kept(handle, program, ps)
    for task, variables in new_variables.items():
        for piece in in_pieces(variables):
            graph, _ = trace(
                partial(assign_initial, piece), variables=piece, name="initialize"
            )
            yield _kept("", plan_on(cluster, graph, task).program)


def _kept(handle: str, program: Program, ps: int = 0) -> Frame:
    message, tensors = encode_program(program)
    body = pb.RegisterProgram(handle=handle, program=message, ps=ps)
    return frame(register_program=body, tensors=tensors)
