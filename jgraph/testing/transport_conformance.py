"""Conformance suite of transports: one suite, run on each of them.

A check is a coroutine function that takes a ``MakeTransport``, which makes transports
of one network. ``CHECKS`` holds all of them by name.

Example:
  >>> import asyncio
  >>> from jgraph.testing.in_process_transport import InProcessNetwork
  >>> check = CHECKS["frames_arrive_in_order"]
  >>> asyncio.run(check(InProcessNetwork().transport))
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from jgraph.errors import (
    ClusterUnreachableError,
    DeadlineError,
    FeedError,
    InternalError,
    MalformedMessageError,
    NotTakingError,
    PortInUseError,
    RoleError,
    TaskLostError,
    UnknownDeviceError,
    UnknownMethodError,
)
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Frame, Tensor
from jgraph.rpc.wire.codec import DTYPES
from jgraph.testing.transport_harness import (
    PS,
    SECRET,
    WAIT_S,
    WORKER,
    MakeTransport,
    Recorder,
    asked,
    call,
    call_fails,
    expect,
    fail,
    numbers,
    started,
    step,
)


async def frames_arrive_in_order(make: MakeTransport) -> None:
    """Frames of one sender keep their order and say who sent them."""
    async with started(make) as (_, at_ps, worker, _, _):
        for i in range(300):
            worker.post(PS, step(i))
        frames = await at_ps.wait_frames(300)
        expect(numbers(frames) == list(range(300)), numbers(frames))
        expect({src for src, _ in at_ps.frames} == {WORKER}, "wrong sender")


async def both_directions_flow_at_once(make: MakeTransport) -> None:
    """2,000 small frames each way, neither waits for the other."""
    async with started(make) as (ps, at_ps, worker, at_worker, _):
        for i in range(2000):
            worker.post(PS, step(i, np.full(3, i % 100, np.float32)))
            ps.post(WORKER, step(i, np.full(5, i % 100, np.int8)))
        for recorder in (at_ps, at_worker):
            frames = await recorder.wait_frames(2000)
            expect(numbers(frames) == list(range(2000)), "order lost")
            tensors = [f.tensors[0] for f in frames]
            expect(all((t == i % 100).all() for i, t in enumerate(tensors)), "mixed up")


async def large_tensors_arrive(make: MakeTransport) -> None:
    """8 MB beside 3 bytes, between small frames, equal to the bit."""
    large = np.random.default_rng(0).standard_normal((1000, 1000))
    small = np.array([1, 2, 3], np.uint8)
    async with started(make) as (_, at_ps, worker, _, _):
        worker.post(PS, step(0))
        worker.post(PS, step(1, small, large, small))
        worker.post(PS, step(2, large.T))
        frames = await at_ps.wait_frames(3)
        expect(numbers(frames) == [0, 1, 2], numbers(frames))
        for sent, received in zip(
            (small, large, small), frames[1].tensors, strict=True
        ):
            np.testing.assert_array_equal(sent, received)
        np.testing.assert_array_equal(large.T, frames[2].tensors[0])


async def every_dtype_and_layout_survives(make: MakeTransport) -> None:
    """All dtypes; 0-d, empty, transposed, strided and big-endian arrays."""
    bits = np.arange(24).reshape(2, 3, 4) % 2
    arrays = [bits.astype(dtype) for dtype in DTYPES.values()]
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    layouts: list[Tensor] = [
        np.full((), 7, np.float32),
        np.zeros((0, 5)),
        base.T,
        base[::2, ::-3],
    ]
    swapped: list[Tensor] = [
        base.astype(">f4"),
        np.arange(3, dtype=">i8"),
        np.zeros((), ">c8"),
    ]
    sent = [*arrays, *layouts, *swapped]
    async with started(make) as (_, at_ps, worker, _, _):
        worker.post(PS, step(0, *sent))
        (received,) = await at_ps.wait_frames(1)
        for theirs, ours in zip(received.tensors, sent, strict=True):
            native = ours.astype(ours.dtype.newbyteorder("="))
            expect(theirs.dtype == native.dtype, f"{ours.dtype} came as {theirs.dtype}")
            expect(theirs.shape == ours.shape, f"{ours.shape} came as {theirs.shape}")
            expect(theirs.tobytes() == native.tobytes(), f"{ours.dtype} changed")


async def received_tensors_are_aligned_and_owned(make: MakeTransport) -> None:
    """The receiver may write, and no one else sees it."""
    sent = [np.ones(n, np.float32) for n in (1, 7, 100_000)]
    async with started(make) as (ps, at_ps, worker, at_worker, address):
        worker.post(PS, step(0, *sent))
        ps.post(WORKER, step(0, *sent))
        (posted,), (also,) = await at_ps.wait_frames(1), await at_worker.wait_frames(1)
        (echo,) = await call(worker, address, "Echo", step(0, *sent))
        for tensor in (*posted.tensors, *also.tensors, *echo.tensors):
            aligned = tensor.nbytes < 1024 or tensor.ctypes.data % 64 == 0
            expect(aligned, "not aligned to 64 bytes")
            expect(bool((tensor == 1).all()), "another receiver wrote into this one")
            tensor[:] = 5
        expect(all(bool((t == 1).all()) for t in sent), "the sender's array changed")


async def unsendable_tensor_is_refused_at_post(make: MakeTransport) -> None:
    """The sender gets the error itself; later frames are not affected."""
    async with started(make) as (_, at_ps, worker, _, _):
        try:
            worker.post(PS, step(0, np.array([object()])))
        except MalformedMessageError:
            pass
        else:
            fail("an array of objects was accepted")
        worker.post(PS, step(1))
        expect(numbers(await at_ps.wait_frames(1)) == [1], "frame after it is missing")


async def call_streams_its_replies(make: MakeTransport) -> None:
    """0, 1 and 100 replies come in order; a client needs no server of its own."""
    async with started(make) as (_, _, worker, _, address):
        client = make(None)
        expect(await client.start(Recorder()) == "", "a client listens nowhere")
        for caller in (client, worker):
            for n in (0, 1, 100):
                frames = await call(caller, address, "Count", step(n))
                expect(numbers(frames) == list(range(n)), numbers(frames))
        await client.close()


async def call_carries_tensors_both_ways(make: MakeTransport) -> None:
    """8 MB there and back."""
    sent = np.random.default_rng(0).standard_normal((1000, 1000))
    async with started(make) as (_, _, worker, _, address):
        for way in (call, asked):
            (reply,) = await way(worker, address, "Echo", step(3, sent))
            expect(body_of(reply).step_id == 3, "another header came back")
            np.testing.assert_array_equal(reply.tensors[0], sent)


async def concurrent_calls_do_not_mix(make: MakeTransport) -> None:
    """20 calls at once, each gets its own answer."""
    async with started(make) as (_, _, worker, _, address):
        for way in (call, asked):
            replies = await asyncio.gather(
                *(
                    way(worker, address, "Echo", step(i, np.full(20_000, i)))
                    for i in range(20)
                )
            )
            for i, (reply,) in enumerate(replies):
                expect(body_of(reply).step_id == i, f"call {i} got another answer")
                same = bool((reply.tensors[0] == i).all())
                expect(same, f"call {i} got other values")


async def hello_is_answered_by_the_transport(make: MakeTransport) -> None:
    """The call "Hello" says who listens there."""
    async with started(make) as (_, _, worker, _, address):
        for way in (call, asked):
            (reply,) = await way(worker, address, "Hello", step(0))
            expect(kind_of(reply) == "hello" and body_of(reply).task == PS, reply)


async def error_keeps_class_message_and_details(make: MakeTransport) -> None:
    """What the handler raised is what the caller gets."""
    async with started(make) as (_, _, worker, _, address):
        for way in (call, asked):
            error = await call_fails(FeedError, worker, address, "Fail", way=way)
            expect(error.message.startswith("x is float64"), error)
            expect(error.details == {"argument": "x"}, error.details)
            unknown = await call_fails(
                UnknownMethodError, worker, address, "Nonsense", way=way
            )
            expect("Nonsense" in unknown.message, unknown)


async def crash_of_a_handler_tells_nothing_secret(make: MakeTransport) -> None:
    """An error that is not ours becomes an InternalError without its text."""
    async with started(make) as (_, _, worker, _, address):
        for way in (call, asked):
            error = await call_fails(InternalError, worker, address, "Crash", way=way)
            expect(SECRET not in str(error), error)
            (echo,) = await way(worker, address, "Echo", step(1))
            expect(numbers([echo]) == [1], "the server does not answer any more")


async def deadline_names_method_and_address(make: MakeTransport) -> None:
    """A call that hangs ends in time, here and in the handler."""
    async with started(make) as (_, at_ps, worker, _, address):
        for way in (call, asked):
            error = await call_fails(
                DeadlineError, worker, address, "Hang", timeout_s=0.2, way=way
            )
            expect("Hang" in error.message and address in error.message, error)
            await at_ps.wait(lambda: at_ps.hanging == 0, "end of the handler")


async def abandoned_call_stops_its_handler(make: MakeTransport) -> None:
    """Cancelling the caller, or not reading on, ends the work on the server."""
    async with started(make) as (_, at_ps, worker, _, address):
        for way in (call, asked):
            hanging = asyncio.create_task(way(worker, address, "Hang", step(0)))
            await at_ps.wait(lambda: at_ps.hanging == 1, "start of the handler")
            hanging.cancel()
            await at_ps.wait(lambda: at_ps.hanging == 0, "end of the handler")
        replies = worker.call(address, "Count", step(50), timeout_s=WAIT_S)
        async with aclosing(replies):  # type: ignore[type-var]  # it is a generator
            async for reply in replies:
                expect(numbers([reply]) == [0], reply)
                break


async def call_to_nothing_is_unreachable(make: MakeTransport) -> None:
    """Nothing listens: said at once, with the address."""
    async with started(make) as (ps, _, worker, _, address):
        await ps.close()
        for way in (call, asked):
            async with asyncio.timeout(5):
                error = await call_fails(
                    ClusterUnreachableError, worker, address, "Echo", way=way
                )
            expect(f"no jgraph server at {address}" in error.message, error)


async def call_ends_when_the_server_closes(make: MakeTransport) -> None:
    """The caller does not wait for its deadline."""
    async with started(make) as (ps, at_ps, worker, _, address):
        failing = [
            asyncio.create_task(
                call_fails(TaskLostError, worker, address, "Hang", way=way)
            )
            for way in (call, asked, asked)
        ]
        await at_ps.wait(lambda: at_ps.hanging == 3, "start of the handlers")
        await ps.close()
        async with asyncio.timeout(5):
            errors = await asyncio.gather(*failing)
        for error in errors:
            expect("Hang" in error.message and address in error.message, error)


async def asked_call_has_one_reply(make: MakeTransport) -> None:
    """Of several replies it is the last; without any, an error says so."""
    async with started(make) as (_, _, worker, _, address):
        expect(numbers(await asked(worker, address, "Count", step(3))) == [2], "3")
        error = await call_fails(InternalError, worker, address, "Count", way=asked)
        expect("answered 'Count' with nothing" in error.message, error)


async def asking_does_not_wait_for_a_slow_answer(make: MakeTransport) -> None:
    """What is asked later may be answered before."""
    async with started(make) as (_, at_ps, worker, _, address):
        hanging = asyncio.create_task(asked(worker, address, "Hang", step(0)))
        await at_ps.wait(lambda: at_ps.hanging == 1, "start of the handler")
        expect(numbers(await asked(worker, address, "Echo", step(7))) == [7], "echo")
        expect(not hanging.done(), "the first call was answered")
        hanging.cancel()


async def asking_reaches_a_server_that_was_started_again(make: MakeTransport) -> None:
    """A connection that broke is made anew for what is asked next."""
    async with started(make) as (ps, _, worker, _, address):
        await asked(worker, address, "Echo", step(1))
        await ps.close()
        again = make(PS, bind=address)
        await again.start(Recorder())
        try:
            # What leaves before the end of the old connection has arrived is lost.
            with suppress(TaskLostError):
                await asked(worker, address, "Echo", step(2))
            echo = await asked(worker, address, "Echo", step(3))
            expect(numbers(echo) == [3], "echo")
        finally:
            await again.close()


async def asking_on_after_close_fails(make: MakeTransport) -> None:
    """What waits when the caller's own side closes ends with an error."""
    async with started(make) as (_, at_ps, worker, _, address):
        failing = asyncio.create_task(
            call_fails(TaskLostError, worker, address, "Hang", way=asked)
        )
        await at_ps.wait(lambda: at_ps.hanging == 1, "start of the handler")
        await worker.close()
        async with asyncio.timeout(5):
            error = await failing
        expect("this side closed" in error.message, error)
        await at_ps.wait(lambda: at_ps.hanging == 0, "end of the handler")


