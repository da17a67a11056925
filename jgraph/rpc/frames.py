"""Helpers that make and read frames."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from google.protobuf.message import Message

from jgraph.errors import VersionError
from jgraph.graph.device import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame, Tensor

PROTOCOL: Final = 6
"""Version of the wire contract; both sides of a stream must have the same."""


def frame(*, tensors: Sequence[Tensor] = (), **body: Message) -> Frame:
    """Returns a frame with one body message, named as in ``protos/jgraph.proto``.

    Args:
      tensors: arrays that travel behind the header.
      **body: exactly one, e.g. ``start_step=pb.StartStep(handle="h", step_id=1)``.

    Example:
      >>> kind_of(frame(call=pb.Call(method="Hello")))
      'call'
    """
    if len(body) != 1:
        raise TypeError(f"a frame has exactly one body, {len(body)} given")
    fields: dict[str, Any] = dict(body)
    return Frame(pb.Frame(**fields), tuple(tensors))


def kind_of(frame: Frame) -> str:
    """Returns the name of the frame's body, e.g. ``"start_step"``."""
    return str(frame.header.WhichOneof("body"))


def body_of(frame: Frame) -> Any:
    """Returns the body message of a frame.

    Example:
      >>> body_of(frame(call=pb.Call(method="Hello"))).method
      'Hello'
    """
    return getattr(frame.header, kind_of(frame))


def hello(
    task: TaskName | None, incarnation: int, protocol: int = PROTOCOL
) -> pb.Hello:
    """Returns the message with which a task introduces itself."""
    return pb.Hello(
        protocol=protocol,
        task=task or "",
        incarnation=incarnation,
        jgraph=installed_version("jgraph"),
        jax=installed_version("jax"),
    )


def check_protocol(ours: pb.Hello, theirs: pb.Hello, who: str) -> None:
    """Refuses another version of the wire contract, or of the package.

    Raises:
      VersionError: naming both versions and both packages.
    """
    everywhere = "install one version of jgraph everywhere"
    versions = {"ours": ours.protocol, "theirs": theirs.protocol}
    if ours.protocol != theirs.protocol:
        older, newer = sorted((ours, theirs), key=lambda hello: hello.protocol)
        raise VersionError(
            f"{who} speaks protocol {theirs.protocol} (jgraph {theirs.jgraph}), this "
            f"side {ours.protocol} (jgraph {ours.jgraph}); {everywhere}, e.g. pip "
            f"install jgraph=={newer.jgraph} where {older.jgraph} is",
            **versions,
        )
    if theirs.jgraph and ours.jgraph != theirs.jgraph:
        raise VersionError(
            f"{who} runs jgraph {theirs.jgraph:.40}, this side {ours.jgraph}, and what "
            f"one says may mean something else to the other; {everywhere}, and go on "
            "from a checkpoint where that takes new tasks",
            **versions,
        )


@cache
def installed_version(package: str) -> str:
    """Returns the installed version of a package, or ``"unknown"``; reads it once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
