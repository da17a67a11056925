"""Task context: what all parts of one task's server share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from jgraph.clock import Clock
from jgraph.cluster.spec import ClusterSpec
from jgraph.coordination.liveness.members import Arrangement
from jgraph.graph.ir import TaskName
from jgraph.rpc.transport import Address, Transport


@final
@dataclass(slots=True)
class TaskContext:
    """Made once, and given to what needs it.

    Attributes:
      task: the task's name.
      transport: to the other tasks; already started or about to be.
      clock: time for reports.
      incarnation: which start of the task this is.
      health_port: returns where its health service listens; 0: nowhere yet.
      data_port: returns where frames from other machines arrive; 0: nowhere.
      check_place: called in threads before they write to files: refuses if another
        process has the place of this one.
      allow_sources: see ``Server``.
      records_dir: where the logs of updates go; None: this task keeps none.
      certificate_ends_s: in seconds since 1970; 0: it has none.
      insecure_i_accept: see ``Server``.
      spec: the cluster; empty until it is told.
      addresses: of all tasks in it.
      tasks_here: how many of them have the host of this one, itself included.
      arrangement: who has joined it, and left; number 0: it is as it was described.
      described: address of each task of the description.
      rearranged: called when the arrangement is another.
    """

    task: TaskName
    transport: Transport
    clock: Clock
    incarnation: int = 0
    health_port: Callable[[], int] = lambda: 0
    data_port: Callable[[], int] = lambda: 0
    check_place: Callable[[], None] = lambda: None
    allow_sources: Sequence[str] = ()
    records_dir: Path | None = None
    certificate_ends_s: float = 0.0
    insecure_i_accept: bool = False
    spec: ClusterSpec = field(init=False, default_factory=lambda: ClusterSpec({}))
    addresses: dict[TaskName, Address] = field(init=False, default_factory=dict)
    tasks_here: int = field(init=False, default=1)
    arrangement: Arrangement = field(init=False, default_factory=Arrangement)
    described: dict[TaskName, Address] = field(init=False, default_factory=dict)
    rearranged: list[Callable[[], None]] = field(init=False, default_factory=list)

    @property
    def address(self) -> Address:
        """Where others reach the task; empty: that is not known yet."""
        return self.addresses.get(self.task, "")

    def set_cluster(self, spec: ClusterSpec) -> None:
        """Tells where all tasks are, this one too, as the cluster is described."""
        self.described = {task: spec.address(task) for task in spec.tasks()}
        if not self.arrangement.number:  # else others have joined since, or left
            self._set_spec(spec)

    def arrange(self, newer: Arrangement) -> bool:
        """Takes an arrangement if it is newer than what is known; returns whether."""
        if newer.number <= self.arrangement.number:
            return False
        spec = spec_of(newer)  # refuses what is none
        self.arrangement = newer
        self._set_spec(spec)
        for tell in self.rearranged:
            tell()
        return True

    def _set_spec(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.addresses = {task: spec.address(task) for task in spec.tasks()}
        hosts = [address.rpartition(":")[0] for address in self.addresses.values()]
        self.tasks_here = hosts.count(self.address.rpartition(":")[0])
        self.transport.set_peers(self.addresses)


def spec_of(arrangement: Arrangement) -> ClusterSpec:
    """Returns an arrangement as the description of a cluster.

    Example:
      >>> from jgraph.coordination.liveness.members import Member
      >>> ps = TaskName("/job:ps/task:0")
      >>> spec_of(Arrangement(1, {ps: Member("a:1")}))
      ClusterSpec({'ps': ['a:1']})
    """
    jobs: dict[str, dict[int, str]] = {}
    for task, member in arrangement.members.items():
        job, _, index = task.removeprefix("/job:").partition("/task:")
        jobs.setdefault(job, {})[int(index)] = member.address
    return ClusterSpec(jobs, port_zero=True)
