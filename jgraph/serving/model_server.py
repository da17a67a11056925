"""Model server: exported models behind the inference protocols, in this process."""

import asyncio
import json
import logging
import os
import ssl
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, Final, Self, TypeAlias, final

import grpc

from jgraph.client.cluster import Cluster
from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.cluster.transport_choice import is_loopback
from jgraph.counts import check_flags, is_count, is_duration
from jgraph.errors import (
    CertificateError,
    ConfigError,
    InsecureError,
    PortInUseError,
    TokenError,
    hints,
)
from jgraph.rpc.grpc.listening import listen, server_options, stop_listening
from jgraph.rpc.security.token import SERVE_NAME, Token, home, own_path
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.serving.answering import VersionSource
from jgraph.serving.artifact import MODEL_NAME, local_directory, versions_in
from jgraph.serving.exported_model import named
from jgraph.serving.inference import Models
from jgraph.serving.oip_grpc import InferenceService
from jgraph.serving.served_model import ExportedVersions, ServedModel, model_row
from jgraph.serving.signature import Array
from jgraph.serving.statistics import EXTRA
from jgraph.view import markup

_LOG = logging.getLogger("jgraph.serving")
MAX_MESSAGE: Final = 64 << 20
MAX_CONNECTIONS: Final = 1024
LOADER_NICE: Final = 10
"""By how much what loads versions is nicer than what answers requests."""
GRACE_S: Final = 10.0
"""Requests under way are answered by then, or the server ends without."""
_LINK: Final = "it is a link, and none is followed here; move the directory here"
TLSFiles: TypeAlias = tuple[str | os.PathLike[str], str | os.PathLike[str]]


