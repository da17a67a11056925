"""Faults of hosts with addresses of their own: network namespaces, joined by a bridge.

Needs root and iproute2, and is skipped without; nothing outside of the namespaces is
touched but the bridge, which goes with them.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, final

import pytest

from jgraph.cluster.client import Cluster, connect
from jgraph.cluster.spec import ClusterSpec
from jgraph.launch.hosts import cluster_file
from jgraph.rpc.certificates import make_certificates
from jgraph.train.async_ps import AsyncPS
from jgraph.train.checkpoints import Checkpoints
from tests.faults.conftest import Fault
from tests.faults.counting import BATCH, IDS, Ledger, after, check_recovered, trainer

pytestmark = [pytest.mark.procs, pytest.mark.chaos, pytest.mark.timeout(240)]

NET: Final = f"198.18.{os.getpid() % 250}"  # kept free for tests of networks
TAG: Final = f"jg{os.getpid() % 10**6}"
PORT: Final = 8470


def ip(*words: str) -> None:
    """Runs ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@final
class Host:
    """A network namespace with one address."""

    def __init__(self, number: int) -> None:
        self.name = f"{TAG}n{number}"
        self.address = f"{NET}.{number}"
        self._port = f"{TAG}p{number}"  # on the bridge
        self._inside = f"{TAG}i{number}"
        ip("netns", "add", self.name)
        cable = ("link", "add", self._port, "type", "veth", "peer", "name")
        ip(*cable, self._inside, "netns", self.name)
        ip("link", "set", self._port, "master", TAG, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self._inside)
        for device in ("lo", self._inside):
            ip("-n", self.name, "link", "set", device, "up")

    def down(self) -> None:
        """Takes its cable out: nothing is closed, nothing comes through."""
        ip("link", "set", self._port, "down")

    def up(self) -> None:
        ip("link", "set", self._port, "up")

    def delay(self, milliseconds: int) -> None:
        """Lets what it sends arrive later."""
        qdisc = ["qdisc", "add", "dev", self._inside, "root", "netem"]
        late = ["tc", "-n", self.name, *qdisc, "delay", f"{milliseconds}ms"]
        if shutil.which("tc") is None or not _try(*late):
            pytest.skip("this kernel has no netem, or there is no tc")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Makes hosts that reach each other, and this process."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip of iproute2, to make hosts of network namespaces")
    try:
        yield _joined(count)
    finally:
        for number in range(1, count + 1):
            _try("ip", "netns", "del", f"{TAG}n{number}")
        _try("ip", "link", "del", TAG)


def _joined(count: int) -> list[Host]:
    try:
        ip("link", "add", TAG, "type", "bridge")
        ip("addr", "add", f"{NET}.254/24", "dev", TAG)
        ip("link", "set", TAG, "up")
        return [Host(number) for number in range(1, count + 1)]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"hosts of their own need root, and namespaces: {error.stderr}")


def _try(*command: str) -> bool:
    """Runs a command; returns whether it did what it should."""
    return not subprocess.run(command, check=False, capture_output=True).returncode


@contextmanager
def cluster_on(there: list[Host], fault: Fault, path: Path) -> Iterator[Cluster]:
    """Starts a ps and a worker on the first host, and a worker on the second."""
    first, second = there
    on = {"ps:0": first, "worker:0": first, "worker:1": second}
    spec = ClusterSpec(
        {
            "ps": [f"{first.address}:{PORT}"],
            "worker": [f"{first.address}:{PORT + 1}", f"{second.address}:{PORT}"],
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
            log = stack.enter_context((fault.logs / f"{job}{index}.log").open("w"))
            server = subprocess.Popen(
                ["ip", "netns", "exec", host.name, *command, *options, *files],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            servers.append(server)
            stack.callback(server.wait, 30)
            assert server.stdin is not None
            stack.callback(server.stdin.close)
        for server in servers:
            assert server.stdout is not None
            assert b"serves at" in server.stdout.readline()
            stack.callback(server.stdout.close)
        target = f"jgraphs://{first.address}:{PORT}"
        with connect(target, timeout_s=60, tls=certificates) as cluster:
            yield cluster


def test_rows_21_and_23_a_cable_that_is_out_for_a_second_loses_nothing(
    fault: Fault, tmp_path: Path
) -> None:
    with hosts(2) as there, cluster_on(there, fault, tmp_path) as cluster:
        trained, ledger = trainer(cluster, AsyncPS()), Ledger()

        def pull() -> None:
            there[1].down()
            threading.Timer(1.0, there[1].up).start()

        run = trained.fit(
            IDS,
            steps=600,
            batch_size=BATCH,
            callbacks=[after(100, pull)],
            progress=False,
        )
        assert (run.state, run.steps) == ("done", 600)
        ledger.add(run)
        assert ledger.check(trained) == 0
        assert set(run.metrics("loss")["replica"]) == {0, 1}
        trained.close()


def test_rows_21_and_23_a_host_whose_cable_is_out_is_noticed_and_done_without(
    fault: Fault, tmp_path: Path
) -> None:
    with hosts(2) as there, cluster_on(there, fault, tmp_path) as cluster:
        trained, ledger = trainer(cluster, AsyncPS()), Ledger()
        back = threading.Event()

        def plug() -> None:
            there[1].up()
            back.set()

        def pull() -> None:
            there[1].down()
            threading.Timer(25.0, plug).start()

        def end(run: object, report: object) -> None:
            if back.is_set():
                run.stop()  # type: ignore[attr-defined]

        run = trained.fit(
            IDS,
            steps=10**6,
            batch_size=BATCH,
            checkpoint=Checkpoints(fault.path, every=100),
            callbacks=[after(200, pull, saved_in=fault.path), end],
            progress=False,
        )
        assert run.state == "stopped"  # by us
        if run.recoveries():  # the worker said first that the ps is gone
            check_recovered(trained, run)
        else:
            ledger.add(run)
            ledger.check(trained, lost=1)
            fault.names += ["/job:worker/task:1 was lost; the other workers go on"]
        trained.close()


def test_row_24_a_slow_host_is_no_lost_one(fault: Fault, tmp_path: Path) -> None:
    with hosts(2) as there, ExitStack() as stack:
        there[1].delay(100)
        cluster = stack.enter_context(cluster_on(there, fault, tmp_path))
        trained, ledger = trainer(cluster, AsyncPS()), Ledger()
        run = trained.fit(IDS, steps=300, batch_size=BATCH, progress=False)
        assert (run.state, run.steps) == ("done", 300)
        ledger.add(run)
        assert ledger.check(trained) == 0
        trained.close()
