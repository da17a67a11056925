"""Tables and plots from results: ``python -m benchmarks.report``.

Reads ``benchmarks/results/*.jsonl``, in the order of their names, which are days; of
lines with one configuration the last counts. Rewrites the part of
``benchmarks/README.md`` between its two marks, and draws ``benchmarks/results/*.png``
(needs ``jgraph[demo]``).
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.tables import HEADINGS, TABLES, Line, all_figures

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# What tells two configurations of a benchmark apart.
KEYS = (
    *("benchmark", "what", "kind", "model", "mb", "rows", "mode", "strategy"),
    *("transport", "ps", "workers", "way", "bytes", "beside", "batch_size", "wait_ms"),
    *("case", "level", "tls"),
)


def read(paths: Iterable[Path]) -> list[Line]:
    """Returns the last line of each configuration, in the order of their first."""
    found: dict[tuple[Any, ...], Line] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["benchmark"] == "compare" and line["transport"] == "grpc":
                line["transport"] = "network"  # its older name
            found[tuple(line.get(key) for key in KEYS)] = line
    return list(found.values())


def write(readme: Path, lines: list[Line]) -> None:
    """Puts the tables between the marks of the README."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["benchmark"]].append(line)
    parts = []
    for name in [*HEADINGS, *(name for name in groups if name not in HEADINGS)]:
        if found := groups.get(name):
            heading = HEADINGS.get(name, name.replace("_", " "))
            made = TABLES[name].text(found) if name in TABLES else all_figures(found)
            parts += [f"### {heading}", made, about(found)]
    pictures = sorted(path.name for path in (readme.parent / "results").glob("*.png"))
    parts += [f"![{name}](results/{name})" for name in pictures]
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    body = "\n\n".join(parts)
    readme.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def about(lines: list[Line]) -> str:
    """Returns where and when the figures come from."""
    whole = [line for line in lines if "load" in line]
    if not whole:
        return ""
    last = whole[-1]
    days = " and ".join(sorted({line["date"] for line in whole}))
    loads = [line["load"] for line in whole]
    jax = f", JAX {last['jax']}" if "jax" in last else ""
    return (
        f"{days}, Python {last['python']}{jax}, {last['cores']} cores, load "
        f"{min(loads)} to {max(loads)} in the last minute of each measurement."
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("results", type=Path, nargs="*", help="files of JSON lines")
    a = parser.parse_args(args)
    from benchmarks.plots import draw

    lines = read(a.results or sorted(RESULTS.glob("*.jsonl")))
    draw(lines, a.readme.parent / "results")
    write(a.readme, lines)


if __name__ == "__main__":
    main()
