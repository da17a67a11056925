"""Facts about a task, for status, dashboard and metrics: sizes, times, counts."""

import os
import platform
import time
from typing import final

import jax
import jax.export
import psutil

from jgraph.cluster.events import EventLog
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import installed_version
from jgraph.rpc.shared_memory.lending import copy_seconds
from jgraph.rpc.statistics import TransportStatistics
from jgraph.runtime.task import TaskRuntime
from jgraph.server.call_counts import CallCounts
from jgraph.server.gates.gates import Gates
from jgraph.server.host_room import DiskLooks, memory_free
from jgraph.server.state_service import SaveCounts, table_statuses
from jgraph.server.steps.driver import StepDriver, waits_of
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext


@final
class TaskFacts:
    """What a task says of itself.

    Args:
      context: of the task.
      runtime: its variables and programs.
      shell: knows how long its threads worked.
      driver: of its steps.
      gates: of its strategies.
      events: what it noted.

    Attributes:
      calls: counters of the calls that it answered.
      saves: counters of checkpoints.
    """

    def __init__(
        self,
        context: TaskContext,
        runtime: TaskRuntime,
        shell: TaskHost,
        driver: StepDriver,
        gates: Gates,
        events: EventLog,
    ) -> None:
        self._context, self._runtime, self._shell = context, runtime, shell
        self._driver, self._gates, self._events = driver, gates, events
        self.calls = CallCounts(context.clock)
        self.saves = SaveCounts(context.clock)
        self._disks = DiskLooks(context.clock, context.records_dir)
        self._began = context.clock.now()
        self._process = psutil.Process()

    async def status(self, *, ready: bool) -> pb.TaskStatus:
        """Returns the facts of this moment.

        Args:
          ready: whether the task takes new work.
        """
        context, runtime = self._context, self._runtime
        await self._disks.look()
        transported = context.transport.statistics()
        disk_free = self._disks.free
        return pb.TaskStatus(
            task=context.task,
            incarnation=context.incarnation,
            address=context.address,
            platform=jax.export.default_export_platform(),  # "cuda", not "gpu"
            state="ready" if ready else "draining",
            pid=os.getpid(),
            rss_bytes=self._process.memory_info().rss,
            jgraph=installed_version("jgraph"),
            jax=jax.__version__,
            python=platform.python_version(),
            variable_bytes=runtime.store.nbytes,
            programs=runtime.programs,
            health_port=context.health_port(),
            data_port=context.data_port(),
            ways={
                peer: found.way
                for peer, found in transported.peers.items()
                if found.way
            },
            device_count=jax.local_device_count(),
            compilations=runtime.cache.compilations,
            busy_s={
                **self._shell.busy(),
                "copy": copy_seconds(),
                "process": time.process_time(),
            },
            hash_tables=table_statuses(runtime.store),
            steps=waits_of(runtime, self._driver),
            up_s=context.clock.now() - self._began,
            traffic=_traffic(transported),
            repeats_dropped=transported.repeats_dropped,
            calls=self.calls.rows(),
            gates=self._gates.statuses(),
            saves=self.saves.status(),
            arrangement=context.arrangement.number,
            # In hundredths: what changes is sent and written.
            memory_free=round(memory_free(), 2),
            disk_free=None if disk_free is None else round(disk_free, 2),
            certificate_ends_s=context.certificate_ends_s,
            newest_event=self._events.lines.count,
        )


def _traffic(transported: TransportStatistics) -> list[pb.PeerTraffic]:
    return [
        pb.PeerTraffic(
            peer=peer,
            frames_sent=found.frames_sent,
            bytes_sent=found.bytes_sent,
            frames_received=found.frames_received,
            bytes_received=found.bytes_received,
            shared_bytes_sent=found.shared_bytes_sent,
            shared_bytes_received=found.shared_bytes_received,
        )
        for peer, found in sorted(transported.peers.items())
    ]
