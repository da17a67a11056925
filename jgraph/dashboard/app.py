"""Routes of a dashboard: the page, its view as JSON, events, logs, health, metrics."""

import logging
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final, Protocol, TypeVar, final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jgraph.client.timeline.collecting import MOST_S
from jgraph.coordination.watch.facts import clean
from jgraph.dashboard import guard
from jgraph.dashboard.patches import Viewed
from jgraph.dashboard.stream import Streams
from jgraph.errors import HttpRequestError, JGError, TokenError

_LOG = logging.getLogger("jgraph.dashboard")
_KINDS: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "LICENSE": "text/plain; charset=utf-8",
}
_LINES: Final = 1000
_LETTERS: Final = 10_000
T = TypeVar("T")


class Source(Viewed, Protocol):
    """What a dashboard shows: a cluster, or a journal."""

    def config(self) -> Mapping[str, Any]:
        """Returns what it is: its kind, address and times."""

    def is_ready(self) -> bool:
        """Whether there is something to see."""

    def curves(self, at: float | None) -> Mapping[str, Any]:
        """Returns the series; of a time, if it is of the past."""

    def timeline(self) -> Mapping[str, Any]:
        """Returns the last steps, and what steps wait for.

        Raises:
          JGError: there is none, or nobody answers.
        """

    def trace(self, last_s: float) -> bytes:
        """Returns what tasks did in the last seconds, as Perfetto takes it.

        Raises:
          JGError: there is none, or nobody answers.
        """

    def log(self, task: str, after: int, lines: int) -> tuple[int, list[str]]:
        """Returns lines of a task's log, and the number of the last.

        Raises:
          JGError: there is no such task, or it does not answer.
        """


def page_files() -> dict[str, bytes]:
    """Returns the files of the page, by path."""
    root = files("jgraph.dashboard") / "page"
    found = {f"/page/{one.name}": one for one in root.iterdir() if one.is_file()}
    vendor = root / "vendor"
    found |= {f"/page/vendor/{one.name}": one for one in vendor.iterdir()}
    return {path: one.read_bytes() for path, one in found.items()}


