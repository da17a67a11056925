"""Programs of replicas: one plan, made for one worker, serves all others too.

A worker may have variables of its own, as what gradients leave over: they are called by
the number of its replica, `residual/0/params/w`.
"""

from dataclasses import replace
from typing import Final

from jgraph.plan.program.program import Partition, Program

_OWN: Final = "residual/"
_STATE: Final = "inner/"


def own_prefix(replica: int) -> str:
    """Returns how the names begin of variables that one replica has.

    Example:
      >>> own_prefix(3)
      'residual/3/'
    """
    return f"{_OWN}{replica}/"


def is_own(name: str) -> bool:
    """Whether a variable is one of those that a replica has.

    Example:
      >>> is_own("residual/0/params/w"), is_own("params/w")
      (True, False)
    """
    return name.startswith(_OWN)


def own_state(name: str) -> str:
    """Returns the name of a variable that a replica keeps from one run to the next.

    Example:
      >>> own_state("rounds"), goes_on(own_state("rounds")), goes_on("residual/3/w")
      ('residual/0/inner/rounds', True, False)
    """
    return f"{own_prefix(0)}{_STATE}{name}"


def goes_on(name: str) -> bool:
    """Whether a replica keeps a variable from one run to the next."""
    return is_own(name) and name.split("/", 2)[2].startswith(_STATE)


def for_replica(program: Program, replica: int, *, of: int = 0) -> Program:
    """Returns a program with the own variables of another replica.

    Args:
      program: planned for a worker.
      replica: number of the other one.
      of: whose variables it has.
    """
    old, new = own_prefix(of), own_prefix(replica)

    def renamed(partition: Partition) -> Partition:
        variables = tuple(
            replace(v, name=new + v.name.removeprefix(old))
            if v.name.startswith(old)
            else v
            for v in partition.variables
        )
        return replace(partition, variables=variables)

    return replace(program, partitions=tuple(map(renamed, program.partitions)))
