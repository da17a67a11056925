"""Versions of a model: which are loaded, which answer, and which go.

A version goes found -> loading -> ready -> draining -> gone, or it failed. The newest
takes over only once it is loaded and tried, so there is no moment without an answer;
one loads at a time. What fails is told and left alone until its files are others; the
version before it stays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

FOUND: Final = "found"
LOADING: Final = "loading"
READY: Final = "ready"
DRAINING: Final = "draining"
FAILED: Final = "failed"
GONE: Final = "unloaded"


@final
@dataclass(frozen=True, slots=True)
class Listed:
    """These versions and labels are in the directory now.

    Attributes:
      versions: their numbers.
      labels: version by label.
      split: percent by label, for requests that name no version.
      mirror: label of the version that gets copies of requests.
      changed: those of which files are not what they were when they failed.
    """

    versions: tuple[int, ...]
    labels: Mapping[str, int] = field(default_factory=dict)
    split: Mapping[str, int] = field(default_factory=dict)
    mirror: str = ""
    changed: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Loaded:
    """A version is in memory, and answered its example.

    Attributes:
      newest: how many of the newest versions are wanted from now on; None: as before.
    """

    version: int
    newest: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Failed:
    """A version cannot be loaded."""

    version: int
    why: str


@final
@dataclass(frozen=True, slots=True)
class Idle:
    """The last request of a version that drains was answered."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class LoadAsked:
    """Somebody asks for the model; what failed is tried again."""


@final
@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """Somebody wants the model to be gone."""


@final
@dataclass(frozen=True, slots=True)
class Load:
    """Load a version, and try it."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class Publish:
    """From now on requests go by this table.

    Attributes:
      ready: versions that answer.
      labels: version by label; only those that are ready.
      split: percent by label, for requests that name no version.
    """

    ready: tuple[int, ...]
    labels: Mapping[str, int] = field(default_factory=dict)
    split: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Drain:
    """Say when the last request of a version was answered."""

    version: int


@final
@dataclass(frozen=True, slots=True)
class Unload:
    """Free the memory of a version."""

    version: int


Event: TypeAlias = Listed | Loaded | Failed | Idle | LoadAsked | UnloadAsked
Instruction: TypeAlias = Load | Publish | Drain | Unload


@final
class Versions:
    """State machine of one model.

    Args:
      newest: how many of the newest versions are wanted; 0: all. Those that have a
        label are wanted too.

    Example:
      >>> versions = Versions()
      >>> versions.handle(Listed((7,)))
      [Load(version=7)]
      >>> versions.handle(Loaded(7))
      [Publish(ready=(7,), labels={}, split={})]
    """

    def __init__(self, newest: int = 1) -> None:
        self._newest = newest
        self._listed = Listed(())
        self._states: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self._labels: dict[str, int] = {}
        self._published = Publish(())
        self._is_wanted = True

    @property
    def states(self) -> list[tuple[int, str, str]]:
        """Every version, its state, and why it failed."""
        return [
            (version, state, self._reasons.get(version, ""))
            for version, state in sorted(self._states.items())
        ]

    @property
    def is_wanted(self) -> bool:
        """Whether there are versions that nobody asked to unload."""
        return self._is_wanted and bool(self._states)

    @property
    def pending(self) -> dict[str, int]:
        """Labels that name a version which cannot answer yet."""
        return {
            label: version
            for label, version in self._listed.labels.items()
            if self._labels.get(label) != version
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Takes an event; returns what to do now."""
        done: list[Instruction] = []
        match event:
            case Listed():
                self._take(event)
            case Loaded(version, newest):
                self._states[version] = READY
                self._newest = self._newest if newest is None else newest
            case Failed(version, why):
                self._states[version] = FAILED
                self._reasons[version] = why
            case Idle(version):
                self._states[version] = GONE
                done.append(Unload(version))
            case LoadAsked():
                self._is_wanted = True
                self._again(self._states)
            case UnloadAsked():
                self._is_wanted = False
        self._move(done)
        return done

    def _take(self, listed: Listed) -> None:
        self._listed = listed
        here = set(listed.versions)
        for version in here - self._states.keys():
            self._states[version] = FOUND
        for version, state in list(self._states.items()):
            if version not in here and state in (FOUND, FAILED, GONE):
                del self._states[version]
                self._reasons.pop(version, None)
        self._again(listed.changed)

    def _again(self, versions: Iterable[int]) -> None:
        for version in versions:
            if self._states.get(version) == FAILED:
                self._states[version] = FOUND
                self._reasons.pop(version, None)

    def _wanted(self) -> set[int]:
        """Returns the versions that should answer, of those that can."""
        if not self._is_wanted:
            return set()
        usable = [
            version
            for version in sorted(self._listed.versions)
            if self._states.get(version) not in (FAILED, None)
        ]
        newest = set(usable[-self._newest :])
        return newest | (set(self._listed.labels.values()) & set(usable))

    def _move(self, done: list[Instruction]) -> None:
        wanted = self._wanted()
        ready = {v for v, state in self._states.items() if state == READY}
        self._label(ready)
        # What is to go stays until all is there that takes its place.
        is_settled = wanted <= ready and bool(wanted)
        if is_settled or not self._is_wanted:
            lasting = wanted | (
                set(self._labels.values()) if self._is_wanted else set()
            )
            leaving = sorted(ready - lasting)
            ready -= set(leaving)
        else:
            leaving = []
        self._label(ready)
        self._publish(ready, done)
        for version in leaving:
            self._states[version] = DRAINING
            done.append(Drain(version))
        self._load(wanted, done)

    def _label(self, ready: set[int]) -> None:
        """Moves labels to what is ready; one whose target is not keeps its last."""
        moved = {
            label: version if version in ready else self._labels.get(label)
            for label, version in self._listed.labels.items()
        }
        self._labels = {n: v for n, v in moved.items() if v is not None and v in ready}

    def _publish(self, ready: set[int], done: list[Instruction]) -> None:
        split = (
            self._listed.split if set(self._listed.split) <= set(self._labels) else {}
        )
        table = Publish(tuple(sorted(ready)), dict(self._labels), dict(split))
        if table != self._published:
            self._published = table
            done.append(table)

    def _load(self, wanted: set[int], done: list[Instruction]) -> None:
        if LOADING in self._states.values():
            return
        for version in sorted(wanted, reverse=True):
            if self._states[version] in (FOUND, GONE):
                self._states[version] = LOADING
                done.append(Load(version))
                return
