"""Memory that a worker lends to its child: parts of its gradients, and a mean.

There is a row for each owner, with what the own replica contributed to the part of
that owner, and one for the mean of the own part. Where no child sums, the owners get
the rows as messages, and each takes the mean of those of its part.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.errors import MalformedMessageError, TaskMemoryError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import mean
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.shared_memory.memory_files import MemoryFile
from jgraph.runtime.gate import Contribution, Key
from jgraph.runtime.group_child import Layout, stamp
from jgraph.view.units import bytes_text

_Array: TypeAlias = np.ndarray[Any, Any]


@final
class GroupMemory:
    """What is summed of one task, and the mean of what it owns.

    Args:
      task: this one.
      order: the parts, and who owns them.
      container: of the variables.

    Raises:
      TaskMemoryError: there is no memory to lend.
    """

    def __init__(
        self, task: TaskName, order: pb.CollectiveGroup, container: str
    ) -> None:
        self._owners = [TaskName(part.task) for part in order.parts]
        self._parts = [_places(container, p.variables, p.elements) for p in order.parts]
        self._own = self._parts[self._owners.index(task)]
        self.elements = max(sum(part.elements) for part in order.parts)
        """Of the largest part."""
        self._layout = Layout(len(self._owners), self.elements)
        self._file = _memory_file(task, self._layout.nbytes)
        self._rows, self._mean = self._layout.rows(self._file.data)
        self._shapes: dict[Key, tuple[int, ...]] = {}
        self._rows_came: defaultdict[int, dict[TaskName, _Array]] = defaultdict(dict)

    @property
    def fd(self) -> int:
        """The file that is lent."""
        return self._file.fd

    def keep(self, version: int, values: Contribution) -> Contribution:
        """Takes what is summed of a contribution; returns what is not.

        Args:
          version: to which it is.
          values: of the own replica all that is summed, of others nothing of that.
        """
        if not any(key in values for part in self._parts for key in part):
            return values
        others = dict(values)
        for row, part in zip(self._rows, self._parts, strict=True):
            for key, place in part.items():
                value = others.pop(key)
                row[place] = value.reshape(-1)
                self._shapes[key] = value.shape
        self._rows[:, -1] = stamp(version)
        return others

    def joined(self, chosen: Sequence[Contribution]) -> Contribution:
        """Returns one contribution for all: means, those of the own part from the sum.

        Args:
          chosen: what else was contributed, in the order in which it is summed.
        """
        others = {key: mean([each[key] for each in chosen]) for key in chosen[0]}
        own = {
            key: self._mean[place].reshape(self._shapes[key])
            for key, place in self._own.items()
        }
        return {**others, **own}

    def row(self, owner: TaskName) -> _Array:
        """Returns a copy of what the own replica contributed to an owner's part."""
        return np.array(self._rows[self._owners.index(owner)])

    def take_row(self, src: TaskName, version: int, tensors: Sequence[Any]) -> bool:
        """Takes what a replica contributed to the own part; returns whether all did.

        Raises:
          MalformedMessageError: it is not of its size.
        """
        sizes = [(np.shape(one), np.asarray(one).dtype) for one in tensors]
        if sizes != [(self._mean.shape, self._mean.dtype)]:
            raise MalformedMessageError(
                f"{src} sends {sizes} as its part of update {version}, and not "
                f"float32[{self._layout.width}]"
            )
        for old in [one for one in self._rows_came if one < version]:
            del self._rows_came[old]
        here = self._rows_came[version]
        here[src] = np.asarray(tensors[0])
        if len(here) < len(self._owners):
            return False
        del self._rows_came[version]
        # Not where a child that was ended a moment ago may still write.
        self._mean = mean([here[one] for one in self._owners])
        return True

    def close(self) -> None:
        """Gives the memory back; the child has ended."""
        self._file.close()


def _places(
    container: str, names: Sequence[str], elements: Sequence[int]
) -> Mapping[Key, slice]:
    """Returns where in its row each variable of a part lies."""
    ends = np.cumsum(elements).tolist()
    starts = [0, *ends[:-1]]
    return {
        (container, name): slice(start, end)
        for name, start, end in zip(names, starts, ends, strict=True)
    }


def _memory_file(task: TaskName, nbytes: int) -> MemoryFile:
    try:
        return MemoryFile(nbytes, b"")
    except OSError as error:
        raise TaskMemoryError(
            f"SyncPS(dense='xla'): {task} has no {bytes_text(nbytes)} to lend to a "
            f"child process ({error.strerror or error}); write dense='workers'",
            task=task,
        ) from error
