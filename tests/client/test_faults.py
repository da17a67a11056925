"""A wrong thing says so at once, by the names that the user knows; nothing hangs."""

import asyncio
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client import cluster as client
from jgraph.client.cluster import connect
from jgraph.clock import SystemClock
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import (
    AddressError,
    CallbackError,
    ClusterError,
    ClusterUnreachableError,
    ConfigError,
    DeadlineError,
    InvalidProgramError,
    JGError,
    NotExportableError,
    PortInUseError,
    TaskMemoryError,
    TaskMissingError,
    UninitializedError,
    UnknownMethodError,
)
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.function import function
from jgraph.graph.variable import Variable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.runtime.compute_errors import as_error
from jgraph.server.server import Server
from tests.support.servers import Servers

PS, WORKER = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def pair() -> Iterator[Servers]:
    """One ps and one worker that a test may break."""
    servers = Servers(ps=1, worker=1)
    yield servers
    servers.stop()


@contextmanager
def no_more_memory(nbytes: int) -> Iterator[None]:
    """This process gets ``nbytes`` more and then none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps no such limit")
@pytest.mark.parametrize("task", [PS, WORKER])
def test_a_task_without_memory_says_so_and_goes_on(
    pair: Servers, task: TaskName
) -> None:
    w = Variable("w", jnp.zeros(()), device=PS)

    def sort(x: Any) -> Any:
        w[...] = w[...] + 1
        with device(task):
            return jnp.sort(jnp.outer(x, x)).sum()

    with connect(pair.servers[-1].target, timeout_s=20) as cluster:
        session = cluster.session()
        assert session.run(sort, np.ones(3, np.float32)) == 9
        with (
            no_more_memory(1 << 30),
            pytest.raises(TaskMemoryError, match=f"{task} has no memory left") as told,
        ):
            session.run(sort, np.ones(1 << 16, np.float32), timeout_s=60)
        assert "17179869184 bytes" in told.value.message
        if lost := " w lost the value; restore" in told.value.message:
            session.initialize([w])
        assert lost == (task == PS)  # where it is updated by the same segment
        assert session.run(sort, np.ones(3, np.float32)) == 9


def test_what_python_says_of_memory_is_said_so_too() -> None:
    assert type(as_error(MemoryError("no room for 3 rows"), PS)) is TaskMemoryError
    assert "(nothing more was given)" in as_error(MemoryError(), PS).message


def test_taken_port_is_named_and_the_first_server_goes_on() -> None:
    with Server({"ps": ["127.0.0.1:0"]}) as first:
        port = first.address.rpartition(":")[2]
        with pytest.raises(PortInUseError, match=port):
            Server({"ps": [f"127.0.0.1:{port}"]})
        with connect(first.target, timeout_s=10) as cluster:
            assert cluster.tasks() == ["/job:ps/task:0"]


def test_stopped_server_has_freed_its_port_and_join_returns() -> None:
    server = Server({"ps": ["127.0.0.1:0"]})
    address = server.address
    assert not server.join(timeout_s=0)
    server.stop()
    assert server.join(timeout_s=10)
    with Server({"ps": [address]}) as again:
        assert again.address == address


def test_server_needs_to_know_which_task_it_is() -> None:
    spec = {"ps": ["127.0.0.1:1", "127.0.0.1:2"]}
    with pytest.raises(ConfigError, match="Give job_name and task_index"):
        Server(spec, "ps")
    with pytest.raises(LookupError, match="has no task 7"):
        Server(spec, "ps", 7)


def test_nothing_listening_is_said_when_the_time_is_up() -> None:
    clock = SystemClock()
    began = clock.now()
    with pytest.raises(ClusterUnreachableError, match="no jgraph server at"):
        connect(f"jgraph://127.0.0.1:{free_port()}", timeout_s=0.5)
    assert clock.now() - began < 10


def test_connect_waits_for_a_server_that_is_still_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    started: list[Server] = []
    once = client.open_cluster

    async def start_after_the_first(*args: Any, **options: Any) -> Any:
        try:
            return await once(*args, **options)
        except ClusterUnreachableError:
            serve = partial(Server, {"worker": [address]})
            started.append(await asyncio.to_thread(serve))
            raise

    monkeypatch.setattr(client, "open_cluster", start_after_the_first)
    with connect(address, timeout_s=60) as cluster:
        assert cluster.tasks() == ["/job:worker/task:0"]
    assert len(started) == 1
    started[0].stop()


def test_host_name_that_does_not_resolve_is_said() -> None:
    with pytest.raises(AddressError, match=r"no-such-host\.invalid"):
        connect("no-such-host.invalid:8470", timeout_s=5)


def test_listed_task_that_never_starts_is_named_by_connect() -> None:
    missing = f"127.0.0.1:{free_port()}"
    server = Server({"worker": ["127.0.0.1:0"]})
    server.set_cluster(ClusterSpec({"worker": [server.address, missing]}))
    with pytest.raises(TaskMissingError, match="/job:worker/task:1") as caught:
        connect(server.target, timeout_s=1)
    assert caught.value.details["missing"] == ["/job:worker/task:1"]
    assert missing in str(caught.value)
    server.stop()


def test_task_that_stopped_after_connecting_fails_the_run_not_hangs_it(
    pair: Servers,
) -> None:
    w = Variable("w", jnp.zeros(2), device="/job:ps/task:0")
    with connect(pair.server("/job:worker/task:0").target, timeout_s=10) as cluster:
        session = cluster.session()
        assert session.run(lambda: w[...] + 1).tolist() == [1, 1]
        fn = lambda: w[...] + 1
        session.run(fn)
        pair.server("/job:ps/task:0").stop()
        with pytest.raises(JGError, match="/job:ps/task:0"):
            session.run(fn, timeout_s=20)
        status = cluster.status()
        assert list(status.missing) == ["/job:ps/task:0"]
        # Closing does not need the ps to answer.


def test_a_session_goes_on_when_a_lost_task_is_there_again(pair: Servers) -> None:
    """Steps and callables of it are registered again, and values are asked for."""
    w = Variable("w", np.zeros(2, np.float32), device="/job:worker/task:0")
    by = Variable("by", np.ones(2, np.float32), device="/job:ps/task:0")

    @function
    def step() -> Any:
        with device("/job:worker/task:0"):
            w[...] = w[...] + by[...]
            return w[...]

    with connect(pair.server("/job:worker/task:0").target, timeout_s=10) as cluster:
        session = cluster.session()
        double = session.make_callable(lambda: 2 * w[...] * by[...])
        assert session.run(step).tolist() == [1, 1]
        assert double().tolist() == [2, 2]
        pair.lose("/job:ps/task:0")
        for _ in range(2):  # it is not there yet
            with pytest.raises(ClusterError, match="/job:ps/task:0"):
                session.run(step)
        pair.start_again("/job:ps/task:0")
        assert cluster.wait_for_tasks(20)
        for run in (double, partial(session.run, step)):
            with pytest.raises(UninitializedError, match="'by' on /job:ps/task:0"):
                run()
        session.write({by: [3.0, 3.0]})
        before = session.read([w])["w"]
        assert double().tolist() == (2 * 3 * before).tolist()
        assert session.run(step).tolist() == (before + 3).tolist()
        assert len(session._programs) < 8  # nor does a try leave a program behind


def test_step_over_its_deadline_names_the_task_that_is_not_done(pair: Servers) -> None:
    def slow(x: Any) -> Any:
        with device("/job:ps/task:0"):
            return jax.lax.fori_loop(0, 100_000_000, lambda i, a: jnp.sin(a) + i, x)

    with connect(pair.server("/job:worker/task:0").target, timeout_s=10) as cluster:
        with pytest.raises(
            DeadlineError, match=r"not done after 0.2 s.*/job:ps/task:0"
        ):
            cluster.session().run(slow, 1.0, timeout_s=0.2)
        # The cluster is whole again: the next step runs.
        assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0


@pytest.mark.bad_input_row(15)
def test_error_in_one_task_ends_the_step_on_all_and_names_the_cause(
    pair: Servers,
) -> None:
    v = Variable("unset", ((2,), jnp.float32, None), device="/job:ps/task:0")

    def f(x: Any) -> Any:
        v[...] = v[...] + x
        with device("/job:worker/task:0"):
            return v[...].sum()

    with connect(pair.server("/job:worker/task:0").target, timeout_s=10) as cluster:
        session = cluster.session()
        for _ in range(2):
            with pytest.raises(JGError, match="'unset' on /job:ps/task:0") as caught:
                session.run(f, 2.0, timeout_s=20)
            assert caught.value.code == "JG-231"
        session.write({v: np.ones(2, np.float32)})
        assert session.run(f, 2.0) == 6.0


@pytest.mark.bad_input_row(19)
@pytest.mark.parametrize("how", ["print", "callback"])
def test_callback_inside_a_shipped_function_is_refused(pair: Servers, how: str) -> None:
    def f(x: Any) -> Any:
        if how == "print":
            jax.debug.print("x = {}", x)
            return x
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x)

    with connect(pair.servers[0].target, timeout_s=10) as cluster:
        with pytest.raises(CallbackError, match=r"test_faults\.py"):
            cluster.session().run(f, 1.0)
        assert all(not task.programs for task in cluster.status().tasks)


def test_function_that_jax_cannot_export_is_refused(pair: Servers) -> None:
    def f(x: Any) -> Any:
        call = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), x.dtype))
        return call(x)

    with (
        connect(pair.servers[0].target, timeout_s=10) as cluster,
        pytest.raises(NotExportableError, match="ffi_call"),
    ):
        cluster.session().run(f, 1.0)


def test_random_bytes_on_the_port_do_no_harm(pair: Servers) -> None:
    server = pair.server("/job:worker/task:0")
    host, _, port = server.address.rpartition(":")
    noise = np.random.default_rng(0).bytes(100_000)
    for _ in range(3):
        raw = socket.create_connection((host, int(port)), timeout=5)
        with closing(raw), suppress(OSError):  # the server may hang up while we talk
            raw.sendall(noise)
            raw.recv(1000)
    with connect(server.target, timeout_s=10) as cluster:
        assert cluster.session().run(lambda x: x + 1, 1.0) == 2.0


def test_call_that_a_server_does_not_know_is_refused(pair: Servers) -> None:
    with (
        connect(pair.servers[0].target, timeout_s=10) as cluster,
        pytest.raises(UnknownMethodError, match="'FormatDisk'"),
    ):
        cluster.call("FormatDisk", frame(empty=pb.Empty()))


@pytest.mark.bad_input_row(3)
def test_step_of_an_unknown_program_says_so(pair: Servers) -> None:
    with (
        connect(pair.servers[0].target, timeout_s=10) as cluster,
        pytest.raises(InvalidProgramError, match="no program 'gone'"),
    ):
        cluster.call(
            "RunStep", frame(run_step=pb.RunStep(handle="gone", timeout_s=5.0))
        )


@pytest.mark.bad_input_row(10)
@pytest.mark.parametrize(
    "tensors",
    [(), (np.zeros(2, np.float64),), (np.zeros(3, np.float32),)],
    ids=["too few", "dtype", "shape"],
)
def test_feeds_that_do_not_fit_the_program_are_refused_by_the_server(
    pair: Servers, tensors: tuple[np.ndarray[Any, Any], ...]
) -> None:
    """Another client may send anything; the server does not trust it."""
    with connect(pair.servers[0].target, timeout_s=10) as cluster:
        session = cluster.session()
        session.run(lambda x: x * 2, np.ones(2, np.float32))
        (handle,) = cluster.status().tasks[0].programs
        order = pb.RunStep(handle=handle, timeout_s=5.0)
        with pytest.raises(JGError, match="feed") as caught:
            cluster.call("RunStep", frame(run_step=order, tensors=tensors))
        assert caught.value.code == "JG-211"
