"""Runs a coroutine in a fresh event loop, under a deadline, and watches the loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_async(main: Coroutine[Any, Any, _T], *, timeout_s: float = 60) -> _T:
    """Returns the result of ``main``; fails on errors that only the loop saw."""

    async def watched() -> _T:
        unseen: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        async with asyncio.timeout(timeout_s):
            result = await main
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1)
        own = [context for context in unseen if not _is_of_another_loop(context)]
        assert not own, own
        left = [task for task in others if not task.done()]
        assert not left, left
        return result

    return asyncio.run(watched())


def _is_of_another_loop(context: dict[str, Any]) -> bool:
    """Whether gRPC, which has one queue for all loops, told a loop that had ended."""
    of_queue = "PollerCompletionQueue" in str(context.get("message"))
    return of_queue and str(context.get("exception")) == "Event loop is closed"
