"""Many benchmarks, one after the other: ``python -m benchmarks selection``.

Takes ten minutes; with ``--all``, for all that the tables of ``benchmarks/README.md``
have, about an hour. The lines go to standard output and to the end of
``benchmarks/results/DAY.jsonl``; then those tables and the plots are made anew. A
benchmark that fails does not stop the others, and is named at the end.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from benchmarks import measure, report
from benchmarks.peer_process import ROOT, installed


@final
@dataclass(frozen=True, slots=True)
class Selection:
    """What to run.

    Attributes:
      always: with or without peers.
      beside: for each peer, if it is installed.
      alone: if none is.
    """

    always: Sequence[str]
    beside: Mapping[str, Sequence[str]]
    alone: Sequence[str]

    def commands(self, peers: Sequence[str]) -> list[str]:
        """Returns what is run where these peers are installed.

        >>> Selection(["memory"], {"ray_ps": ["compare"]}, ["scale"]).commands([])
        ['memory', 'scale']
        """
        beside: dict[str, list[str]] = {}
        for peer in peers:
            for words in self.beside[peer]:
                beside.setdefault(words, []).append(peer)
        compared = [f"{words} {' '.join(them)}" for words, them in beside.items()]
        return [*self.always, *(compared or self.alone)]


TURNS = "--rounds 3 --seconds 1 --peer"
MLP = f"compare --only mlp --workers 2 --transport auto {TURNS}"
SHORT = Selection(
    [
        "imports --repeats 2",
        "startup --rounds 1",
        "overhead --rounds 3",
        "machines",
        "memory --width 3000",
        "scale --rounds 2",
        "auto --only mlp towers --rounds 2",
        "split --rounds 8",
        "straggler --rounds 2",
        "train --model mlp cnn --rounds 3 --steps 30",
        "train --ps 1 --workers 1 4 --baseline --rounds 3 --steps 100",
        "train --strategy SyncPS --ps 1 --workers 2 --baseline --rounds 3 --steps 60",
        "transport --largest 16000000",
        "transport --fan-in",
        "transport --tls --largest 1000000",
    ],
    {
        "tensorflow_ps": [
            f"compare --only scalar sparse mlp --workers 1 4 --transport auto {TURNS}",
            f"compare --only dense8 --workers 1 4 {TURNS}",
            f"compare --only sync-dense8 --workers 2 {TURNS}",
            "embedding --rounds 2 --steps 60 --peer",
        ],
        "tensorflow_strategy": (),
        **dict.fromkeys(("ray_ps", "torch_ddp"), (MLP,)),
    },
    [
        "null_step --kind scalar --workers 1 4",
        "null_step --kind dense --workers 1 4 --steps 50",
        "null_step --kind sparse --workers 1 4",
        "embedding --rounds 2 --steps 60",
    ],
)
LARGE = "--model cnn resnet18 lstm transformer wide_deep --rounds 3 --steps 8"
PAIRED = "compare --only dense8 mlp --peer"
ALL = Selection(
    [
        *("imports", "startup", "overhead", "memory", "straggler", "auto", "split"),
        "scale --workers 1 2 4 8",
        "scale --workers 1 2 4 8 --mode sync",
        "curves",
        "train",
        f"train {LARGE}",
        "train --ps 1 --workers 1 2 4 --baseline",
        f"train --ps 1 --workers 2 --baseline {LARGE}",
        "train --strategy SyncPS --ps 1 --workers 1 2 4 --baseline",
        f"train --strategy SyncPS --ps 1 --workers 2 --baseline {LARGE}",
        *("transport", "transport --fan-in", "transport --tls"),
    ],
    {
        "tensorflow_ps": [
            "compare --peer",
            "embedding --rows 1000000 16000000 --peer",
            "embedding --workers 2 --peer",
        ],
        **dict.fromkeys(("tensorflow_strategy", "ray_ps", "torch_ddp"), (PAIRED,)),
    },
    [
        "null_step --kind scalar --workers 1 4 8",
        "null_step --kind dense --workers 1 4 8",
        "null_step --kind dense --workers 1 4 8 --transport network",
        "null_step --kind dense --workers 2 4 --mode sync",
        "null_step --kind sparse --workers 1 4",
        "embedding --rows 1000000 16000000",
        "embedding --workers 2",
    ],
)


def select(commands: Sequence[str], results: Path) -> list[str]:
    """Runs benchmarks; adds their lines to a file. Returns those that failed."""
    failed = []
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as file:
        for words in commands:
            print(f"python -m benchmarks {words}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks", *words.split()]
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True
            ) as run:
                assert run.stdout is not None  # asked for
                for line in run.stdout:
                    print(line, end="", flush=True)
                    file.write(line)
                    file.flush()
            if run.returncode:
                failed.append(words)
    return failed


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="an hour of them")
    a = parser.parse_args(args)
    peers = installed()
    if not peers:
        print("no peers to compare with; type: make peers", file=sys.stderr)
    commands = (ALL if a.all else SHORT).commands(peers)
    failed = select(commands, report.RESULTS / f"{measure.today()}.jsonl")
    report.main([])
    if failed:
        sys.exit("\n".join(["these failed:", *failed]))


if __name__ == "__main__":
    main()
