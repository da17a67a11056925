"""Bad inputs by their row in docs/reliability.md: refused in words, nothing changed."""

import asyncio
import itertools
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import optax
import pytest
from flax import nnx

from jgraph.client.cluster import Cluster, connect
from jgraph.client.inspect import status_of
from jgraph.cluster import event_loop
from jgraph.cluster.methods import METHODS
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import (
    CheckpointPathError,
    ConfigError,
    JGError,
    MalformedMessageError,
    TaskLostError,
    TaskMissingError,
)
from jgraph.plan.program.nodes import RecvNode
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.calls.caller import ASKS_METHOD
from jgraph.rpc.dial import lost_its_end
from jgraph.rpc.exchange.link import EXCHANGE_METHOD
from jgraph.rpc.frames import frame, hello
from jgraph.rpc.grpc import service
from jgraph.rpc.security.token import find_token
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.decoder import Decoder
from jgraph.train.checkpoint.checkpoints import Checkpoints
from jgraph.train.trainer import Trainer
from tests.support.bad_frames import data as encoded, error_in, typed
from tests.support.models import BATCH, NnxMLP, data, nnx_loss
from tests.support.served import PS, WORKER, Served, X, step
from tests.support.servers import Servers


def talk(
    address: str,
    chunks: AsyncIterator[bytes] | Iterator[bytes],
    method: str = ASKS_METHOD,
) -> JGError:
    """Sends raw bytes with the token; returns the error that comes back."""

    async def send() -> list[Frame]:
        async with grpc.aio.insecure_channel(address) as channel:
            dial = channel.stream_stream(method, None, None)
            stream = dial(chunks, timeout=20, metadata=find_token().metadata)
            decoder, frames = Decoder(), list[Frame]()
            try:
                async for chunk in stream:
                    frames += decoder.feed(chunk)
            except grpc.aio.AioRpcError as error:
                # A write that met the end of the stream; what was told came before.
                if not lost_its_end(error.code(), error.details() or ""):
                    raise
            return frames

    return error_in(event_loop.run(send()))


@pytest.mark.bad_input_row(3)
def test_a_task_of_another_cluster_at_an_address_is_named(
    served: Served,
) -> None:
    """Both lists name the other's port, as after a mistake in one of two files."""
    other = Servers(ps=1, worker=1)
    worker = other.server(WORKER)
    wrong = served.servers.server(WORKER).address
    worker.set_cluster(ClusterSpec({"ps": [wrong], "worker": [worker.address]}))
    with pytest.raises(TaskMissingError) as told:
        connect(worker.target, timeout_s=0.5)
    assert told.value.details["missing"] == [PS]
    assert (
        f"{wrong} should be {PS}, but is {WORKER}; correct the cluster description"
        in told.value.message
    )
    assert list(status_of(worker.target).missing) == [PS]
    other.stop()


HELLO = frame(hello=hello(None, incarnation=5))
RUN = frame(run_step=pb.RunStep(handle="h", timeout_s=5.0), tensors=[X])
MALFORMED = {
    "random bytes": (b"\x07random bytes", "not a jgraph message"),
    "fewer bytes than the shape says": (encoded(RUN)[:-4], "middle of a frame"),
    "a negative dimension": (
        typed("float32", [3, -1]),
        "tensor 0 has shape [3, -1], not allowed",
    ),
    "a dtype of objects": (
        encoded(RUN).replace(b"float32", b"object_"),
        "dtype 'object_', which is not allowed",
    ),
}


@pytest.mark.bad_input_row(5, 6, 7, 8)
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_bytes_are_refused(served: Served, case: str) -> None:
    sent, said = MALFORMED[case]
    error = talk(served.servers.server(WORKER).address, iter([encoded(HELLO) + sent]))
    assert error.code == "JG-401"
    assert said in error.message


@pytest.mark.bad_input_row(5)
def test_a_frame_of_another_kind_is_refused_by_every_method(
    served: Served,
) -> None:
    wrong = frame(values=pb.Values(handle="h", key="k"))
    for method, kind in ((name, m.request) for name, m in METHODS.items()):
        with pytest.raises(MalformedMessageError, match=f"takes a '{kind}' frame"):
            served.cluster.call(method, wrong)


@pytest.mark.bad_input_row(5)
@pytest.mark.parametrize("text", ["", "{", "[]", '{"parts": 3}', "[" * 10**5])
def test_a_plan_of_the_data_that_is_none_is_refused(served: Served, text: str) -> None:
    order = frame(open_data_run=pb.OpenDataRun(run="r", plan=text))
    with pytest.raises(MalformedMessageError, match="the data of a run is none"):
        served.cluster.call("Master.OpenDataRun", order)


