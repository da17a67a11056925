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
        assert not unseen, unseen
        left = [task for task in others if not task.done()]
        assert not left, left
        return result

    return asyncio.run(watched())
