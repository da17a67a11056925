"""Task context: what all parts of one task's server share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from jgraph.clock import Clock
from jgraph.cluster.spec import ClusterSpec
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
      spec: the cluster; empty until it is told.
      addresses: of all tasks in it.
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
    spec: ClusterSpec = field(init=False, default_factory=lambda: ClusterSpec({}))
    addresses: dict[TaskName, Address] = field(init=False, default_factory=dict)

    @property
    def address(self) -> Address:
        """Where others reach the task; empty: that is not known yet."""
        return self.addresses.get(self.task, "")

    def set_cluster(self, spec: ClusterSpec) -> None:
        """Tells where all tasks are, this one too."""
        self.spec = spec
        self.addresses = {task: spec.address(task) for task in spec.tasks()}
        self.transport.set_peers(self.addresses)