ZEROS = np.zeros((3, 2), np.float32)
WRONG = {
    "nothing": ([], f"{WORKER} sent 0 values"),
    "one too many": ([ZEROS, ZEROS], f"{WORKER} sent 2 values"),
    "transposed": ([ZEROS.T], "sent float32[2,3] as value 0"),
    "integers": ([ZEROS.astype("int32")], "sent int32[3,2] as value 0"),
}


@pytest.mark.bad_input_row(9, 10)
@pytest.mark.parametrize("case", WRONG)
def test_gradients_of_another_program_change_nothing(served: Served, case: str) -> None:
    sent, said = WRONG[case]
    worker, ps = (served.servers.server(task)._server for task in (WORKER, PS))
    assert worker is not None
    assert ps is not None
    handle = ps.service.runtime.programs[0]
    (message,) = (
        node
        for node in ps.service.runtime.program(handle).partition(PS).nodes
        if isinstance(node, RecvNode)
    )
    driver = worker.service.driver
    next_id = next(driver._ids)
    driver._ids = itertools.count(next_id)
    values = pb.Values(handle=handle, step_id=next_id, key=message.key)

    async def send_before_the_step() -> None:
        worker._transport.post(PS, frame(values=values, tensors=sent))

    event_loop.run(send_before_the_step())
    with pytest.raises(MalformedMessageError, match=f"message '{message.key}'") as told:
        served.session.run(step, X, timeout_s=20)
    assert said in told.value.message


@pytest.mark.bad_input_row(15)
def test_a_server_that_is_being_stopped_takes_no_step() -> None:
    servers = Servers(ps=1, worker=1)
    worker = servers.server(WORKER)
    with connect(worker.target, timeout_s=20) as cluster:
        session = cluster.session()
        session.run(step, X)
        assert worker._server is not None
        event_loop.run(worker._server.service.drain(0.0))
        with pytest.raises(TaskLostError, match=f"{WORKER} is being stopped"):
            session.run(step, X)
        assert cluster.status().tasks[-1].state == "draining"
    servers.stop()


@pytest.mark.bad_input_row(17)
@pytest.mark.parametrize("method", [ASKS_METHOD, EXCHANGE_METHOD])
def test_a_caller_that_sends_a_byte_now_and_then_is_sent_away(
    served: Served, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The limit is for all of its Hello, and not for each byte."""
    monkeypatch.setattr(service, "HELLO_TIMEOUT_S", 0.2)

    async def drip() -> AsyncIterator[bytes]:
        for n in itertools.count():
            yield encoded(HELLO)[n : n + 1]
            await asyncio.sleep(0.05)

    error = talk(served.servers.server(WORKER).address, drip(), method)
    assert error.code == "JG-401"
    assert "did not arrive in time" in error.message


TEXT: Any = "a"
NUMBER: Any = 3
ARGUMENTS: dict[str, Callable[[Cluster], object]] = {
    "timeout_s is 'a'; give a number": lambda cluster: cluster.wait_for_tasks(TEXT),
    "timeout_s is -1; give a number": lambda cluster: cluster.wait_for_tasks(-1),
    "grace_s is 'a'; give a number": lambda cluster: cluster.drain(WORKER, TEXT),
    "grace_s is -0.5; give a number": lambda cluster: cluster.drain(WORKER, -0.5),
    "grace_s is nan; give a number": lambda cluster: cluster.shutdown(math.nan),
    "names of containers, and 3 is not": lambda cluster: cluster.reset("a", NUMBER),
}


@pytest.mark.parametrize("said", ARGUMENTS)
def test_arguments_of_a_cluster_that_are_none_are_refused_before_anything_is_asked(
    served: Served, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ARGUMENTS[said](served.cluster)


PATHS = {
    "a zero byte": ("a\0b", "zero byte"),
    "an object store": ("gs://bucket/run", "address of an object store"),
    "an object store, as a Path": (Path("s3://bucket"), "address of an object store"),
    "nothing": ("", "it is empty"),
    "too long": ("x" * 300, "File name too long"),
    "below a file": (f"{__file__}/run", "Not a directory"),
    "somebody unknown": ("~no-such-user/run", "home directory"),
    "a number": (3, "not int"),
}


@pytest.mark.bad_input_row(21)
@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_cannot_be_of_checkpoints_is_refused_before_training(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, said = PATHS[case]
    wrong: Any = path
    trainer = Trainer(NnxMLP(rngs=nnx.Rngs(0)), nnx_loss, optax.sgd(0.1))
    options: dict[str, Any] = {"steps": 1, "batch_size": BATCH, "progress": False}
    run = trainer.fit(data(), **options)
    for act in (
        lambda: trainer.fit(data(), **options, checkpoint=Checkpoints(wrong)),
        lambda: run.save(wrong),
        lambda: trainer.restore(wrong),
    ):
        with pytest.raises(CheckpointPathError, match=said) as told:
            act()
        assert "give one of this machine, for example 'runs/mlp'" in str(told.value)
    assert not list(tmp_path.iterdir())
    assert trainer.fit(data(), **options).steps == 2
