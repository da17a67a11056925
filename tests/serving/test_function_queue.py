"""Requests that wait together run together, and each gets its own answer."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jgraph.clock import SystemClock
from jgraph.coordination.serving.batching import Limits
from jgraph.coordination.serving.joining import LATEST, LONELY, LOOK_EVERY
from jgraph.errors import NonFiniteError, OverloadedError
from jgraph.serving.exported_model import LoadedFunction
from jgraph.serving.function_queue import FunctionQueue
from jgraph.serving.signature import Array, Signature, TensorSpec
from jgraph.serving.statistics import Statistics

SPEC = TensorSpec("x", "float32", (None,))
SIGNATURE = Signature(
    "0" * 64, (SPEC,), (SPEC,), is_batched=True, rows_independent=True
)


class Gate:
    """Code that waits, the first time, until it is let go; doubles its input."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, x: Array) -> Sequence[Any]:
        assert self.open.wait(20)
        self.sizes.append(len(x))
        return [x * 2]


def answered(rows: Sequence[int], limits: Limits) -> tuple[list[Any], Gate, Statistics]:
    """Answers, or errors, of requests that come while the first is under way."""
    gate, statistics = Gate(), Statistics()

    async def ask() -> list[Any]:
        with ThreadPoolExecutor(1) as threads:
            queue = FunctionQueue(
                LoadedFunction(SIGNATURE, gate, ()),
                limits,
                statistics,
                SystemClock(),
                threads,
            )
            asked = []
            for number, count in enumerate(rows):
                x = np.full(count, number, np.float32)
                deadline = SystemClock().now() + 20
                asked.append(asyncio.create_task(queue.answer([x], count, deadline)))
                await asyncio.sleep(0)
            gate.open.set()
            return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(ask()), gate, statistics


def test_requests_that_run_together_get_their_own_rows() -> None:
    rows = [1, 2, 1, 3, 9]
    answers, gate, statistics = answered(rows, Limits(max_rows=8, buckets=(1, 8)))
    for number, (count, answer) in enumerate(zip(rows, answers, strict=True)):
        assert answer.outputs[0].tolist() == [number * 2.0] * count
    assert len(gate.sizes) < len(rows)
    assert set(gate.sizes) <= {1, 8}
    assert statistics.success.count == len(rows)
    assert statistics.rows == sum(rows)


def test_a_request_for_which_there_is_no_room_is_told_when_to_come_again() -> None:
    limits = Limits(max_rows=1, buckets=(1,), max_queued_rows=2)
    answers, _, statistics = answered([1] * 5, limits)
    refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
    assert len(refused) == 2
    assert refused[0].details["retry_after_s"] >= 1
    assert statistics.refused == {"JG-604": 2}


def test_an_error_of_the_code_is_told_to_all_of_its_batch_and_ends_nothing() -> None:
    class Broken(Gate):
        def __call__(self, x: Array) -> Sequence[Any]:
            found = super().__call__(x)
            if len(self.sizes) == 1:
                raise ValueError("bad")
            return found

    gate = Broken()
    gate.open.set()

    async def ask() -> Any:
        with ThreadPoolExecutor(1) as threads:
            queue = FunctionQueue(
                LoadedFunction(SIGNATURE, gate, ()),
                Limits(),
                Statistics(),
                SystemClock(),
                threads,
            )
            x, deadline = np.ones(1, np.float32), SystemClock().now() + 20
            with pytest.raises(ValueError, match="bad"):
                await queue.answer([x], 1, deadline)
            return await queue.answer([x], 1, deadline)

    assert asyncio.run(ask()).outputs[0].tolist() == [2.0]


def test_the_rest_of_a_request_whose_first_rows_failed_is_dropped() -> None:
    class Broken(Gate):
        def __call__(self, x: Array) -> Sequence[Any]:
            super().__call__(x)
            if x[0] < 0:
                raise ValueError("bad")
            return [x * 2]

    gate = Broken()
    gate.open.set()

    async def ask() -> Any:
        with ThreadPoolExecutor(1) as threads:
            limits = Limits(max_rows=2, buckets=(1, 2))
            function = LoadedFunction(SIGNATURE, gate, ())
            clock = SystemClock()
            queue = FunctionQueue(function, limits, Statistics(), clock, threads)
            queue.warm([np.zeros(1, np.float32)])
            deadline = clock.now() + 5
            with pytest.raises(ValueError, match="bad"):
                await queue.answer([np.full(9, -1, np.float32)], 9, deadline)
            return await queue.answer([np.ones(1, np.float32)], 1, deadline)

    assert asyncio.run(ask()).outputs[0].tolist() == [2.0]


def test_what_takes_no_time_runs_for_each_request_and_waits_for_no_other() -> None:
    sizes: list[int] = []

    def code(x: Array) -> Sequence[Any]:
        sizes.append(len(x))
        return [x * 2]

    class Still:
        """A clock by which everything takes no time."""

        def now(self) -> float:
            return 1.0

    async def ask() -> list[Any]:
        with ThreadPoolExecutor(1) as threads:
            function = LoadedFunction(SIGNATURE, code, ())
            clock = Still()
            queue = FunctionQueue(function, Limits(), Statistics(), clock, threads)
            queue.warm([np.ones(1, np.float32)])
            sizes.clear()
            x = np.ones(1, np.float32)
            return await asyncio.gather(*(queue.answer([x], 1, 5.0) for _ in range(3)))

    assert [one.outputs[0].tolist() for one in asyncio.run(ask())] == [[2.0]] * 3
    assert sizes == [1, 1, 1]


