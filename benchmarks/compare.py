"""Ours and other systems in turns: ``python -m benchmarks.compare``.

Needs ``make peers``. For each kind of work all clusters are started once and then take
turns, A B C, C B A, …, each for about ``--seconds``; the others wait idle. Prints one
JSON line per configuration, transport of ours and peer (``beside``): medians of both
sides, and ``ratio``, the median, least and greatest of ours / the peer's over the
rounds.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

from benchmarks import measure
from benchmarks.models.mlp import BATCH
from benchmarks.null_step import MODES, configuration
from benchmarks.peer_process import PEERS, Peer
from benchmarks.train import on_cluster


@final
@dataclass(frozen=True, slots=True)
class Work:
    """What is compared: its kind and size, and with what it usually is."""

    kind: str
    mb: float
    workers: tuple[int, ...]
    transports: tuple[str, ...] = ("auto",)
    mode: str = "async"


SELECTION = {
    "scalar": Work("scalar", 0, (1, 4, 8)),
    "dense8": Work("dense", 8, (1, 4, 8), ("auto", "network")),
    "dense100": Work("dense", 100, (1, 4, 8), ("auto", "network")),
    "sparse": Work("sparse", 0, (1, 4)),
    "mlp": Work("mlp", 0, (1, 2, 4), ("auto", "network")),
    "sync-scalar": Work("scalar", 0, (2, 4), mode="sync"),
    "sync-dense8": Work("dense", 8, (2, 4), mode="sync"),
    "sync-dense100": Work("dense", 100, (2, 4), ("network",), mode="sync"),
}
# What a peer can do; one that is not here can do all.
ABLE = {
    "tensorflow_strategy": {"dense", "mlp"},
    "ray_ps": {"dense", "mlp"},
    "torch_ddp": {"dense", "mlp"},
}
# These run on all of their workers or not at all.
WHOLE = {"tensorflow_strategy", "torch_ddp"}
# These can also do synchronous training.
IN_STEP = {"tensorflow_ps", "torch_ddp"}


class Side(Protocol):
    """A cluster that runs steps when asked."""

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs steps on each of the first workers; returns when each was done."""

    def peaks(self) -> dict[str, float]:
        """Returns the peak memory of each task, in MB."""


def open_sides(
    stack: ExitStack, what: Work, workers: int, a: argparse.Namespace
) -> dict[str, Side]:
    """Starts our clusters, one per transport, and those of the peers."""
    sides: dict[str, Side] = {}
    transports: Any = a.transport or what.transports
    for transport in transports:
        if what.kind == "mlp":
            sides[transport] = stack.enter_context(
                on_cluster(
                    "mlp",
                    ps=a.ps,
                    workers=workers,
                    transport=transport,
                    strategy="prefetch" if a.prefetch else "AsyncPS",
                )
            )
        else:
            work: Any = MODES[what.mode](
                what.kind,  # type: ignore[arg-type]  # one of its kinds
                mb=what.mb,
                rows=a.rows,
                ps=a.ps,
                workers=workers,
                transport=transport,
                tls=a.tls,
            )
            sides[transport] = stack.enter_context(work)
    arguments = [f"--kind={what.kind}", f"--mb={what.mb}", f"--rows={a.rows}"]
    arguments += [f"--ps={a.ps}", f"--workers={workers}"]
    for name in able(what, a):
        mode = [f"--mode={what.mode}"] if name == "tensorflow_ps" else []
        sides[name] = stack.enter_context(Peer(name, [*arguments, *mode]))
    return sides


def able(what: Work, a: argparse.Namespace) -> list[str]:
    """Returns those of the chosen peers that can do a kind of work."""
    peers = [peer for peer in a.peer if what.kind in ABLE.get(peer, {what.kind})]
    return [peer for peer in peers if what.mode == "async" or peer in IN_STEP]


def compare(
    sides: dict[str, Side], workers: int, a: argparse.Namespace
) -> dict[str, list[measure.Rates]]:
    """Lets the sides take turns, each with steps for about ``--seconds``."""
    ways: dict[str, Callable[[], measure.Rates]] = {}
    for name, side in sides.items():
        side.run(workers, 6)
        steps = measure.steps_for(partial(side.run, workers), a.seconds, a.least)
        ways[name] = partial(measure.rates_of, side.run, workers, steps)
    return measure.take_turns(ways, a.rounds)


def report(
    what: dict[str, Any],
    sides: dict[str, Side],
    found: dict[str, list[measure.Rates]],
) -> None:
    """Prints a line for each transport of ours and each peer."""
    ours: dict[str, Any] = {t: side for t, side in sides.items() if t not in PEERS}
    for transport, side in ours.items():
        if what["kind"] != "mlp":
            side.check()
        rates = [r.steps_per_s for r in found[transport]]
        examples: dict[str, float] = {}
        if what["kind"] == "mlp":
            examples = measure.spread("examples_per_s", [r * BATCH for r in rates], 0)
        for peer in [name for name in sides if name in PEERS]:
            theirs = found[peer]
            measure.emit(
                "compare",
                **what,
                transport=transport,
                beside=peer,
                rounds=len(theirs),
                **measure.rate_figures(found[transport]),
                **examples,
                **measure.ratio("ratio", rates, [r.steps_per_s for r in theirs]),
                bytes_per_step=side.bytes_per_step,
                peak_rss_mb=side.peaks(),
                **measure.rate_figures(theirs, "peer_"),
                peer_peak_rss_mb=sides[peer].peaks(),
                peer=version(sides[peer]),
            )


def version(peer: Any) -> str:
    """Returns the name and version of what a peer runs on."""
    about: dict[str, Any] = peer.about
    names = ("tensorflow", "ray", "torch")
    return ", ".join(f"{name} {about[name]}" for name in names if name in about)


def run(what: Work, a: argparse.Namespace) -> None:
    """Compares one kind of work with several numbers of workers."""
    peers = able(what, a)
    if not peers:
        return
    # A Trainer uses all workers of its cluster: that takes a cluster for each number.
    whole = what.kind == "mlp" or what.mode == "sync" or WHOLE.intersection(peers)
    workers = list(a.workers or what.workers)
    mode: dict[str, Any] = {} if what.mode == "async" else {"mode": what.mode}
    if a.prefetch:
        mode["prefetch"] = 1
    if a.tls:
        mode["tls"] = True
    for group in [[w] for w in workers] if whole else [workers]:
        with ExitStack() as stack:
            sides = open_sides(stack, what, max(group), a)
            for count in group:
                found = compare(sides, count, a)
                line = configuration(what.kind, what.mb, a.rows, a.ps, count)
                report({**line, **mode}, sides, found)


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    names = list(SELECTION)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, nargs="+", help="in place of the usual")
    parser.add_argument("--transport", nargs="+", choices=["auto", "network"])
    peers = list(PEERS)
    parser.add_argument("--peer", nargs="+", choices=peers, default=peers[:1])
    parser.add_argument("--tls", action="store_true", help="ours encrypted; not mlp")
    parser.add_argument(
        "--prefetch", action="store_true", help="ours with prefetch=1; only mlp"
    )
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--least", type=int, default=6, help="steps of one turn")
    a = parser.parse_args(args)
    for name in a.only:
        run(SELECTION[name], a)


if __name__ == "__main__":
    main()
