"""Served function of a model in training: ids of a batch, their rows, and the outputs.

For each number of rows of a batch two pieces of code are compiled here: one gives the
ids that the model looks up, and one the outputs, from the dense parameters and the rows
of these ids. In between the rows are asked for.
"""

import asyncio
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph.clock import Clock
from jgraph.cluster import event_loop
from jgraph.coordination.serving.batching import Limits
from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.errors import ArtifactError, JGError, RowIdError, TaskLostError
from jgraph.graph.rows.hash_keys import NO_KEY, join_keys
from jgraph.graph.rows.rows import NO_ID, id_text
from jgraph.graph.tracing.inline import inline_calls
from jgraph.serving.answering import Answered
from jgraph.serving.signature import Array, Signature, TensorSpec, check_dtype
from jgraph.train.live.parameters import DenseCopy, Parameters
from jgraph.train.live.table_rows import TableRows
from jgraph.train.model.adapters import Adapter
from jgraph.train.model.served import Example, called, names_after_first, outputs_of
from jgraph.train.step.train_step import TrainStep
from jgraph.train.tables.ids import Ids, usable_ids
from jgraph.train.tables.row_tables import RowTable, RowTables, find_row_tables

OnLoss: TypeAlias = Literal["stale", "error"]
SHORT_S: Final = 0.002
"""What computes for less time does so on the event loop."""
RUNTIME_SIZES: Final = 3
"""How many sizes of lookups programs are made for."""


@final
@dataclass(slots=True)
class _Code:
    """What is compiled for a number of rows.

    Attributes:
      tables: those that are looked up.
      ids: of (inputs): the ids of each table, int32[n]; of a hash table its keys,
        uint32[n, 2].
      outputs: of (dense parameters, rows, positions, inputs).
      took_s: how long the last ``outputs`` was.
    """

    tables: Sequence[RowTable]
    ids: Callable[..., Sequence[Any]] | None
    outputs: Callable[..., Sequence[Any]]
    took_s: float = SHORT_S


