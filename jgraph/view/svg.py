"""Drawing views as one SVG: tasks are regions, time goes downwards."""

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from jgraph.errors import ConfigError
from jgraph.view.layout import GAP_X, HEIGHT, TOP, WIDTH, Layout, Region, layout
from jgraph.view.units import bytes_text
from jgraph.view.viewer import CLOSEST, POLICY, SCRIPT, STYLE
from jgraph.view.views import Box, Edge, View

_TITLE_LETTERS, _LINE_LETTERS = 21, 27
_LANES = 7
_HIGHEST = 900  # pixels of a frame in a notebook
# What XML 1.0 cannot hold, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@final
@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG drawing that notebooks show and ``save`` writes to a file.

    It takes nothing from elsewhere, and a page with it may not: its policy forbids it.

    Attributes:
      title: of the drawing.
      svg: the drawing.
      width: of what shows at first, in pixels at its natural size.
      height: likewise.
    """

    title: str
    svg: str
    width: int
    height: int

    def page(self) -> str:
        """Returns a web page with the drawing."""
        return (
            f'<!doctype html><html><head><meta charset="utf-8">{POLICY}'
            f"<title>{plain(self.title)}</title></head>"
            f'<body style="margin:0;height:100vh">{self.svg}</body></html>\n'
        )

    def _repr_html_(self) -> str:
        # A frame: styles and names of two pictures, or of the notebook, do not meet.
        look = (
            f"width:100%;aspect-ratio:{self.width}/{self.height};min-height:160px;"
            f"max-height:{min(max(round(self.height / CLOSEST), 160), _HIGHEST)}px;"
            "border:1px solid #e2e8f0;border-radius:8px;box-sizing:border-box"
        )
        page = escape(self.page())
        return (
            f'<iframe sandbox="allow-scripts" style="{look}" srcdoc="{page}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<picture of {self.title}: save('picture.html') writes it>"

    def save(self, path: str | pathlib.Path) -> None:
        """Writes one self-contained file: a web page, or the drawing alone.

        Args:
          path: ends in ``.html`` or ``.svg``; its directory is made if need be.

        Raises:
          ConfigError: another ending, or a place that cannot be written.
        """
        file = pathlib.Path(path)
        match file.suffix.lower():
            case ".svg":
                text = f"{self.svg}\n"
            case ".html" | ".htm":
                text = self.page()
            case suffix:
                raise ConfigError(
                    f"a picture is written as .html or .svg, not as '{suffix}'; "
                    f"write for example '{file.with_suffix('.html')}'"
                )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the picture to {file} ({error.strerror}); choose "
                "another path"
            ) from error


def shortened(text: str, letters: int) -> str:
    """Returns ``text``, or as much of it as fits; of a path rather the end.

    Example:
      >>> shortened("dynamic_update_slice", 10)
      'dynamic_u…'
      >>> shortened("read params/Dense_0/kernel", 20)
      'read …Dense_0/kernel'
    """
    if len(text) <= letters:
        return text
    begin = 5 if "/" in text else letters - 1
    return f"{text[:begin]}…{text[len(text) - letters + begin + 1 :]}"


def draw(views: Sequence[View]) -> Picture:
    """Returns a picture of views: the first shows, the others open by a click."""
    names = {view.key: f"v{n}" for n, view in enumerate(views)}
    layouts = [(names[view.key], view, layout(view)) for view in views]
    first = layouts[0][2]
    parts = [_view(name, view, placed, names) for name, view, placed in layouts]
    return document(views[0].trail[-1][0], first.width, first.height, "".join(parts))


def document(title: str, width: int, height: int, body: str) -> Picture:
    """Returns the picture of drawn views, with its styles and its script.

    Args:
      title: of the picture.
      width: of the view that shows at first.
      height: likewise.
      body: SVG groups of the class ``view``, each with its ``data-w`` and ``data-h``.
    """
    return Picture(
        title,
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jg" role="img" '
        f'width="100%" height="100%" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="xMidYMin">'
        f"<title>{plain(title)}</title><style><![CDATA[{STYLE}]]></style>{_ARROW}"
        f"{body}<script><![CDATA[{SCRIPT}]]></script></svg>",
        width,
        height,
    )


_ARROW = (
    '<defs><marker id="jg-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="context-stroke"/>'
    "</marker></defs>"
)


def _view(name: str, view: View, placed: Layout, names: dict[str, str]) -> str:
    hidden = "" if name == "v0" else ' style="display:none"'
    lane_of = {box.key: box.lane for box in view.boxes}
    ids = {box.key: n for n, box in enumerate(view.boxes)}
    parts = [
        *(_region(r, n, view, placed.height) for n, r in enumerate(placed.regions)),
        _trail(view, names),
        *(
            _edge(e, route.path, ids, crosses=lane_of[e.source] != lane_of[e.target])
            for e, route in zip(view.edges, placed.routes, strict=True)
        ),
        *(_box(b, placed.places[b.key], ids[b.key], names) for b in view.boxes),
        *(
            _label(e, route.x, route.y, ids)
            for e, route in zip(view.edges, placed.routes, strict=True)
            if e.nbytes and lane_of[e.source] != lane_of[e.target]
        ),
    ]
    return (
        f'<g class="view" id="{name}" data-w="{placed.width}" '
        f'data-h="{placed.height}"{hidden}>{"".join(parts)}</g>'
    )


def _region(region: Region, number: int, view: View, height: int) -> str:
    x, letters = region.x + 14, region.width // 7
    lane = shortened(region.lane or "the plan decides", letters)
    return (
        f'<rect class="lane l{number % _LANES}" x="{region.x}" y="{TOP}" '
        f'width="{region.width}" height="{height - TOP - 12}" rx="12"/>'
        f'<text class="task" x="{x}" y="{TOP + 24}">{plain(lane)}</text>'
        f'<text class="about" x="{x}" y="{TOP + 41}">'
        f"{plain(shortened(view.lanes[region.lane], letters))}</text>"
    )


def _trail(view: View, names: dict[str, str]) -> str:
    spans = []
    for title, key in view.trail[:-1]:
        spans.append(
            f'<tspan class="go" data-view="{names[key]}">{plain(title)}</tspan>'
        )
    spans.append(f"<tspan>{plain(view.trail[-1][0])}</tspan>")
    inner = '<tspan class="sep"> / </tspan>'.join(spans)
    return f'<text class="trail" x="{GAP_X}" y="29">{inner}</text>'


def _edge(edge: Edge, path: str, ids: dict[str, int], *, crosses: bool) -> str:
    kind = "crosses" if crosses else "state" if edge.is_state else "stays"
    return (
        f'<path class="edge {kind}" d="{path}" data-ends="{ids[edge.source]} '
        f'{ids[edge.target]}"><title>{plain(edge.detail or "uses")}</title></path>'
    )


def _label(edge: Edge, x: int, y: int, ids: dict[str, int]) -> str:
    return (
        f'<text class="bytes" x="{x}" y="{y + 3}" data-ends="{ids[edge.source]} '
        f'{ids[edge.target]}">{bytes_text(edge.nbytes)}</text>'
    )


def _box(box: Box, place: tuple[int, int], number: int, names: dict[str, str]) -> str:
    x, y = place
    title = plain(shortened(box.title, _TITLE_LETTERS))
    line = plain(shortened(box.line, _LINE_LETTERS))
    frame = f'width="{WIDTH}" height="{HEIGHT}" rx="8"'
    parts = [
        f"<title>{plain(box.detail or box.title)}</title>",
        f'<rect class="under" x="5" y="5" {frame}/>' if box.opens else "",
        f'<rect {frame}/><rect class="bar" x="4" y="6" width="5" rx="2.5" '
        f'height="{HEIGHT - 12}"/>',
        f'<text class="t" x="14" y="{20 if line else HEIGHT // 2 + 4}">{title}</text>',
        f'<text class="s" x="14" y="36">{line}</text>' if line else "",
    ]
    opens = f' data-view="{names[box.opens]}"' if box.opens else ""
    return (
        f'<g class="box k-{box.kind}{" more" if box.opens else ""}" '
        f'data-n="{number}"{opens} transform="translate({x} {y})">{"".join(parts)}</g>'
    )


def plain(text: str) -> str:
    """Returns text as it stands in XML."""
    return escape(_NOT_XML.sub("�", text))