async def sender_learns_that_the_receiver_closed(make: MakeTransport) -> None:
    """The error names the task and its address."""
    async with started(make) as (ps, at_ps, worker, at_worker, address):
        worker.post(PS, step(0))
        await at_ps.wait_frames(1)
        await ps.close()
        error = await at_worker.wait_lost(PS)
        expect(isinstance(error, TaskLostError), repr(error))
        expect(PS in error.message and address in error.message, error)


async def receiver_learns_that_the_sender_closed(make: MakeTransport) -> None:
    """After the last frames, which close still delivers."""
    async with started(make) as (_, at_ps, worker, at_worker, _):
        for i in range(100):
            worker.post(PS, step(i))
        await worker.close()
        error = await at_ps.wait_lost(WORKER)
        expect(isinstance(error, TaskLostError) and WORKER in error.message, error)
        expect(numbers([f for _, f in at_ps.frames]) == list(range(100)), "lost some")
        expect(not at_worker.lost, at_worker.lost)


async def frames_posted_before_the_peer_listens_arrive(make: MakeTransport) -> None:
    """Tasks may start in any order."""
    async with started(make) as (ps, _, worker, at_worker, address):
        await ps.close()
        worker.post(PS, step(7))
        late, at_late = make(PS, bind=address), Recorder()
        await late.start(at_late)
        try:
            expect(numbers(await at_late.wait_frames(1)) == [7], at_late.frames)
            expect(not at_worker.lost, at_worker.lost)
        finally:
            await late.close()


