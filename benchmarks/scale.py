"""More workers, more steps: ``python -m benchmarks.scale --workers 1 2 8``.

Null steps of dense parameters with a wait in place of computing, as if every worker had
an accelerator of its own: what keeps N workers from N times the steps of one is then
the way of the bytes and the ps. Prints one JSON line per number of workers; ``speedup``
is the ratio to the first number, of rounds that took turns on one cluster.

``--idle``: what a ps pays, in memory and CPU, for each of 500 workers that connected
and do nothing; see ``idle_workers``.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks import idle_workers, measure
from benchmarks.null_step import MODES


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--wait-ms", type=float, default=50, help="of every step")
    parser.add_argument("--mb", type=float, default=4, help="of parameters")
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--mode", choices=list(MODES), default="async")
    parser.add_argument("--transport", choices=["auto", "network"], default="auto")
    parser.add_argument("--steps", type=int, default=40, help="of each worker a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", action="store_true", help="workers that do nothing")
    parser.add_argument("--connections", type=int, nargs="+", default=[500])
    parser.add_argument("--seconds", type=float, default=20, help="of doing nothing")
    parser.add_argument("--rows", action="store_true", help="of --idle: only its row")
    a = parser.parse_args(args)
    if a.idle:
        idle_workers.run(a.connections, a.seconds, rows=a.rows)
        return
    with MODES[a.mode](
        "dense",
        mb=a.mb,
        ps=a.ps,
        workers=max(a.workers),
        transport=a.transport,
        compute_wait_s=a.wait_ms / 1e3,
    ) as work:
        work.run(max(a.workers), 4)
        ways = {
            str(workers): partial(measure.rates_of, work.run, workers, a.steps)
            for workers in a.workers
        }
        found = measure.take_turns(ways, a.rounds)
        work.check()
        first = [r.steps_per_s for r in found[str(a.workers[0])]]
        for workers in a.workers:
            rates = found[str(workers)]
            measure.emit(
                "scale",
                mode=a.mode,
                transport=a.transport,
                mb=a.mb,
                wait_ms=a.wait_ms,
                ps=a.ps,
                workers=workers,
                steps=a.steps,
                rounds=a.rounds,
                **measure.rate_figures(rates),
                **measure.ratio("speedup", [r.steps_per_s for r in rates], first),
                bytes_per_step=work.bytes_per_step,
                peak_rss_mb=work.peaks(),
            )


if __name__ == "__main__":
    main()
