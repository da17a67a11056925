"""Live model: a model server that answers with parameters while these are trained."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeAlias, final

from jgraph.client.cluster import Cluster
from jgraph.clock import Clock, SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.wait_message import show_wait
from jgraph.coordination.serving.batching import Limits
from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.coordination.serving.versions import Listed
from jgraph.errors import ArtifactError, ModelNotReadyError
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.serving.answering import Version, WaitingFunction
from jgraph.serving.artifact import check_model_name
from jgraph.serving.exported_model import LoadedVersion
from jgraph.serving.live.live_function import LiveFunction
from jgraph.serving.live.live_options import LiveOptions
from jgraph.serving.live.parameters import Parameters, RemoteParameters, read_first
from jgraph.serving.live.refreshing import Refreshing
from jgraph.serving.live.table_rows import LiveTable
from jgraph.serving.model_options import ModelOptions
from jgraph.serving.model_server import ModelServer
from jgraph.serving.signature import DEFAULT, Array
from jgraph.train.live.local_parameters import LocalParameters
from jgraph.train.live.model_call import ModelCall, counts_for
from jgraph.train.model.served import Example, rows_independent
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import RunState
from jgraph.train.step.train_step import TrainStep
from jgraph.view import markup

_LOG = logging.getLogger("jgraph.serving")
VERSION: Final = 1
"""The one version that a live model has."""
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
        self._threads = threads
        self._clock = clock
        self._refreshing = Refreshing(name, parameters, refresh_s)

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

    def curl(self, model: str = "") -> str:
        """Returns a command line that asks the model, with its example.

        Args:
          model: its name, as for ``ModelServer.curl``; may be left out.

        Raises:
          ModelNotFoundError: the server has no model of that name.
        """
        return self.server.curl(model or self.name)

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends the server; the run goes on.

        Args:
          drain_s: as for ``ModelServer.stop``.
        """
        self.server.stop(drain_s)
        self._refreshing.stop()
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


@final
@dataclass(frozen=True, slots=True)
class LiveSource:
    """The model of a run, as it is trained.

    Attributes:
      step: the variables of the run.
      state: their values.
      cluster: where they are; None: in this process.
      newest: returns the variables as they lie by now.
    """

    step: TrainStep
    state: RunState
    cluster: Cluster | None
    newest: Callable[[], Sequence[Variable]]


@final
class TriedModel:
    """A model that was traced, and tried with parameters of now.

    Args:
      name: what it is called.
      source: the model.
      example: a batch.
      fn: called in place of the model.
      limits: what it takes at a time.
      options: how it is served.

    Attributes:
      call: the model as a function.
      parameters: where its parameters are.
      function: answers with them.
    """

    def __init__(
        self,
        name: str,
        source: LiveSource,
        example: Example,
        fn: Fn,
        limits: Limits,
        options: LiveOptions,
    ) -> None:
        self.clock = SystemClock()
        self.threads = ThreadPoolExecutor(2, "jgraph-live")
        step = source.step
        self.call = ModelCall(step, example, fn, rows_of=_by_rows(step, source.cluster))
        self.by_name: dict[str, Variable] = {v.name: v for v in step.variables}
        counts = counts_for(self.call, limits)
        self.tables = {n: LiveTable(self.by_name[n], counts[n]) for n in counts}
        self.parameters = self._parameters(source, options)
        try:
            self._try(name, options)
        except BaseException:
            self.close()
            raise

    def _parameters(self, source: LiveSource, options: LiveOptions) -> Parameters:
        step, state, cluster = source.step, source.state, source.cluster
        if cluster is None:
            return LocalParameters(state, step.names, self.threads, self.clock)
        assert isinstance(state, RemoteState)  # of a cluster
        state.initialize()
        rows = options.cache_rows if options.on_loss == "stale" else 0
        return RemoteParameters(
            cluster,
            [self.by_name[name] for name in self.call.dense],
            self.by_name["global_step"],
            self.tables,
            rows,
            self.threads,
            self.clock,
            source.newest,
        )

    def _try(self, name: str, options: LiveOptions) -> None:
        read_first(self.parameters)
        signature, example = self.call.signature, self.call.example
        self.function = LiveFunction(
            self.call.compiled,
            self.call.dense,
            signature,
            self.parameters,
            LookupShare(options.max_share),
            options.on_loss,
            self.threads,
            self.clock,
        )
        independent = rows_independent(
            self.function.tried, signature, example, options.rtol, name
        )
        self.function.signature = replace(
            signature, rows_independent=independent, rtol=options.rtol
        )

    def close(self) -> None:
        """Drops what is held on other tasks."""
        self.parameters.close()
        self.threads.shutdown(wait=False)


def serve_live(
    name: str,
    example: Any,
    fn: Fn,
    options: LiveOptions,
    source: LiveSource,
    **server_options: Any,
) -> LiveModel:
    """Starts a server for the model of a run; see ``Run.serve``.

    Args:
      name: what the model is called.
      example: a batch.
      fn: called in place of the model.
      options: how it is served.
      source: the model.
      **server_options: of ``ModelServer``.
    """
    check_model_name(name)
    batch = Example.of(example, batch="b")
    with show_wait(f"tracing and compiling {name} to be served"):
        model = ModelOptions.of(f"[batching]\nmax_rows = {options.max_rows}\n")
        trial = TriedModel(name, source, batch, fn, model.limits, options)
        row = trial.call.example.rows(0, 1)
        try:
            versions = LiveVersions(name, trial.function, row, model)
            server = ModelServer(None, models=[versions], **server_options)
        except BaseException:
            trial.close()
            raise
    live = LiveModel(
        name, server, trial.parameters, options.refresh_s, trial.threads, trial.clock
    )
    for version in server.status():
        if version["state"] != "READY":
            live.stop()
            raise ModelNotReadyError(f"{name} cannot be served: {version['reason']}")
    return live


def _by_rows(step: TrainStep, cluster: Cluster | None) -> frozenset[str]:
    """Returns the parameters of which rows may be looked up."""
    if cluster is None:
        return frozenset()
    return frozenset(
        v.name for v in step.variables if v.shape and LiveTable(v, ()).is_by_rows
    )
