"""Replica loops as the client sees them: orders out, reports in."""

import asyncio
import concurrent.futures
import json
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from jgraph.cluster import loop
from jgraph.cluster.calls import CONTROL_S, loop_timeout_s
from jgraph.cluster.client import unique
from jgraph.coordination.dispatch import LEASE_S
from jgraph.coordination.slots import SlotPlan
from jgraph.errors import DeadlineError, JGError, TaskLostError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame

if TYPE_CHECKING:
    from jgraph.cluster.client import Cluster

_LOG = logging.getLogger("jgraph.loops")


@final
@dataclass(frozen=True, slots=True)
class DealtData:
    """Data that the master deals out to all loops of a run.

    Attributes:
      plan: its slots; every worker has the data under the same name.
      batches: how many to deal, all loops together.
      position: where to begin; see ``Dispatch``.
      lease_s: a worker that holds data and is silent for so long is lost.
    """

    plan: SlotPlan
    batches: int
    position: Mapping[str, Any] | None = None
    lease_s: float = LEASE_S


@final
@dataclass(frozen=True, slots=True)
class SyncRequest:
    """What the ps that decides in synchronous training must know.

    Attributes:
      gate: name of the gates.
      version: updates applied so far.
      wanted: contributions of an update.
      replicas: worker of each replica, by the handle of its program.
      shards: the tasks with gates; the first one decides.
      plan: slots of the data that it deals out to the replicas.
      position: where in the data to begin; see ``Dispatch``.
    """

    gate: str
    version: int
    wanted: int
    replicas: Mapping[str, TaskName]
    shards: Sequence[TaskName]
    plan: SlotPlan
    position: Mapping[str, Any] | None = None


@final
@dataclass(frozen=True, slots=True)
class LoopRequest:
    """Run ``steps`` steps of a program on the worker that drives it.

    Attributes:
      task: the worker; the driver of the program.
      handle: the registered program.
      data: name of a data set put on that worker; its fields are feeds.
      data_feeds: where its fields have other names: the feeds, in the order of those.
      steps: how many steps; at most, where data is dealt.
      batch_size: examples per step.
      seed: decides the order of the examples.
      replica: number of this replica.
      first_step: number of the first step.
      step_feed: int32 feed that gets the number of the step; empty: none.
      replica_feed: int32 feed that gets the number of the replica; empty: none.
      batch_feed: int32 feed that gets the number of the batch; empty: none.
      step_timeout_s: limit for one step.
      report_every_s: least time between reports.
      sync: set: decide and apply updates of synchronous training; ``handle`` applies.
      compute_wait_s: for benchmarks: emulated computing in each step.
      plan: the slots, where the task has data of its own and all of it once, in order,
        is not shuffled by ``seed``.
      attempt: how many loops of the replica were lost before in this run.
    """

    task: TaskName
    handle: str
    data: str
    steps: int
    batch_size: int
    seed: int = 0
    replica: int = 0
    first_step: int = 0
    step_feed: str = ""
    replica_feed: str = ""
    batch_feed: str = ""
    step_timeout_s: float = 60.0
    report_every_s: float = 0.25
    sync: SyncRequest | None = None
    compute_wait_s: float = 0.0
    data_feeds: tuple[str, ...] = ()
    plan: SlotPlan | None = None
    attempt: int = 0


@final
@dataclass(frozen=True, slots=True)
class LoopReport:
    """What one replica has done since its last report.

    Attributes:
      replica: number of the replica.
      task: its worker.
      state: "running", "done", "stopped", or "lost": its worker is gone, and others go
        on with its data.
      steps: numbers of the steps, int64[n].
      seconds: when each was computed, since the loop began, float64[n].
      fetches: per fetch of the program, its values stacked over the n steps.
      times: seconds by part, summed over the n steps: ``wait`` (for acknowledgements
        of earlier steps), ``input``, ``pull``, ``compute``, ``push``, ``other``.
      dropped: gradients that came too late so far, by worker: contributions that
        did not count, or steps that were refused and computed anew.
      position: of synchronous training: where in the data it is; see ``Dispatch``.
    """

    replica: int
    task: TaskName
    state: str
    steps: np.ndarray[Any, Any]
    seconds: np.ndarray[Any, Any]
    fetches: tuple[np.ndarray[Any, Any], ...]
    times: Mapping[str, float]
    error: JGError | None = None
    dropped: Mapping[TaskName, int] = field(default_factory=dict)
    position: Mapping[str, Any] | None = None


