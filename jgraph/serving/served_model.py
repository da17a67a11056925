"""Served model: its versions loaded, watched, routed to and let go.

The shell of ``coordination.serving.versions``.
"""

import asyncio
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from jgraph.client.cluster import Cluster
from jgraph.clock import Clock
from jgraph.coordination.serving.versions import (
    Drain,
    Event,
    Failed,
    Idle,
    Listed,
    Load,
    LoadAsked,
    Loaded,
    Publish,
    Unload,
    UnloadAsked,
    Versions,
)
from jgraph.errors import (
    ArtifactError,
    JGError,
    ModelInputError,
    ModelNotFoundError,
    ModelNotReadyError,
)
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.serving.answering import Version, VersionSource, WaitingFunction
from jgraph.serving.artifact import (
    FILE,
    ModelManifest,
    checked_program,
    read_arrays,
    read_example,
    read_manifest,
    versions_in,
)
from jgraph.serving.exported_model import (
    LoadedFunction,
    LoadedVersion,
    read_version,
)
from jgraph.serving.function_queue import FunctionQueue
from jgraph.serving.labels import Labels, read_labels, set_label
from jgraph.serving.model_options import FILE as OPTIONS, ModelOptions, read_options
from jgraph.serving.statistics import Statistics
from jgraph.serving.tasks.program_file import program_from
from jgraph.serving.tasks.program_function import ProgramFunction

_LOG = logging.getLogger("jgraph.serving")
LABEL: Final = "label:"
_Place: TypeAlias = tuple[int, int, int]
"""Number, time and size of a file."""
_Files: TypeAlias = frozenset[tuple[str, _Place]]
Mirror: TypeAlias = "Callable[[], AbstractContextManager[ServedVersion | None]]"


@final
class ServedVersion:
    """A version that answers, or did.

    Args:
      number: of the version.
      loaded: what it is.
      options: of the model.
      clock: for deadlines.
      threads: where long executions run.
    """

    def __init__(
        self,
        number: int,
        loaded: Version,
        options: ModelOptions,
        clock: Clock,
        threads: Executor,
    ) -> None:
        self.number = number
        self.loaded = loaded
        self.timeout_s = options.timeout_s
        self.statistics = Statistics()
        self.under_way = 0
        self.mirror: Mirror | None = None
        """Holds the version that gets copies of what this one is asked."""
        self.queues: dict[str, FunctionQueue] = {}
        for name, function in loaded.functions.items():
            merges = function.signature.rows_independent
            limits = replace(options.limits, merges=merges)
            self.queues[name] = queue = FunctionQueue(
                function,
                limits,
                self.statistics,
                clock,
                threads,
                refuses_nonfinite=options.refuse_nonfinite,
            )
            queue.warm([*loaded.examples[name].values()])

    @property
    def queued_rows(self) -> int:
        """Rows that wait."""
        return sum(queue.queued_rows for queue in self.queues.values())

    @property
    def is_quick(self) -> bool:
        """Whether some requests need not wait."""
        return any(queue.is_quick for queue in self.queues.values())

    @property
    def can_answer(self) -> bool:
        """Whether all that its functions need is there."""
        return all(
            isinstance(one, LoadedFunction) or one.problem is None
            for one in self.loaded.functions.values()
        )

    def close(self) -> None:
        """Lets go of what its functions hold elsewhere."""
        for one in self.loaded.functions.values():
            if not isinstance(one, LoadedFunction):
                one.close()


