"""Arrangements of a run's variables on its ps, as its client has planned them."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from jgraph.errors import ConfigError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.ps_setup import ps_task


@final
@dataclass(slots=True)
class Transfer:
    """What one ps gives another.

    Attributes:
      src: who has it.
      dst: who gets it.
      names: of the variables.
      nbytes: of these.
      sent_bytes: that were copied so far; more where rows were copied again.
    """

    src: TaskName
    dst: TaskName
    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    sent_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class RunArrangements:
    """Where the variables of a run lie, by the number of its ps.

    Args:
      order: what the client said of the run; its ``ps.now`` is the number of now.
    """

    order: pb.OpenRun

    @property
    def least(self) -> int:
        """How many ps the run may have at least."""
        return min((one.ps for one in self.order.ps.arrangements), default=0)

    @property
    def most(self) -> int:
        """How many ps the run may have at most."""
        return max((one.ps for one in self.order.ps.arrangements), default=0)

    def of(self, ps: int) -> pb.PsArrangement:
        """Returns the arrangement for so many ps.

        Raises:
          ConfigError: there is none.
        """
        for one in self.order.ps.arrangements:
            if one.ps == ps:
                return one
        raise ConfigError(f"run '{self.order.run}' has no arrangement for {ps} ps")

    def transfers(self, ps: int) -> list[Transfer]:
        """Returns what goes where when the run gets so many ps."""
        found: dict[tuple[int, int], Transfer] = {}
        homes = zip(self.of(self.order.ps.now).homes, self.of(ps).homes, strict=True)
        for (src, dst), group in zip(homes, self.order.ps.groups, strict=True):
            if src != dst:
                new = Transfer(ps_task(src), ps_task(dst))
                one = found.setdefault((src, dst), new)
                one.names += group.variables
                one.nbytes += group.nbytes
        return list(found.values())

    def elsewhere(self) -> Iterator[tuple[TaskName, list[str]]]:
        """Yields each ps there may be, and the variables that are not on it now."""
        names: defaultdict[int, list[str]] = defaultdict(list)
        pairs = zip(self.of(self.order.ps.now).homes, self.order.ps.groups, strict=True)
        for home, group in pairs:
            for ps in range(self.most):
                if ps != home:
                    names[ps] += group.variables
        for ps in sorted(names):
            yield ps_task(ps), names[ps]
