"""Live model: a model server that answers with parameters while these are trained."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeAlias, final

from jgraph.client.cluster import Cluster
from jgraph.clock import Clock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.wait_message import show_wait
from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.coordination.serving.versions import Listed
from jgraph.errors import ArtifactError, ConfigError, ModelNotReadyError
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.serving.answering import Version, WaitingFunction
from jgraph.serving.artifact import check_model_name
from jgraph.serving.exported_model import LoadedVersion
from jgraph.serving.model_options import ModelOptions
from jgraph.serving.model_server import ModelServer
from jgraph.serving.signature import DEFAULT, Array
from jgraph.train.live.live_function import (
    LiveFunction,
    ModelCall,
    OnLoss,
    counts_for,
)
from jgraph.train.live.parameters import (
    LocalParameters,
    Parameters,
    RemoteParameters,
)
from jgraph.train.live.table_rows import LiveTable
from jgraph.train.model.served import Example, rows_independent
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import RunState
from jgraph.train.step.train_step import TrainStep
from jgraph.view import markup

_LOG = logging.getLogger("jgraph.serving")
VERSION: Final = 1
"""The one version that a live model has."""
CACHE_ROWS: Final = 100_000
MAX_SHARE: Final = 0.5
Fn: TypeAlias = Callable[..., Any] | None


@final
@dataclass(frozen=True, slots=True)
class Freshness:
    """How new is what a live model answers with.

    Attributes:
      step: updates that had been applied when dense parameters were copied.
      age_s: since then, in seconds.
      lost: tasks that do not answer; what they have is served as it was.
    """

    step: int
    age_s: float
    lost: tuple[TaskName, ...]


@final
@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How a live model is served; see ``Run.serve``.

    Raises:
      ConfigError: an option has a value that means nothing.
    """

    refresh_s: float = 1.0
    on_loss: OnLoss = "stale"
    cache_rows: int = CACHE_ROWS
    max_share: float = MAX_SHARE
    max_rows: int = 64
    rtol: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.refresh_s < float("inf"):
            raise ConfigError(
                f"refresh_s={self.refresh_s!r} is how often dense parameters are "
                "copied; give seconds, more than 0"
            )
        if self.on_loss not in ("stale", "error"):
            raise ConfigError(
                f"on_loss={self.on_loss!r}: give 'stale', to answer with what was "
                "there, or 'error', to refuse requests meanwhile"
            )
        if self.cache_rows < 0 or self.max_rows < 1:
            raise ConfigError(
                f"cache_rows={self.cache_rows}, max_rows={self.max_rows}: give 0 or "
                "more, and 1 or more"
            )


@final
class LiveVersions:
    """The one version of a live model; a ``VersionSource``."""

    newest = 1

    def __init__(
        self,
        name: str,
        function: WaitingFunction,
        example: Mapping[str, Array],
        options: ModelOptions,
    ) -> None:
        self.name = name
        self._version: LoadedVersion[WaitingFunction] = LoadedVersion(
            {DEFAULT: function}, {DEFAULT: example}
        )
        self._options = options

    def look(self) -> Listed:
        """See ``VersionSource.look``."""
        return Listed((VERSION,))

    def load(self, version: int) -> tuple[Version, ModelOptions]:
        """See ``VersionSource.load``."""
        assert version == VERSION  # there is no other
        return self._version, self._options

    def set_label(self, label: str, version: int | None) -> None:
        """See ``VersionSource.set_label``."""
        raise ArtifactError(
            f"{self.name} is served from parameters in training, and has no versions "
            f"to call '{label:.40}'; export one with jg.export(run, example, path)"
        )


