"""Runs the notebooks and writes into them what their cells show.

Outputs are written in a normal form, without what differs from run to run: times and
rates, addresses, ids of processes and runs, paths. Of a progress display the last frame
stays, as text and without logs. A picture of a graph is an image of what it shows
before a click: pages that show notebooks drop frames and scripts.

Losses and counts of an asynchronous run differ too, and stay. A notebook is not written
if it differs in nothing else, so its numbers are those of one run.
"""

import base64
import html
import json
import os
import re
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
NOTEBOOKS: Final = ROOT / "notebooks"
COLUMNS: Final = {"address", "pid", "incarnation", "memory", "jax"}
"""Of tables, columns that differ from run to run or from machine to machine."""
SVG: Final = "http://www.w3.org/2000/svg"

_RULES: Final = [
    # New lines of logs, in a progress display.
    (re.compile(r"^/job:\w+/task:\d+: \d{4}-\d\d-\d\d .*\n?", re.M), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ "), ""),
    (re.compile(r"  [\d,.]+ (?:steps|ex)/s"), ""),
    (re.compile(r"  ?(?:wait|input|pull|compute|push|other) \d+%"), ""),
    (re.compile(r"\btime=[\d.]+ m?s, "), ""),
    (re.compile(r"<tr><th>time</th><td>[^<]*</td></tr>"), ""),
    (re.compile(r"\b\d[\d,.]* (m?s)\b"), r"… \1"),
    (re.compile(r"\b(?:\d+\.\d+\.\d+\.\d+|localhost|\[::1\]):\d+"), "HOST:PORT"),
    (re.compile(r"\bloop-[0-9a-f]{12}\b"), "loop-…"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x…"),
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/tmp\w{{8}}"), "…"),
    (re.compile(rf"{re.escape(str(ROOT))}/"), ""),
]

_MEASURED: Final = [
    (re.compile(r'(<img alt="[^"]*… ms") src="[^"]*"'), r"\1"),
    # What a task logged last, and how a loss was noticed: by whoever was faster.
    (re.compile(r"^[A-Z]+ jgraph\.events: .*\n", re.M), ""),
    (re.compile(r"(?<=TaskLostError: ).*"), "lost"),
    (re.compile(r"[▁▂▃▄▅▆▇█]+"), "#"),
    (
        re.compile(r"(?<![\d,.])\d(?:[\d,.]*\d)?(?![\d,.]*\d| (?:[KMG]iB|B|bytes)\b)"),
        "#",
    ),
    (re.compile(r"  stale # \(up to #\)"), ""),
    (re.compile(r"#: #(?:,\s+#: #)*"), "#"),  # counts by staleness
    (re.compile(r"\s+"), " "),
]


def main() -> None:
    os.environ.pop("JGRAPH_DATA", None)  # made-up data, as for a reader without files
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        old = json.loads(path.read_text("utf-8"))
        new = with_outputs(old, executed(path))
        same = essence(old) == essence(new)
        if not same:
            text = json.dumps(new, indent=1, ensure_ascii=False)
            path.write_text(f"{text}\n", "utf-8")
        print(f"{path.name}: {'only measured values differ' if same else 'written'}")


def executed(path: Path) -> list[list[Any]]:
    """Runs a notebook and returns the outputs of its cells."""
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(  # type: ignore[no-untyped-call]
        path.read_text("utf-8"), as_version=4
    )
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(node, timeout=300, resources=resources).execute()
    return [cell.get("outputs", []) for cell in node["cells"]]


def with_outputs(notebook: Any, outputs: Sequence[Sequence[Any]]) -> Any:
    """Returns a notebook with the normal form of outputs, cell by cell."""
    cells = [
        cell | {"execution_count": None, "outputs": normal(shown)}
        if cell["cell_type"] == "code"
        else cell
        for cell, shown in zip(notebook["cells"], outputs, strict=True)
    ]
    return notebook | {"cells": cells}


def normal(outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the normal form of a cell's outputs; of a normal form it is the same."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] == "stream":
            text = settled(joined(output["text"]))
            if found and found[-1].get("name") == output["name"]:
                text = joined(found.pop()["text"]) + text
            found.append(
                {
                    "name": output["name"],
                    "output_type": "stream",
                    "text": text.splitlines(keepends=True),
                }
            )
        elif data := bundle(output["data"]):
            shown: dict[str, Any] = {
                "data": data,
                "metadata": {},
                "output_type": "display_data",
            }
            if output["output_type"] == "execute_result":
                shown["execution_count"] = None
                shown["output_type"] = "execute_result"
            found.append(dict(sorted(shown.items())))
    return found


def bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the normal form of one output; empty if it shows nothing."""
    if "image/png" in data:
        return dict(data)
    texts = {kind: joined(text) for kind, text in data.items()}
    if "text/html" in texts:
        page = texts.pop("text/html")
        if not page:
            return {}
        if not page.startswith(("<progress", "<i>starting")):
            page = re.sub(r'<iframe[^>]* srcdoc="([^"]*)"></iframe>', image, page)
            texts = {"text/html": without_columns(page), **texts}
    lines = {
        kind: (text if "<img" in text else settled(text).rstrip("\n"))
        for kind, text in texts.items()
    }
    return {
        kind: text.splitlines(keepends=True) for kind, text in lines.items() if text
    }


def joined(text: str | Sequence[str]) -> str:
    return "".join(text)


def settled(text: str) -> str:
    """Returns text without what differs from run to run."""
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


def without_columns(page: str) -> str:
    """Returns HTML whose tables lack COLUMNS."""

    def table(match: re.Match[str]) -> str:
        names = re.findall(r"<th>(.*?)</th>", match[0])
        kept = [number for number, name in enumerate(names) if name not in COLUMNS]

        def row(match: re.Match[str]) -> str:
            cells = re.findall(r"<t[hd]>.*?</t[hd]>", match[0])
            return f"<tr>{''.join(cells[number] for number in kept)}</tr>"

        return re.sub(r"<tr>.*?</tr>", row, match[0])

    return re.sub(r"<table><thead>.*?</table>", table, page)


def image(frame: re.Match[str]) -> str:
    """Returns an interactive picture as an image of what it shows at first."""
    drawing = re.search(r"<svg.*</svg>", html.unescape(frame[1]), re.S)
    assert drawing is not None, "a frame without a drawing"
    ET.register_namespace("", SVG)
    root = ET.fromstring(drawing[0])
    title = settled(root.findtext(f"{{{SVG}}}title", ""))
    views = root.findall(f"{{{SVG}}}g[@class='view']")
    for part in [*views[1:], *root.findall(f"{{{SVG}}}script")]:
        root.remove(part)
    _, _, root.attrib["width"], root.attrib["height"] = root.attrib["viewBox"].split()
    for element in list(root.iter()):
        # What only the pointer shows.
        for told in element.findall(f"{{{SVG}}}title"):
            element.remove(told)
        for name in [name for name in element.attrib if name.startswith("data-")]:
            del element.attrib[name]
    code = base64.b64encode(ET.tostring(root)).decode()
    alt = html.escape(title)
    return f'<img alt="{alt}" src="data:image/svg+xml;base64,{code}">'


def essence(notebook: Any) -> str:
    """Returns what of a notebook only a change of its code, or of jgraph, changes.

    Not numbers, unless of bytes, and neither plots nor pictures of measured times.
    """
    told = []
    for cell in notebook["cells"]:
        told.append(joined(cell["source"]))
        for output in cell.get("outputs", []):
            data = {"stream": output.get("text")} | output.get("data", {})
            told += [
                f"{kind} {measured_apart(joined(text))}"
                for kind, text in data.items()
                if text and kind != "image/png"
            ]
    return "\n".join(told)


def measured_apart(text: str) -> str:
    for pattern, instead in _MEASURED:
        text = pattern.sub(instead, text)
    return text


if __name__ == "__main__":
    main()