@final
class ModelServer:
    """Answers with the models of a directory; ``jg.serve`` starts it.

    Versions that come are loaded, and answer once they have been tried; those that were
    replaced go when their last request is answered. Ends with its ``with`` block.

    Args:
      path: a directory of models, or one model; None: only ``models``.
      models: served as well, from elsewhere; ``run.serve`` makes one.
      may_be_empty: start without any model; those that come are served.
      cluster: computes models over tasks, which ``jg.export(session=…)`` wrote, and has
        the parameters of those that ``jg.export(rows="ps")`` wrote.
      http_port: 0: any that is free; None: no HTTP.
      grpc_port: likewise.
      bind: the address to listen at.
      token_file: what callers have to show; ``~/.jgraph/serve_token`` if unset, which
        is made when there is none. The token of a cluster is refused.
      tls: files of a certificate and its key, PEM.
      insecure_i_accept: listen beyond this machine without ``tls``.
      watch_s: how often to look for new versions and labels.
      allow_control: callers may load and unload models.
      max_message: bytes of a request.
      max_connections: over HTTP; more are refused until one of them ends.

    Raises:
      ConfigError: there are no models, or a package is missing.
      InsecureError: it would listen beyond this machine in plain text.
      PortInUseError: a port is taken.

    Example:
      >>> import tempfile
      >>> import jgraph as jg
      >>> import numpy as np
      >>> x = np.zeros(1, np.float32)
      >>> with tempfile.TemporaryDirectory() as models:
      ...     model = jg.export(lambda x: x / 2 + 3, x, f"{models}/half")
      ...     with jg.ModelServer(models, http_port=None) as server:
      ...         server.predict("half", {"x": [1, 2, 5]})["y"].tolist()
      [3.5, 4.0, 5.5]
    """

    @hints.naming_arguments(hints.MODEL_SERVER_ARGUMENTS)
    def __init__(
        self,
        path: str | Path | None,
        *,
        models: Sequence[VersionSource] = (),
        may_be_empty: bool = False,
        cluster: Cluster | None = None,
        http_port: int | None = 0,
        grpc_port: int | None = 0,
        bind: str = "127.0.0.1",
        token_file: str | Path | None = None,
        tls: TLSFiles | None = None,
        insecure_i_accept: bool = False,
        watch_s: float = 2.0,
        allow_control: bool = False,
        max_message: int = MAX_MESSAGE,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        check_flags(
            may_be_empty=may_be_empty,
            insecure_i_accept=insecure_i_accept,
            allow_control=allow_control,
        )
        self.path = None if path is None else local_directory(path)
        self._sources = tuple(models)
        self._may_be_empty = may_be_empty
        self._cluster = cluster
        self._bind = bind
        self._tls = None if tls is None else _certificate_and_key(tls)
        self._watch_s = watch_s
        self._allow_control = allow_control
        self._max_message = max_message
        self._max_connections = max_connections
        self.http_port: int | None = http_port
        self.grpc_port: int | None = grpc_port
        self._check(insecure_i_accept=insecure_i_accept)
        if http_port is not None:
            _import_http()
        self.token = _token(token_file)
        self._cache = CompileCache()
        self._clock = SystemClock()
        self._loader = ThreadPoolExecutor(1, "jgraph-load", yield_to_others)
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "jgraph-serve")
        self._bodies = ThreadPoolExecutor(1, "jgraph-json")
        self._models = Models(self._clock)
        self._unreadable: dict[str, str] = {}
        """Models whose directories could not be read at the last look, and why."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._grpc: asyncio.Task[None] | None = None
        self._uvicorn: Any = None
        try:
            event_loop.run(self._start(), "loading models")
        except BaseException:
            self.stop()
            raise

    def _check(self, *, insecure_i_accept: bool) -> None:
        if self.path is not None and not self.path.is_dir():
            raise ConfigError(
                f"there is no directory {self.path}; export a model first"
            )
        for port in (self.http_port, self.grpc_port):
            if port is not None and not (is_count(port, 0) and port < 1 << 16):
                raise ConfigError(
                    f"{port!r:.40} is no port; give 1 to 65535, or 0 for any that is "
                    "free"
                )
        if not (is_duration(self._watch_s) and self._watch_s < float("inf")):
            raise ConfigError(
                f"watch_s={self._watch_s!r:.40} is how often to look for new "
                "versions; give seconds, more than 0"
            )
        for name in ("max_message", "max_connections"):
            value = getattr(self, f"_{name}")
            if not is_count(value, 1):
                raise ConfigError(f"{name}={value!r:.40}: give a number, 1 or more")
        if not (is_loopback(self._bind) or self._tls or insecure_i_accept):
            raise InsecureError(
                f"at {self._bind} others could read requests and the token; give "
                "tls=(certificate, key) (--tls-cert, --tls-key), or say "
                "--insecure-i-accept in a network that is yours alone"
            )
        if self._tls is not None:
            _check_pair(*self._tls)

    async def _start(self) -> None:
        unreadable = await self._find()
        if (why := unreadable.get(str(self.path))) is not None:
            raise ConfigError(f"cannot look for models in {self.path}: {why}")
        self._models.first = frozenset(self._models.by_name)
        if not (self._models.by_name or self._may_be_empty):
            others = "".join(f"; {name}: {why}" for name, why in unreadable.items())
            raise ConfigError(
                f"{self.path} holds no exported models{others}; jg.export writes them "
                "to PATH/NAME/VERSION"
            )
        if self.grpc_port is not None:
            await self._start_grpc(self.grpc_port)
        if self.http_port is not None:
            await self._start_http(self.http_port)
        # Where a port is taken, nothing is being loaded that would have to end.
        await self._look()
        await self._settled()
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _start_grpc(self, port: int) -> None:
        options = dict(server_options())
        options |= {
            "grpc.max_receive_message_length": self._max_message,
            "grpc.max_send_message_length": -1,
            # Callers of a model come and go, and may be silent between requests.
            "grpc.max_connection_idle_ms": 600_000,
        }
        server = grpc.aio.server(options=list(options.items()))
        service = InferenceService(
            self._models,
            self.token,
            aside=self._bodies,
            allow_control=self._allow_control,
        )
        server.add_generic_rpc_handlers((service.handler(),))
        address = _address(self._bind, port)
        try:
            if self._tls is None:
                self.grpc_port = server.add_insecure_port(address)
            else:
                cert, key = (_read(path) for path in self._tls)
                credentials = grpc.ssl_server_credentials([(key, cert)])
                self.grpc_port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PortInUseError(
                f"cannot listen at {address}: another server is there, or this machine "
                "has no such address"
            ) from error
        self._grpc = await listen(server, grace_s=GRACE_S)

    async def _start_http(self, port: int) -> None:
        import uvicorn

        from jgraph.rpc.http_port import bound_socket, http_config
        from jgraph.serving.oip_http import (
            HttpDoor,
            InferenceRoutes,
            http_app,
            protocol_of,
        )
        from jgraph.serving.tf_http import TensorFlowRoutes

        door = HttpDoor(
            self._models,
            self.token,
            aside=self._bodies,
            allow_control=self._allow_control,
            max_message=self._max_message,
            is_loopback=is_loopback(self._bind),
        )
        routes = InferenceRoutes(door)
        files = self._tls and [os.fspath(path) for path in self._tls]
        config = http_config(
            http_app(door, routes, TensorFlowRoutes(door).routes()),
            protocol_of(routes),
            connections=self._max_connections,
            end_s=GRACE_S,
            ssl_certfile=files[0] if files else None,
            ssl_keyfile=files[1] if files else None,
        )
        listening = bound_socket(self._bind, port, "is another server there?")
        self.http_port = listening.getsockname()[1]
        self._uvicorn = uvicorn.Server(config)
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[listening]))
        self._tasks.append(serving)
        while not self._uvicorn.started and not serving.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._watch_s)
            try:
                await self._look()
            except Exception:  # noqa: BLE001  # no look may be the last one
                _LOG.exception("A look for new versions failed in an unexpected way.")

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        unreadable = await self._find()
        there = self._models.by_name
        for model in list(there.values()):
            try:
                model.tell(await loop.run_in_executor(None, model.source.look))
            except OSError as error:  # it stays as it is, and others are looked at
                unreadable[model.name] = error.strerror or str(error)
            if not model.states:
                del there[model.name]
        for name, why in unreadable.items():
            if self._unreadable.get(name) != why:
                _LOG.warning("Cannot look for models in %s: %s", name, why)
        self._unreadable = unreadable

    async def _find(self) -> dict[str, str]:
        """Serves models that are new; returns what cannot be read, and why."""
        there = self._models.by_name
        for source in self._sources:
            if source.name not in there:
                self._serve(source)
        if self.path is None:
            return {}
        found, unreadable = await asyncio.get_running_loop().run_in_executor(
            None, _models_in, self.path
        )
        for path in found:
            if path.name not in there:
                self._serve(
                    ExportedVersions(path, self._cache, self._cluster, self._threads)
                )
        return unreadable

    def _serve(self, source: VersionSource) -> None:
        model = ServedModel(source, self._clock, self._loader, self._threads)
        self._models.by_name[source.name] = model

    async def _settled(self) -> None:
        for model in list(self._models.by_name.values()):
            await model.settled()

    def refresh(self) -> Self:
        """Looks for new versions and labels now; returns when all are loaded."""

        async def refreshed() -> None:
            await self._look()
            await self._look()  # at what failed before, whether its files come no more
            await self._settled()

        event_loop.run(refreshed(), "loading new versions of models")
        return self

    @property
    def compilations(self) -> int:
        """How often code was compiled since the server started."""
        return self._cache.compilations

    @property
    def url(self) -> str:
        """Address for HTTP; empty without it."""
        if self.http_port is None:
            return ""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{_address(self._bind, self.http_port)}"

    @property
    def grpc_target(self) -> str:
        """Address for gRPC; empty without it."""
        if self.grpc_port is None:
            return ""
        return _address(self._bind, self.grpc_port)

    def predict(
        self,
        model: str,
        x: Any,
        *,
        version: str = "",
        signature: str = "",
        timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """Returns the outputs for a batch, by name, as a caller gets them.

        Args:
          model: its name.
          x: a dict by the names of the inputs, or the one input.
          version: a number, or ``label:NAME``; the newest if empty.
          signature: which function; the default one if empty.
          timeout_s: how long the answer is of use.

        Raises:
          JGError: as over the protocols.
        """

        async def asked() -> dict[str, Array]:
            with self._models.model(model).routed(version) as routed:
                function = routed.loaded.function(signature)
                values = named(function.signature, x)
                answer = await self._models.answer(
                    self._models.asked(routed, signature, values, timeout_s=timeout_s)
                )
            return {spec.name: value for spec, value in answer.outputs}

        return event_loop.run(asked(), f"waiting for an answer of {model}")

    def curl(self, model: str) -> str:
        """Returns a command line that asks a model, with its example.

        Raises:
          ModelNotFoundError, ModelNotReadyError: it cannot be asked.
        """
        with self._models.model(model).routed() as routed:
            loaded = routed.loaded
            one = loaded.function("").signature
            example = loaded.examples[loaded.default]
        inputs = [
            {
                "name": spec.name,
                "datatype": spec.datatype,
                "shape": list(value.shape),
                "data": value.astype(
                    "float32" if spec.datatype in ("FP16", "BF16") else value.dtype
                )
                .ravel()
                .tolist(),
            }
            for spec, value in zip(one.inputs, example.values(), strict=True)
        ]
        body = json.dumps({"inputs": inputs})
        return (
            f'curl -s -H "Authorization: Bearer $(cat {self.token.path})" '
            f"-H 'Content-Type: application/json' -d '{body}' "
            f"{self.url}/v2/models/{model}/infer"
        )

    def status(self) -> list[dict[str, Any]]:
        """Returns each version of each model, its state, and why it failed."""
        return [row for one in self._models.by_name.values() for row in model_row(one)]

    def labels(self, model: str) -> Mapping[str, int]:
        """Returns the labels of a model that requests may name."""
        return dict(self._models.model(model).labels)

    def set_label(self, model: str, label: str, version: int | None) -> Self:
        """Calls a version by a label, in the directory and here.

        Raises:
          ArtifactError: no such version, or no label.
        """
        self._models.model(model).source.set_label(label, version)
        return self.refresh()

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends the server; requests under way are answered.

        Args:
          drain_s: how long to go on as usual after it has said that it is not ready,
            which whoever sends requests here has to notice first.
        """
        event_loop.run(self._stop(drain_s), "ending the model server")
        for model in self._models.by_name.values():
            model.close()
        self._loader.shutdown(wait=False)
        self._threads.shutdown(wait=False)
        self._bodies.shutdown(wait=False)

    async def _stop(self, drain_s: float) -> None:
        self._models.says_ready = False
        await asyncio.sleep(drain_s)
        self._models.is_ending = True
        for model in self._models.by_name.values():
            model.load_no_more()
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._grpc is not None:
            await stop_listening(self._grpc)
        serving = self._tasks[:1] if self._uvicorn is not None else []
        if serving:
            await asyncio.wait(serving, timeout=GRACE_S + 5)
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        names = ", ".join(sorted(self._models.by_name)) or "no models"
        return f"ModelServer({names}, http={self.url!r}, grpc={self.grpc_target!r})"

    def _repr_html_(self) -> str:
        rows = [
            [row["name"], row["version"], row["state"], row["reason"]]
            for row in self.status()
        ]
        where = f"ModelServer {self.url} {self.grpc_target}"
        return markup.table(["model", "version", "state", "reason"], rows, where)


