"""Transport conformance: send queues; see ``transport_conformance``."""

import numpy as np

from jgraph.errors import NotTakingError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame, kind_of
from jgraph.rpc.transport import Frame
from jgraph.testing.transport_harness import (
    PS,
    WORKER,
    MakeTransport,
    Recorder,
    expect,
    numbers,
    started,
    step,
)

_NBYTES = 40_000


def _values(step_id: int, key: str = "w") -> Frame:
    body = pb.Values(handle="train", step_id=step_id, key=key)
    return frame(values=body, tensors=[np.zeros(_NBYTES, np.uint8)])


async def withdrawn_values_do_not_leave(make: MakeTransport) -> None:
    """Nor do they leave a hole; what else belongs to the step is sent."""
    abort = frame(abort_step=pb.AbortStep(handle="train", step_id=1))
    async with started(make) as (_, at_ps, worker, at_worker, _):
        for posted in (_values(1), _values(2), _values(1, "b"), abort, step(3)):
            worker.post(PS, posted)
        dropped = worker.withdraw("train", 1)
        expect(dropped == 2, f"{dropped} frames were withdrawn, not 2")
        worker.post(PS, step(4))
        got = await at_ps.wait_frames(4)
        kinds = [(kind_of(f), body_of(f).step_id) for f in got]
        wanted = [("values", 2), ("abort_step", 1), ("start_step", 3)]
        expect(kinds == [*wanted, ("start_step", 4)], kinds)
        expect(worker.withdraw("train", 2) == 0, "withdrawn after it had left")
        expect(not at_worker.lost and not at_ps.lost, at_worker.lost)


async def peer_that_takes_nothing_is_lost(make: MakeTransport) -> None:
    """The error says how much waits; later frames begin anew, at a task that takes."""
    async with started(make) as (ps, at_ps, _, _, address):
        worker, at_worker = make(WORKER, max_queued_bytes=3 * _NBYTES), Recorder()
        await worker.start(at_worker)
        worker.set_peers({PS: address})
        try:
            for i in range(4):  # the loop does not run: nothing can leave
                worker.post(PS, _values(i))
            expect(not at_worker.lost, "peer_lost was called inside post")
            error = await at_worker.wait_lost(PS)
            expect(isinstance(error, NotTakingError), repr(error))
            waited = error.details["waiting_frames"], error.details["waiting_bytes"]
            expect(waited[0] == 2 and waited[1] > 2 * _NBYTES, error.details)
            for word in (PS, WORKER, address, "2 frames", f"{3 * _NBYTES:,} bytes"):
                expect(word in error.message, f"no '{word}' in: {error.message}")
            expect(len(at_worker.lost) == 1, "told more than once")
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
