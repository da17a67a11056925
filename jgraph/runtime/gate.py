"""Gates and aggregators: which steps may start here, and what makes up an update.

A partition may name a gate. The task asks it before the partition's steps start, and
tells it when they are over. Who decides is not the runtime's business: the cluster puts
gates into ``TaskRuntime.gates``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from jgraph.errors import InvalidProgramError, JGError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import SUM, mean, mean_of_rows, total
from jgraph.plan.program.nodes import AggregateNode, runs
from jgraph.plan.program.program import Partition, StoredVariable
from jgraph.plan.program.row_values import joined
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.groups import VariableGroup

Key: TypeAlias = tuple[str, str]
"""(container, name) of a variable."""

Contribution: TypeAlias = Mapping[Key, np.ndarray[Any, Any]]
"""Values by variable; of rows, those that are there."""


class Chosen(NamedTuple):
    """What an update is the mean of.

    Attributes:
      contributions: in the order in which they are summed.
      parts: of variables of which some contributions came as a sum: what came.
    """

    contributions: Sequence[Contribution]
    parts: Mapping[Key, Sequence[np.ndarray[Any, Any]]] = {}

    def of(self, key: Key) -> Sequence[np.ndarray[Any, Any]]:
        """Returns what there is of a variable."""
        return self.parts.get(key) or [each[key] for each in self.contributions]


class Gate(Protocol):
    """What a task asks and tells. Called on its event loop; returns at once."""

    def ask(
        self,
        step: StepKey,
        let_in: Callable[[], None],
        refuse: Callable[[JGError], None],
    ) -> None:
        """Calls ``let_in`` when the step may start here, or ``refuse``, once."""

    def sent(self, step: StepKey, dst: TaskName) -> None:
        """Learns that all that a step sends from here was given to the transport."""

    def ended(self, step: StepKey, *, done: bool) -> None:
        """Learns that a step that asked is over; ``done`` unless it failed."""


class Aggregator(Gate, Protocol):
    """A gate that also averages what steps contribute."""

    def contribute(self, step: StepKey, slot: int, values: Contribution) -> None:
        """Takes what a step that was let in contributes for a data slot."""

    def ask_update(
        self, let_in: Callable[[], None], refuse: Callable[[JGError], None]
    ) -> None:
        """Calls ``let_in`` when all that was chosen is here, or ``refuse``, once."""

    def chosen(self) -> Chosen:
        """Returns the contributions to average."""

    def applied(self) -> None:
        """Learns that the update of the chosen contributions is applied here."""


def aggregator(gate: Gate | None) -> Aggregator:
    """Returns a gate that averages.

    Raises:
      InvalidProgramError: it is none, or does not; the program is for another gate.
    """
    if not hasattr(gate, "contribute"):
        raise InvalidProgramError(
            "the program averages contributions, and its gate takes none; the gate may "
            "have been opened for asynchronous training: call fit again"
        )
    return cast(Aggregator, gate)


def key_of(variable: StoredVariable) -> Key:
    """Returns what a contribution's values are known by."""
    return variable.container, variable.name


def averages(
    partition: Partition,
    node: AggregateNode,
    group: VariableGroup,
    chosen: Chosen,
) -> list[np.ndarray[Any, Any]]:
    """Returns the means of what was chosen, as a group takes them.

    Args:
      partition: of the node.
      node: says what is averaged.
      group: its variables, those of ``row_means`` last.
      chosen: the contributions.
    """
    variables = partition.variables
    keys = list(map(key_of, group[: len(node.variables)]))
    packed, alone = runs(keys, group.packs)
    # An element is summed as it would be alone: a mean has the same bits.
    means = [
        _joint(run, chosen)([joined(row, *layout) for row in _rows(run, chosen)])
        for run, layout in zip(packed, group.layouts(), strict=True)
    ]
    means += [_joint([key], chosen)(chosen.of(key)) for key in alone]
    for rows in node.row_means:
        names = [key_of(variables[v]) for v in (rows.ids, *rows.rows)]
        parts = [[each[name] for name in names] for each in chosen.contributions]
        means += mean_of_rows(parts, variables[rows.ids].type.shape[0])
    return means


def _rows(run: Sequence[Key], chosen: Chosen) -> list[list[np.ndarray[Any, Any]]]:
    """Returns what there is of variables; zeros where some of it came as a sum."""
    columns = [chosen.of(key) for key in run]
    most = max(map(len, columns))
    full = [
        [*column, *[np.zeros_like(column[0])] * (most - len(column))]
        for column in columns
    ]
    return [list(row) for row in zip(*full, strict=True)]


def _joint(
    run: Sequence[Key], chosen: Chosen
) -> Callable[[Sequence[Any]], np.ndarray[Any, Any]]:
    """Returns what makes one array of those of all contributions.

    Raises:
      InvalidProgramError: some of a flat array are summed, and others averaged.
    """
    summed = {name.startswith(SUM) for _, name in run}
    if len(summed) > 1:
        raise InvalidProgramError(
            "a flat array has variables that are summed, and others that are averaged"
        )
    return total if summed == {True} else partial(mean, over=len(chosen.contributions))