def serve(path: str | Path, **options: Any) -> ModelServer:
    """Starts a server for the models of a directory; see ``ModelServer``.

    Example:
      ``with jg.serve("models") as server: print(server.curl("ctr"))``

      >>> import jgraph as jg
      >>> jg.serve("no/such/models")
      Traceback (most recent call last):
        ...
      jgraph.errors.ConfigError: JG-124 there is no directory ...
    """
    return ModelServer(path, **options)


def yield_to_others() -> None:
    """Lets other threads of this process go first, where the system can tell threads.

    On Linux a priority belongs to a thread.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + LOADER_NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _models_in(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the models of a directory, and what cannot be read, with its reason."""
    found: list[Path] = []
    unreadable: dict[str, str] = {}
    try:
        if versions_in(path):
            return [path], {}
        with os.scandir(path) as entries:
            names = sorted(
                one.name for one in entries if MODEL_NAME.fullmatch(one.name)
            )
    except OSError as error:
        return [], {str(path): error.strerror or str(error)}
    for one in (path / name for name in names):
        try:
            if not one.is_dir() or not versions_in(one):
                continue
            if one.is_symlink():
                unreadable[one.name] = _LINK
            else:
                found.append(one)
        except OSError as error:
            unreadable[one.name] = error.strerror or str(error)
    return found, unreadable