@final
@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids of one table in a batch.

    Attributes:
      unique: each once, ascending.
      positions: which of them each id is, int32[n]; n where it has no row.
      bad: ids that are out of range.
    """

    unique: Array
    positions: Array
    bad: Array

    @classmethod
    def of(cls, ids: Array, table: RowTable) -> "_Ids":
        """Returns what ``_numbers`` gives, put in order."""
        if table.hashed:
            here, is_none = ids != NO_KEY, ids == NO_KEY
        else:
            here, is_none = (ids >= 0) & (ids < table.rows), ids == NO_ID
        unique, places = np.unique(ids[here], return_inverse=True)
        positions = np.full(len(ids), len(ids), np.int32)
        positions[here] = places
        return cls(unique, positions, np.unique(ids[~here & ~is_none]))


def _numbers(ids: Any, table: RowTable) -> Array:
    """Returns ids of a table as numbers: int32[n], of a hash table int64[n]."""
    return join_keys(ids) if table.hashed else np.asarray(ids)


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

    def row_type(self, table: RowTable) -> tuple[tuple[int, ...], Any]:
        """Returns shape and dtype of a row."""
        leaf = jax.tree.leaves(self._model[0])[table.number]
        return tuple(leaf.shape[1:]), leaf.dtype

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


@final
class LiveFunction:
    """Answers with the parameters of now; a ``WaitingFunction``.

    Args:
      call: the model.
      signature: of it, with what was found out about its rows.
      parameters: where its parameters are.
      share: what lookups may take of their servers' time.
      on_loss: ``"stale"``: what is lost is served as it was; ``"error"``: it is not.
      threads: where long computations run.
      clock: for ages.
    """

    def __init__(
        self,
        call: ModelCall,
        signature: Signature,
        parameters: Parameters,
        share: LookupShare,
        on_loss: OnLoss,
        threads: Executor,
        clock: Clock,
    ) -> None:
        self.signature = signature
        self._call = call
        self._parameters = parameters
        self._share = share
        self._on_loss = on_loss
        self._threads = threads
        self._clock = clock
        self._codes: dict[int, _Code] = {}
        self._compiling = threading.Lock()
        self._dense = call.dense

    @property
    def problem(self) -> JGError | None:
        """See ``WaitingFunction.problem``."""
        if self._on_loss == "stale":
            return None
        return next(iter(self._parameters.lost.values()), None)

    def close(self) -> None:
        """See ``WaitingFunction.close``; whoever serves closes the parameters."""

    # ------------------------------------------------------------ code

    def code(self, rows: int) -> _Code:
        """Returns the code for so many rows, which is compiled at first."""
        with self._compiling:
            if rows not in self._codes:
                self._codes[rows] = self._compiled(rows)
            return self._codes[rows]

    def _compiled(self, rows: int) -> _Code:
        call, avals = self._call, self._call.avals(rows)
        found = call.row_tables(rows)
        tables = found.tables
        copy = self._parameters.copy
        dense = [
            jax.ShapeDtypeStruct(copy.values[name].shape, copy.values[name].dtype)
            for name in self._dense
        ]
        ids = None
        if tables:
            ids_jit = jax.jit(partial(call.ids, found), keep_unused=True)
            ids = ids_jit.lower(*avals).compile()
        row_types = [call.row_type(table) for table in tables]
        table_rows = [
            jax.ShapeDtypeStruct((table.count, *shape), dtype)
            for table, (shape, dtype) in zip(tables, row_types, strict=True)
        ]
        positions = [jax.ShapeDtypeStruct((t.count,), jnp.int32) for t in tables]
        compute = jax.jit(partial(call.outputs, found), keep_unused=True)
        compiled = compute.lower(dense, table_rows, positions, *avals).compile()
        return _Code(tables, ids, compiled)

    def prepare(self, inputs: Sequence[Array]) -> None:
        """See ``WaitingFunction.prepare``."""
        self.code(self._count(inputs))
        event_loop.run(self.answer(inputs), "trying a model that is to be served")

    def tried(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Returns outputs of rows that are functions of their ids, for a trial.

        Nobody trains these, so equal inputs have equal outputs.
        """
        code = self.code(self._count(inputs))
        ids = self._ids(code, inputs)
        rows = {}
        for table, one in zip(code.tables, ids, strict=True):
            shape, _ = self._call.row_type(table)
            width = int(np.prod(shape))
            angle = one.unique[:, None] * 0.7 + np.arange(width)
            values = np.sin(angle).reshape(-1, *shape)
            found = np.ones(len(one.unique), bool)
            rows[table.name] = TableRows(values, found, from_cache=False)
        return self._outputs(code, self._parameters.copy, ids, rows, inputs)

    def _count(self, inputs: Sequence[Array]) -> int:
        return len(inputs[0]) if self.signature.is_batched else 1

    # ------------------------------------------------------------ answers

    async def answer(self, inputs: Sequence[Array]) -> Answered:
        """See ``WaitingFunction.answer``."""
        loop, count = asyncio.get_running_loop(), self._count(inputs)
        code = self._codes.get(count)
        if code is None:
            code = await loop.run_in_executor(self._threads, self.code, count)
        if self._on_loss == "error":
            self._check_there()
        ids = self._ids(code, inputs)
        rows: Mapping[str, TableRows] = {}
        if code.tables:
            rows = await self._looked_up(code, ids)
        copy = self._parameters.copy
        if code.took_s < SHORT_S:
            outputs = self._outputs(code, copy, ids, rows, inputs)
        else:
            outputs = await loop.run_in_executor(
                self._threads, self._outputs, code, copy, ids, rows, inputs
            )
        return Answered(
            outputs, self._facts(copy, rows), self._refused(code, ids, rows, inputs)
        )

    def _ids(self, code: _Code, inputs: Sequence[Array]) -> list[_Ids]:
        if code.ids is None:
            return []
        return [
            _Ids.of(_numbers(ids, table), table)
            for table, ids in zip(code.tables, code.ids(*inputs), strict=True)
        ]

    async def _looked_up(
        self, code: _Code, ids: Sequence[_Ids]
    ) -> Mapping[str, TableRows]:
        if (wait_s := self._share.wait_s(self._clock.now())) > 0:
            await asyncio.sleep(wait_s)  # training keeps its share
        began_s = self._clock.now()
        wanted = {t.name: i.unique for t, i in zip(code.tables, ids, strict=True)}
        try:
            return await self._parameters.rows(wanted)
        finally:
            now = self._clock.now()
            self._share.took(now - began_s, now)

    def _outputs(
        self,
        code: _Code,
        copy: DenseCopy,
        ids: Sequence[_Ids],
        rows: Mapping[str, TableRows],
        inputs: Sequence[Array],
    ) -> list[Array]:
        began_s = self._clock.now()
        padded = []
        for table in code.tables:
            found = rows[table.name].rows
            shape, dtype = self._call.row_type(table)
            values = np.zeros((table.count, *shape), dtype)
            values[: len(found)] = found
            padded.append(values)
        dense = [copy.values[name] for name in self._dense]
        positions = [one.positions for one in ids]
        results = code.outputs(dense, padded, positions, *inputs)
        outputs = [np.asarray(value) for value in results]
        code.took_s = self._clock.now() - began_s
        return outputs

    def _facts(
        self, copy: DenseCopy, rows: Mapping[str, TableRows]
    ) -> dict[str, int | str]:
        age_ms = int((self._clock.now() - copy.at) * 1000)
        facts: dict[str, int | str] = {"jgraph_step": copy.step}
        facts["jgraph_age_ms"] = age_ms
        if rows:
            is_old = any(one.from_cache for one in rows.values())
            facts["jgraph_rows"] = "cache" if is_old else "live"
        return facts

    # ------------------------------------------------------------ refusals

    def _check_there(self) -> None:
        for task, error in self._parameters.lost.items():
            raise _lost(task, error)

    def _refused(
        self,
        code: _Code,
        ids: Sequence[_Ids],
        rows: Mapping[str, TableRows],
        inputs: Sequence[Array],
    ) -> dict[int, JGError]:
        refused: dict[int, JGError] = {}
        for place, (table, one) in enumerate(zip(code.tables, ids, strict=True)):
            missing = one.unique[~rows[table.name].is_there]
            if len(missing):
                refused |= dict.fromkeys(
                    self._with_ids(place, table, missing, inputs), self._missing(table)
                )
            if len(one.bad):
                error = RowIdError(
                    f"{table.feature} has the id {id_text(int(one.bad[0]))}, and the "
                    f"table has the rows 0 to {table.rows - 1}; send ids that it has"
                )
                refused |= dict.fromkeys(
                    self._with_ids(place, table, one.bad, inputs), error
                )
        return refused

    def _with_ids(
        self, place: int, table: RowTable, ids: Array, inputs: Sequence[Array]
    ) -> list[int]:
        """Returns the rows of a batch that look one of these ids of a table up."""
        count = self._count(inputs)
        if count == 1:
            return [0]
        code = self.code(1)
        found = []
        for row in range(count):
            assert code.ids is not None  # there are tables
            mine = code.ids(*(one[row : row + 1] for one in inputs))[place]
            if np.isin(_numbers(mine, table), ids).any():
                found.append(row)
        return found or list(range(count))

    def _missing(self, table: RowTable) -> JGError:
        for task, error in self._parameters.lost.items():
            return _lost(task, error)
        return TaskLostError(
            f"the parameter server of {table.name} does not answer; ask again"
        )


def _lost(task: str, error: JGError) -> TaskLostError:
    return TaskLostError(
        f"{task}, which has parameters of this model, does not answer "
        f"({error.code}); ask again when it is there",
        task=task,
    )


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