class Hand:
    """A clock that stands still unless somebody moves it."""

    def __init__(self) -> None:
        self.at = 1.0

    def now(self) -> float:
        return self.at


def test_requests_go_on_without_a_queue_when_some_executions_are_held_up() -> None:
    clock = Hand()
    takes_s = [1e-5]

    def code(x: Array) -> Sequence[Any]:
        clock.at += takes_s[-1]
        return [x * 2]

    with ThreadPoolExecutor(1) as threads:
        function = LoadedFunction(SIGNATURE, code, ())
        queue = FunctionQueue(function, Limits(), Statistics(), clock, threads)
        x = [np.ones(1, np.float32)]
        queue.warm(x)
        for one in (0.05, 0.05, 1e-5, 0.05):
            takes_s.append(one)
            assert queue.at_once(x, 1, clock.at + 1) is not None
        for _ in range(LATEST):
            queue.at_once(x, 1, clock.at + 1)
        assert queue.at_once(x, 1, clock.at + 1) is None  # now it is a long one


def test_a_model_whose_rows_cost_less_together_leaves_the_loop_to_those_who_come() -> (
    None
):
    clock, ran_in = Hand(), list[tuple[int, int]]()

    def code(x: Array) -> Sequence[Any]:
        clock.at += 1e-3  # whatever the number of rows
        ran_in.append((len(x), threading.get_ident()))
        return [x * 2]

    async def ask() -> bool:
        with ThreadPoolExecutor(1) as threads:
            function = LoadedFunction(SIGNATURE, code, ())
            queue = FunctionQueue(function, Limits(), Statistics(), clock, threads)
            queue.warm([np.ones(1, np.float32)])
            ran_in.clear()
            x = np.ones(1, np.float32)
            for _ in range(LONELY + 1):
                asked = [queue.answer([x], 1, clock.at + 5) for _ in range(9)]
                await asyncio.gather(*asked)
            assert not queue.is_quick
            together = [rows for rows, _ in ran_in]
            assert together == [1, 8] * (LONELY + 1)
            assert threading.get_ident() not in {thread for _, thread in ran_in}
            # Somebody who asks alone is answered at once before long.
            ran_in.clear()
            for _ in range(LONELY + LOOK_EVERY + 1):
                await queue.answer([x], 1, clock.at + 5)
            here = [thread == threading.get_ident() for _, thread in ran_in]
            assert here == [False] * LONELY + [True] * LOOK_EVERY + [False]
            return queue.is_quick

    assert asyncio.run(ask())


def test_the_way_to_a_thread_is_no_part_of_an_execution() -> None:
    clock = Hand()

    def code(x: Array) -> Sequence[Any]:
        clock.at += 1e-5
        return [x * 2]

    class Late(ThreadPoolExecutor):
        """Threads that come late to each execution."""

        def submit(self, fn: Any, /, *args: Any, **options: Any) -> Any:
            clock.at += 0.1
            return super().submit(fn, *args, **options)

    async def ask() -> bool:
        with Late(1) as threads:
            function = LoadedFunction(SIGNATURE, code, ())
            queue = FunctionQueue(function, Limits(), Statistics(), clock, threads)
            await queue.answer([np.ones(1, np.float32)], 1, clock.at + 5)
            return queue.is_quick

    assert asyncio.run(ask())


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_answers_that_are_not_finite_are_counted_and_may_be_refused(
    refuses: bool, slow: bool
) -> None:
    statistics = Statistics()

    def code(x: Array) -> Sequence[Any]:
        threading.Event().wait(0.005 if slow else 0)
        with np.errstate(all="ignore"):
            return [np.log(x)]

    async def ask() -> list[Any]:
        with ThreadPoolExecutor(1) as threads:
            clock = SystemClock()
            queue = FunctionQueue(
                LoadedFunction(SIGNATURE, code, ()),
                Limits(),
                statistics,
                clock,
                threads,
                refuses_nonfinite=refuses,
            )
            queue.warm([np.ones(1, np.float32)])
            asked = (
                queue.answer([np.full(1, value, np.float32)], 1, clock.now() + 20)
                for value in (1.0, -1.0, 0.0, np.e)
            )
            return await asyncio.gather(*asked, return_exceptions=True)

    first, *bad, last = asyncio.run(ask())
    assert first.outputs[0].tolist() == [0.0]
    assert last.outputs[0].tolist() == pytest.approx([1.0])
    assert statistics.nonfinite == 2
    assert [isinstance(one, NonFiniteError) for one in bad] == [refuses] * 2
    assert statistics.refused == ({"JG-212": 2} if refuses else {})
    assert statistics.success.count == (2 if refuses else 4)
