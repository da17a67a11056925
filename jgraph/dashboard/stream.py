"""Server-sent events of a dashboard: a whole view, then what changes in it."""

import asyncio
from contextlib import suppress
from typing import Final, final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jgraph.dashboard.patches import Patches, View, Viewed, as_json

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

    One task looks at the source for all of them, and only where something changed:
    what many read is made once, and a thread is asked for it once.

    Args:
      source: what is shown.

    Attributes:
      count: of the streams that are open.
    """

    def __init__(self, source: Viewed) -> None:
        self._patches = Patches(source)
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._has_ended = False
        self.count = 0

    async def open(self, request: Request) -> Response:
        """Answers a request with a stream.

        Raises:
          HTTPException: there are as many as there may be.
        """
        if self.count >= MOST:
            text = f"{MOST} pages are open, and no more at once; close one of them"
            raise HTTPException(503, text)
        self.count += 1  # at once: many may be asked for before the first one runs
        return _Stream(self)

    def leave(self) -> None:
        """Counts a stream no more, which is over."""
        self.count -= 1
        if not self.count and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def end(self) -> None:
        """Ends all streams; called in their event loop."""
        self._has_ended = True
        self._tell()

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
        await run_in_threadpool(self._patches.look)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        looking = self._looking
        view, number = self._patches.newest, 1
        await put(_event("state", number, as_json(view)))
        while not self._has_ended:
            if view is self._patches.newest:
                await self._wait(looking)
            after, patch = await self._after(view)
            if after is view:
                await put(b": keep\n\n")
            elif patch:
                number += 1
                await put(_event("patch", number, patch))
            view = after
        await put(b"", more=False)

    async def _wait(self, looking: "asyncio.Task[None]") -> None:
        """Waits until there is another view, at most until a reader is to hear of us.

        Raises:
          Exception: what came of the last look at the source.
        """
        if not looking.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_S):
                    await self._news.wait()
        if looking.done():
            looking.result()

    async def _after(self, view: View) -> tuple[View, str]:
        """Returns the newest view, and what changed since a reader's."""
        if self._patches.has(view):
            return self._patches.after(view)
        return await run_in_threadpool(self._patches.after, view)

    async def _look(self) -> None:
        """Looks at the source again and again, and tells all readers."""
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                if self._patches.is_old and await run_in_threadpool(self._patches.look):
                    self._tell()
        finally:
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


@final
class _Stream(Response):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._streams.run(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in (sending, leaving):
                work.cancel()
            try:
                await asyncio.gather(sending, leaving, return_exceptions=True)
            finally:
                self._streams.leave()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, number: int, text: str) -> bytes:
    return f"event: {name}\nid: {number}\ndata: {text}\n\n".encode()