def _token(source: str | Path | None) -> Token:
    """Returns the token of the server, which is never that of a cluster.

    Raises:
      TokenError: it is, or cannot be read.
    """
    if source is None:
        token = Token.make(home() / SERVE_NAME)
    else:
        path = Path(source).expanduser()
        if not path.exists():
            raise TokenError(
                f"there is no token at {path}; make one: "
                f"`jgraph token new {quote(str(path))}`, or leave --token-file away"
            )
        token = Token.read(path)
    with suppress(TokenError):  # there is none, and none is made
        if token.value == Token.read(own_path()).value:
            raise ConfigError(
                f"{token.path} is the token of a cluster, and who asks a model must "
                "not run programs there; make another: `jgraph token new "
                f"{token.path.with_name('other_token')}`, and name it with --token-file"
            )
    return token


def _certificate_and_key(tls: object) -> tuple[Path, Path]:
    """Returns the two files.

    Raises:
      ConfigError: it is something else, such as one path.
    """
    if isinstance(tls, tuple | list) and len(tls) == 2:
        with suppress(TypeError):
            certificate, key = (Path(path).expanduser() for path in tls)
            return certificate, key
    raise ConfigError(
        f"tls is {tls!r:.80}; give the files of a certificate and of its key: "
        "tls=('server.crt', 'server.key')"
    )


def _check_pair(certificate: Path, key: Path) -> None:
    """Refuses files that no server could listen with.

    Raises:
      CertificateError: says what is wrong.
    """
    for path in (certificate, key):
        _read(path)
    try:
        # Asked for no password, OpenSSL would wait for one at the terminal.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(
            f"{certificate} and {key} are no certificate and its key: {error}; give "
            "files in PEM, the certificate first, and the key without a password"
        ) from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from error


def _import_http() -> None:
    """Imports what HTTP needs, before threads load models.

    A library parses its source as it is imported, and Python 3.11 fails where two
    threads parse at once.

    Raises:
      ConfigError: the extra is not installed.
    """
    try:
        import uvicorn  # noqa: F401

        from jgraph.serving import oip_http, tf_http  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"HTTP needs starlette and uvicorn: {EXTRA}, or give http_port=None"
        ) from error
