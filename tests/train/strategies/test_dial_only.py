"""Clients of federated runs that listen nowhere: they only dial."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.client.cluster import Cluster, connect
from jgraph.errors import ClusterUnreachableError
from jgraph.graph.device import TaskName
from jgraph.launch.local.cluster import LocalCluster
from jgraph.rpc.dial import is_refused
from jgraph.rpc.grpc.transport import GrpcTransport
from jgraph.rpc.security.token import TOKEN_FILE
from jgraph.testing.transport_harness import PS, Recorder, numbers, step
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.strategies.federated import Federated
from tests.support.cli import run as command
from tests.support.clients import (
    EXAMPLES,
    client_trainer,
    mean_of_clients,
    named,
    tallied,
    written,
)
from tests.support.listening import listening_sockets
from tests.support.models import parameters
from tests.support.run_async import run_async
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.procs, pytest.mark.timeout(150)]


@contextmanager
def dialling(cluster: LocalCluster, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that joins a cluster and listens nowhere."""
    words = ["--join", cluster.target, "--dial-only", "--json", "--end-with-input"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment[TOKEN_FILE] = str(cluster._token_file)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jgraph", "server", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_clients_that_only_dial_train_and_have_no_listening_socket(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        local = stack.enter_context(LocalCluster(ps=1, workers=1))
        clients = [
            stack.enter_context(dialling(local, tmp_path / f"{n}.log")) for n in (1, 2)
        ]
        told = [json.loads(client.stdout.readline()) for client in clients]  # type: ignore[union-attr]
        assert {one["task"] for one in told} == {
            "/job:worker/task:1",
            "/job:worker/task:2",
        }
        cluster = stack.enter_context(connect(local.target))
        strategy = Federated(min_clients=3, secure_sum=SecureSum(threshold=2))
        there = client_trainer(cluster, strategy)
        source = written(tmp_path / "own", 3)
        run = there.fit(source, steps=3, batch_size=EXAMPLES, progress=False)
        rounds = [one.members for one in run.rounds()]
        assert [len(members) for members in rounds] == [3, 3, 3]
        for value, wanted in zip(
            parameters(run.model()), mean_of_clients(3, rounds), strict=True
        ):
            np.testing.assert_allclose(value, wanted, atol=1e-4)
        there.close()
        take_turns(cluster, tmp_path / "names")
        for client in clients:
            assert listening_sockets(client.pid) == []
        assert listening_sockets(os.getpid())  # of the others, that this test started


def take_turns(cluster: Cluster, directory: Path) -> None:
    """All clients have rounds that wait for nobody, and each of these counts once."""
    there = tallied(cluster, Federated(max_staleness=0), 3)

    def look(run: Any, report: Any) -> None:
        if len({task for one in run.rounds() for task in one.members}) == 3:
            run.stop()

    options: Any = {"batch_size": EXAMPLES, "progress": False, "callbacks": [look]}
    run = there.fit(named(directory, 3), steps=100_000, **options)
    (counts,) = parameters(run.model())
    members = [task for one in run.rounds() for task in one.members]
    clients = [f"/job:worker/task:{n}" for n in range(3)]
    assert counts.tolist() == [members.count(TaskName(task)) for task in clients]
    there.close()


@pytest.mark.nightly
def test_a_client_that_only_dials_is_left_out_of_rounds_once_it_is_killed(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        local = stack.enter_context(LocalCluster(ps=1, workers=2))
        client = stack.enter_context(dialling(local, tmp_path / "log"))
        assert client.stdout is not None
        task = json.loads(client.stdout.readline())["task"]
        there = client_trainer(
            stack.enter_context(connect(local.target)), Federated(min_clients=2)
        )
        source = written(tmp_path / "own", 3)
        run = there.fit(
            source, steps=10**6, batch_size=EXAMPLES, block=False, progress=False
        )
        wait_until(lambda: len(run.rounds()) > 2)
        client.kill()
        wait_until(lambda: task not in run.rounds()[-1].members)
        before = run.rounds()[-1].number
        wait_until(lambda: run.rounds()[-1].number > before + 2)
        run.stop()
        run.wait(30)
        members = [set(one.members) for one in run.rounds()]
        assert members[0] == {f"/job:worker/task:{n}" for n in range(3)}
        assert members[-1] == {f"/job:worker/task:{n}" for n in range(2)}
        there.close()


def test_two_that_only_dial_talk_through_a_task_that_both_dial() -> None:
    async def main() -> None:
        names = [TaskName(f"/job:worker/task:{n}") for n in range(2)]
        ps = GrpcTransport(PS)
        workers = [GrpcTransport(name, bind=None) for name in names]
        at = {one: Recorder() for one in (ps, *workers)}
        peers = {PS: await ps.start(at[ps])}
        for name, worker in zip(names, workers, strict=True):
            peers[name] = await worker.start(at[worker])
        for one in at:
            one.set_peers(peers)
        first, second = workers
        await first.ask(peers[PS], "Echo", step(0), timeout_s=10)
        first.post(names[1], step(1))
        second.post(names[0], step(2))
        assert numbers(await at[second].wait_frames(1)) == [1]
        assert numbers(await at[first].wait_frames(1)) == [2]
        reply = await second.ask(peers[names[0]], "Echo", step(3), timeout_s=10)
        assert numbers([reply]) == [3]
        theirs = await second.who_is_at(peers[names[0]], 10)
        assert (theirs.task, theirs.incarnation) == (names[0], first.incarnation)
        assert not await is_refused(peers[names[0]])
        stranger = GrpcTransport(None)
        with pytest.raises(ClusterUnreachableError, match="nothing listens there"):
            await stranger.ask(peers[names[0]], "Echo", step(4), timeout_s=10)
        await stranger.close()
        for one in reversed(at):
            await one.close()

    run_async(main())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--dial-only goes with --join"),
        (("--join", "jgraph://here:1", "--bind", "0.0.0.0"), "does not go with --bind"),
        (("--join", "jgraph://here:1", "--port", "8470"), "does not go with --port"),
        (("--join", "jgraph://here:1", "--job", "ps"), "all workers dial a ps"),
    ],
)
def test_what_would_have_to_listen_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    code, out, err = command(capsys, "server", "--dial-only", *words)
    assert (code, out) == (1, "")
    assert err.startswith("JG-124")
    assert says in err