@final
class ExportedVersions:
    """The versions in the directory of a model; a ``VersionSource``.

    Args:
      path: the directory.
      cache: compiled code of all models.
      cluster: runs the programs of models over tasks.
      threads: for what blocks.
    """

    def __init__(
        self,
        path: Path,
        cache: CompileCache,
        cluster: Cluster | None,
        threads: Executor,
    ) -> None:
        self.name = path.name
        self._cluster = cluster
        self._threads = threads
        self.newest = _newest(path)
        self._path = path
        self._cache = cache
        self._labels = Labels()
        self._said = ""
        self._manifests: dict[str, _Place] = {}
        """Which files were the manifests of versions that were loaded."""
        self._failed: dict[int, _Files] = {}
        """What there was of versions that could not be loaded."""
        self._seen: dict[int, _Files] = {}
        """What there was of them at the last look."""

    def look(self) -> Listed:
        """See ``VersionSource.look``."""
        found = tuple(
            number
            for number in versions_in(self._path)
            if _has_manifest(self._path / str(number))
        )
        try:
            self._labels, problem = read_labels(self._path), ""
        except ArtifactError as error:  # the last good ones stay
            problem = str(error)
        if problem and problem != self._said:
            _LOG.warning("The labels of %s stay as they were: %s", self.name, problem)
        self._said = problem
        labels = self._labels
        changed = tuple(filter(self._is_another, found))
        return Listed(found, labels.targets, labels.split, labels.mirror, changed)

    def _is_another(self, version: int) -> bool:
        """Whether files of a version that failed are others, and come no more."""
        if version not in self._failed:
            return False
        files = self._files(version)
        is_still = self._seen.get(version) == files
        self._seen[version] = files
        return is_still and files != self._failed[version]

    def _files(self, version: int) -> "_Files":
        """Returns what tells whether a load would read something else."""
        walk = os.walk(self._path / str(version))
        files = [Path(where, name) for where, _, names in walk for name in names]
        return frozenset(map(_facts, [self._path / OPTIONS, *files]))

    def load(self, version: int) -> tuple[Version, ModelOptions]:
        """See ``VersionSource.load``."""
        files = self._files(version)
        try:
            loaded = self._load(version)
        except Exception:
            self._failed[version] = files
            raise
        self._failed.pop(version, None)
        return loaded

    def _load(self, version: int) -> tuple[Version, ModelOptions]:
        path, options = self._path / str(version), read_options(self._path)
        place = self._check_same(path)
        loaded, options = self._read(path, options)
        self.newest = options.newest
        self._manifests[path.name] = place
        return loaded, options

    def _read(self, path: Path, options: ModelOptions) -> tuple[Version, ModelOptions]:
        manifest = read_manifest(path)
        if manifest.kind == "stablehlo":
            return read_version(path, self._cache), options
        if self._cluster is None:
            is_live = manifest.kind == "live"
            what = "is in training" if is_live else "runs on several tasks"
            raise ArtifactError(
                f"{self.name} {what}; give the server a cluster: jg.serve(path, "
                "cluster=…), jgraph serve --cluster jgraph://host:8470"
            )
        if manifest.kind == "program":
            return self._over_tasks(path, manifest, self._cluster), options
        # Who serves no model in training starts without what asks parameter servers.
        from jgraph.serving.live.live_version import read_live

        live, limits = read_live(
            path, manifest, self._cluster, self._cache, self._threads, options.limits
        )
        return live, replace(options, limits=limits)

    def _check_same(self, path: Path) -> "_Place":
        """Refuses a version that is another one than when it was loaded first."""
        _, place = _facts(path / FILE)
        if self._manifests.get(path.name, place) != place:
            raise ArtifactError(
                f"{path} is not what was loaded under this number, and versions never "
                "change; export the model again, as the next version",
                path=str(path),
            )
        return place

    def _over_tasks(
        self, path: Path, manifest: ModelManifest, cluster: Cluster
    ) -> LoadedVersion[WaitingFunction]:
        arrays = dict(read_arrays(path, manifest))
        functions: dict[str, WaitingFunction] = {
            name: ProgramFunction(
                f"{self.name}/{path.name}",
                one,
                program_from(checked_program(path, one.program)),
                arrays,
                cluster,
                self._threads,
            )
            for name, one in manifest.signatures.items()
        }
        return LoadedVersion(functions, read_example(path, manifest))

    def set_label(self, label: str, version: int | None) -> None:
        """See ``VersionSource.set_label``."""
        set_label(self._path, label, version)


@final
class _Held:
    """A version that stays loaded until the block ends.

    Args:
      version: the version.
      let_go: is told its number then.
    """

    __slots__ = ("_let_go", "_version")

    def __init__(self, version: ServedVersion, let_go: Callable[[int], None]) -> None:
        self._version = version
        self._let_go = let_go

    def __enter__(self) -> ServedVersion:
        self._version.under_way += 1
        return self._version

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if isinstance(error, ModelInputError | ModelNotFoundError):
            # Nobody else counts it: it came to no queue.
            self._version.statistics.failed(error.code, 0.0)
        self._version.under_way -= 1
        self._let_go(self._version.number)


