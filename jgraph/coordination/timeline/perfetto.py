"""Perfetto's trace format: a timeline as protobuf packets of track events.

Written by hand, as packets are plain and there are many: field numbers are those of
``perfetto/protos/trace`` (Apache 2.0), https://perfetto.dev/docs/reference/synthetic-track-event.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, final

from jgraph.coordination.timeline.chrome import task_title
from jgraph.coordination.timeline.spans import TRACKS, Span, rows_of
from jgraph.graph.device import TaskName

# Wire types.
_VARINT: Final = 0
_FIXED: Final = 1
_BYTES: Final = 2
# Fields of TracePacket.
_CLOCKS, _TIME, _SEQUENCE, _EVENT, _INTERNED, _FLAGS, _TRACK = 6, 8, 10, 11, 12, 13, 60
_ALL_NEW, _GOES_ON = 1, 2
_BEGIN, _END = 1, 2
_REAL_TIME, _BOOT_TIME = 1, 6
_BASE_NS: Final = 1_000_000_000
ARRIVAL: Final = "message"
"""Name of the slices of no length at which arrows end."""


def varint(value: int) -> bytes:
    """Returns a number of 64 bits as protobuf writes it.

    Example:
      >>> varint(300).hex()
      'ac02'
    """
    found = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: int) -> bytes:
    return varint(field << 3 | _VARINT) + varint(value)


def _message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | _BYTES) + varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


@final
class _Names:
    """Texts, each written once, and numbers for them."""

    def __init__(self, field: int) -> None:
        self._field = field
        self._numbers: dict[str, int] = {}
        self.new: list[bytes] = []

    def __getitem__(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers) + 1
            row = _number(1, number) + _text(2, text)
            self.new.append(_message(self._field, row))
        return number


@final
class _Writer:
    def __init__(self) -> None:
        self._categories = _Names(1)
        self._events = _Names(2)
        self._arguments = _Names(3)
        self._messages: dict[str, int] = {}
        self._begins: dict[tuple[str, str, int], bytes] = {}
        self._sequence = _number(_SEQUENCE, 1) + _number(_FLAGS, _GOES_ON)
        self._ends: dict[int, bytes] = {}
        self.packets: list[bytes] = []

    def packet(self, content: bytes) -> None:
        self.packets.append(_message(1, content))

    def track(self, uuid: int, name: str, *more: bytes) -> None:
        descriptor = _number(1, uuid) + _text(2, name) + b"".join(more)
        self.packet(_number(_SEQUENCE, 1) + _message(_TRACK, descriptor))

    def process(self, uuid: int, name: str, pid: int) -> None:
        self.track(uuid, name, _message(3, _number(1, pid) + _text(6, name)))

    def clocks(self, began: float) -> None:
        """Says which time of day it is at time 0."""
        rows = {_BOOT_TIME: _BASE_NS, _REAL_TIME: round(1e9 * began)}
        clocks = [_message(1, _number(1, k) + _number(2, v)) for k, v in rows.items()]
        self.packet(_number(_SEQUENCE, 1) + _message(_CLOCKS, b"".join(clocks)))

    def first(self) -> None:
        flags = _number(_FLAGS, _ALL_NEW | _GOES_ON)
        self.packet(_number(_SEQUENCE, 1) + flags)

    def span(self, span: Span, uuid: int, messages: Callable[[str], int]) -> None:
        key = (span.name, span.track, uuid)
        begins = self._begins.get(key)
        if begins is None:
            begins = self._begins[key] = (
                _number(9, _BEGIN)
                + _number(11, uuid)
                + _number(10, self._events[span.name])
                + _number(3, self._categories[span.track])
            )
        event = begins
        if span.step:
            event += self._argument("step", span.step)
        if span.node is not None and span.node.nbytes:
            event += self._argument("bytes", span.node.nbytes)
        if span.sends and (number := messages(span.sends)):
            event += varint(47 << 3 | _FIXED) + number.to_bytes(8, "little")
        start = max(0, round(1e9 * span.start_s)) + _BASE_NS
        ended = max(start, round(1e9 * span.end_s) + _BASE_NS)
        self._event(start, event)
        ends = self._ends.get(uuid)
        if ends is None:
            ends = self._ends[uuid] = _number(9, _END) + _number(11, uuid)
        self._event(ended, ends)
        if span.receives and (number := messages(span.receives)):
            # Arrows go to the beginning of a slice: to one of no length, as it came.
            comes = _number(9, _BEGIN) + _number(11, uuid)
            comes += _number(10, self._events[ARRIVAL])
            comes += varint(48 << 3 | _FIXED) + number.to_bytes(8, "little")
            self._event(ended, comes)
            self._event(ended, ends)

    def _event(self, time_ns: int, event: bytes) -> None:
        new = self._categories.new + self._events.new + self._arguments.new
        content = _number(_TIME, time_ns) + self._sequence + _message(_EVENT, event)
        if new:
            content += _message(_INTERNED, b"".join(new))
            for names in (self._categories, self._events, self._arguments):
                names.new.clear()
        self.packet(content)

    def _argument(self, name: str, value: int) -> bytes:
        return _message(4, _number(1, self._arguments[name]) + _number(3, value))


def perfetto_trace(
    errors_s: Mapping[TaskName, float], spans: Sequence[Span], began: float = 0.0
) -> bytes:
    """Returns spans as a trace: a task is a process, and a message is a flow.

    Args:
      errors_s: by task, in their order: by how much its times may be off.
      spans: in seconds.
      began: the time of day at time 0, in seconds since 1970; 0 if unknown.
    """
    writer = _Writer()
    writer.first()
    if began > 0:
        writer.clocks(began)
    messages = _both_ends(spans)
    of_track: dict[tuple[TaskName, str], list[Span]] = {}
    for span in spans:
        of_track.setdefault((span.task, span.track), []).append(span)
    uuid = 0
    for pid, (task, error) in enumerate(errors_s.items(), 1):
        uuid += 1
        process = uuid
        writer.process(process, task_title(task, error), pid)
        for rank, track in enumerate(TRACKS):
            for row in rows_of(of_track.get((task, track), ())):
                uuid += 1
                order = _number(12, rank)
                writer.track(uuid, track, _number(5, process), order)
                for span in row:
                    writer.span(span, uuid, lambda key: messages.get(key, 0))
    return b"".join(writer.packets)


def _both_ends(spans: Iterable[Span]) -> dict[str, int]:
    """Returns a number for each message whose sending and coming are both there."""
    sent, came = set(), set()
    for span in spans:
        if span.sends:
            sent.add(span.sends)
        if span.receives:
            came.add(span.receives)
    return {key: number for number, key in enumerate(sorted(sent & came), 1)}
