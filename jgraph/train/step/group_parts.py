"""Parts of the gradients that the children of the workers' servers sum.

With ``SyncPS(dense="xla")`` what a worker computes stays with its server, which lends
it to its child; see ``server.gates.group_sums``. A part is what one worker owns.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.device import is_worker
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.graph.sharding import array_nbytes
from jgraph.graph.variable import Variable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.view.units import bytes_text, count_text

Parts: TypeAlias = dict[TaskName, list[VariableSpec]]
"""Variables by the task that owns them."""


@final
@dataclass(frozen=True, slots=True)
class GroupParts:
    """The variables of a part for each worker.

    Attributes:
      parts: by the worker that owns them, in the order of workers.
    """

    parts: Parts

    def homes(self, worker: TaskName) -> dict[VariableKey, TaskName]:
        """Returns where a worker sends each variable: it stays there."""
        return {spec.key: worker for part in self.parts.values() for spec in part}

    @property
    def note(self) -> str:
        """A line for the plan."""
        specs = [spec for part in self.parts.values() for spec in part]
        nbytes = sum(array_nbytes(spec.shape, spec.dtype) for spec in specs)
        whole = {spec.name.partition("/part_")[0] for spec in specs}
        return (
            f"dense='xla': gradients of {count_text(len(whole), 'parameter')}, "
            f"{bytes_text(nbytes)}, are summed by XLA's collectives in a child process "
            f"of each of {count_text(len(self.parts), 'worker')}"
        )

    def order(self, limit_s: float) -> pb.CollectiveGroup:
        """Returns what the tasks are told.

        Args:
          limit_s: of a step.
        """
        return pb.CollectiveGroup(parts=part_messages(self.parts), limit_s=limit_s)


def part_messages(
    parts: Mapping[TaskName, Sequence[VariableSpec]],
) -> list[pb.GroupPart]:
    """Returns what tasks are told of parts."""
    return [
        pb.GroupPart(
            task=owner,
            variables=[spec.name for spec in part],
            elements=[prod(spec.shape) for spec in part],
        )
        for owner, part in parts.items()
    ]


def parts_of_workers(means: Sequence[Variable]) -> Parts:
    """Returns the parts of dense gradients that workers own, of those in float32.

    Args:
      means: their variables, each with the tasks of its shards.
    """
    parts = defaultdict[TaskName, list[VariableSpec]](list)
    for variable in means:
        owners = [TaskName(str(shard.device)) for shard in variable.shards]
        if np.dtype(variable.dtype) == np.float32 and all(map(is_worker, owners)):
            for owner, shard in zip(owners, variable.spec.shards, strict=True):
                parts[owner].append(shard)
    return dict(parts)


def group_parts(means: Sequence[Variable], workers: Sequence[TaskName]) -> GroupParts:
    """Returns what is summed of the means of dense gradients.

    Args:
      means: their variables, each with the tasks of its shards.
      workers: all that train.

    Raises:
      ConfigError: a worker would own nothing that is summed.
    """
    parts = parts_of_workers(means)
    missing = [worker for worker in workers if worker not in parts]
    if missing:
        raise ConfigError(
            f"SyncPS(dense='xla'): {', '.join(missing)} would own no parameter in "
            "float32, and each worker's child sums what that worker owns; the model "
            f"is too small for {count_text(len(workers), 'worker')}: write "
            "dense='workers', or train on fewer"
        )
    return GroupParts({worker: parts[worker] for worker in workers})
