"""Hosts with addresses of their own: network namespaces, and what joins them.

Needs root and iproute2; nothing outside of the namespaces is touched but the bridge, or
the device, which goes with them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, final

from jgraph.client.cluster import Cluster, connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.launch.hosts import cluster_file
from jgraph.rpc.security.certificates import make_certificates
from tests.support.fault import Fault
from tests.support.loopback_hosts import begin_server, wait_serving
from tests.support.lossy import LossyNetwork

NET: Final = f"198.18.{os.getpid() % 250}"  # kept free for tests of networks
TAG: Final = f"jg{os.getpid() % 10**6}"
PORT: Final = 8470


def ip(*words: str) -> None:
    """Runs ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@final
class Host:
    """A network namespace with one address, on a device called ``inside``."""

    def __init__(self, number: int) -> None:
        self.name = f"{TAG}n{number}"
        self.address = f"{NET}.{number}"
        self.inside = f"{TAG}i{number}"
        self._port = f"{TAG}p{number}"  # on the bridge
        ip("netns", "add", self.name)

    def plug_in(self) -> None:
        """Joins it to the bridge."""
        cable = ("link", "add", self._port, "type", "veth", "peer", "name")
        ip(*cable, self.inside, "netns", self.name)
        ip("link", "set", self._port, "master", TAG, "up")
        self.configure()

    def configure(self) -> None:
        """Gives its device the address."""
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.inside)
        for device in ("lo", self.inside):
            ip("-n", self.name, "link", "set", device, "up")

    def down(self) -> None:
        """Takes its cable out: nothing is closed, nothing comes through."""
        ip("link", "set", self._port, "down")

    def up(self) -> None:
        ip("link", "set", self._port, "up")

    def lose(self, other: "Host") -> None:
        """Sends what is for another host where nobody is; other links stay."""
        nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
        self._neighbour("replace", other, *nobody)

    def find(self, other: "Host") -> None:
        """Asks anew where that is."""
        self._neighbour("del", other)

    def _neighbour(self, act: str, other: "Host", *how: str) -> None:
        ip("-n", self.name, "neigh", act, other.address, *how, "dev", self.inside)

    def tcp(self) -> dict[str, int]:
        """Returns what its kernel has counted of TCP."""
        read = ["ip", "netns", "exec", self.name, "cat", "/proc/net/snmp"]
        said = subprocess.run(read, check=True, capture_output=True, text=True).stdout
        names, counts = (x.split()[1:] for x in said.splitlines() if x[:4] == "Tcp:")
        return dict(zip(names, map(int, counts), strict=True))


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Makes hosts that reach each other, and this process, by a bridge."""
    try:
        ip("link", "add", TAG, "type", "bridge")
        _join_here()
        there = [Host(number) for number in range(1, count + 1)]
        for host in there:
            host.plug_in()
        yield there
    finally:
        _clear(count)


@contextmanager
def lossy_hosts(count: int, seed: int) -> Iterator[tuple[list[Host], LossyNetwork]]:
    """Makes hosts that are joined, also to this process, by a network that may err."""
    network = LossyNetwork(seed)
    try:
        network.add(TAG, f"{NET}.254")
        _join_here()
        there = [Host(number) for number in range(1, count + 1)]
        for host in there:
            network.add(host.inside, host.address)
            ip("link", "set", host.inside, "netns", host.name)
            host.configure()
        network.start()
        yield there, network
    finally:
        network.close()
        _clear(count)


def _join_here() -> None:
    ip("addr", "add", f"{NET}.254/24", "dev", TAG)
    ip("link", "set", TAG, "up")


def why_no_hosts() -> str:
    """Returns why this machine gives tests no hosts of their own; empty if it does."""
    if shutil.which("ip") is None:
        return "needs ip of iproute2, to make hosts of network namespaces"
    try:
        with hosts(1):
            pass
        with lossy_hosts(1, 0):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"hosts of their own need root, namespaces and their links: {said}"


def _clear(count: int) -> None:
    numbers = range(1, count + 1)
    # First the cables: those of a namespace that is gone stay for a while.
    cables = [["link", "del", f"{TAG}p{number}"] for number in numbers]
    spaces = [["netns", "del", f"{TAG}n{number}"] for number in numbers]
    for command in [*cables, *spaces, ["link", "del", TAG]]:
        subprocess.run(["ip", *command], check=False, capture_output=True)


@contextmanager
def cluster_on(
    there: list[Host], fault: Fault, path: Path, ps: int = 1
) -> Iterator[Cluster]:
    """Starts a ps on each of the first hosts, and workers on the two last."""
    on = {f"ps:{index}": there[index] for index in range(ps)}
    on |= {"worker:0": there[-2], "worker:1": there[-1]}
    spec = ClusterSpec(
        {
            "ps": [f"{host.address}:{PORT}" for host in there[:ps]],
            "worker": [f"{host.address}:{PORT + 1}" for host in there[-2:]],
        }
    )
    file, certificates = path / "cluster.toml", path / "certificates"
    file.write_bytes(cluster_file(spec))
    make_certificates(certificates, spec.tasks())
    fault.logs.mkdir()
    servers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for task, host in on.items():
            job, index = task.split(":")
            options = ["--job", job, "--task", index, "--bind", host.address]
            files = ["--cluster", str(file), "--tls-dir", str(certificates)]
            command = [sys.executable, "-m", "jgraph", "server", "--end-with-input"]
            words = ["ip", "netns", "exec", host.name, *command, *options, *files]
            log = fault.logs / f"{job}{index}.log"
            servers.append(begin_server(stack, words, log))
        wait_serving(stack, servers)
        target = f"jgraphs://{there[0].address}:{PORT}"
        with connect(target, timeout_s=60, tls=certificates) as cluster:
            yield cluster
