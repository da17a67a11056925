"""Change-log streams of one task: those it sends, and those it follows."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from jgraph.cluster.methods import Answer
from jgraph.cluster.options import RECORDS_DIR
from jgraph.errors import ConfigError, CopyLostError, JGError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.replay import RowsAre, changing
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.rpc.status import from_status, to_status
from jgraph.rpc.transport import Frame
from jgraph.rpc.wire.record_codec import record_to
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.ahead import LEAST_BYTES, AheadCopy
from jgraph.runtime.store.change_log import Recorder, Recording
from jgraph.runtime.task import TaskRuntime
from jgraph.server.host_room import check_memory
from jgraph.server.replication.follower import ChangeApplier, Follower
from jgraph.server.replication.wal import read_log, remove_logs
from jgraph.server.replication.wal_thread import WalThread
from jgraph.server.steps.task_host import TaskHost
from jgraph.server.task_context import TaskContext

_LOG = logging.getLogger("jgraph.server")
_OWN: Final = "jgraph-records"
_REST: Final = 1.0
"""After a part is copied ahead nothing is for so many times as long as it took."""
_UNKEPT: Final = 4
"""So many records of what was there are sent before the first of them is kept."""
_PATIENCE_S: Final = 10.0
_BASE: StepKey = ("", 0)
"""Stands for all that was there when a stream began; no program has such a handle."""


@final
@dataclass(frozen=True, slots=True)
class _Source:
    """A stream that begins here: at its ``backup``, or in the ``log``, it is kept.

    ``ahead``: it is of variables that are copied while they are used.
    """

    recorder: Recorder
    backup: TaskName
    log: WalThread | None
    ahead: AheadCopy | None = None


@final
class ChangeStreams:
    """The streams of records that begin or end at a task.

    Args:
      context: of this task.
      runtime: of this task.
      shell: runs what is long.
    """

    def __init__(
        self, context: TaskContext, runtime: TaskRuntime, shell: TaskHost
    ) -> None:
        self._transport = context.transport
        self._check_place = context.check_place
        self._clock = context.clock
        self._runtime = runtime
        self._shell = shell
        # A directory of our own: files that are not needed any more are deleted there.
        directory = context.records_dir
        self._directory = None if directory is None else directory / _OWN
        self._loop = asyncio.get_running_loop()
        self._sources: dict[str, _Source] = {}
        self._ending: dict[str, WalThread] = {}
        """The log of each stream that was dropped last."""
        self._copies: dict[str, Follower] = {}
        self._claims: dict[str, object] = {}
        """What begins of each stream, until it has begun or is dropped."""
        self.methods: Mapping[str, Answer] = {
            "KeepRecords": self._keep,
            "TakeRecords": self._take,
            "EndRecords": self._end,
            "CopyAhead": self._copy_ahead,
        }

    # ------------------------------------------------------------ of this task

    async def _keep(self, request: Frame) -> AsyncIterator[Frame]:
        """Answers when all that is there is kept."""
        order = body_of(request)
        source = self._sources.get(order.stream)
        if source is None:
            source = self._sources[order.stream] = self._source(order)
            try:
                await self._shell.run(partial(self._begin, source, order))
                await self._all_kept(source.recorder)
            except BaseException:  # or who asks again would take it for kept
                if self._sources.get(order.stream) is source:
                    self.drop([order.stream])
                raise
        recorder = source.recorder
        for handle, program in zip(order.handles, order.programs, strict=False):
            due = None
            if order.updates:
                due = changing(self._runtime.loaded(handle).partition)
            self._runtime.record(handle, Recording(recorder, program, due))
        yield frame(empty=pb.Empty())

    def _source(self, order: pb.KeepRecords) -> _Source:
        stream, backup = order.stream, TaskName(order.backup)
        if backup:
            wake = partial(self._wake, stream)
            return _Source(Recorder(wake, undoes=order.undoes), backup, None)
        log = WalThread(
            *(self._logs(), stream, order.container, self._runtime.store),
            soon=self._loop.call_soon_threadsafe,
            base=_BASE,
            check_place=self._check_place,
            without=frozenset(order.without),
        )
        return _Source(log.recorder, backup, log)

    def _logs(self) -> Path:
        if self._directory is None:
            raise ConfigError(
                f"durability='log' needs a directory for the log of "
                f"{self._runtime.task}; set {RECORDS_DIR} where it is started, to a "
                "directory on a disk that outlives it"
            )
        return self._directory

    def _begin(self, source: _Source, order: pb.KeepRecords) -> None:
        if source.log is not None:
            # One of this name that was dropped may still have its files in hand.
            if (before := self._ending.pop(order.stream, None)) is not None:
                before.join()
            source.log.start()
            return

        def tell(what: str | RowsAre | HashSpec, arrays: Sequence[Any]) -> None:
            # All at once would lie a third and a fourth time in memory that is shared.
            number = source.recorder.put(what, arrays, _BASE)
            if sum(array.nbytes for array in arrays) >= LEAST_BYTES:
                source.recorder.wait_kept(number - _UNKEPT, _PATIENCE_S)

        without = frozenset(order.without)
        self._runtime.store.whole(order.container, tell, without)

    async def _all_kept(self, recorder: Recorder) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def answer(error: JGError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        recorder.when_kept(_BASE, answer)
        await done

    async def _copy_ahead(self, request: Frame) -> AsyncIterator[Frame]:
        """Answers when what is to be sent now is kept."""
        order, sent = body_of(request), 0
        if order.begins:
            self.drop([order.stream])
            names, claim = list(order.names), self._claim(order.stream)
            ahead = await self._shell.run(
                partial(AheadCopy, self._runtime.store, order.container, names)
            )
            if not self._is_claimed(order.stream, claim):
                ahead.close()
                raise self._no_copy(order.stream)
            recorder = Recorder(partial(self._wake, order.stream))
            backup = TaskName(order.backup)
            self._sources[order.stream] = _Source(recorder, backup, None, ahead)
        source = self._sources.get(order.stream)
        if source is None or source.ahead is None:
            raise self._no_copy(order.stream)
        if order.ends:
            sent = await self._shell.run(partial(_put_rest, source.ahead, source))
            await self._all_kept(source.recorder)
        elif not order.begins:
            sent = await self._round(source.ahead, source.recorder)
        copied = pb.CopyAhead(
            stream=order.stream,
            sent=sent,
            left=source.ahead.remainder,
            number=source.recorder.number,
        )
        yield frame(copy_ahead=copied)

    async def _round(self, ahead: AheadCopy, recorder: Recorder) -> int:
        """Sends rows that have changed, so slowly that steps have most of the time."""
        parts, sent, clock = ahead.parts(), 0, self._clock
        while True:
            began = clock.now()
            part = await self._shell.run(lambda: next(parts, None))
            if part is None:
                return sent
            recorder.put(part.what, part.arrays, _BASE)
            await self._all_kept(recorder)
            sent += part.nbytes
            await asyncio.sleep(_REST * (clock.now() - began))

    def _wake(self, stream: str) -> None:
        self._loop.call_soon_threadsafe(self._send, stream)

    def _send(self, stream: str) -> None:
        if (source := self._sources.get(stream)) is not None:
            for record in source.recorder.take():
                self._transport.post(source.backup, record_to(stream, record))

    def commit(self, message: pb.RecordsKept) -> None:
        """Learns what a backup keeps, or why it keeps nothing more."""
        source = self._sources.get(message.stream)
        if source is None:
            return
        if message.HasField("status"):
            source.recorder.fail(from_status(message.status))
        else:
            source.recorder.commit(message.number)

    # ------------------------------------------------------------ of others

    async def _take(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        src, stream = TaskName(order.src), order.stream
        loaded = [self._runtime.loaded(h) if h else None for h in order.handles]
        here = self._runtime.task, self._shell
        check_memory(self._runtime.task, order.nbytes)
        if src == self._runtime.task:
            copier = ChangeApplier(stream, loaded, self._runtime.store, first=None)
            claim = self._claim(stream)
            await self._shell.run(partial(self._replay, stream, copier))
            if not self._is_claimed(stream, claim):
                raise self._no_copy(stream)
            unheard = lambda number, error: None  # nobody sends more
            self._copies[stream] = Follower(copier, stream, src, *here, unheard)
            yield frame(empty=pb.Empty())
            return

        def report(number: int, error: JGError | None) -> None:
            message = pb.RecordsKept(stream=stream, number=number)
            if error is not None:
                message.status.CopyFrom(to_status(error))
            self._transport.post(src, frame(records_kept=message))

        copier = ChangeApplier(stream, loaded, self._runtime.store)
        self._copies[stream] = Follower(copier, stream, src, *here, report)
        yield frame(empty=pb.Empty())

    def _replay(self, stream: str, copier: ChangeApplier) -> None:
        for record in read_log(self._logs(), stream):
            copier.apply(record)
        _LOG.info("applied the change log '%s' up to record %d", stream, copier.number)

    def received(self, src: TaskName, record: Frame) -> None:
        """Takes a record of another task."""
        stream = body_of(record).stream
        copy = self._copies.get(stream)
        if copy is not None and copy.src == src:
            copy.received(record)
            return
        error = to_status(self._no_copy(stream))
        message = pb.RecordsKept(stream=stream, status=error)
        self._transport.post(src, frame(records_kept=message))

    async def _end(self, request: Frame) -> AsyncIterator[Frame]:
        order = body_of(request)
        stream, copy = order.stream, self._copies.get(order.stream)
        version = order.version if order.HasField("version") else None
        if order.source:
            number, versions = 0, await self._hold(stream, version)
        elif copy is None:
            raise self._no_copy(stream)
        else:
            number, versions = await copy.end(version)
        first, last = versions.start, versions.stop
        ended = pb.EndRecords(stream=stream, number=number, first=first, end=last)
        yield frame(end_records=ended)

    async def _hold(self, stream: str, version: int | None) -> range:
        """Changes nothing more; returns the versions that what is here can have."""
        source = self._sources.get(stream)
        if source is None:
            return range(0)
        versions = await self._shell.run(source.recorder.hold)
        source.recorder.fail(CopyLostError(f"'{stream[:80]}' is held: its run goes on"))
        if source.log is not None:
            source.log.end(remove=False)
            await self._shell.run(source.log.join)  # it may be read next
        if version is not None:
            await self._shell.run(partial(source.recorder.end, version))
        return versions

    def _claim(self, stream: str) -> object:
        self._claims[stream] = claim = object()
        return claim

    def _is_claimed(self, stream: str, claim: object) -> bool:
        """Whether nothing has dropped the stream since, or begun it anew."""
        if self._claims.get(stream) is not claim:
            return False
        del self._claims[stream]
        return True

    def _no_copy(self, stream: str) -> JGError:
        task = self._runtime.task
        return CopyLostError(
            f"{task} keeps no copy '{stream[:80]}': it was started again, or the run "
            "it was of is over",
            task=task,
        )

    # ------------------------------------------------------------ ends

    def peer_lost(self, peer: TaskName, error: JGError) -> None:
        """Fails what only the lost task would keep."""
        for source in list(self._sources.values()):
            if source.backup == peer:
                source.recorder.fail(error)

    def drop(self, streams: Collection[str]) -> None:
        """Ends these streams (none named: all), and removes their logs."""
        error = CopyLostError(f"{self._runtime.task} records nothing any more")
        ending = {s: log for s, log in self._ending.items() if log.is_writing}
        self._ending = ending
        for stream in [s for s in self._sources if not streams or s in streams]:
            source = self._sources.pop(stream)
            source.recorder.fail(error)
            if source.ahead is not None:
                source.ahead.close()
            if source.log is not None:
                source.log.end(remove=True)
                ending[stream] = source.log
        for stream in [s for s in self._claims if not streams or s in streams]:
            del self._claims[stream]
        for stream in [s for s in self._copies if not streams or s in streams]:
            del self._copies[stream]
        if self._directory is not None:
            for stream in streams:
                remove_logs(self._directory, stream)

    def close(self) -> None:
        """Ends the logs' threads; the logs stay."""
        for source in self._sources.values():
            if source.log is not None:
                source.log.end(remove=False)


def _put_rest(ahead: AheadCopy, source: _Source) -> int:
    """Records all that is not copied yet; returns its bytes."""
    sent = 0
    for part in ahead.rest():
        source.recorder.put(part.what, part.arrays, _BASE)
        sent += part.nbytes
    return sent