@final
class App:
    """The application.

    Args:
      source: what it shows.
      guard: lets requests in.
      metrics: returns what ``/metrics`` says, and its content type; None: there are
        none.
    """

    def __init__(
        self,
        source: Source,
        guard: guard.Guard,
        metrics: Callable[[], tuple[bytes, str]] | None = None,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._tracing = False
        self.streams = Streams(source)
        page = page_files()
        routes = [
            Route("/", _file(page.pop("/page/index.html"), "html")),
            *(Route(path, _file(data, _kind(path))) for path, data in page.items()),
            Route("/healthz", _health),
            Route("/readyz", self._ready),
            Route("/api/v1/config", self._config),
            Route("/api/v1/state", self._state),
            Route("/api/v1/curves", self._curves),
            Route("/api/v1/stream", self.streams.open),
            Route("/api/v1/timeline", self._timeline),
            Route("/api/v1/trace", self._trace),
            Route("/api/v1/tasks/{job}/{index}/log", self._log),
        ]
        if metrics is not None:
            routes.append(Route("/metrics", self._show_metrics))
        handlers: Any = {HTTPException: _no_such_path, JGError: _failed}
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        self.asgi: ASGIApp = Guarded(starlette, guard)

    async def _ready(self, request: Request) -> Response:
        ready = self._source.is_ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _config(self, request: Request) -> Response:
        return JSONResponse(dict(self._source.config()))

    async def _state(self, request: Request) -> Response:
        at = _time(request)
        return JSONResponse(await run_in_threadpool(self._source.view, at))

    async def _curves(self, request: Request) -> Response:
        at = _time(request)
        return JSONResponse(await run_in_threadpool(self._source.curves, at))

    async def _timeline(self, request: Request) -> Response:
        return JSONResponse(dict(await self._alone(self._source.timeline)))

    async def _trace(self, request: Request) -> Response:
        last_s = _count(request, "last", 30)
        if not 0 < last_s <= MOST_S:
            raise _bad(400, f"'last' is in seconds, {MOST_S:g} at most")
        content = await self._alone(self._source.trace, float(last_s))
        named = {"Content-Disposition": 'attachment; filename="cluster.pftrace"'}
        return Response(content, headers=named, media_type="application/octet-stream")

    async def _alone(self, ask: Callable[..., T], *args: float) -> T:
        """Asks all tasks of the cluster for something, one page at a time."""
        if self._tracing:
            text = "another page is asking for a timeline; ask again in a second"
            raise _bad(409, text)
        self._tracing = True
        try:
            return await run_in_threadpool(ask, *args)
        finally:
            self._tracing = False

    async def _log(self, request: Request) -> Response:
        job, index = (request.path_params[name] for name in ("job", "index"))
        task, view = f"/job:{job}/task:{index}", self._source.view
        known = (await run_in_threadpool(view, None))["tasks"]
        if task not in known:
            names = ", ".join(known) or "none"
            raise _bad(404, f"the cluster has no such task; its tasks are: {names}")
        after, lines = _count(request, "after", 0), _count(request, "lines", 200)
        last, found = await run_in_threadpool(
            self._source.log, task, after, min(lines, _LINES)
        )
        return JSONResponse({"next": last, "lines": [_cut(line) for line in found]})

    async def _show_metrics(self, request: Request) -> Response:
        assert self._metrics is not None  # else there is no such route
        text, kind = await run_in_threadpool(self._metrics)
        return Response(text, media_type=kind)


@final
class Guarded:
    """Asks the guard before anything else looks at a request.

    Args:
      app: what answers.
      guard: lets requests in.
    """

    def __init__(self, app: ASGIApp, guard: guard.Guard) -> None:
        self._app = app
        self._guard = guard
        self._headers = [
            (name.lower().encode(), value.encode())
            for name, value in guard.headers().items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        headers = tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in scope["headers"]
        )
        asked = guard.Request(scope["method"], scope["path"], headers)
        refused = self._guard.check(asked)
        if refused is None:
            await self._app(scope, receive, send_with_headers)
            return
        answer = _error(refused.status, refused.text, refused.headers)
        await answer(scope, receive, send_with_headers)


def _file(data: bytes, kind: str) -> Any:
    async def answer(request: Request) -> Response:
        return Response(data, headers={"Content-Type": _KINDS[kind]})

    return answer


def _kind(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[2]


async def _health(request: Request) -> Response:
    return JSONResponse({"alive": True})


def _error(status: int, text: str, headers: Mapping[str, str]) -> JSONResponse:
    kind = TokenError if status == 401 else HttpRequestError
    body = {"error": f"{kind.code} {text}", "code": kind.code}
    return JSONResponse(body, status, dict(headers))


def _bad(status: int, text: str) -> HTTPException:
    return HTTPException(status, text)


async def _no_such_path(request: Request, error: HTTPException) -> Response:
    text = error.detail
    if error.status_code == 404 and text == "Not Found":
        text = "this dashboard has no such path; the page is at /"
    return _error(error.status_code, text, error.headers or {})


async def _failed(request: Request, error: JGError) -> Response:
    return JSONResponse({"error": str(error), "code": error.code}, 502)


def _count(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal()) or len(value) > 15:
        raise _bad(400, f"'{name}' is a whole number, from 0 on")
    return int(value)


def _time(request: Request) -> float | None:
    value = request.query_params.get("at")
    if value is None:
        return None
    try:
        at = float(value)
    except ValueError:
        at = -1.0
    if not 0 <= at < 1e12:
        raise _bad(400, "'at' is a time in seconds since 1970")
    return at


def _cut(line: str) -> str:
    # A line of a log may be longer than any other text.
    pieces = [line[at : at + 2000] for at in range(0, min(len(line), _LETTERS), 2000)]
    mark = " … (cut)" if len(line) > _LETTERS else ""
    return "".join(map(clean, pieces)) + mark
