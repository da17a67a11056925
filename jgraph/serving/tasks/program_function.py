"""Function that a cluster computes: a step of a program for each batch of requests."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final, final

from jgraph.client.cluster import Cluster
from jgraph.cluster import event_loop
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.errors import ClusterBusyError, JGError, OverloadedError, TaskLostError
from jgraph.graph.variable import Variable
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.serving.answering import NO_FACTS, Answered
from jgraph.serving.signature import Array, Signature
from jgraph.serving.tasks.program_file import placed

_LOG = logging.getLogger("jgraph.serving")
STEP_S: Final = 30.0
AGAIN_S: Final = 1.0
"""How long after a failure the program is given to the tasks again."""


@final
class ProgramFunction:
    """A function of a version that several tasks compute; a ``WaitingFunction``.

    Args:
      name: of the model and its version, for people.
      signature: of the function.
      program: computes it.
      arrays: values of its variables, by their names.
      cluster: whose tasks run it.
      threads: where what blocks is done.

    Raises:
      ArtifactError: the cluster has too few tasks.
      ClusterError: a task does not answer.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        program: Program,
        arrays: Mapping[str, Array],
        cluster: Cluster,
        threads: Executor,
    ) -> None:
        self.signature = signature
        self.problem: JGError | None = None
        self.facts = NO_FACTS
        self._name = name
        self._cluster = cluster
        self._threads = threads
        self._container = f"serve-{secrets.token_hex(4)}"
        self._program = placed(program, cluster.tasks(), self._container)
        self._arrays = arrays
        self._session = cluster.session()
        self._handle = ""
        self._placing: asyncio.Task[None] | None = None
        self._place()

    def _place(self) -> None:
        """Gives the tasks the variables and the program; they may be new ones."""
        values = {
            Variable(
                one.name,
                (one.type.shape, one.type.np_dtype, None),
                device=partition.task,
                container=one.container,
            ): self._arrays[one.name]
            for partition in self._program.partitions
            for one in partition.variables
        }
        if self._handle:
            with suppress(JGError, ValueError):
                self._session.unregister(self._handle)
        self._session.write(values)
        self._handle = self._session.register(self._program)

    def prepare(self, inputs: Sequence[Array]) -> None:
        """See ``WaitingFunction.prepare``."""
        event_loop.run(self.answer(inputs), "trying a model that is to be served")

    async def answer(self, inputs: Sequence[Array]) -> Answered:
        """See ``WaitingFunction.answer``."""
        if self.problem is not None:
            raise self._lost(self.problem)
        order = pb.RunStep(handle=self._handle, timeout_s=STEP_S)
        nbytes = sum(value.nbytes for value in inputs)
        try:
            reply = await self._cluster.transport.ask(
                self._cluster.find(self._program.driver),
                "RunStep",
                frame(run_step=order, tensors=inputs),
                timeout_s=STEP_S + bulk_timeout_s(nbytes),
            )
        except ClusterBusyError as error:
            raise OverloadedError(
                "the tasks of the model have too many calls; send the request again "
                "in 1 s",
                retry_after_s=1,
            ) from error
        except JGError as error:
            self._fail(error)
            raise self._lost(error) from error
        return Answered(list(reply.tensors))

    def _lost(self, error: JGError) -> TaskLostError:
        task = str(error.details.get("task", "")) or "a task of the model"
        return TaskLostError(
            f"{task} does not answer, and {self._name} needs it ({error.code}: "
            f"{error.message:.200}); ask again when it is there",
            task=task,
        )

    def _fail(self, error: JGError) -> None:
        if self.problem is None:
            self.problem = error
            _LOG.warning("%s cannot be computed: %s", self._name, error)
            self._placing = asyncio.get_running_loop().create_task(self._place_again())

    async def _place_again(self) -> None:
        loop = asyncio.get_running_loop()
        while self.problem is not None:
            await asyncio.sleep(AGAIN_S)
            try:
                await loop.run_in_executor(self._threads, self._place)
            except JGError as error:
                self.problem = error
            else:
                self.problem = None
                _LOG.info("%s is computed again.", self._name)

    def close(self) -> None:
        """See ``WaitingFunction.close``."""
        placing = self._placing
        if placing is not None:
            event_loop.event_loop().call_soon_threadsafe(placing.cancel)
        with suppress(JGError):
            self._session.close()
            self._cluster.reset(self._container)