_Item: TypeAlias = LoopReport | LoopRequest | JGError


@final
class LoopHandle:
    """Loops under way: iterate for their reports until all have ended.

    Iterating raises the first error of any loop, after asking the others to stop. Where
    data is dealt out, the loss of a worker is no error while another one goes on.
    """

    def __init__(
        self,
        cluster: "Cluster",
        requests: Sequence[LoopRequest],
        data: DealtData | None = None,
    ) -> None:
        self._cluster = cluster
        self._name = unique("loop")
        self._requests = list(requests)
        self._data = data
        self._arbiter = next((r for r in requests if r.sync is not None), None)
        self._plan = ""
        if data is not None:
            self._plan = _plain(data.plan)
            self._open(data)
        elif self._arbiter is not None and self._arbiter.sync is not None:
            self._plan = _plain(self._arbiter.sync.plan)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._left = len(self._requests)
        self._stopped = threading.Event()
        self._telling: set[asyncio.Future[None]] = set()
        # A worker reports at least once per step; silence beyond that is an error.
        self._silence_s = 30.0 + max(
            (r.step_timeout_s + r.report_every_s for r in requests), default=0.0
        )
        self._following = [self._start(request) for request in requests]

    def __iter__(self) -> Iterator[LoopReport]:
        try:
            while self._left:
                item = self._next()
                if isinstance(item, JGError):
                    raise item
                if isinstance(item, LoopRequest):
                    self._begin(item)
                    continue
                if item.state != "running":
                    self._left -= 1
                yield item
                if item.error is not None and not self._left:
                    raise item.error  # nobody is left to go on
        finally:
            if self._left:
                self.stop()

    def add(self, request: LoopRequest) -> None:
        """Sets a loop going in place of one that was lost; from any thread.

        Nothing happens if the others end, or were asked to stop, before it begins.
        """
        self._items.put(request)

    def _begin(self, request: LoopRequest) -> None:
        if not self._stopped.is_set():
            self._left += 1
            self._requests.append(request)
            self._following.append(self._start(request))

    def _start(self, request: LoopRequest) -> "concurrent.futures.Future[None]":
        following = self._follow(request)
        return asyncio.run_coroutine_threadsafe(following, loop.event_loop())

    def position(self) -> dict[str, Any]:
        """Returns where in the data the run is, as plain data for a checkpoint."""
        return self._ask_position("Master.DataPosition")

    def close(self) -> dict[str, Any]:
        """Ends the dealing of the data and returns the last position."""
        return self._ask_position("Master.CloseDataRun")

    def _ask_position(self, method: str) -> dict[str, Any]:
        request = frame(data_run=pb.DataRun(run=self._name))
        reply = body_of(self._cluster.call(method, request))
        position: dict[str, Any] = json.loads(reply.position)
        return position

    def _open(self, data: DealtData) -> None:
        order = pb.OpenDataRun(
            run=self._name,
            plan=self._plan,
            budget=data.batches,
            workers=len(self._requests),
            position="" if data.position is None else json.dumps(data.position),
            lease_s=data.lease_s,
        )
        self._cluster.call("Master.OpenDataRun", frame(open_data_run=order))

    def stop(self) -> None:
        """Asks all loops to end after their steps in flight; returns at once."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for request in self._requests:
            order = pb.StopLoop(loop=self._loop_name(request), task=request.task)
            with suppress(JGError):
                self._cluster.call("Master.StopLoop", frame(stop_loop=order))

    def _next(self) -> _Item:
        try:
            return self._items.get(timeout=self._silence_s)
        except queue.Empty:
            raise DeadlineError(
                f"no report from the training loops for {self._silence_s:g} s; look at "
                "the tasks with cluster.status()"
            ) from None

    @property
    def _data_run(self) -> str:
        if self._arbiter is not None:
            return self._loop_name(self._arbiter)
        return "" if self._data is None else self._name

    def _loop_name(self, request: LoopRequest) -> str:
        again = f"-{request.attempt}" if request.attempt else ""
        return f"{self._name}-{request.replica}{again}"

    async def _follow(self, request: LoopRequest) -> None:
        order = pb.RunLoop(
            handle=request.handle,
            data=request.data,
            steps=request.steps,
            batch_size=request.batch_size,
            seed=request.seed,
            replica=request.replica,
            step_timeout_s=request.step_timeout_s,
            report_every_s=request.report_every_s,
            loop=self._loop_name(request),
            task=request.task,
            first_step=request.first_step,
            step_feed=request.step_feed,
            replica_feed=request.replica_feed,
            batch_feed=request.batch_feed,
            data_run=self._data_run,
            dealer="" if self._arbiter is None else self._arbiter.task,
            data_plan=self._plan if request.plan is None else _plain(request.plan),
            compute_wait_s=request.compute_wait_s,
            sync=_sync_order(request.sync),
            data_feeds=request.data_feeds,
        )
        try:
            replies = self._cluster.transport.call(
                self._cluster.address,
                "Master.RunLoop",
                frame(run_loop=order),
                timeout_s=loop_timeout_s(request.steps, request.step_timeout_s),
            )
            async for reply in replies:
                body = body_of(reply)
                steps, seconds, *fetches = reply.tensors
                self._items.put(
                    LoopReport(
                        request.replica,
                        request.task,
                        body.state,
                        steps,
                        seconds,
                        tuple(fetches),
                        dict(body.times),
                        dropped={TaskName(t): n for t, n in body.dropped.items()},
                        position=json.loads(body.data_position or "null"),
                    )
                )
        except JGError as error:
            self._items.put(self._lost(request, error) or self._named(error))

    def _named(self, error: JGError) -> JGError:
        """Returns the error; of a lost master it says that it is one."""
        master = self._cluster.master
        lost = error.details.get("task", master)
        if not isinstance(error, TaskLostError) or lost != master:
            return error
        return TaskLostError(
            f"{master}, the master of this run, was lost: {error.message.rstrip('.')}. "
            "A client that is connected to a ps may lose any worker",
            **{**error.details, "task": master},
        )

    def _lost(self, request: LoopRequest, error: JGError) -> LoopReport | None:
        """Returns what to tell of a worker that others can do without."""
        of_worker = isinstance(error, TaskLostError) and (
            error.details.get("task") == request.task
        )
        is_shared = self._data_run and request is not self._arbiter
        if not (is_shared and of_worker) or request.task == self._cluster.master:
            return None
        if self._arbiter is not None:
            self._leave(self._arbiter, request.task)
        _LOG.warning(
            "%s was lost; the other workers go on: %s",
            request.task,
            error.message,
        )
        none = np.empty(0)
        return LoopReport(
            request.replica, request.task, "lost", none, none, (), {}, error
        )

    def _leave(self, arbiter: LoopRequest, lost: TaskName) -> None:
        """Tells who decides in synchronous training that a worker is gone."""
        order = pb.StopLoop(loop=self._loop_name(arbiter), task=arbiter.task, lost=lost)

        async def tell() -> None:
            replies = self._cluster.transport.call(
                self._cluster.address,
                "Master.StopLoop",
                frame(stop_loop=order),
                timeout_s=CONTROL_S,
            )
            with suppress(JGError):
                async for _ in replies:
                    continue

        telling = asyncio.ensure_future(tell())
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)


def _plain(plan: SlotPlan) -> str:
    return json.dumps(plan.to_dict())


def _sync_order(request: SyncRequest | None) -> pb.SyncOrder | None:
    if request is None:
        return None
    return pb.SyncOrder(
        gate=request.gate,
        version=request.version,
        wanted=request.wanted,
        handles=list(request.replicas),
        tasks=list(request.replicas.values()),
        shards=request.shards,
        data_position=json.dumps(request.position),
    )
