"""Server-sent events of a dashboard: a whole view, then what changes in it."""

import asyncio
from collections.abc import Callable
from typing import Final, final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jgraph.dashboard.patches import Patches, Viewed, as_json

EVERY_S: Final = 0.5
KEEP_S: Final = 15.0
SEND_S: Final = 20.0
"""A reader that takes nothing for so long is given up."""
MOST: Final = 32
_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",  # or a proxy may keep what is to be seen now
}
_FILLER: Final = f": {' ' * 2048}\n\n".encode()
"""Some proxies, and browsers, wait for so much before they show anything."""


@final
class Streams:
    """Opens streams, not more than there may be at once.

    Args:
      source: what is shown.

    Attributes:
      count: of the streams that are open.
    """

    def __init__(self, source: Viewed) -> None:
        self._patches = Patches(source)
        self.count = 0
        self.ends: Callable[[], bool] = lambda: False
        """Whether all streams are to end."""

    async def open(self, request: Request) -> Response:
        """Answers a request with a stream.

        Raises:
          HTTPException: there are as many as there may be.
        """
        if self.count >= MOST:
            text = f"{MOST} pages are open, and no more at once; close one of them"
            raise HTTPException(503, text)
        return _Stream(self)

    async def run(self, send: Send) -> None:
        """Sends the view, and what changes, until the reader is gone."""

        async def put(data: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(SEND_S):
                await send(
                    {"type": "http.response.body", "body": data, "more_body": more}
                )

        headers = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await put(_FILLER)
        view = await run_in_threadpool(self._patches.view, _tick())
        await put(_event("state", 1, as_json(view)))
        number, quiet_s = 1, 0.0
        while not self.ends():
            # All readers look at the same moments, and share what they see.
            await asyncio.sleep(EVERY_S - _now() % EVERY_S)
            view, patch = await run_in_threadpool(self._patches.after, view, _tick())
            quiet_s += EVERY_S
            if patch:
                number, quiet_s = number + 1, 0.0
                await put(_event("patch", number, patch))
            if quiet_s >= KEEP_S:
                quiet_s = 0.0
                await put(b": keep\n\n")
        await put(b"", more=False)


@final
class _Stream(Response):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.count += 1
        sending = asyncio.ensure_future(self._streams.run(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.count -= 1
            for work in (sending, leaving):
                work.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _now() -> float:
    return asyncio.get_running_loop().time()


def _tick() -> int:
    return int(_now() / EVERY_S)


def _event(name: str, number: int, text: str) -> bytes:
    return f"event: {name}\nid: {number}\ndata: {text}\n\n".encode()
