"""Parts of the gradients that are summed on each host before they leave it.

With ``SyncPS(dense="workers")`` and several workers on a host, what these contribute to
an owner on another host is placed on a task of their own host; see
``coordination.sync.host_sums``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.graph.sharding import array_nbytes
from jgraph.graph.variable import Variable
from jgraph.plan.placement.collectors import collectors
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.step.compress import GradientDtype
from jgraph.train.step.group_parts import part_messages, parts_of_workers
from jgraph.view.units import bytes_text, count_text

_SUM_BYTES: Final = 4
"""Of an element of a sum, which is float32."""
_SENT_BYTES: Final[Mapping[GradientDtype | None, int]] = {
    None: 4,
    "bfloat16": 2,
    "int8": 1,
}


def least_on_host(dtype: GradientDtype | None) -> int:
    """Returns of how many workers a sum has fewer bytes than what they send.

    Args:
      dtype: what gradients travel as; None: as they are, in float32.

    Example:
      >>> least_on_host(None), least_on_host("bfloat16"), least_on_host("int8")
      (2, 3, 5)
    """
    return _SUM_BYTES // _SENT_BYTES[dtype] + 1


@final
@dataclass(frozen=True, slots=True)
class HostParts:
    """What each owner has, and who sums it on each host.

    Attributes:
      parts: the variables, by owner.
      hosts: of the workers.
      collectors: by host and owner.
    """

    parts: Mapping[TaskName, Sequence[VariableSpec]]
    hosts: Mapping[TaskName, str]
    collectors: Mapping[tuple[str, TaskName], TaskName]

    def homes(self, worker: TaskName) -> dict[VariableKey, TaskName]:
        """Returns where a worker sends what it does not send to the owner."""
        host = self.hosts.get(worker, "")
        return {
            spec.key: collector
            for owner, part in self.parts.items()
            if (collector := self.collectors.get((host, owner))) is not None
            for spec in part
        }

    @property
    def note(self) -> str:
        """A line for the plan."""
        sizes = {
            owner: sum(array_nbytes(spec.shape, spec.dtype) for spec in part)
            for owner, part in self.parts.items()
        }
        summed = sum(sizes[owner] for _, owner in self.collectors)
        hosts = dict.fromkeys(host for host, _ in self.collectors)
        workers = sum(host in hosts for host in self.hosts.values())
        return (
            f"gradients of {count_text(workers, 'worker')} are summed on each of "
            f"{count_text(len(hosts), 'host')} before they leave it: "
            f"{bytes_text(summed)} a step, in place of what each of them would send"
        )

    def order(self) -> pb.HostSums:
        """Returns what the tasks are told."""
        return pb.HostSums(parts=part_messages(self.parts))


def host_parts(
    means: Sequence[Variable],
    workers: Sequence[TaskName],
    hosts: Mapping[TaskName, str],
    dtype: GradientDtype | None,
) -> HostParts | None:
    """Returns what is summed on hosts of the means of dense gradients.

    Args:
      means: their variables, each with the tasks of its shards.
      workers: all that train.
      hosts: of the tasks.
      dtype: what gradients travel as.

    Returns:
      None: nothing, as no host has several workers and owners on other hosts.
    """
    parts = parts_of_workers(means)
    on = {worker: hosts[worker] for worker in workers if worker in hosts}
    found = collectors(sorted(parts), workers, on, least_on_host(dtype))
    return HostParts(parts, on, found) if found else None