async def peer_that_never_listens_is_lost_in_seconds(make: MakeTransport) -> None:
    """A post never blocks and never waits for ever."""
    async with started(make) as (ps, _, worker, at_worker, address):
        await ps.close()
        worker.post(PS, step(0))
        async with asyncio.timeout(5):
            error = await at_worker.wait_lost(PS)
        expect(isinstance(error, ClusterUnreachableError), repr(error))
        expect(f"no jgraph server for {PS} at {address}" in error.message, error)


async def peer_without_address_is_lost(make: MakeTransport) -> None:
    """Reported like any other loss, not raised."""
    nobody = TaskName("/job:ps/task:9")
    async with started(make) as (_, _, worker, at_worker, _):
        worker.post(nobody, step(0))
        expect(not at_worker.lost, "peer_lost was called inside post")
        error = await at_worker.wait_lost(nobody)
        expect(isinstance(error, UnknownDeviceError), repr(error))


async def another_task_at_the_address_gets_nothing(make: MakeTransport) -> None:
    """Who listens is checked before the first frame."""
    other = TaskName("/job:ps/task:1")
    async with started(make) as (_, at_ps, worker, at_worker, address):
        worker.set_peers({other: address})
        worker.post(other, step(0))
        error = await at_worker.wait_lost(other)
        expect(isinstance(error, ClusterUnreachableError | RoleError), repr(error))
        expect(other in error.message, error)
        expect(PS in error.message or "ps-0.jgraph" in error.message, error)
        expect(not at_ps.frames, "a frame for another task was delivered")


