"""Plots of results, for ``benchmarks.report``."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.peer_process import PEERS
from benchmarks.tables import ENCRYPTED, Line, route, work

# How a figure was come by.
KINDS = {"measured": "C0", "emulated": "C1", "simulated": "C7"}
COLOURS = {
    **KINDS,
    "auto": "C0",
    "network": "C1",
    ENCRYPTED: "C2",
    **dict(zip(PEERS, ("C7", "C8", "C3", "C4"), strict=True)),
}


def draw(lines: list[Line], folder: Path) -> list[Path]:
    """Draws what the lines are good for; returns the files."""
    folder.mkdir(exist_ok=True)
    compared = [
        {**line, "transport": ENCRYPTED} if route(line) == ENCRYPTED else line
        for line in lines
        if line["benchmark"] == "compare"
    ]
    drawings = {
        "workers": (_workers, compared),
        "ratios": (_ratios, compared),
        "transport": (_transport, [x for x in lines if x["benchmark"] == "transport"]),
        "curves": (_curves, [x for x in lines if x["benchmark"] == "curves"]),
    }
    made = []
    for name, (make, chosen) in drawings.items():
        if chosen:
            figure = make(chosen)
            FigureCanvasAgg(figure)
            made.append(folder / f"{name}.png")
            figure.savefig(made[-1], dpi=80)
    return made


def _workers(lines: list[Line]) -> Figure:
    """Steps per second over workers, ours and the peers'."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[work(line)].append(line)
    figure = Figure(figsize=(3.2 * len(groups), 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(groups), squeeze=False)[0]
    named: dict[str, Any] = {}
    for axes, (name, found) in zip(all_axes, groups.items(), strict=True):
        for label, figure_name, side in _sides(found):
            _line(axes, side, figure_name, label)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("workers")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    all_axes[0].set_ylabel("steps/s")
    figure.legend(
        named.values(), named, loc="outside lower center", ncols=6, fontsize=8
    )
    return figure


def _sides(lines: list[Line]) -> Iterator[tuple[str, str, list[Line]]]:
    """Yields (name, figure, lines) of each side, one line per number of workers."""
    for key, figure in (("transport", "steps_per_s"), ("beside", "peer_steps_per_s")):
        sides: dict[str, dict[int, Line]] = defaultdict(dict)
        for line in lines:
            # Of a side that several lines tell of, the first counts.
            sides[line[key]].setdefault(line["workers"], line)
        for name, found in sides.items():
            yield name, figure, list(found.values())


def _line(axes: Any, lines: list[Line], figure: str, label: str) -> None:
    found = sorted(lines, key=lambda line: line["workers"])
    workers = [line["workers"] for line in found]
    middle = [line[figure] for line in found]
    low = [line[figure] - line[f"{figure}_min"] for line in found]
    high = [line[f"{figure}_max"] - line[figure] for line in found]
    name = PEERS[label][1] if label in PEERS else label
    colour = COLOURS[label]
    axes.errorbar(
        workers, middle, (low, high), marker="o", capsize=3, label=name, color=colour
    )


def _ratios(lines: list[Line]) -> Figure:
    """Our steps per second by the peers', with the range over the rounds."""
    figure = Figure(figsize=(7, 0.3 * len(lines) + 1), layout="constrained")
    axes = figure.subplots()
    labels = [
        f"{work(x)}, {x['workers']} w, {x['transport']} by {PEERS[x['beside']][1]}"
        for x in lines
    ]
    middle = [line["ratio"] for line in lines]
    low = [line["ratio"] - line["ratio_min"] for line in lines]
    high = [line["ratio_max"] - line["ratio"] for line in lines]
    colours = [COLOURS[line["transport"]] for line in lines]
    axes.barh(labels, middle, xerr=(low, high), color=colours, capsize=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("steps/s by the peer's in the same run")
    return figure


def _transport(lines: list[Line]) -> Figure:
    """Gigabytes per second over the size of a message."""
    ways: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        ways[line["way"]].append(line)
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for way, found in ways.items():
        axes.plot(
            [line["bytes"] for line in found],
            [line["gb_per_s"] for line in found],
            marker="o",
            label=way,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a message")
    axes.set_ylabel("GB/s, request included")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _curves(lines: list[Line]) -> Figure:
    """Steps over workers in the colours of how they were come by, and the errors."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rates, errors = figure.subplots(1, 2)
    for kind, colour in KINDS.items():
        found = sorted(
            (line for line in lines if line["kind"] == kind),
            key=lambda line: line["workers"],
        )
        workers = [line["workers"] for line in found]
        simulated = [line["simulated_per_s"] for line in found]
        grey = KINDS["simulated"]
        if kind == "simulated":
            rates.plot(workers, simulated, marker="o", color=grey, label=kind)
            continue
        _line(rates, found, "steps_per_s", kind)
        rates.plot(workers, simulated, marker=".", linestyle="--", color=grey)
        percent = [100 * line["error"] for line in found]
        errors.plot(workers, percent, marker="o", color=colour, label=kind)
    rates.set_yscale("log")
    rates.set_ylabel("steps/s of all workers")
    errors.axhline(0, color="black", linewidth=0.8)
    errors.axhspan(-30, 30, color="C7", alpha=0.15)
    errors.set_ylabel("error of the simulation, %")
    with_errors = [line for line in lines if "error" in line]
    for axes, shown in ((rates, lines), (errors, with_errors)):
        axes.set_xscale("log")
        axes.set_xlabel("workers")
        ticks = sorted({line["workers"] for line in shown})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    return figure
