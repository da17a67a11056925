"""Bar charts over time (Gantt charts) as SVG: a lane per task, a bar per activity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from jgraph.view.svg import Picture, document, plain, shortened

_LEFT: Final = 190
_WIDTH: Final = 1000
_TOP: Final = 62
_ROW: Final = 22
_GAP: Final = 14
_LETTER: Final = 6.2
_FEWEST: Final = 6  # letters that say something of a longer title


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time on a row of a lane.

    Attributes:
      start: when it begins, in the unit of the chart.
      end: when it ends.
      title: on the bar, as far as it fits.
      detail: shown where the mouse rests; the title if empty.
      kind: ``"compute"``, ``"forward"``, ``"backward"``, ``"send"``, ``"wait"`` or
        ``"queueing"``: its color.
      sends: the message that begins here, by its key.
      receives: the message that ends here, by its key.
    """

    start: float
    end: float
    title: str
    detail: str = ""
    kind: str = "compute"
    sends: str = ""
    receives: str = ""


@final
@dataclass(frozen=True, slots=True)
class Lane:
    """The rows of one task; bars of a row do not overlap."""

    title: str
    rows: tuple[tuple[Bar, ...], ...]


def draw_bars(title: str, unit: str, lanes: Sequence[Lane]) -> Picture:
    """Returns a chart: time goes to the right, arrows go with messages.

    Args:
      title: over the chart.
      unit: of times, e.g. ``"ms"``.
      lanes: from top to bottom.
    """
    bars = [bar for lane in lanes for row in lane.rows for bar in row]
    longest = max((bar.end for bar in bars), default=0.0) or 1.0
    scale = _WIDTH / longest
    tops, top = [], _TOP
    for lane in lanes:
        tops.append(top)
        top += _ROW * max(len(lane.rows), 1) + _GAP
    width, height = _LEFT + _WIDTH + 30, top + 8
    numbers = {id(bar): number for number, bar in enumerate(bars)}
    parts = [
        f'<text class="trail" x="14" y="29">{plain(title)}</text>',
        *_ticks(longest, unit, scale, top),
    ]
    places: dict[int, float] = {}
    for number, (lane, y) in enumerate(zip(lanes, tops, strict=True)):
        parts.append(_lane(lane, number, y))
        for n, row in enumerate(lane.rows):
            for bar in row:
                places[numbers[id(bar)]] = y + n * _ROW
                parts.append(_bar(bar, numbers[id(bar)], y + n * _ROW, scale))
    parts += _arrows(bars, places, scale)
    view = (
        f'<g class="view" id="v0" data-w="{width}" data-h="{height}">'
        f"{''.join(parts)}</g>"
    )
    return document(title, width, height, view)


def _lane(lane: Lane, number: int, y: float) -> str:
    height = _ROW * max(len(lane.rows), 1) + 6
    return (
        f'<rect class="lane l{number % 7}" x="8" y="{y - 3}" '
        f'width="{_LEFT + _WIDTH + 14}" height="{height}" rx="6"/>'
        f'<text class="task" x="16" y="{y + 15}">{plain(shortened(lane.title, 23))}'
        "</text>"
    )


def _bar(bar: Bar, number: int, y: float, scale: float) -> str:
    x, width = _LEFT + bar.start * scale, max((bar.end - bar.start) * scale, 1.5)
    letters = int((width - 4) / _LETTER)
    fits = letters >= min(len(bar.title), _FEWEST)
    title = plain(shortened(bar.title, letters)) if fits else ""
    text = f'<text x="{x + 3:.1f}" y="{y + 14}">{title}</text>' if title else ""
    return (
        f'<g class="box span s-{bar.kind}" data-n="{number}">'
        f"<title>{plain(bar.detail or bar.title)}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" rx="3"/>'
        f"{text}</g>"
    )


def _arrows(bars: Sequence[Bar], places: dict[int, float], scale: float) -> list[str]:
    begins = {bar.sends: n for n, bar in enumerate(bars) if bar.sends}
    parts = []
    for target, bar in enumerate(bars):
        source = begins.get(bar.receives) if bar.receives else None
        if source is None:
            continue
        x1, y1 = _LEFT + bars[source].start * scale, places[source] + _ROW / 2 - 2
        x2, y2 = _LEFT + bar.end * scale, places[target] + _ROW / 2 - 2
        bend = max(abs(x2 - x1) / 2, 12)
        parts.append(
            f'<path class="edge crosses" d="M{x1:.1f} {y1}C{x1 + bend:.1f} {y1} '
            f'{x2 - bend:.1f} {y2} {x2:.1f} {y2}" data-ends="{source} {target}">'
            f"<title>{plain(bars[source].detail or bars[source].title)}</title></path>"
        )
    return parts


def _ticks(longest: float, unit: str, scale: float, bottom: float) -> list[str]:
    rough = longest / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    parts = []
    for n in range(int(longest / step * 1.0001) + 1):
        x = _LEFT + n * step * scale
        parts.append(
            f'<path class="tick" d="M{x:.1f} {_TOP - 8}V{bottom}"/>'
            f'<text class="tick-text" x="{x:.1f}" y="{_TOP - 13}">'
            f"{n * step:g} {plain(unit)}</text>"
        )
    return parts
