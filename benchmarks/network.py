"""What runs between hosts, beside TensorFlow and plain JAX: ``python -m benchmarks
network --rows``.

Needs ``make peers-tensorflow peers-torch``, and about half an hour of a quiet machine.
A line for each row, as ``benchmarks/README.md`` has them under "Between hosts": ratios
of steps/s where nothing else is said, medians of three rounds in turns.
``--only 1 4`` prints these rows.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from benchmarks.rows import Lines, Row, each, print_rows

TURNS = "--rounds 3 --seconds 2"
BESIDE = f"{TURNS} --peer tensorflow_ps"
NETWORK = "--transport network"


def transport_figures(lines: Lines) -> list[Any]:
    """Returns GB/s of TCP's at 16 and 100 MB, then CPU of TCP's, then of records."""
    speed = each("to_tcp", benchmark="transport", way="post")(lines)[-2:]
    found: dict[tuple[str, str, int], float] = {
        (line["benchmark"], line["way"], line["bytes"]): line["cpu_s_per_gb"]
        for line in lines
    }
    cpu = []
    for kind, way in (("transport", "post"), ("transport_tls", "records")):
        for nbytes in (16 * 10**6, 100 * 10**6):
            own, bare = found[kind, way, nbytes], found[kind, "tcp", nbytes]
            cpu.append(round(own / bare, 3))
    return [*speed, *cpu]


ROWS = [
    Row([f"compare --only dense8 --workers 1 4 8 {NETWORK} {BESIDE}"], each("ratio")),
    Row([f"compare --only dense100 --workers 1 4 8 {NETWORK} {BESIDE}"], each("ratio")),
    Row(
        [
            f"compare --only {kind} --workers 1 {NETWORK} --tls {BESIDE}"
            for kind in ("dense8", "dense100")
        ],
        each("ratio"),
    ),
    Row([f"compare --only scalar --workers 1 8 {NETWORK} {BESIDE}"], each("ratio")),
    Row(
        [
            f"compare --only sparse --workers 1 4 {NETWORK} {BESIDE}",
            f"embedding --rounds 3 {NETWORK} --peer",
        ],
        each("ratio"),
    ),
    Row(
        [
            f"compare --only mlp --workers 1 2 4 --transport {way} {BESIDE}"
            for way in ("network", "auto", "auto --prefetch")
        ],
        each("ratio"),
    ),
    Row(
        [
            f"train --model mlp --ps 1 --workers 1 --baseline --rounds 3 --strategy {s}"
            for s in ("AsyncPS", "prefetch")
        ],
        each("ratio_to_plain_jax"),
    ),
    Row(
        ["variables --layers 8 24 --rounds 3"],
        lambda lines: [
            ratio
            for way in ("cluster", "prefetch", "local")
            for ratio in each(f"{way}_ratio")(lines)
        ],
    ),
    Row(["overhead --variables 100 1000 --rounds 3"], each("variable_us"), "us"),
    Row(["transport", "transport --tls"], transport_figures),
    Row(["transport --largest 64"], each("ms", way="post", bytes=4), "ms"),
    Row(["transport --fan-in"], each("speed_to_tcp", way="post")),
    Row(
        [f"compare --only sync-dense100 --workers 2 4 {TURNS} --peer torch_ddp"],
        each("ratio"),
    ),
]


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument(
        "--rows", action="store_true", help="the default; no other form"
    )
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="ROW")
    a = parser.parse_args(args)
    print_rows(ROWS, a.only)


if __name__ == "__main__":
    main()
