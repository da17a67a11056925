"""Prepared step: what a run on a cluster registers for batches of one shape.

A program belongs to one arrangement of variables on ps. Where their number may change,
the step is traced and planned for all before a run begins, as only its client can do
that; the ps need not be there yet.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph.coordination.step.finite import FiniteCheck
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.plan.plan import Plan
from jgraph.plan.program.program import Program
from jgraph.plan.program.replicas import for_replica
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.step.arrange import held_nbytes
from jgraph.train.step.train_step import TrainStep


@final
@dataclass(slots=True)
class Prepared:
    """A step for batches of one shape, traced and planned.

    Attributes:
      graph: of what a worker runs.
      plan: of that, for worker 0.
      names: of the metrics.
      shards: tasks with the gate; the first one decides for all.
      finite: which metric says what is finite; None: it is not checked.
      on_ps: the program that averages and updates in synchronous training, if any.
      of_workers: the program of each worker, where they hold variables; else all have
        that of the plan.
      entropy: shape of the random bits that an update is fed; empty: none.
      words: of what is contributed to secure sums; 0: the ps see each.
      group: what children of the workers' servers sum; None: nothing.
      host_sums: what is summed on each host before it leaves that; None: nothing.
      handles: of the registered programs: one per replica, then that of ``on_ps``.
      workers: by handle, also of programs of workers that were lost.
    """

    graph: Graph
    plan: Plan
    names: list[str]
    shards: list[TaskName]
    finite: FiniteCheck | None
    on_ps: Sequence[Program] = ()
    of_workers: Mapping[TaskName, Program] = field(default_factory=dict)
    entropy: Sequence[int] = ()
    words: int = 0
    group: pb.CollectiveGroup | None = None
    host_sums: pb.HostSums | None = None
    handles: list[str] = field(default_factory=list)
    workers: dict[str, TaskName] = field(default_factory=dict)

    def programs(self, workers: Sequence[TaskName]) -> list[Program]:
        """Returns what each worker runs, and then what is run on the ps."""
        program = self.plan.program
        each = [
            self.of_workers.get(worker) or program.rename_task(program.driver, worker)
            for worker in workers
        ]
        return [*(for_replica(one, n) for n, one in enumerate(each)), *self.on_ps]

    @property
    def recorded(self) -> list[str]:
        """Handles of the programs that change what copies are kept of: one of each."""
        return [self.handles[0], *self.handles[len(self.handles) - len(self.on_ps) :]]


@final
@dataclass(frozen=True, slots=True)
class PsCuts:
    """A step, cut for each number of ps.

    Attributes:
      order: where its variables lie.
      programs: for each number of ps those of the workers, and of ps, by handle.
    """

    order: pb.RunPs
    programs: Mapping[int, Mapping[str, Program]]


def plan_cuts(
    step: TrainStep,
    prepared: Prepared,
    make: Callable[[TrainStep], Prepared],
    workers: Sequence[TaskName],
) -> PsCuts:
    """Returns a step as it is cut for each number of ps.

    Args:
      step: its variables lie where they are now.
      prepared: the same, registered.
      make: traces and plans a step.
      workers: of the run.
    """
    elastic = step.arrangement.elastic
    assert elastic is not None  # who asks has seen to it
    groups = step.groups
    sizes = {name: sum(map(held_nbytes, specs)) for name, specs in groups.items()}
    homes = elastic.homes(sizes)
    now = len(step.arrangement.ps)
    cuts = {ps: prepared if ps == now else make(step.on(ps)) for ps in homes}
    order = pb.RunPs(
        now=now,
        groups=[
            pb.ShardGroup(variables=[s.name for s in specs], nbytes=sizes[name])
            for name, specs in groups.items()
        ],
        arrangements=[
            pb.PsArrangement(
                ps=ps,
                homes=[elastic.tasks.index(homes[ps][name]) for name in groups],
                shards=cut.shards,
            )
            for ps, cut in cuts.items()
        ],
    )
    programs = {
        ps: dict(zip(prepared.handles, cut.programs(workers), strict=True))
        for ps, cut in cuts.items()
    }
    return PsCuts(order, programs)