@final
class LiveModel:
    """A model that is served while it is trained; ``run.serve`` makes it.

    Ends with its ``with`` block, and does not end the run.

    Attributes:
      name: of the model.
      server: answers; a ``ModelServer`` with all that those have.

    Example:
      >>> import jax.numpy as jnp
      >>> import jgraph as jg
      >>> import numpy as np
      >>> import optax
      >>> from flax import nnx
      >>> loss = lambda model, x: jnp.mean((model(x) - x.sum(1, keepdims=True)) ** 2)
      >>> x = np.ones((8, 3), np.float32)
      >>> trainer = jg.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), loss, optax.sgd(0.1))
      >>> run = trainer.fit(x, steps=2, batch_size=8, progress=False)
      >>> with run.serve("line", x, http_port=None, max_rows=1) as live:
      ...     live.predict(x)["y"].shape, live.freshness().step
      ((8, 1), 2)
    """

    def __init__(
        self,
        name: str,
        server: ModelServer,
        parameters: Parameters,
        refresh_s: float,
        threads: ThreadPoolExecutor,
        clock: Clock,
    ) -> None:
        self.name = name
        self.server = server
        self._parameters = parameters
        self._refresh_s = refresh_s
        self._threads = threads
        self._clock = clock
        self._refreshing: Future[None] = event_loop.start(self._refresh())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self._parameters.refresh()
            except Exception:  # noqa: BLE001  # a closed cluster is one of the reasons
                _LOG.exception("The parameters of %s stay as they were.", self.name)

    def predict(self, x: Any, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the outputs for a batch, by name, as a caller gets them.

        Args:
          x: a dict by the names of the inputs, or the one input.
          timeout_s: how long the answer is of use.

        Raises:
          JGError: as over the protocols.
        """
        return self.server.predict(self.name, x, timeout_s=timeout_s)

    def refresh(self) -> Self:
        """Takes a new copy of dense parameters now."""
        event_loop.run(self._parameters.refresh(), "reading the parameters")
        return self

    def freshness(self) -> Freshness:
        """Returns how new what it answers with is; rows are as of each request."""
        copy = self._parameters.copy
        age_s = self._clock.now() - copy.at
        return Freshness(copy.step, age_s, tuple(self._parameters.lost))

    @property
    def url(self) -> str:
        """Address for HTTP; empty without it."""
        return self.server.url

    @property
    def grpc_target(self) -> str:
        """Address for gRPC; empty without it."""
        return self.server.grpc_target

    def curl(self) -> str:
        """Returns a command line that asks the model, with its example."""
        return self.server.curl(self.name)

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends the server; the run goes on.

        Args:
          drain_s: as for ``ModelServer.stop``.
        """
        self.server.stop(drain_s)
        self._refreshing.cancel()
        self._parameters.close()
        self._threads.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        now = self.freshness()
        return f"LiveModel({self.name!r}, step={now.step}, url={self.url!r})"

    def _repr_html_(self) -> str:
        now = self.freshness()
        facts: dict[str, object] = {
            "step": f"{now.step:,}",
            "age": f"{now.age_s:.1f} s",
            "lost": ", ".join(now.lost) or "nothing",
            "HTTP": self.url or "none",
            "gRPC": self.grpc_target or "none",
        }
        return markup.facts(f"LiveModel {self.name}", facts)


def serve_live(
    name: str,
    example: Any,
    fn: Fn,
    options: LiveOptions,
    *,
    step: TrainStep,
    state: RunState,
    cluster: Cluster | None,
    **server_options: Any,
) -> LiveModel:
    """Starts a server for the model of a run; see ``Run.serve``.

    Args:
      name: what the model is called.
      example: a batch.
      fn: called in place of the model.
      options: how it is served.
      step: the variables of the run.
      state: their values.
      cluster: where they are; None: in this process.
      **server_options: of ``ModelServer``.
    """
    check_model_name(name)
    share = LookupShare(options.max_share)
    clock, batch = SystemClock(), Example.of(example, batch="b")
    threads = ThreadPoolExecutor(2, "jgraph-live")
    with show_wait(f"tracing and compiling {name} to be served"):
        call = ModelCall(step, batch, fn, rows_of=_by_rows(step, cluster))
        model = ModelOptions.of(f"[batching]\nmax_rows = {options.max_rows}\n")
        parameters = _parameters(
            call, model, options, step, state, cluster, threads, clock
        )
        try:
            _read_first(parameters)
            function = LiveFunction(
                call, call.signature, parameters, share, options.on_loss, threads, clock
            )
            independent = rows_independent(
                function.tried, call.signature, call.example, options.rtol, name
            )
            function.signature = replace(
                call.signature, rows_independent=independent, rtol=options.rtol
            )
            source = LiveVersions(name, function, call.example.rows(0, 1), model)
            server = ModelServer(None, models=[source], **server_options)
        except BaseException:
            parameters.close()
            raise
    live = LiveModel(name, server, parameters, options.refresh_s, threads, clock)
    for row in server.status():
        if row["state"] != "READY":
            live.stop()
            raise ModelNotReadyError(f"{name} cannot be served: {row['reason']}")
    return live


def _read_first(parameters: Parameters) -> None:
    event_loop.run(parameters.refresh(), "reading the parameters")
    for error in parameters.lost.values():
        raise error


def _by_rows(step: TrainStep, cluster: Cluster | None) -> frozenset[str]:
    """Returns the parameters of which rows may be looked up."""
    if cluster is None:
        return frozenset()
    return frozenset(
        v.name for v in step.variables if v.shape and LiveTable(v, ()).is_by_rows
    )


def _parameters(
    call: ModelCall,
    model: ModelOptions,
    options: LiveOptions,
    step: TrainStep,
    state: RunState,
    cluster: Cluster | None,
    threads: ThreadPoolExecutor,
    clock: Clock,
) -> Parameters:
    if cluster is None:
        return LocalParameters(state, step.names, threads, clock)
    assert isinstance(state, RemoteState)  # of a cluster
    state.initialize()
    by_name: dict[str, Variable] = {v.name: v for v in step.variables}
    counts = counts_for(call, model.limits)
    tables = {n: LiveTable(by_name[n], counts[n]) for n in call.tables}
    dense = [by_name[name] for name in call.dense]
    rows = options.cache_rows if options.on_loss == "stale" else 0
    count = by_name["global_step"]
    return RemoteParameters(cluster, dense, count, tables, rows, threads, clock)
