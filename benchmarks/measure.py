"""What all benchmarks share: turns, medians, ratios, memory, and lines of JSON.

Needs nothing but numpy, so that peers in environments of their own can use it.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

import numpy as np

T = TypeVar("T")
Times: TypeAlias = Sequence[np.ndarray[Any, np.dtype[np.float64]]]
"""Per worker, when each of its steps was done, in seconds on one clock."""


def micros(call: Callable[[], Any], steps: int) -> float:
    """Returns the least time of a call in batches of ten: without other processes."""
    batches = []
    for _ in range(max(1, steps // 10)):
        began = time.perf_counter()
        for _ in range(10):
            call()
        batches.append((time.perf_counter() - began) / 10 * 1e6)
    return min(batches)


def emit(benchmark: str, **figures: Any) -> dict[str, Any]:
    """Prints one line: what was measured, with versions and the machine's load."""
    line = {"benchmark": benchmark, **figures, **circumstances()}
    print(json.dumps(line), flush=True)
    return line


def emit_row(row: int, value: Any, unit: str, **more: Any) -> None:
    """Prints a row of a table as a line, for who compares its figures with a limit."""
    print(json.dumps({"row": row, "value": value, "unit": unit, **more}), flush=True)


def circumstances() -> dict[str, Any]:
    """Versions, cores, how many processes wanted them in the last minute, the day."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "tensorflow-cpu", "ray", "torch"):
        try:
            found[name.removesuffix("-cpu")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    load = round(os.getloadavg()[0], 1)
    return {**found, "cores": os.cpu_count(), "load": load, "date": today()}


def today() -> str:
    """Returns the day, as in the names of files of results."""
    return time.strftime("%Y-%m-%d")


def spread(name: str, values: Iterable[float], digits: int = 1) -> dict[str, float]:
    """Returns the median of ``values`` under ``name``, and ``…_min``, ``…_max``.

    >>> spread("ms", [3.0, 1.0, 2.0])
    {'ms': 2.0, 'ms_min': 1.0, 'ms_max': 3.0}
    """
    found = list(values)
    return {
        name: round(float(statistics.median(found)), digits),
        f"{name}_min": round(float(min(found)), digits),
        f"{name}_max": round(float(max(found)), digits),
    }


def ratio(
    name: str, ours: Sequence[float], theirs: Sequence[float], digits: int = 3
) -> dict[str, float]:
    """Returns the spread of ours / theirs over the rounds that they took turns in."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return spread(name, pairs, digits)


def interval(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Returns the median of ``values`` with the interval that it is in: 95 of 100.

    By 2,000 drawings of as many values as there are (the bootstrap).

    >>> interval("ratio", [0.9, 1.0, 1.0, 1.0, 1.1])
    {'ratio': 1.0, 'ratio_low': 0.9, 'ratio_high': 1.1}
    """
    found = np.asarray(values, float)
    drawn = np.random.default_rng(0).choice(found, (2000, len(found)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return {
        name: round(float(np.median(found)), digits),
        f"{name}_low": round(float(low), digits),
        f"{name}_high": round(float(high), digits),
    }


def take_turns(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Calls every way once per round, in turns A B, B A, A B, ….

    A slow minute of the machine so hits all of them; what belongs together has the
    same index in the results.
    """
    results: dict[str, list[T]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways)[:: -1 if i % 2 else 1]:
            results[name].append(ways[name]())
    return results


@final
@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a round of steps was.

    Attributes:
      steps_per_s: of all workers, while all of them ran.
      p50: milliseconds of a worker's step, median.
      p99: the same, 99th percentile.
    """

    steps_per_s: float
    p50: float
    p99: float


def rates(times: Times) -> Rates:
    """Returns the rates of one round, less each worker's first steps.

    Raises:
      RuntimeError: one worker was done before another had begun.

    >>> rates([np.arange(10.0), np.arange(10.0)]).steps_per_s
    2.0
    """
    start, end = _together(times)
    if end <= start:
        raise RuntimeError("the workers did not run at the same time; run more steps")
    count = sum(int(((s > start) & (s <= end)).sum()) for s in times)
    steps = np.concatenate([np.diff(seconds[1:]) * 1e3 for seconds in times])
    p50, p99 = np.percentile(steps, [50, 99])
    return Rates(float(count / (end - start)), float(p50), float(p99))


def _together(times: Times) -> tuple[float, float]:
    """From when to when all workers ran; their first steps do not count."""
    if min(map(len, times)) < 2:
        return 0.0, 0.0
    start = max(seconds[min(1, len(seconds) - 2)] for seconds in times)
    return float(start), float(min(seconds[-1] for seconds in times))


def rates_of(run: Callable[[int, int], Times], workers: int, steps: int) -> Rates:
    """Runs a round, and a longer one if its workers did not run at the same time."""
    for _ in range(3):
        times = run(workers, steps)
        start, end = _together(times)
        if start < end:
            return rates(times)
        steps *= 2
    return rates(run(workers, steps))


def rate_figures(rounds: Sequence[Rates], prefix: str = "") -> dict[str, Any]:
    """Returns the figures of several rounds: medians, with the range of steps/s."""
    return {
        **spread(f"{prefix}steps_per_s", [r.steps_per_s for r in rounds]),
        f"{prefix}step_ms": {
            "p50": round(statistics.median(r.p50 for r in rounds), 3),
            "p99": round(statistics.median(r.p99 for r in rounds), 3),
        },
    }


def steps_for(run: Callable[[int], Times], seconds: float, least: int) -> int:
    """Returns how many steps of each worker keep it busy for about ``seconds``."""
    steps = least
    while True:
        span = max(float(times[-1] - times[0]) for times in run(steps))
        if span >= seconds / 4:
            return max(least, int(steps * seconds / span))
        steps *= 4


def peak_mb(pid: int) -> float:
    """Returns the most memory that a process has had, in MB; shared pages count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RuntimeError("this kernel does not tell the peak memory of a process")


def forget_peak(pid: int) -> None:
    """Lets the peak memory of a process be what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def share_mb(pid: int) -> float:
    """Returns a process's share of memory now, in MB (PSS).

    A page that several processes map counts for each as its part of it.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RuntimeError("this kernel does not tell a process's share of memory")


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has used, all its threads together."""
    # The kernel's clock of another process, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime((~pid << 3) | 2)


def thread_seconds(pid: int, name: str) -> float:
    """Returns the CPU time of a process's threads whose names begin so; 0 elsewhere.

    Only of threads that live; ``/proc`` has their time to the nanosecond.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # a thread may end meanwhile
            if (task / "comm").read_text().startswith(name):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with what every benchmark takes."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="the default; no other form")
    return made
