"""Tables of results in Markdown, for ``benchmarks.report``: one per benchmark."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from benchmarks import measure
from benchmarks.peer_process import PEERS

Line: TypeAlias = dict[str, Any]
Column: TypeAlias = tuple[str, Callable[[Line], Any]]
ENDS = ("", "_min", "_max")

# Least ratios to TensorFlow's ps that we hold ourselves to, by work and workers; and
# where frames travel, if not through memory.
BETWEEN_HOSTS, ENCRYPTED = "between hosts", "encrypted"
AIMS: dict[tuple[str, str], dict[int, float]] = {
    ("scalar", ""): {1: 1.2, 4: 1.3, 8: 1.3},
    ("scalar", BETWEEN_HOSTS): {1: 1.6, 8: 1.4},
    ("dense 8 MB", ""): dict.fromkeys((1, 4, 8), 2.0),
    ("dense 8 MB", BETWEEN_HOSTS): dict.fromkeys((1, 4, 8), 1.5),
    ("dense 8 MB", ENCRYPTED): {1: 1.0},
    ("dense 100 MB", ""): dict.fromkeys((1, 4, 8), 2.0),
    ("dense 100 MB", BETWEEN_HOSTS): dict.fromkeys((1, 4, 8), 2.0),
    ("dense 100 MB", ENCRYPTED): {1: 1.2},
    ("sparse", ""): {1: 1.2, 4: 1.2},
    ("sparse", BETWEEN_HOSTS): {1: 1.3, 4: 1.3},
    ("mlp", ""): dict.fromkeys((1, 2, 4), 1.6),
    ("mlp", BETWEEN_HOSTS): {1: 1.3, 2: 1.3, 4: 1.2},
    ("sync scalar", ""): {2: 1.3, 4: 1.3},
    ("sync dense 8 MB", ""): {2: 2.0, 4: 2.0},
}


def work(line: Line) -> str:
    """Returns the name of what was done.

    >>> work({"kind": "dense", "mb": 8.0, "mode": "sync"})
    'sync dense 8 MB'
    """
    size = f" {line['mb']:g} MB" if "mb" in line else ""
    return f"{_kind(line)}{size}"


def _kind(line: Line) -> str:
    return f"sync {line['kind']}" if line.get("mode") == "sync" else str(line["kind"])


def route(line: Line) -> str:
    """Returns how frames travelled: nothing is between tasks of one host.

    >>> route({"transport": "network", "tls": True})
    'encrypted'
    """
    if line.get("tls"):
        return ENCRYPTED
    return "" if line["transport"] == "auto" else BETWEEN_HOSTS


def beside(lines: Iterable[Line]) -> list[Line]:
    """Returns a line for each work, workers and peer, with the ratio of each way."""
    found: dict[tuple[str, int, str], Line] = {}
    for line in lines:
        key = work(line), line["workers"], line["beside"]
        # The rates that are told are those of the first way.
        row = found.setdefault(key, dict(line))
        row |= {f"{route(line)} ratio{end}": line[f"ratio{end}"] for end in ENDS}
    return list(found.values())


def ratio(where: str) -> Column:
    """Returns the column of a way: the ratio, its range, and what it should be."""

    def show(line: Line) -> str:
        shown = ranged(f"{where} ratio", ".2f")(line)
        aims = AIMS.get((work(line), where), {})
        if not shown or line["beside"] != "tensorflow_ps":
            return shown
        return (
            f"{shown} of {aims[line['workers']]}" if line["workers"] in aims else shown
        )

    return where or "one host", show


def told(name: str, form: str = "") -> Callable[[Line], str]:
    """Returns what shows a figure, or nothing where a line has none."""
    return lambda line: format(line[name], form) if name in line else ""


def ranged(name: str, form: str = ",.0f") -> Callable[[Line], str]:
    """Returns what shows a median with its range, or nothing."""

    def show(line: Line) -> str:
        if name not in line:
            return ""
        middle, low, high = (format(line[name + end], form) for end in ENDS)
        return f"{middle} ({low} to {high})"

    return show


def percentiles(line: Line) -> str:
    """Shows the milliseconds of a step."""
    return "{p50:.1f}, {p99:.1f} ms".format(**line["step_ms"])


def cluster(line: Line) -> str:
    """Shows how many tasks there were."""
    return f"{line['ps']} + {line['workers']}"


def by_task(name: str) -> Callable[[Line], str]:
    """Returns what shows a figure of each task."""

    def show(line: Line) -> str:
        short = {t.removeprefix("/job:").replace("/task", ""): t for t in line[name]}
        return ", ".join(f"{task} {line[name][t]:,g}" for task, t in short.items())

    return show


@final
@dataclass(frozen=True, slots=True)
class Table:
    """A heading and columns; ``lines`` says which lines have a row.

    ``rows`` makes one row of several lines.
    """

    heading: str
    columns: Sequence[Column]
    lines: Callable[[Line], bool] = lambda _: True
    rows: Callable[[Iterable[Line]], Iterable[Line]] = iter

    def text(self, lines: Iterable[Line]) -> str:
        """Returns the table of these lines."""
        head = [name for name, _ in self.columns]
        chosen = self.rows(line for line in lines if self.lines(line))
        rows = [[show(line) for _, show in self.columns] for line in chosen]
        return markdown(head, rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table.

    >>> print(markdown(["a", "b"], [[1, 2]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def all_figures(lines: Iterable[Line]) -> str:
    """Returns the figures of lines that have no columns of their own."""
    skipped = {*measure.circumstances(), "benchmark", "rounds", "repeats", "steps"}
    rows = []
    for line in lines:
        for name, value in line.items():
            if name in skipped or name.endswith(ENDS[1:]):
                continue
            if isinstance(value, dict):
                rows.append([name, by_task(name)(line)])
            elif f"{name}_min" in line:
                rows.append([name, ranged(name, ",g")(line)])
            else:
                rows.append([name, value])
    return markdown(["figure", "median"], rows)


STEPS: Column = ("steps/s", ranged("steps_per_s"))
EXAMPLES: Column = ("examples/s", ranged("examples_per_s"))
STEP: Column = ("step p50, p99", percentiles)
TASKS: Column = ("ps + workers", cluster)
TRANSPORT: Column = ("transport", told("transport"))
WORKERS: Column = ("workers", told("workers"))
MODE: Column = ("mode", told("mode"))
MESSAGE: Sequence[Column] = (
    ("way", told("way")),
    ("bytes", told("bytes", ",")),
    ("ms", ranged("ms", ".3f")),
    ("GB/s", told("gb_per_s", ".2f")),
    ("CPU s per GB", told("cpu_s_per_gb")),
)

TABLES: dict[str, Table] = {
    "compare": Table(
        "Beside other systems",
        (
            *(("work", work), WORKERS, STEPS),
            ("beside", lambda line: PEERS[line["beside"]][1]),
            ("its steps/s", ranged("peer_steps_per_s")),
            *(ratio(""), ratio(BETWEEN_HOSTS), ratio(ENCRYPTED)),
        ),
        rows=beside,
    ),
    "null_step": Table(
        "The null step alone",
        (("work", work), TASKS, TRANSPORT, STEPS, STEP),
    ),
    "train": Table(
        "Training on a cluster beside plain JAX",
        (
            ("model", told("model")),
            *(("strategy", told("strategy")), TASKS, TRANSPORT, EXAMPLES),
            ("plain JAX", told("plain_jax_examples_per_s", ",.0f")),
            ("ratio", ranged("ratio_to_plain_jax", ".2f")),
            STEP,
        ),
    ),
    "train_local": Table(
        "The Trainer in one process",
        (
            *(("model", told("model")), ("batch", told("batch_size"))),
            ("by hand, us a step", ranged("by_hand_us")),
            ("Trainer", ranged("trainer_us")),
            ("ratio of times", ranged("ratio", ".3f")),
        ),
    ),
    "embedding": Table(
        "Rows of a large table",
        (
            *(("rows", told("rows", ",")), TASKS, EXAMPLES, STEP),
            ("TensorFlow's examples/s", ranged("peer_examples_per_s")),
            ("ratio", ranged("ratio", ".2f")),
            ("step by that of the first", ranged("step_ms_ratio", ".2f")),
            ("CPU ms per step", by_task("cpu_ms_per_step")),
        ),
    ),
    "scale": Table(
        "More workers, with a wait in place of computing",
        (
            *(MODE, ("MB", told("mb", "g")), ("wait", told("wait_ms", "g"))),
            *(WORKERS, STEPS, ("speed-up", ranged("speedup", ".2f"))),
        ),
    ),
    "curves": Table(
        "Steps over workers: measured, emulated, simulated",
        (
            *(("", told("kind")), ("wait, ms", told("wait_ms", "g")), TASKS, STEPS),
            ("simulated", told("simulated_per_s", ",.1f")),
            ("error", told("error", "+.0%")),
        ),
    ),
    "straggler": Table(
        "One slow worker in synchronous training, ms of a step",
        (
            *(WORKERS, ("wait", told("wait_ms", "g")), ("more", told("slow_ms", "g"))),
            ("none slow", ranged("even_ms", ".1f")),
            ("waited for", ranged("waited_for_ms", ".1f")),
            ("with a backup", ranged("backup_ms", ".1f")),
            ("backup by none slow", ranged("backup_over_even", ".2f")),
        ),
    ),
    "transport": Table(
        "Transport",
        (
            *MESSAGE,
            ("of TCP", told("to_tcp")),
            ("of memcpy", told("to_memcpy")),
        ),
    ),
    "transport_tls": Table(
        "Transport with TLS beside without",
        (*MESSAGE, ("of the same without TLS", told("to_plain"))),
        lambda line: line["way"] not in {"tcp", "memcpy"},
    ),
    "transport_fan_in": Table(
        "Eight workers at one ps, 25 MB each way",
        (
            *(("way", told("way")), ("ms", ranged("ms")), MESSAGE[3]),
            ("speed by streams'", ranged("speed_to_post", ".2f")),
        ),
    ),
    "memory": Table(
        "Memory of a ps",
        (
            ("state, MB", told("variables_mb")),
            ("idle, MB", told("ps_idle_mb")),
            ("peak, MB", told("ps_peak_mb")),
            ("(peak - 250 MB) by state", told("ratio")),
            ("peak share, MB", told("ps_peak_share_mb")),
            ("(share - 250 MB) by state", told("share_ratio")),
        ),
    ),
    "imports": Table(
        "Imports",
        (
            ("statement", lambda line: f"`{line['what']}`"),
            ("ms", told("ms", ",.0f")),
            ("of jax, flax.linen", told("ratio_to_reference")),
        ),
        lambda line: line["what"] != "pass",
    ),
}
HEADINGS = {
    **{name: table.heading for name, table in TABLES.items()},
    "overhead": "What a step costs that computes nothing",
    "startup": "From nothing to the first step",
}