async def posts_reach_a_task_that_was_started_again(make: MakeTransport) -> None:
    """After the loss is reported, the next post connects anew."""
    async with started(make) as (ps, at_ps, worker, at_worker, address):
        worker.post(PS, step(0))
        await at_ps.wait_frames(1)
        await ps.close()
        await at_worker.wait_lost(PS)
        again, at_again = make(PS, bind=address), Recorder()
        await again.start(at_again)
        try:
            for i in (5, 6):
                worker.post(PS, step(i))
            expect(numbers(await at_again.wait_frames(2)) == [5, 6], at_again.frames)
        finally:
            await again.close()


async def posts_after_close_are_ignored(make: MakeTransport) -> None:
    """Work that ends while a task shuts down has nobody to tell."""
    async with started(make) as (_, at_ps, worker, at_worker, _):
        worker.post(PS, step(0))
        await worker.close()
        worker.post(PS, step(1))
        await at_ps.wait_lost(WORKER)
        expect(numbers([f for _, f in at_ps.frames]) == [0], at_ps.frames)
        expect(not at_worker.lost, at_worker.lost)


async def close_is_idempotent_and_frees_the_address(make: MakeTransport) -> None:
    """The address is taken while it is used, and free at once afterwards."""
    async with started(make) as (ps, at_ps, worker, _, address):
        worker.post(PS, step(0))
        await at_ps.wait_frames(1)
        second = make(PS, bind=address)
        try:
            await second.start(Recorder())
        except PortInUseError as error:
            expect(address.rpartition(":")[2] in error.message, error)
        else:
            fail(f"two transports listen at {address}")
        await ps.close()
        await ps.close()
        third = make(PS, bind=address)
        expect(await third.start(Recorder()) == address, "another address")
        (echo,) = await call(worker, address, "Echo", step(4))
        expect(numbers([echo]) == [4], echo)
        await third.close()
        await second.close()


