"""Kept reads of a worker: what it read last of the variables that others hold.

A worker has the parameters as what its step takes. If nobody has a copy of those that
an owner held, they are lost with it, unless they are kept here for longer than the
step: until the next one has read them again.
"""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from typing import Any, final

from jgraph.cluster.methods import Answer
from jgraph.errors import CopyLostError, MalformedMessageError
from jgraph.plan.program.nodes import ValueType, packed_type
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.row_values import cuts_of, unpacked
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.codec import check_type
from jgraph.runtime.task import TaskRuntime
from jgraph.server.steps.task_host import TaskHost


@final
class _Kept:
    """Messages of one program: the last of each kind, and how many came."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = frozenset(keys)
        self.counts = Counter[str]()
        self.values: dict[str, Sequence[Any]] = {}

    def took(self, key: str, values: Sequence[Any]) -> None:
        """Learns what a step takes."""
        if key in self._keys:
            self.counts[key] += 1
            self.values[key] = values

    def end(self) -> None:
        """Lets go of all, and keeps nothing of the steps to come."""
        self._keys = frozenset()
        self.values.clear()


@final
class KeptReads:
    """What a task keeps of the variables that it reads, by their container.

    Args:
      runtime: of this task.
      shell: runs what is long.
    """

    def __init__(self, runtime: TaskRuntime, shell: TaskHost) -> None:
        self._runtime = runtime
        self._shell = shell
        self._reads: dict[str, _Kept] = {}
        self.methods: Mapping[str, Answer] = {
            "KeepReads": self._keep,
            "GiveReads": self._give,
        }

    def drop(self, containers: Collection[str]) -> None:
        """Forgets what is kept of these containers; of all, if none is named."""
        for container in [c for c in self._reads if not containers or c in containers]:
            self._reads.pop(container).end()

    async def _keep(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        self.drop([order.container])
        if order.handle:
            reads = self._reads[order.container] = _Kept(order.keys)
            self._runtime.keep(order.handle, reads.took)
        yield frame(empty=pb.Empty())

    async def _give(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        reads = self._reads.get(order.container) or _Kept(())
        for message in order.messages:
            if not message.key:  # the caller has it
                await self._shell.run(partial(self._store, message, request.tensors))
                continue
            if not message.count or reads.counts[message.key] != message.count:
                raise CopyLostError(
                    f"{self._runtime.task} does not have '{message.key[:80]}' as it "
                    f"came the {message.count}th time",
                    task=self._runtime.task,
                )
            values = reads.values[message.key]
            await self._shell.run(partial(self._store, message, values))
        yield frame(give_reads=pb.GiveReads(counts=reads.counts))

    def _store(self, message: pb.KeptMessage, values: Sequence[Any]) -> None:
        """Makes variables of this task of what came in a message."""
        for one in message.values:
            stored = [_stored(variable) for variable in one.variables]
            if not stored or one.place >= len(values):
                raise MalformedMessageError(
                    f"a message of {len(values)} values gives {len(stored)} variables "
                    f"the value {one.place}"
                )
            value, types = values[one.place], [each.type for each in stored]
            wanted = packed_type(types) if len(types) > 1 else types[0]
            if (tuple(value.shape), str(value.dtype)) != (wanted.shape, wanted.dtype):
                raise MalformedMessageError(
                    f"'{stored[0].name}' is to be made of {value.dtype}"
                    f"{[*value.shape]}, and takes {wanted}"
                )
            found = unpacked(value, cuts_of(types)) if len(types) > 1 else [value]
            self._runtime.store.write(stored, found)


def _stored(message: pb.StoredVariable) -> StoredVariable:
    check_type(message.type, f"variable '{message.name}'")
    type_ = ValueType(tuple(message.type.shape), message.type.dtype)
    return StoredVariable(message.name, type_, message.container)
