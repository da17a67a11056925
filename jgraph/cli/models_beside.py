"""Model server beside a task: what a task of the job ``serve`` is for."""

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from jgraph.errors import JGError

if TYPE_CHECKING:
    from jgraph.server.server import Server
    from jgraph.serving.model_server import ModelServer

_LOG = logging.getLogger("jgraph.serving")
START_S: Final = 600.0
"""All tasks of the cluster answer by then, or the task ends."""
DRAIN_S: Final = 5.0


@final
class ModelsBeside:
    """Serves a directory of models by the cluster that a task belongs to.

    The directory may be empty, or not there yet: what comes into it is served.

    Args:
      task: a server of this process.
      directory: of models.
      cluster_tls: certificates of a client of the cluster.
      cluster_token: file of the cluster's token.
      drain_s: how long to go on at the end, after it has said that it is not ready.
      **options: of ``ModelServer``.

    Attributes:
      server: answers, once the cluster is there.
      error: why there is none.
    """

    def __init__(
        self,
        task: "Server",
        directory: Path,
        cluster_tls: Path | None,
        cluster_token: Path | None,
        drain_s: float = DRAIN_S,
        **options: Any,
    ) -> None:
        self.server: ModelServer | None = None
        self.error: JGError | None = None
        self._task = task
        self._directory = directory
        self._connection = {"tls": cluster_tls, "token_file": cluster_token}
        self._drain_s = drain_s
        self._options = options
        self._cluster: Any = None
        self._starting = threading.Thread(target=self._start, daemon=True)

    def start(self) -> None:
        """Begins to wait for the cluster; the models are served when it is there."""
        self._starting.start()

    def _start(self) -> None:
        from jgraph.client.cluster import connect
        from jgraph.serving.model_server import ModelServer

        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._cluster = connect(
                self._task.target, timeout_s=START_S, **self._connection
            )
            self.server = ModelServer(
                self._directory,
                cluster=self._cluster,
                may_be_empty=True,
                **self._options,
            )
        except JGError as error:
            _LOG.error("%s serves no models: %s", self._task.task, error)
            self.error = error
            self._task.stop()
        else:
            places = self.server.url, self.server.grpc_target
            at = " and ".join(filter(None, places))
            _LOG.info("%s answers for models at %s", self._task.task, at)

    def stop(self) -> None:
        """Ends the model server, after the task: requests are answered until then.

        Raises:
          JGError: what kept it from starting.
        """
        self._starting.join(DRAIN_S)
        if self.server is not None:
            self.server.stop(self._drain_s)
        if self._cluster is not None:
            self._cluster.close()
        if self.error is not None:
            raise self.error
