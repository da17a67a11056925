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
from functools import partial
from typing import Any, Protocol

from benchmarks import measure
from benchmarks.models.mlp import BATCH
from benchmarks.null_step import NullStep, configuration
from benchmarks.peer_process import PEERS, Peer
from benchmarks.train import OnCluster

# Name: kind, megabytes, numbers of workers, transports of ours.
SELECTION: dict[str, tuple[str, float, tuple[int, ...], tuple[str, ...]]] = {
    "scalar": ("scalar", 0, (1, 4, 8), ("auto",)),
    "dense8": ("dense", 8, (1, 4, 8), ("auto", "grpc")),
    "dense100": ("dense", 100, (1, 4, 8), ("auto", "grpc")),
    "sparse": ("sparse", 0, (1, 4), ("auto",)),
    "mlp": ("mlp", 0, (1, 2, 4), ("auto", "grpc")),
}
# What a peer can do; one that is not here can do all.
ABLE = {
    "tensorflow_strategy": {"dense", "mlp"},
    "ray_ps": {"dense", "mlp"},
    "torch_ddp": {"dense", "mlp"},
}
# These run on all of their workers or not at all.
WHOLE = {"tensorflow_strategy", "torch_ddp"}


class Side(Protocol):
    """A cluster that runs steps when asked."""

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs steps on each of the first workers; returns when each was done."""

    def peaks(self) -> dict[str, float]:
        """Returns the peak memory of each task, in MB."""


def open_sides(
    stack: ExitStack, kind: str, mb: float, workers: int, a: argparse.Namespace
) -> dict[str, Side]:
    """Starts our clusters, one per transport, and those of the peers."""
    sides: dict[str, Side] = {}
    for transport in a.transport:
        if kind == "mlp":
            sides[transport] = stack.enter_context(
                OnCluster("mlp", ps=a.ps, workers=workers, transport=transport)
            )
        else:
            work: Any = NullStep(
                kind,  # type: ignore[arg-type]  # argparse has checked it
                mb=mb,
                rows=a.rows,
                ps=a.ps,
                workers=workers,
                transport=transport,
            )
            sides[transport] = stack.enter_context(work)
    arguments = [f"--kind={kind}", f"--mb={mb}", f"--rows={a.rows}", f"--ps={a.ps}"]
    for name in able(kind, a):
        peer = Peer(name, [*arguments, f"--workers={workers}"])
        sides[name] = stack.enter_context(peer)
    return sides


def able(kind: str, a: argparse.Namespace) -> list[str]:
    """Returns those of the chosen peers that can do a kind of work."""
    return [peer for peer in a.peer if kind in ABLE.get(peer, {kind})]


def compare(
    sides: dict[str, Side], workers: int, a: argparse.Namespace
) -> dict[str, list[measure.Rates]]:
    """Lets the sides take turns, each with steps for about ``--seconds``."""
    ways: dict[str, Callable[[], measure.Rates]] = {}
    for name, side in sides.items():
        side.run(workers, 6)
        steps = measure.steps_for(partial(side.run, workers), a.seconds, a.least)
        ways[name] = partial(lambda s, n: measure.rates(s.run(workers, n)), side, steps)
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


def run(kind: str, mb: float, workers: Sequence[int], a: argparse.Namespace) -> None:
    """Compares one kind of work with several numbers of workers."""
    peers = able(kind, a)
    if not peers:
        return
    # A Trainer uses all workers of its cluster: that takes a cluster for each number.
    whole = kind == "mlp" or WHOLE.intersection(peers)
    groups = [[w] for w in workers] if whole else [list(workers)]
    for group in groups:
        with ExitStack() as stack:
            sides = open_sides(stack, kind, mb, max(group), a)
            for count in group:
                found = compare(sides, count, a)
                report(configuration(kind, mb, a.rows, a.ps, count), sides, found)


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    names = list(SELECTION)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--workers", type=int, nargs="+", help="in place of the usual")
    parser.add_argument("--transport", nargs="+", choices=["auto", "grpc"])
    peers = list(PEERS)
    parser.add_argument("--peer", nargs="+", choices=peers, default=peers[:1])
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--least", type=int, default=6, help="steps of one turn")
    a = parser.parse_args(args)
    chosen = a.transport
    for name in a.only:
        kind, mb, workers, transports = SELECTION[name]
        a.transport = chosen or transports
        run(kind, mb, a.workers or workers, a)


if __name__ == "__main__":
    main()