@final
class ServedModel:
    """A model of a server; everything but loading happens in the event loop.

    Args:
      source: of its versions.
      clock: for deadlines.
      loader: loads versions, one at a time.
      threads: where long executions run.
    """

    def __init__(
        self,
        source: VersionSource,
        clock: Clock,
        loader: Executor,
        threads: Executor,
    ) -> None:
        self.source = source
        self.name = source.name
        self._clock = clock
        self._loader = loader
        self._threads = threads
        self._machine = Versions(source.newest)
        self._table = Publish(())
        self._there: dict[int, ServedVersion] = {}
        self._mirror = ""
        self._draining: set[int] = set()
        self.has_answered = False
        """Whether a version was ready, at any time."""
        self._loading: set[asyncio.Task[None]] = set()

    @property
    def versions(self) -> Mapping[int, ServedVersion]:
        """Versions that answer now."""
        return {number: self._there[number] for number in self._table.ready}

    @property
    def labels(self) -> Mapping[str, int]:
        """What they are called."""
        return self._table.labels

    @property
    def states(self) -> list[tuple[int, str, str]]:
        """Every version, its state, and why it failed."""
        return self._machine.states

    @property
    def pending(self) -> Mapping[str, int]:
        """Labels whose version cannot answer yet."""
        return self._machine.pending

    def tell(self, event: Event) -> None:
        """Does what follows from an event."""
        if isinstance(event, Listed) and event.mirror != self._mirror:
            self._mirror = event.mirror
            self._set_mirrors()
        for instruction in self._machine.handle(event):
            match instruction:
                case Load(version):
                    task = asyncio.get_running_loop().create_task(self._load(version))
                    self._loading.add(task)
                    task.add_done_callback(self._loading.discard)
                case Publish():
                    self._publish(instruction)
                case Drain(version):
                    self._draining.add(version)
                    self._end_if_idle(version)
                case Unload(version):
                    unloaded = self._there.pop(version)
                    asyncio.get_running_loop().run_in_executor(
                        self._threads, unloaded.close
                    )

    def _publish(self, table: Publish) -> None:
        self._table = table
        self.has_answered = self.has_answered or bool(table.ready)
        self._set_mirrors()
        ready = ", ".join(map(str, table.ready)) or "nothing"
        _LOG.info("%s answers with version %s.", self.name, ready)

    def _set_mirrors(self) -> None:
        for version in self._table.ready:
            mirror = partial(self._mirrored, version) if self._mirror else None
            self._there[version].mirror = mirror

    async def _load(self, version: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(self._loader, self._loaded, version)
        except Exception as error:  # noqa: BLE001  # a model must not end a server
            known = isinstance(error, JGError)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            _LOG.warning(
                "%s %d cannot be loaded: %s",
                self.name,
                version,
                why,
                exc_info=not known,
            )
            self.tell(Failed(version, why))
            return
        self._there[version] = loaded
        self.tell(Loaded(version, self.source.newest))

    def _loaded(self, version: int) -> ServedVersion:
        loaded, options = self.source.load(version)
        return ServedVersion(version, loaded, options, self._clock, self._threads)

    def routed(self, version: str = "", key: str = "") -> "_Held":
        """Returns the version that a request is for; it stays until the block ends.

        Args:
          version: a number, ``label:NAME``, or empty.
          key: of requests that a split sends to the same label; empty: any.

        Raises:
          ModelNotFoundError: there is no such version or label.
          ModelNotReadyError: it cannot answer now.
        """
        return _Held(self._chosen(version, key), self._end_if_idle)

    @contextmanager
    def _mirrored(self, version: int) -> Iterator[ServedVersion | None]:
        """Gives the version that gets copies of the requests of another one."""
        number = self._table.labels.get(self._mirror, version)
        if number == version or self._there[number].queued_rows:
            yield None  # it is behind already
            return
        with self.routed(str(number)) as mirror:
            yield mirror

    def _end_if_idle(self, version: int) -> None:
        if version in self._draining and not self._there[version].under_way:
            self._draining.discard(version)
            self.tell(Idle(version))

    def _chosen(self, version: str, key: str) -> ServedVersion:
        table = self._table
        label = version.removeprefix(LABEL) if version.startswith(LABEL) else ""
        if not version and table.split:
            label = _split(table.split, key)
        if label:
            number = table.labels.get(label)
            if number is None:
                raise self._no_label(label)
        elif version:
            number = self._number(version)
        else:
            number = table.ready[-1] if table.ready else None
        if number not in table.ready or number is None:
            raise self._not_ready(number)
        return self._there[number]

    def _number(self, version: str) -> int:
        known = {str(number): number for number, _, _ in self.states}
        if version not in known:
            raise ModelNotFoundError(
                f"{self.name} has no version '{version:.40}'; it has "
                f"{', '.join(map(str, self._table.ready)) or 'none that is ready'}"
            )
        return known[version]

    def _no_label(self, label: str) -> JGError:
        if label in self.pending:
            return ModelNotReadyError(
                f"the label '{label}' of {self.name} names version "
                f"{self.pending[label]}, which is not ready; ask again"
            )
        return ModelNotFoundError(
            f"{self.name} has no label '{label:.80}'; it has "
            f"{', '.join(self._table.labels) or 'none'}"
        )

    def _not_ready(self, number: int | None) -> ModelNotReadyError:
        states = [
            f"version {version} is {state}{f' ({reason})' if reason else ''}"
            for version, state, reason in self.states
            if number in (None, version)
        ]
        what = "; ".join(states[-3:]) or "it has no versions"
        return ModelNotReadyError(f"{self.name} cannot answer: {what}")

    @property
    def is_wanted(self) -> bool:
        """Whether there are versions of it that nobody asked to unload."""
        return self._machine.is_wanted

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        ready = [self._there[number] for number in self._table.ready]
        return bool(ready) and all(version.can_answer for version in ready)

    def close(self) -> None:
        """Lets go of what its versions hold elsewhere; they answer no more."""
        for version in self._there.values():
            version.close()

    @property
    def is_quick(self) -> bool:
        """Whether some requests to versions of it need not wait."""
        return any(self._there[number].is_quick for number in self._table.ready)

    async def load(self) -> None:
        """Loads the model, what failed before too; returns when it answers.

        Raises:
          ModelNotReadyError: it cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        self.tell(await loop.run_in_executor(None, self.source.look))
        self.tell(LoadAsked())
        await self.settled()
        if not self.is_ready:
            raise self._not_ready(None)

    async def unload(self) -> None:
        """Lets the model go; requests under way are answered."""
        self.tell(UnloadAsked())

    def load_no_more(self) -> None:
        """Gives up what is being loaded, and what would be after it."""
        for task in self._loading:
            task.cancel()

    async def settled(self) -> None:
        """Waits until nothing is being loaded; a load has no deadline but its end."""
        while self._loading:
            await asyncio.wait(self._loading)


def _facts(path: Path) -> tuple[str, _Place]:
    """Returns what tells one file from another that comes in its place."""
    try:
        facts = path.lstat()
    except OSError:  # it is not there; whoever reads it says so
        return str(path), (0, 0, 0)
    return str(path), (facts.st_ino, facts.st_mtime_ns, facts.st_size)


def _has_manifest(version: Path) -> bool:
    try:
        return (version / FILE).is_file()
    except OSError:
        return True  # whoever loads it says why it cannot


def _newest(path: Path) -> int:
    try:
        return read_options(path).newest
    except ArtifactError:
        return 1  # it is told when a version is loaded


def _split(split: Mapping[str, int], key: str) -> str:
    """Returns the label that a request with this key goes to: always the same one."""
    place = zlib.crc32(key.encode()) % 100
    for label, share in split.items():
        if place < share:
            return label
        place -= share
    raise AssertionError("the shares of a split make 100")


def model_row(model: ServedModel) -> list[dict[str, Any]]:
    """Returns what the index of a repository says of a model."""
    return [
        {
            "name": model.name,
            "version": str(version),
            "state": "READY" if version in model.versions else state.upper(),
            "reason": reason,
        }
        for version, state, reason in model.states
    ]
