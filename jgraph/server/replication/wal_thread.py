"""Write-ahead log thread: appends records and syncs them in groups."""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from jgraph.errors import CopyLostError, JGError
from jgraph.failpoints import failpoint
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.plan.program.replay import RowsAre
from jgraph.rpc.wire.record_codec import record_to
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.change_log import Recorder
from jgraph.runtime.store.store import VariableStore
from jgraph.server.replication.wal import LogWriter, remove_logs

_LOG = logging.getLogger("jgraph.server")


@final
class WalThread:
    """Keeps the records of a stream in files: all that wait, with one ``fsync``.

    Args:
      directory: of the files.
      stream: their name.
      container: of the variables.
      store: where these are.
      soon: calls a function on the task's event loop.
      base: what waits for the first values, as a step.
      check_place: see ``TaskContext``.
      without: variables of the container of which nothing is kept.
    """

    def __init__(
        self,
        directory: Path,
        stream: str,
        container: str,
        store: VariableStore,
        soon: Callable[[Callable[[], None]], object],
        base: StepKey,
        check_place: Callable[[], None],
        without: Collection[str] = (),
    ) -> None:
        self._directory = directory
        self._stream = stream
        self._container = container
        self._store = store
        self._soon = soon
        self._base = base
        self._check_place = check_place
        self._without = without
        self._writer = LogWriter(directory, stream)
        self._due = threading.Event()
        self._is_closed = self._is_gone = False
        self._turn = threading.Lock()  # of who starts it, and who ends it
        self.recorder = Recorder(self._due.set)
        self._thread = threading.Thread(
            target=self._run, name=f"jgraph-log-{stream}", daemon=True
        )

    def start(self) -> None:
        """Begins with all that is there; not at all after ``end``."""
        self._tell(self._base)
        with self._turn:
            if not self._is_closed:
                self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether its thread goes on."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits until nothing more is written, after ``end``."""
        if self._thread.ident is not None:
            self._thread.join()

    def end(self, *, remove: bool) -> None:
        """Writes nothing more; the files stay unless they are to be removed."""
        with self._turn:
            self._is_gone = remove
            self._is_closed = True
        self._due.set()

    def _run(self) -> None:
        try:
            self._writer.begin()
            self._write_all()
        except Exception as error:  # noqa: BLE001  # becomes that of the steps
            _LOG.error("the change log '%s' ends: %s", self._stream, error)
            what = getattr(error, "strerror", None) or error
            lost = error if isinstance(error, JGError) else None
            lost = lost or CopyLostError(
                f"{self._store.task} cannot write its log in {self._directory}: {what}",
                path=str(self._directory),
                task=self._store.task,
            )
            self._soon(partial(self.recorder.fail, lost))
        finally:
            self._writer.close()
            if self._is_gone:
                remove_logs(self._directory, self._stream)

    def _write_all(self) -> None:
        cut = 0
        while not self._is_closed:
            self._due.wait()
            self._due.clear()
            number = 0
            for record in self.recorder.take():
                self._check_place()
                number = record.number
                if number == cut:
                    self._writer.begin()
                self._writer.write(record_to(self._stream, record))
            if number:
                failpoint("log.written")
                self._check_place()
                self._writer.sync()
                failpoint("log.on_disk")
                self._soon(partial(self.recorder.commit, number))
            if self._writer.is_long:
                cut = self._tell(None)

    def _tell(self, step: StepKey | None) -> int:
        """Records all that is there; returns the number of the first record of it.

        0 if there is nothing, or in the middle of an update: the log goes on then.
        """
        numbers: list[int] = []

        def tell(
            what: str | RowsAre | HashSpec, arrays: Sequence[np.ndarray[Any, Any]]
        ) -> None:
            numbers.append(self.recorder.put(what, arrays, step))

        is_torn = lambda: self.recorder.is_torn
        self._store.whole(self._container, tell, self._without, is_torn)
        return numbers[0] if numbers else 0
