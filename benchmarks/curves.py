"""Steps over workers, measured, emulated, simulated: ``python -m benchmarks curves``.

*Measured*: null steps of real workers on the cores of this machine. *Emulated*: the
same traffic with a wait in place of computing, as if every worker had an accelerator of
its own. *Simulated*: both once more, on the cores that other processes left, from the
costs of ``--costs``; and emulated steps of more workers, each task on a host of its own
with 10 Gbit/s. One JSON line per point; where a point was run as well as simulated, the
line has the error of the simulation. ``python -m benchmarks report`` draws them.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.calibrate import cost_of, median, null_steps
from benchmarks.null_step import NullStep
from jgraph.testing import Computing, Costs, dense_step, load_costs, simulate
from jgraph.testing.scale.costs import MEASURED


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--more", type=int, nargs="*", default=[16, 32, 64, 100])
    parser.add_argument("--mb", type=float, default=4, help="of parameters")
    parser.add_argument("--wait-ms", type=float, default=50, help="of emulated steps")
    parser.add_argument("--steps", type=int, default=30, help="of each worker a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--costs",
        type=Path,
        default=MEASURED,
        help="from calibrate; else the package's",
    )
    a = parser.parse_args(args)
    costs = load_costs(a.costs, "auto")
    for how, wait_ms in (("measured", 0.0), ("emulated", a.wait_ms)):
        run(how, wait_ms, a, costs)
    for workers in a.more:
        beyond(workers, a, costs)


def run(how: str, wait_ms: float, a: Any, costs: Costs) -> None:
    """Runs and simulates steps of each number of workers."""
    with NullStep(
        "dense", mb=a.mb, workers=max(a.workers), compute_wait_s=wait_ms / 1e3
    ) as work:
        work.run(max(a.workers), 4)
        ways = {str(n): partial(cost_of, work, n, a.steps) for n in a.workers}
        found = measure.take_turns(ways, a.rounds)
        work.check()
    for workers in a.workers:
        rounds = found[str(workers)]
        rates = [one.steps_per_s for one in rounds]
        null = null_steps(costs, "async", a.mb, workers, 0, wait_ms)
        simulated = null.predicted(median(rounds, "cores"))
        measure.emit(
            "curves",
            kind=how,
            mb=a.mb,
            wait_ms=wait_ms,
            ps=1,
            workers=workers,
            **measure.spread("steps_per_s", rates),
            simulated_per_s=round(simulated, 1),
            error=round(simulated / statistics.median(rates) - 1, 3),
        )


def beyond(workers: int, a: Any, costs: Costs) -> None:
    """Simulates emulated steps of more workers, a ps for eight of them."""
    ps = max(1, workers // 8)
    found = simulate(
        dense_step(int(a.mb * 1e6), variables=16),
        workers=workers,
        ps=ps,
        mode="async",
        steps=20,
        computing=Computing(a.wait_ms / 1e3),
        costs=costs,
    )
    measure.emit(
        "curves",
        kind="simulated",
        mb=a.mb,
        wait_ms=a.wait_ms,
        ps=ps,
        workers=workers,
        simulated_per_s=round(found.steps_per_s, 1),
    )


if __name__ == "__main__":
    main()