_NBYTES = 40_000


def _values(step_id: int, key: str = "w") -> Frame:
    body = pb.Values(handle="train", step_id=step_id, key=key)
    return frame(values=body, tensors=[np.zeros(_NBYTES, np.uint8)])


async def withdrawn_values_do_not_leave(make: MakeTransport) -> None:
    """Nor do they leave a hole; what else belongs to the step is sent.

    So is what travels with its values and belongs to another.
    """
    abort = frame(abort_step=pb.AbortStep(handle="train", step_id=1))
    begins, begins_next, reports = _values(1, "c"), _values(1, "d"), _values(1, "e")
    begins.header.values.start.CopyFrom(pb.StartStep(handle="train", step_id=1))
    begins_next.header.values.start.CopyFrom(pb.StartStep(handle="train", step_id=2))
    reports.header.values.done.CopyFrom(pb.StepDone(handle="train"))
    together = _values(1, "f")
    together.header.values.more.add(handle="train", step_id=2, key="w")
    rest = (abort, step(3), begins_next, reports, together)
    async with started(make) as (_, at_ps, worker, at_worker, _):
        for posted in (_values(1), _values(2), _values(1, "b"), begins, *rest):
            worker.post(PS, posted)
        dropped = worker.withdraw("train", 1)
        expect(dropped == 3, f"{dropped} frames were withdrawn, not 3")
        worker.post(PS, step(4))
        frames = await at_ps.wait_frames(7)
        kinds = [(kind_of(f), body_of(f).step_id) for f in frames]
        wanted = [("values", 2), ("abort_step", 1), ("start_step", 3)]
        travelling = [("values", 1)] * 3
        expect(kinds == [*wanted, *travelling, ("start_step", 4)], kinds)
        expect(worker.withdraw("train", 2) == 0, "withdrawn after it had left")
        expect(not at_worker.lost and not at_ps.lost, at_worker.lost)


