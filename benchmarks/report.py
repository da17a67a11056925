"""Tables and plots from results: ``python -m benchmarks.report``.

Reads ``benchmarks/results/*.jsonl``, in the order of their names; of lines with one
configuration the last counts. Rewrites the part of ``benchmarks/README.md`` between its
two marks, and draws ``benchmarks/results/*.png`` (needs ``jgraph[demo]``).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import measure
from benchmarks.peer_process import PEERS

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# What tells two configurations of a benchmark apart.
KEYS = (
    *("benchmark", "what", "kind", "model", "mb", "rows", "mode", "strategy"),
    *("transport", "ps", "workers", "way", "bytes", "beside", "batch_size", "wait_ms"),
)
FIRST_PEER = "tensorflow_ps"
# Least ratios to TensorFlow that we hold ourselves to.
AIMS: dict[str, dict[int, float]] = {
    "scalar": {1: 1.2, 4: 1.3, 8: 1.3},
    "dense": dict.fromkeys((1, 4, 8), 2.0),
    "dense grpc": dict.fromkeys((1, 4, 8), 1.1),
    "sparse": {1: 1.2, 4: 1.2},
    "mlp": dict.fromkeys((1, 2, 4), 2.0),
    "sync scalar": {2: 1.3, 4: 1.3},
    "sync dense": {2: 2.0, 4: 2.0},
}

Line: TypeAlias = dict[str, Any]


def read(paths: Iterable[Path]) -> list[Line]:
    """Returns the last line of each configuration, in the order of their first."""
    found: dict[tuple[Any, ...], Line] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["benchmark"] == "compare":
                line.setdefault("beside", FIRST_PEER)
            found[tuple(line.get(key) for key in KEYS)] = line
    return list(found.values())


def work(line: Line) -> str:
    """Returns the name of what was done: ``dense 8 MB``."""
    size = f" {line['mb']:g} MB" if "mb" in line else ""
    return f"{_kind(line)}{size}"


def _kind(line: Line) -> str:
    """Returns the kind of work, with the mode if that is not the usual one."""
    sync = line["benchmark"] == "compare" and line.get("mode") == "sync"
    return f"sync {line['kind']}" if sync else str(line["kind"])


def aim(line: Line) -> float | None:
    """Returns the least ratio that this line should have."""
    if line["beside"] != FIRST_PEER:
        return None
    kind = _kind(line)
    if line["transport"] == "grpc":
        kind += " grpc"
    return AIMS.get(kind, {}).get(line["workers"])


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def ranged(line: Line, name: str, form: str = ",.0f") -> str:
    """Returns a median with its range."""
    low, high = (format(line[f"{name}_{end}"], form) for end in ("min", "max"))
    return f"{line[name]:{form}} ({low} to {high})"


def told(line: Line, name: str, form: str) -> str:
    """Returns a figure, or nothing if the line has none."""
    return format(line[name], form) if name in line else ""


def compare_table(lines: list[Line]) -> str:
    return table(
        ["work", "workers", "transport", "steps/s", "TensorFlow", "ratio", "aim"],
        [
            (
                work(line),
                line["workers"],
                line["transport"],
                ranged(line, "steps_per_s"),
                ranged(line, "peer_steps_per_s"),
                ratio(line),
                aim(line) or "",
            )
            for line in lines
        ],
    )


def peers_table(lines: list[Line]) -> str:
    return table(
        ["work", "workers", "transport", "steps/s", "beside", "its steps/s", "ratio"],
        [
            (
                work(line),
                line["workers"],
                line["transport"],
                ranged(line, "steps_per_s"),
                PEERS[line["beside"]][1],
                ranged(line, "peer_steps_per_s"),
                ratio(line),
            )
            for line in lines
        ],
    )


def ratio(line: Line) -> str:
    """Returns the ratio to the peer, with its range."""
    low, high = line["ratio_min"], line["ratio_max"]
    return f"**{line['ratio']:.2f}** ({low:.2f} to {high:.2f})"


def null_table(lines: list[Line]) -> str:
    return table(
        ["work", "mode", "ps + workers", "transport", "steps/s", "step p50, p99"],
        [
            (
                work(line),
                line["mode"],
                f"{line['ps']} + {line['workers']}",
                line["transport"],
                ranged(line, "steps_per_s"),
                "{p50:.1f}, {p99:.1f} ms".format(**line["step_ms"]),
            )
            for line in lines
        ],
    )


def train_table(lines: list[Line]) -> str:
    return table(
        [
            *("model", "strategy", "ps + workers", "examples/s"),
            *("plain JAX", "ratio", "step p50, p99"),
        ],
        [
            (
                line["model"],
                line["strategy"],
                f"{line['ps']} + {line['workers']}",
                ranged(line, "examples_per_s"),
                told(line, "plain_jax_examples_per_s", ",.0f"),
                told(line, "ratio_to_plain_jax", ".2f"),
                "{p50:.1f}, {p99:.1f} ms".format(**line["step_ms"]),
            )
            for line in lines
        ],
    )


def transport_table(lines: list[Line]) -> str:
    return table(
        ["way", "bytes", "ms", "GB/s", "of TCP", "of memcpy", "CPU s per GB"],
        [
            (
                line["way"],
                f"{line['bytes']:,}",
                ranged(line, "ms", ".3f"),
                f"{line['gb_per_s']:.2f}",
                line["to_tcp"],
                line["to_memcpy"],
                line["cpu_s_per_gb"],
            )
            for line in lines
        ],
    )


def tls_table(lines: list[Line]) -> str:
    return table(
        ["way", "bytes", "ms", "GB/s", "of the same without TLS", "CPU s per GB"],
        [
            (
                line["way"],
                f"{line['bytes']:,}",
                ranged(line, "ms", ".3f"),
                f"{line['gb_per_s']:.2f}",
                line["to_plain"],
                line["cpu_s_per_gb"],
            )
            for line in lines
            if line["way"] not in {"tcp", "memcpy"}
        ],
    )


def plain_table(lines: list[Line]) -> str:
    """Every figure of lines that need no shape of their own."""
    skipped = {*measure.circumstances(), "benchmark", "rounds", "repeats", "steps"}
    rows = []
    for line in lines:
        what = line.get("what") or line.get("model") or line.get("kind") or ""
        for name, value in line.items():
            if name in skipped or isinstance(value, str):
                continue
            if not name.endswith(("_min", "_max")):
                rows.append((what, name, _text(value)))
    return table(["what", "figure", "median"], rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return f"{value:,g}" if isinstance(value, float) else str(value)


TABLES: dict[str, tuple[str, Callable[[list[Line]], str]]] = {
    "compare": ("Beside TensorFlow's parameter servers", compare_table),
    "peers": ("Beside other systems", peers_table),
    "null_step": ("The null step alone", null_table),
    "train": ("Training on a cluster beside plain JAX", train_table),
    "train_local": ("The Trainer in one process", plain_table),
    "transport": ("Transport", transport_table),
    "transport_tls": ("Transport with TLS beside without", tls_table),
    "transport_fan_in": ("Eight workers at one ps", plain_table),
    "overhead": ("What a step costs that computes nothing", plain_table),
    "startup": ("From nothing to the first step", plain_table),
    "memory": ("Memory of a ps", plain_table),
    "imports": ("Imports", plain_table),
}


def write(readme: Path, lines: list[Line]) -> None:
    """Puts the tables between the marks of the README."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[group(line)].append(line)
    parts = []
    for name in [*TABLES, *(name for name in groups if name not in TABLES)]:
        title, make = TABLES.get(name, (name.replace("_", " "), plain_table))
        if name in groups:
            parts.append(
                f"### {title}\n\n{make(groups[name])}\n\n{about(groups[name])}"
            )
    pictures = sorted(path.name for path in (readme.parent / "results").glob("*.png"))
    parts += [f"![{name}](results/{name})" for name in pictures]
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    body = "\n\n".join(parts)
    readme.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def group(line: Line) -> str:
    """Returns the table that a line belongs to."""
    others = line.get("beside", FIRST_PEER) != FIRST_PEER
    return "peers" if others else str(line["benchmark"])


def about(lines: list[Line]) -> str:
    """Returns where the figures come from."""
    last = lines[-1]
    if "load" not in last:
        return ""
    loads = [line["load"] for line in lines if "load" in line]
    jax = f", JAX {last['jax']}" if "jax" in last else ""
    return (
        f"Python {last['python']}{jax}, {last['cores']} cores, load {min(loads)} to "
        f"{max(loads)} in the last minute of each measurement."
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("results", type=Path, nargs="*", help="files of JSON lines")
    a = parser.parse_args(args)
    from benchmarks.plots import draw

    paths = a.results or sorted((HERE / "results").glob("*.jsonl"))
    lines = read(paths)
    draw(lines, a.readme.parent / "results")
    write(a.readme, lines)


if __name__ == "__main__":
    main()
