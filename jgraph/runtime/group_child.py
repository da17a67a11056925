"""Child process of a worker's server: XLA's collectives, gloo on CPU and NCCL on GPU.

A process that takes part in a collective is aborted when another one is lost, and
nothing can be done about it there. So it is a process of its own, which holds nothing:
what it sums is in memory that it shares with its server, and so are the sums.

    server -> child   {"rank": 0, …} once, then "sum <version>"
    child -> server   "ready", then "summed <version>", or "failed <why>" and the end

It ends with its server, however that ends: the kernel sends SIGKILL, and there is an
end of its input. Run as ``python -m jgraph.runtime.group_child``.
"""

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any, Final, final

import numpy as np

BUCKET_BYTES: Final = 8 << 20
"""Of one collective at most: gloo takes many times as long for what is larger."""

STAMPS: Final = 4096
"""The number of a version is known in a sum modulo this."""

_ALIGNED: Final = 16
_PR_SET_PDEATHSIG: Final = 1


@final
class Layout:
    """Where what is summed lies in the memory of a server and its child.

    There is a row for each member, with its part of what is summed, then a number that
    tells of the version; below is a row for the sum of the own part.

    Args:
      members: how many there are.
      elements: float32 of the largest part.

    Example:
      >>> layout = Layout(2, 100)
      >>> layout.width, layout.buckets, layout.nbytes
      (112, 1, 1344)
    """

    def __init__(self, members: int, elements: int) -> None:
        most = max(BUCKET_BYTES // 4 // members // _ALIGNED, 1) * _ALIGNED
        self.members = members
        self.buckets = -(-(elements + 1) // most)
        even = -(-(elements + 1) // self.buckets)
        self.bucket = -(-even // _ALIGNED) * _ALIGNED
        self.width = self.bucket * self.buckets
        self.nbytes = 4 * self.width * (members + 1)

    def rows(
        self, memory: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns what is summed, float32[members, width], and the sum, float32[width].

        Args:
          memory: uint8, of at least ``nbytes``.
        """
        floats = memory[: self.nbytes].view(np.float32)
        rows = floats.reshape(self.members + 1, self.width)
        return rows[:-1], rows[-1]


def stamp(version: int) -> float:
    """Returns the number by which contributions to a version are known in their sum.

    Example:
      >>> stamp(4097)
      1.0
    """
    return float(version % STAMPS)


def sum_in_buckets(
    add: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    layout: Layout,
    rows: np.ndarray[Any, Any],
    mean: np.ndarray[Any, Any],
) -> None:
    """Fills the mean of the own part, bucket by bucket.

    Args:
      add: gives float32[bucket], the mean over members of their float32[members,
        bucket], in the row of this one.
      layout: of the memory.
      rows: float32[members, width].
      mean: float32[width].

    Raises:
      ValueError: the members had other versions.
    """
    wanted = rows[0, -1]
    for start in range(0, layout.width, layout.bucket):
        piece = slice(start, start + layout.bucket)
        mean[piece] = add(np.ascontiguousarray(rows[:, piece]))
    if not abs(float(mean[-1]) - float(wanted)) < 0.25:
        raise ValueError(
            f"the children summed other versions: {mean[-1]:g}, and not {wanted:g}"
        )


def main() -> None:
    """Joins the others, and sums until the input ends."""
    out = _own_output()
    setup = json.loads(sys.stdin.readline())
    _end_with(setup["parent"])
    orders: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, orders), daemon=True).start()
    try:
        _serve(setup, orders, out)
    except Exception as error:  # noqa: BLE001  # whatever it is, the server is told
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        _say(out, f"failed {text}")
        # What JAX does when it ends would wait for those that are lost.
        os._exit(3)


def _serve(setup: Any, orders: "SimpleQueue[int]", out: IO[str]) -> None:
    from jgraph._compat import join_collectives, member_means

    layout = Layout(setup["members"], setup["elements"])
    memory = np.memmap(f"/proc/self/fd/{setup['memory']}", np.uint8, "r+")
    rows, mean = layout.rows(memory)
    host = setup["host"]
    if setup["loopback"]:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    join_collectives(setup["address"], setup["members"], setup["rank"], host)
    add = member_means(layout.members, layout.bucket)
    add(np.zeros((layout.members, layout.bucket), np.float32))  # all have met
    _say(out, "ready")
    while True:
        version = orders.get()
        sum_in_buckets(add, layout, rows, mean)
        _say(out, f"summed {version}")


def _own_output() -> IO[str]:
    """Returns the output, to which nothing else writes from now on."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def _end_with(parent: int) -> None:
    """Lets the kernel end this process with its server."""
    with suppress(OSError, AttributeError):  # another system: its input ends as well
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _listen(lines: IO[str], orders: "SimpleQueue[int]") -> None:
    for line in lines:
        orders.put(int(line.removeprefix("sum ")))
    os._exit(0)  # the server has ended, or wants no more


def _say(out: IO[str], text: str) -> None:
    with suppress(OSError):  # the server has ended
        out.write(text + "\n")
        out.flush()


if __name__ == "__main__":
    main()
