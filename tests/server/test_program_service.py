"""Programs of a task, as callers register them and take them back."""

import asyncio

from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Partition, Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.program_codec import encode_program
from tests.support.in_process import cluster_of

PS = TaskName("/job:ps/task:0")


def registration(handle: str) -> Frame:
    partition = Partition(PS, (), (), ())
    message, tensors = encode_program(Program("step", PS, (partition,), (), (), ()))
    body = pb.RegisterProgram(handle=handle, program=message, participants=[PS])
    return frame(register_program=body, tensors=tensors)


def test_a_program_that_is_taken_back_while_it_is_compiled_is_not_kept() -> None:
    async def run() -> None:
        async with cluster_of([PS]) as (_, services):
            methods, runtime = services[PS].methods, services[PS].runtime

            async def answered(method: str, request: Frame) -> None:
                assert [one async for one in methods[method](request)]

            compiling = asyncio.create_task(
                answered("RegisterProgram", registration("a"))
            )
            await asyncio.sleep(0)
            body = pb.ProgramHandle(handle="a")
            await answered("UnregisterProgram", frame(program_handle=body))
            await compiling
            assert list(runtime.programs) == []
            await answered("RegisterProgram", registration("a"))
            assert list(runtime.programs) == ["a"]

    asyncio.run(run())
