"""Program in a file: the bytes of the frame by which a client registers it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from jgraph.errors import ArtifactError, JGError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.wire.codec import encode
from jgraph.rpc.wire.decoder import Decoder
from jgraph.rpc.wire.program_codec import decode_program, encode_program


def program_bytes(program: Program) -> bytes:
    """Returns a program as a file has it.

    Raises:
      MessageTooLargeError: it is larger than a frame may be.
    """
    message, tensors = encode_program(program)
    order = pb.RegisterProgram(program=message)
    return b"".join(encode(frame(register_program=order, tensors=tensors)).pieces)


def program_from(data: bytes) -> Program:
    """Returns the program of a file; it is checked as one from the network is.

    Raises:
      ArtifactError: these are no bytes of one.
    """
    decoder = Decoder()
    try:
        frames = decoder.feed(data)
        decoder.finish()
        orders = [one.header.WhichOneof("body") for one in frames]
        if orders == ["register_program"]:
            (one,) = frames
            return decode_program(one.header.register_program.program, one.tensors)
    except JGError as error:
        raise ArtifactError(f"the file has no program: {error.message}") from error
    raise ArtifactError("the file has something else than one program")


def placed(program: Program, tasks: Sequence[TaskName], container: str) -> Program:
    """Returns a program on these tasks, its variables in a container of its own.

    Tasks keep their names if all of them are there; else they get others, in order.

    Raises:
      ArtifactError: there are too few tasks.
    """
    own = [partition.task for partition in program.partitions]
    if not set(own) <= set(tasks):
        if len(own) > len(tasks):
            raise ArtifactError(
                f"the model runs on {len(own)} tasks ({', '.join(own)}), and the "
                f"cluster has {len(tasks)}; serve it by a cluster of as many"
            )
        # By names that nobody has: a new name may be an old one of another task.
        between = [TaskName(f"/job:{n}-of-program/task:0") for n in range(len(own))]
        names = chain(zip(own, between, strict=True), zip(between, tasks, strict=False))
        for old, new in names:
            program = program.rename_task(old, new)
    partitions = tuple(
        replace(
            partition,
            variables=tuple(
                replace(variable, container=container)
                for variable in partition.variables
            ),
        )
        for partition in program.partitions
    )
    return replace(program, partitions=partitions)
