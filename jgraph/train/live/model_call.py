"""Model in training as a function of its variables and a batch, traced to be served."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph.coordination.serving.batching import Limits
from jgraph.errors import ArtifactError
from jgraph.graph.tracing.inline import inline_calls
from jgraph.serving.live.batch_code import BatchCode, LookedUp
from jgraph.serving.signature import Signature, TensorSpec, check_dtype
from jgraph.train.model.adapters import Adapter
from jgraph.train.model.served import Example, called, names_after_first, outputs_of
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.ids import Ids, usable_ids
from jgraph.train.tables.row_tables import RowTable, RowTables, find_row_tables

RUNTIME_SIZES: Final = 3
"""How many sizes of lookups programs are made for."""


@final
@dataclass(frozen=True, slots=True)
class TracedBatch:
    """Functions of a model for one number of rows; see ``BatchCode``.

    Attributes:
      tables: those that are looked up.
      ids: of inputs of the types ``inputs``.
      outputs: of values of the types ``taken``.
      inputs: types of the inputs.
      taken: types of dense parameters, rows, positions and inputs.
    """

    tables: tuple[LookedUp, ...]
    ids: Callable[..., Sequence[Any]]
    outputs: Callable[..., Sequence[Any]]
    inputs: Sequence[Any]
    taken: Sequence[Any]


@final
class ModelCall:
    """A model as a function of its variables and a batch.

    Args:
      step: has the variables.
      example: a batch.
      fn: called in place of the model, as in ``Trainer.predict``.
      rows_of: names of parameters of which rows may be looked up, where the model
        needs no more of them.

    Raises:
      ArtifactError: it is no function that can be served.
    """

    def __init__(
        self,
        step: TrainStep,
        example: Example,
        fn: Callable[..., Any] | None,
        *,
        rows_of: Container[str],
    ) -> None:
        names = names_after_first(fn) if example.kind == "tuple" else ()
        self.example = example.called(names)
        self.names = [n for n in step.names if n.startswith(("params/", "state/"))]
        """Variables that it takes, in order."""
        self._adapter: Adapter = step.adapter
        self._fn = fn
        self._rows_of = rows_of
        self._parameters = [n for n in self.names if n.startswith("params/")]
        avals = {v.name: v.spec.aval for v in step.variables}
        now = step.unflatten([avals[name] for name in step.names])
        self._model = (now["params"], now["state"])
        self._output_names: list[str] = []
        self.tables = {t.name: t for t in self.row_tables(1).tables}
        """Parameters of which it looks rows up, for a batch of one row."""
        needed = self._needed()
        self.dense = [n for n in self.names if n in needed and n not in self.tables]
        """Variables of which it takes the whole value."""
        hashed = {v.name for v in step.variables if v.spec.table is not None}
        if whole := sorted(hashed.intersection(self.dense)):
            raise ArtifactError(
                f"{whole[0]} is a hash table, of which rows can only be looked up by "
                "keys from the batch, and the function uses it otherwise; look rows up "
                "by table(ids), outside of loops"
            )
        self.signature = self._signature()

    def _needed(self) -> set[str]:
        """Returns the names of the variables that outputs depend on."""
        batch = self.example.passed(self.avals(1))
        leaves, tree = jax.tree.flatten((*self._model, batch, ()))
        jaxpr, consts, _ = _compat.make_jaxpr(
            lambda *flat: self(*jax.tree.unflatten(tree, flat)), *leaves
        )
        flat = inline_calls(jaxpr, consts).jaxpr
        _, inputs = Ids(flat, len(self.names)).inputs(flat.outvars)
        return {self.names[n] for n in inputs if n < len(self.names)}

    def _looked_up(self, table: RowTable, inputs: tuple[int, ...]) -> LookedUp:
        leaf = jax.tree.leaves(self._model[0])[table.number]
        shape, dtype = tuple(leaf.shape[1:]), np.dtype(leaf.dtype).name
        facts = table.name, table.feature, table.rows, table.count, table.hashed
        return LookedUp(*facts, shape, dtype, inputs)

    def _fed(self, tables: RowTables, avals: Sequence[Any]) -> list[tuple[int, ...]]:
        """Returns, by table, which inputs its ids are; none where they are computed."""
        jaxpr, consts, _ = _compat.make_jaxpr(
            lambda *inputs: tables.ids(self.example.passed(inputs), ()), *avals
        )
        flat = inline_calls(jaxpr, consts).jaxpr
        makers, ids = Ids(flat, 0), iter(flat.outvars)
        fed = []
        for table in tables.tables:
            numbers = [makers.whole_feed(next(ids)) for _ in table.lookups]
            known = [number for number in numbers if number is not None]
            is_fed = len(known) == len(numbers) and not table.hashed
            fed.append(tuple(known) if is_fed else ())
        return fed

    def traced(self, rows: int) -> "TracedBatch":
        """Returns the functions for batches of so many rows, and their types."""
        found = self.row_tables(rows)
        inputs = self.avals(rows)
        fed = self._fed(found, inputs)
        tables = tuple(map(self._looked_up, found.tables, fed))
        types = dict(zip(self.names, jax.tree.leaves(self._model), strict=True))
        dense = len(self.dense)
        ends = dense, dense + len(tables), dense + 2 * len(tables)

        def outputs(*flat: Any) -> list[Any]:
            parts = [flat[: ends[0]], flat[ends[0] : ends[1]], flat[ends[1] : ends[2]]]
            return self.outputs(found, *parts, *flat[ends[2] :])

        table_rows = [
            jax.ShapeDtypeStruct((t.count, *t.shape), np.dtype(t.dtype)) for t in tables
        ]
        positions = [jax.ShapeDtypeStruct((t.count,), jnp.int32) for t in tables]
        taken = [*(types[n] for n in self.dense), *table_rows, *positions, *inputs]
        return TracedBatch(tables, partial(self.ids, found), outputs, inputs, taken)

    def compiled(self, rows: int) -> BatchCode:
        """Returns the code for so many rows, for this process."""
        batch = self.traced(rows)

        def compiled(fn: Callable[..., Any], types: Sequence[Any]) -> Any:
            return jax.jit(fn, keep_unused=True).lower(*types).compile()

        ids = compiled(batch.ids, batch.inputs) if batch.tables else None
        return BatchCode(batch.tables, ids, compiled(batch.outputs, batch.taken))

    def avals(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of inputs of so many rows."""
        return [
            jax.ShapeDtypeStruct(
                (rows, *v.shape[1:]) if self.example.batch else v.shape, v.dtype
            )
            for v in self.example.values.values()
        ]

    def __call__(self, params: Any, state: Any, batch: Any, _: Any) -> list[Any]:
        """Returns the outputs."""
        predict = self._adapter.predict
        outputs = outputs_of(called(predict, params, state, batch, self._fn))
        self._output_names[:] = outputs
        return list(outputs.values())

    def row_tables(self, rows: int) -> RowTables:
        """Returns the tables that a batch of so many rows looks rows up of."""
        batch = self.example.passed(self.avals(rows))
        found = find_row_tables(
            self, *self._model, batch, (), self._parameters, small=True
        )
        whole = [t.name for t in found.tables if t.name not in self._rows_of]
        return found.without(dict.fromkeys(whole, "it is copied as a whole"))

    def ids(self, tables: RowTables, *inputs: Any) -> list[Any]:
        """Returns the ids of each table; traced."""
        found = tables.ids(self.example.passed(inputs), ())
        return [
            jnp.concatenate(
                [
                    ids.reshape(-1, 2)
                    if table.hashed
                    else usable_ids(
                        ids, table.rows, lookup.mode, of_bags=lookup.of_bags
                    )
                    for ids, lookup in zip(lookups, table.lookups, strict=True)
                ]
            )
            for table, lookups in zip(tables.tables, found, strict=True)
        ]

    def outputs(
        self,
        tables: RowTables,
        dense: Sequence[Any],
        rows: Sequence[Any],
        positions: Sequence[Any],
        *inputs: Any,
    ) -> list[Any]:
        """Returns the outputs; traced."""
        by_name = {t.name: r for t, r in zip(tables.tables, rows, strict=True)}
        by_name |= zip(self.dense, dense, strict=True)
        avals = jax.tree.leaves(self._model)
        values = [
            by_name[name] if name in by_name else jnp.zeros(aval.shape, aval.dtype)
            for name, aval in zip(self.names, avals, strict=True)
        ]
        params, state = jax.tree.unflatten(jax.tree.structure(self._model), values)
        call = tables.loss(positions)
        result: list[Any] = call(params, state, self.example.passed(inputs), ())
        return result

    def _signature(self) -> Signature:
        sizes = (2, 3) if self.example.batch else (1, 1)
        avals = [
            jax.eval_shape(self, *self._model, self.example.passed(self.avals(n)), ())
            for n in sizes
        ]
        outputs = [
            self._output(name, first, second, sizes)
            for name, first, second in zip(self._output_names, *avals, strict=True)
        ]
        inputs = [
            TensorSpec(
                name,
                value.dtype.name,
                (None, *value.shape[1:]) if self.example.batch else value.shape,
            )
            for name, value in self.example.values.items()
        ]
        return Signature(
            "", tuple(inputs), tuple(outputs), is_batched=bool(self.example.batch)
        )

    def _output(
        self, name: str, first: Any, second: Any, sizes: tuple[int, int]
    ) -> TensorSpec:
        check_dtype(f"output {name}", first.dtype.name)
        shape, other = tuple(first.shape), tuple(second.shape)
        if not self.example.batch:
            return TensorSpec(name, first.dtype.name, shape)
        if (shape[:1], other[:1]) != (sizes[:1], sizes[1:]) or shape[1:] != other[1:]:
            raise ArtifactError(
                f"output '{name}' has the shape {shape} for {sizes[0]} examples; "
                "return a row for each example along axis 0"
            )
        return TensorSpec(name, first.dtype.name, (None, *shape[1:]))


def counts_for(call: ModelCall, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Returns, by table, how many ids a lookup of each size has at most."""
    sizes = limits.buckets if call.example.batch else (1,)
    step = max(1, -(-len(sizes) // RUNTIME_SIZES))
    chosen = sorted({*sizes[::step], sizes[-1]})
    found: dict[str, list[int]] = {name: [] for name in call.tables}
    for rows in chosen:
        for table in call.row_tables(rows).tables:
            most = table.count if table.hashed else min(table.count, table.rows)
            found[table.name].append(most)
    return {name: tuple(counts) for name, counts in found.items()}
