"""``python -m benchmarks NAME …`` runs one; ``selection`` runs ten minutes of them.

The selection goes to standard output and to ``benchmarks/results/selection.jsonl``, of
which ``report`` makes the tables and plots of ``benchmarks/README.md``.
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peer_process import installed

RESULTS = Path(__file__).resolve().parent / "results"
SELECTION = [
    "imports --repeats 3",
    "startup --rounds 2",
    "straggler",
    "scale --rounds 2",
    "memory --width 3000",
    "overhead --rounds 3",
    "train --model mlp cnn --rounds 3 --steps 60",
    "train --ps 1 --workers 1 4 --baseline --rounds 3 --steps 100",
    "train --model wide_deep lstm --ps 1 --workers 2 --rounds 2 --steps 20 --baseline",
    "transport --largest 16000000",
    "transport --fan-in",
    "transport --tls --largest 16000000",
]
SHORT = "--rounds 3 --seconds 1"
# Of each peer, what of its comparison fits the time.
BESIDE = {
    "tensorflow_ps": [
        "compare --only scalar sparse mlp --workers 1 4 --transport auto",
        "compare --only dense8 --workers 1 4",
        "compare --only sync-scalar sync-dense8 --workers 2",
    ],
    "tensorflow_strategy": ["compare --only mlp --workers 2 --transport auto"],
    "ray_ps": ["compare --only mlp --workers 2 --transport auto"],
    "torch_ddp": ["compare --only mlp --workers 2 --transport auto"],
}
ALONE = [
    "null_step --kind scalar --workers 1 4",
    "null_step --kind dense --workers 1 4 --steps 50",
    "null_step --kind sparse --workers 1 4",
]


def selection() -> list[str]:
    """Returns what is run; beside the peers that are installed."""
    beside: dict[str, list[str]] = {}
    for peer in installed():
        for words in BESIDE[peer]:
            beside.setdefault(words, []).append(peer)
    compared = [
        f"{words} {SHORT} --peer {' '.join(peers)}" for words, peers in beside.items()
    ]
    if not compared:
        print("no peers to compare with; type: make peers", file=sys.stderr)
    return [*SELECTION, *(compared or ALONE)]


def select() -> None:
    """Runs the selection, one benchmark after the other."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "selection.jsonl").open("w") as file:
        for words in selection():
            name, *options = words.split()
            print(f"benchmarks.{words}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", f"benchmarks.{name}", *options]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
                assert run.stdout is not None  # asked for
                for line in run.stdout:
                    print(line, end="", flush=True)
                    file.write(line)
                    file.flush()
            if run.returncode:
                sys.exit(run.returncode)


def main() -> None:
    name, *options = sys.argv[1:] or ["--help"]
    if name == "selection":
        select()
    elif name.startswith("-"):
        print(__doc__)
    else:
        # In place of this process: what it spawns must find its own main module.
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
