"""Served function of a model in training: ids of a batch, their rows, and the outputs.

For each number of rows of a batch there are two pieces of code: one gives the ids that
the model looks up, and one the outputs, from the dense parameters and the rows of these
ids. In between the rows are asked for.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import final

import numpy as np

from jgraph.clock import Clock
from jgraph.cluster import event_loop
from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.errors import JGError, RowIdError, TaskLostError
from jgraph.graph.rows.rows import id_text
from jgraph.serving.answering import Answered, Fact
from jgraph.serving.live.batch_code import SHORT_S, BatchCode, BatchIds, LookedUp
from jgraph.serving.live.live_options import OnLoss
from jgraph.serving.live.parameters import DenseCopy, Parameters, why_lost
from jgraph.serving.live.table_rows import TableRows
from jgraph.serving.signature import Array, Signature


@final
class LiveFunction:
    """Answers with the parameters of now; a ``WaitingFunction``.

    Args:
      compiled: gives the code for a number of rows, and takes its time.
      dense: names of the variables of which the code takes whole values.
      signature: of the model.
      parameters: where its parameters are.
      share: what lookups may take of their servers' time.
      on_loss: ``"stale"``: what is lost is served as it was; ``"error"``: it is not.
      threads: where long computations run.
      clock: for ages.
      close: lets go of the parameters; None: whoever made them does.
    """

    def __init__(
        self,
        compiled: Callable[[int], BatchCode],
        dense: Sequence[str],
        signature: Signature,
        parameters: Parameters,
        share: LookupShare,
        on_loss: OnLoss,
        threads: Executor,
        clock: Clock,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.signature = signature
        self._compiled = compiled
        self._dense = dense
        self._close = close
        self._parameters = parameters
        self._share = share
        self._on_loss = on_loss
        self._threads = threads
        self._clock = clock
        self._codes: dict[int, BatchCode] = {}
        self._compiling = threading.Lock()

    @property
    def problem(self) -> JGError | None:
        """See ``WaitingFunction.problem``."""
        if self._on_loss == "stale":
            return None
        return next(iter(self._parameters.lost.values()), None)

    @property
    def facts(self) -> Mapping[str, Fact]:
        """See ``WaitingFunction.facts``."""
        return self._facts(self._parameters.copy, {})

    def close(self) -> None:
        """See ``WaitingFunction.close``."""
        if self._close is not None:
            self._close()

    # ------------------------------------------------------------ code

    def code(self, rows: int) -> BatchCode:
        """Returns the code for so many rows, which is compiled at first."""
        with self._compiling:
            if rows not in self._codes:
                self._codes[rows] = self._compiled(rows)
            return self._codes[rows]

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
            width = int(np.prod(table.shape))
            angle = one.unique[:, None] * 0.7 + np.arange(width)
            values = np.sin(angle).reshape(-1, *table.shape)
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

    def _ids(self, code: BatchCode, inputs: Sequence[Array]) -> list[BatchIds]:
        if code.ids is None:
            return []
        fed = [BatchIds.fed(inputs, table) for table in code.tables]
        found = [one for one in fed if one is not None]
        if len(found) == len(fed):  # as usual: ids are computed for what remains
            return found
        return [
            BatchIds.of(table.numbers(ids), table)
            for table, ids in zip(code.tables, code.ids(*inputs), strict=True)
        ]

    async def _looked_up(
        self, code: BatchCode, ids: Sequence[BatchIds]
    ) -> Mapping[str, TableRows]:
        if (wait_s := self._share.wait_s(self._clock.now())) > 0:
            await asyncio.sleep(wait_s)  # training keeps its share
        wanted = {t.name: i.unique for t, i in zip(code.tables, ids, strict=True)}
        found = await self._parameters.rows(wanted)
        self._share.took(found.busy_s, self._clock.now())
        return found.tables

    def _outputs(
        self,
        code: BatchCode,
        copy: DenseCopy,
        ids: Sequence[BatchIds],
        rows: Mapping[str, TableRows],
        inputs: Sequence[Array],
    ) -> list[Array]:
        began_s = self._clock.now()
        padded = []
        for table in code.tables:
            found = rows[table.name].rows
            dtype = np.dtype(table.dtype)
            values = np.zeros((table.count, *table.shape), dtype)
            values[: len(found)] = found
            padded.append(values)
        dense = [copy.values[name] for name in self._dense]
        positions = [one.positions for one in ids]
        results = code.outputs(*dense, *padded, *positions, *inputs)
        outputs = [np.asarray(value) for value in results]
        code.took_s = self._clock.now() - began_s
        return outputs

    def _facts(self, copy: DenseCopy, rows: Mapping[str, TableRows]) -> dict[str, Fact]:
        age_ms = int((self._clock.now() - copy.at) * 1000)
        facts: dict[str, Fact] = {"jgraph_step": copy.step}
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
        code: BatchCode,
        ids: Sequence[BatchIds],
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
        self, place: int, table: LookedUp, ids: Array, inputs: Sequence[Array]
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
            if np.isin(table.numbers(mine), ids).any():
                found.append(row)
        return found or list(range(count))

    def _missing(self, table: LookedUp) -> JGError:
        for task, error in self._parameters.lost.items():
            return _lost(task, error)
        return TaskLostError(
            f"the parameter server of {table.name} does not answer; ask again"
        )


def _lost(task: str, error: JGError) -> TaskLostError:
    return TaskLostError(
        f"{task}, which has parameters of this model, {why_lost(error)} "
        f"({error.code}); ask again when it is there",
        task=task,
    )
