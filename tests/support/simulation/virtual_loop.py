"""Asyncio event loop in virtual time: nothing is waited for, threads run at once."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """Lets time pass at once; nothing ever comes from outside."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits, and nothing will happen"
        self.loop.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer as soon as nobody has anything to do."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # who waits raises it
            done.set_exception(error)
        return done


class VirtualClock:
    """The time of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def run_virtually(main: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of ``main``; whatever else goes on ends with it."""
    loop = VirtualLoop()
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        result = loop.run_until_complete(main)
    finally:
        others = asyncio.all_tasks(loop)
        for task in others:
            task.cancel()
        if others:
            loop.run_until_complete(asyncio.wait(others))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    assert not unseen, unseen
    return result
