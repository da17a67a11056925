"""A served function of a model in training asks for rows, and keeps to its share."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
import pytest

from jgraph.coordination.serving.batching import Limits
from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.errors import JGError
from jgraph.graph.ir import TaskName
from jgraph.serving.function_queue import FunctionQueue
from jgraph.serving.live.batch_code import BatchCode, LookedUp
from jgraph.serving.live.live_function import LiveFunction
from jgraph.serving.live.parameters import DenseCopy, FoundRows
from jgraph.serving.live.table_rows import TableRows
from jgraph.serving.signature import Array, Signature, TensorSpec
from jgraph.serving.statistics import Statistics
from tests.support.loop_orders import SetClock

ROUND_TRIP_S = 0.3
"""For some of which the parameter server is busy."""
USERS = LookedUp("users", "user", 10, 1, False, (1,), "float32", (0,))
SIGNATURE = Signature(
    "",
    (TensorSpec("user", "int32", (None,)),),
    (TensorSpec("y", "float32", (None, 1)),),
    is_batched=True,
)


@final
class FarParameters:
    """Twice its id is the row of each; an answer is there after a round trip."""

    def __init__(self, clock: SetClock, busy_s: float) -> None:
        self.copy = DenseCopy({}, 1, 0.0)
        self.lost: Mapping[TaskName, JGError] = {}
        self._clock = clock
        self._busy_s = busy_s

    async def refresh(self) -> None:
        """There is nothing to copy."""

    async def rows(self, wanted: Mapping[str, Array]) -> FoundRows:
        self._clock.at_s += ROUND_TRIP_S
        ids = wanted["users"]
        rows = TableRows(ids[:, None] * np.float32(2), ids >= 0, from_cache=False)
        return FoundRows({"users": rows}, self._busy_s)

    def close(self) -> None:
        """There is nothing to drop."""


def outputs(rows: Any, positions: Any, _: Any) -> list[Any]:
    return [rows[positions]]


@pytest.mark.parametrize(
    ("busy_s", "waits"), [(0.01, False), (ROUND_TRIP_S, True)], ids=["idle", "busy"]
)
def test_a_lookup_counts_for_as_long_as_it_keeps_its_server_busy(
    busy_s: float, waits: bool
) -> None:
    """On its way it takes nobody's time: who asks alone need not wait."""
    clock, share = SetClock(), LookupShare(0.5)
    code = BatchCode([USERS], lambda *_: [], outputs)
    with ThreadPoolExecutor(1) as threads:
        function = LiveFunction(
            lambda _: code,
            [],
            SIGNATURE,
            FarParameters(clock, busy_s),
            share,
            "stale",
            threads,
            clock,
        )
        answered = asyncio.run(function.answer([np.array([3], np.int32)]))
    assert answered.outputs[0].tolist() == [[6]]
    assert (share.wait_s(clock.now()) > 0) == waits


def test_an_answer_for_no_rows_says_how_new_the_parameters_are() -> None:
    clock = SetClock()
    with ThreadPoolExecutor(1) as threads:
        function = LiveFunction(
            lambda _: BatchCode([USERS], lambda *_: [], outputs),
            [],
            SIGNATURE,
            FarParameters(clock, 0.0),
            LookupShare(0.5),
            "stale",
            threads,
            clock,
        )
        queue = FunctionQueue(function, Limits(), Statistics(), clock, threads)
        answered = queue.at_once([np.zeros(0, np.int32)], 0, deadline=1.0)
    assert answered is not None
    assert answered.outputs[0].shape == (0, 1)
    assert answered.facts == {"jgraph_step": 1, "jgraph_age_ms": 0}
