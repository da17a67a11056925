"""Transport conformance: calls; see ``transport_conformance``."""

import asyncio
from contextlib import aclosing, suppress

import numpy as np

from jgraph.errors import (
    ClusterUnreachableError,
    DeadlineError,
    FeedError,
    InternalError,
    TaskLostError,
    UnknownMethodError,
)
from jgraph.rpc.frames import body_of, kind_of
from jgraph.testing.transport_harness import (
    PS,
    SECRET,
    WAIT_S,
    MakeTransport,
    Recorder,
    asked,
    call,
    call_fails,
    expect,
    numbers,
    started,
    step,
)


async def call_streams_its_replies(make: MakeTransport) -> None:
    """0, 1 and 100 replies come in order; a client needs no server of its own."""
    async with started(make) as (_, _, worker, _, address):
        client = make(None)
        expect(await client.start(Recorder()) == "", "a client listens nowhere")
        for caller in (client, worker):
            for n in (0, 1, 100):
                got = await call(caller, address, "Count", step(n))
                expect(numbers(got) == list(range(n)), numbers(got))
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