async def sender_is_told_when_nothing_waits_to_leave(make: MakeTransport) -> None:
    """Later, and once for each time that it asks; also if there is no such peer."""
    nobody = TaskName("/job:ps/task:9")
    async with started(make) as (_, at_ps, worker, at_worker, _):
        calls = asyncio.Queue[int]()
        for i in range(3):
            worker.post(PS, step(i, np.zeros(3 << 20, np.uint8)))
            worker.when_sent(PS, partial(calls.put_nowait, i))
        expect(calls.empty(), "told before anything could leave")
        worker.when_sent(nobody, partial(calls.put_nowait, 3))
        expect(calls.empty(), "told inside the call")
        async with asyncio.timeout(WAIT_S):
            found = [await calls.get() for _ in range(4)]
        expect(sorted(found) == [0, 1, 2, 3], found)
        await at_ps.wait_frames(3)
        worker.when_sent(PS, partial(calls.put_nowait, 4))
        async with asyncio.timeout(WAIT_S):
            expect(await calls.get() == 4, "not told though nothing waits")
        worker.post(nobody, step(7))
        worker.when_sent(nobody, partial(calls.put_nowait, 5))
        await at_worker.wait_lost(nobody)
        async with asyncio.timeout(WAIT_S):
            expect(await calls.get() == 5, "not told of who has no address")
        expect(calls.empty(), "told twice")


async def peer_that_takes_nothing_is_lost(make: MakeTransport) -> None:
    """The error says how much waits; later frames begin anew, at a task that takes."""
    async with started(make) as (ps, at_ps, _, _, address):
        worker, at_worker = make(WORKER, max_queued_bytes=3 * _NBYTES), Recorder()
        await worker.start(at_worker)
        worker.set_peers({PS: address})
        try:
            for i in range(4):  # the loop does not run: nothing can leave
                worker.post(PS, _values(i))
            sent = asyncio.Event()
            worker.when_sent(PS, sent.set)
            expect(not at_worker.lost, "peer_lost was called inside post")
            error = await at_worker.wait_lost(PS)
            expect(isinstance(error, NotTakingError), repr(error))
            backlog = error.details["waiting_frames"], error.details["waiting_bytes"]
            expect(backlog[0] == 2 and backlog[1] > 2 * _NBYTES, error.details)
            for word in (PS, WORKER, address, "2 frames", f"{3 * _NBYTES:,} bytes"):
                expect(word in error.message, f"no '{word}' in: {error.message}")
            expect(len(at_worker.lost) == 1, "told more than once")
            async with asyncio.timeout(WAIT_S):
                await sent.wait()
            worker.post(PS, step(7))
            await at_ps.wait_frames(1)
            expect(numbers([f for _, f in at_ps.frames]) == [7], at_ps.frames)
        finally:
            await worker.close()
            await ps.close()


async def frames_that_fit_are_not_too_much(make: MakeTransport) -> None:
    """What has left counts no more, and one frame may be over the limit."""
    # A frame may arrive a moment before its sender knows that it has left.
    for limit, posts in ((3 * _NBYTES, 5), (_NBYTES // 2, 1)):
        async with started(make) as (_, at_ps, idle, _, address):
            await idle.close()
            worker, at_worker = make(WORKER, max_queued_bytes=limit), Recorder()
            await worker.start(at_worker)
            worker.set_peers({PS: address})
            try:
                for i in range(posts):
                    worker.post(PS, _values(i))
                    await at_ps.wait_frames(i + 1)
                expect(not at_worker.lost, at_worker.lost)
            finally:
                await worker.close()


Check: TypeAlias = Callable[[MakeTransport], Awaitable[None]]

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        name: check
        for name, check in list(globals().items())
        if inspect.isfunction(check)
        and inspect.iscoroutinefunction(check)
        and check.__module__ == __name__
    }
)
"""Every coroutine function of this module by its name, in their order."""
