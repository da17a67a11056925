"""Two network namespaces with a veth pair between them, as two hosts.

Run: ``python -m benchmarks null_step --namespaces`` (as root, on Linux with iproute2).
A task has a PID namespace of its own as well: neither an abstract socket nor memory of
another process can be reached, so that what runs between hosts is all that helps.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.launch.hosts import Host
from jgraph.launch.ssh import HostsCluster

_NET: Final = 0x40000000  # CLONE_NEWNET
_START_S: Final = 90.0
_ENDS: Final = ("192.0.2.1", "192.0.2.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts; this process moves to the first, for good.

    Raises:
      SystemExit: that is not permitted, or iproute2 is not here; says so.
    """
    names = [f"jgraph{os.getpid()}{end}" for end in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name])
            first, second = names
            pair = ("type", "veth", "peer", "name", "eth", "netns", second)
            _ip("-n", first, "link", "add", "eth", *pair)
            for name, address in zip(names, _ENDS, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth")
                for device in ("lo", "eth"):
                    _ip("-n", name, "link", "set", device, "up")
            _move_to(first)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            raise SystemExit(
                "skipped: two network namespaces need root and iproute2 "
                f"({str(why).strip()})"
            ) from None
        hosts = [Host(*end) for end in zip(names, _ENDS, strict=True)]
        yield hosts[0], hosts[1]


def _move_to(name: str) -> None:
    """Lets the threads that this process begins from now on be in a namespace."""
    with open(f"/run/netns/{name}", "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _NET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@contextmanager
def cluster_of_two_hosts(ps: int, workers: int) -> Iterator[Cluster]:
    """A cluster whose ps are on one host, and whose workers and client on another."""
    with (
        two_hosts() as (ours, theirs),
        tempfile.TemporaryDirectory() as logs,
        HostsCluster(
            [theirs] * ps + [ours] * workers,
            {"ps": ps, "worker": workers},
            Path(logs),
            jgraph=f"{sys.executable} -m jgraph",
            ssh=f"{sys.executable} -m benchmarks.namespaces",
            say=lambda line: print(line, file=sys.stderr),
        ) as hosts,
    ):
        hosts.wait(_START_S)
        with jg.connect(hosts.target, tls=hosts.certificates) as cluster:
            yield cluster


def main() -> None:
    """Runs a command on one of the hosts, as ssh does: ``-- HOST COMMAND``."""
    host, command = sys.argv[sys.argv.index("--") + 1 :]
    own = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    words = ("ip", "netns", "exec", host, *own, "sh", "-c", command)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
