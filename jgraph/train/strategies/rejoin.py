"""Rejoin of workers that were lost during a run and answer again."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Final, final

from jgraph.client.cluster import Cluster
from jgraph.client.wait_for_tasks import reaches_every_ps, ready_tasks
from jgraph.cluster import event_loop
from jgraph.cluster.polling import Polling
from jgraph.errors import ClusterError, JGError, TaskLostError
from jgraph.graph.ir import TaskName

LOOK_EVERY_S: Final = 0.5
"""That a worker answers again shows only by asking it."""
_POLL_S: Final = 0.2
_LOG = logging.getLogger("jgraph.recover")


@final
class Rejoin:
    """Looks after lost workers, from the first loss to the end of the run.

    One that answers must also reach every ps: it may have lost no more than a link.

    Args:
      cluster: theirs.
      admit: given the number of a replica, lets its worker run a loop again; called
        from a thread of this object. None: the master of a detached run does that.
    """

    def __init__(self, cluster: Cluster, admit: Callable[[int], None] | None) -> None:
        self._cluster = cluster
        self._admit = admit
        self._lost: dict[int, TaskName] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def lost(self, replica: int, worker: TaskName) -> None:
        """Begins to look after a worker."""
        if self._admit is None:
            return
        self._lost[replica] = worker
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look, name="jgraph-rejoin", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Admits nobody any more; returns when nobody is being admitted."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            answering = event_loop.run(ready_tasks(self._cluster)) if self._lost else {}
            for replica, worker in list(self._lost.items()):
                if worker not in answering or self._over.is_set():
                    continue
                if reaches_every_ps(self._cluster, worker):
                    self._try(replica, worker)

    def _try(self, replica: int, worker: TaskName) -> None:
        # Before: the worker may be lost again as soon as it is admitted.
        del self._lost[replica]
        assert self._admit is not None  # else nobody is looked for
        try:
            self._admit(replica)
        except JGError as error:  # it went away again; the next look tells
            _LOG.info("%s does not take part yet: %s", worker, error.message)
            self._lost.setdefault(replica, worker)
        else:
            _LOG.warning("%s answers again and takes part in the run", worker)


def is_one_back(
    cluster: Cluster,
    workers: Iterable[TaskName],
    back: Collection[int],
    stop: threading.Event,
    wait_s: float,
) -> bool:
    """Waits for a worker that takes part again; False: no longer wanted.

    Args:
      cluster: of the workers.
      workers: of whom none is left.
      back: gets the replica of one that is back.
      stop: set from another thread: waits no longer.
      wait_s: how long.

    Raises:
      TaskLostError: none came back in time.
    """
    _LOG.warning("no worker is left; the run waits up to %g s for one", wait_s)
    polling = Polling(_POLL_S, wait_s, stop=stop)
    while not back and polling.wait():
        try:
            cluster.check_startable()
        except ClusterError:  # nobody starts it again
            break
    if not back and not stop.is_set():
        lost = ", ".join(workers)
        raise TaskLostError(f"no worker is left to train: {lost} went away")
    return bool(back)
