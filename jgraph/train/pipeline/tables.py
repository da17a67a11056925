"""Embedding tables below a pipeline: on parameter servers, and by rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.errors import PipelineError
from jgraph.graph.device import device
from jgraph.graph.rows.rows import unique_rows
from jgraph.train.model.trees import Tree
from jgraph.train.tables.ids import without_no_id

Places: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Per table its rows that a batch needs, each once, and which of them each id is."""


@final
@dataclass(frozen=True, slots=True)
class PipelineTables:
    """The tables of a pipeline, by the name that their ids have in a batch.

    Attributes:
      rows: how many each has.
      first: the device of the first stage, which takes rows in place of ids.
    """

    rows: Mapping[str, int]
    first: str

    def places(self, x: Tree) -> Places:
        """Returns which rows a batch needs.

        Raises:
          PipelineError: the batch has no such ids.
        """
        for name in self.rows:
            ids = x.get(name) if isinstance(x, Mapping) else None
            if getattr(ids, "dtype", None) != jnp.int32:
                raise PipelineError(
                    f"x['{name}'] has to be int32 ids of the table '{name}'; give x as "
                    "a dict with the ids of each table by its name"
                )
        return {
            name: unique_rows(
                without_no_id(x[name].reshape(-1)), rows=count, feature=f"x['{name}']"
            )
            for name, count in self.rows.items()
        }

    def looked_up(self, x: Tree, found: Mapping[str, Any], places: Places) -> Tree:
        """Returns the batch with rows in place of ids."""
        if not self.rows:
            return x
        with device(self.first):
            taken = {
                name: found[name][positions].reshape(*x[name].shape, -1)
                for name, (_, positions) in places.items()
            }
        return {**x, **taken}

    def gradients(
        self, into: Tree, found: Mapping[str, Any], places: Places
    ) -> dict[str, Any]:
        """Returns the gradients of the rows, given those of what was looked up."""
        with device(self.first):
            return {
                name: jnp.zeros_like(found[name])
                .at[positions]
                .add(into[name].reshape(positions.size, -1))
                for name, (_, positions) in places.items()
            }


def joined(stages: list[Tree], tables: Mapping[str, Any]) -> Tree:
    """Returns all parameters: the stages' alone where there are no tables."""
    return {"stages": stages, "tables": dict(tables)} if tables else stages


def apart(params: Tree) -> tuple[list[Tree], dict[str, Any]]:
    """Returns the parameters of the stages, and the tables."""
    if isinstance(params, dict):
        return params["stages"], params["tables"]
    return params, {}


def table_of(group: list[str], value: Any, rows: Mapping[str, int]) -> str:
    """Returns of which table a variable has the rows; ``""`` of none.

    Args:
      group: path of the parameter that it belongs to.
      value: what the variable begins with.
      rows: of each table.
    """
    is_table = group[:2] == ["params", "tables"]
    shape = jax.numpy.shape(value)
    return group[2] if is_table and shape[:1] == (rows[group[2]],) else ""


def stage_of(group: list[str]) -> int | None:
    """Returns the stage that a parameter belongs to, by its path."""
    number = group[2 if group[1:2] == ["stages"] else 1 :][:1]
    return int(number[0]) if group[0] == "params" and number[0].isdigit() else None
