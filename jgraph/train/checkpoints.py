"""A directory of checkpoints, one per step: written by one run, verified, pruned.

``runs/mlp/500`` is a checkpoint as ``Run.save`` writes it. Beside the steps are the
writer's lease, and ``500.corrupt`` where a step turned out to be damaged.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar, final

from jgraph.errors import CheckpointCorruptError, CheckpointError, ConfigError
from jgraph.failpoints import failpoint
from jgraph.graph import markup
from jgraph.runtime.manifest import FILE, read_manifest
from jgraph.runtime.step_files import remove, steps_in
from jgraph.runtime.writer_lease import WriterLease
from jgraph.train import checkpoint
from jgraph.train.runner import Position
from jgraph.train.trees import Tree

_LOG = logging.getLogger("jgraph.checkpoint")
_GOING: Final = ".going"
"""Ends the name of a step that is being deleted."""
_UNFINISHED: Final = re.compile(
    r"\d+\.(orbax-checkpoint-tmp|new-|old-).*|\d+\.going|\.jgraph_writer\..*"
)
_T = TypeVar("_T")


class Policy(Protocol):
    """Says which steps to keep: any of ``orbax.checkpoint.checkpoint_managers``."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Returns for each checkpoint, oldest first, whether it stays."""


Keep: TypeAlias = int | Policy


@final
@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where and how often ``Trainer.fit`` saves.

    A run saves every so many updates, and at its end, in a thread of its own: training
    goes on. The directory has one writer at a time. A save that fails for want of room
    is told in the log, and training goes on too.

    Args:
      directory: made if it is not there.
      every: updates between two checkpoints, or more while one takes longer.
      keep: how many to keep, the newest ones; or a policy of Orbax, such as
        ``orbax.checkpoint.checkpoint_managers.EveryNSteps(1000)``. The newest stays.

    Raises:
      ConfigError: ``every`` or ``keep`` is less than 1.

    Example:
      >>> Checkpoints("runs/mlp", every=500).keep
      3
    """

    directory: str | Path
    every: int = 1000
    keep: Keep = 3

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(frozen=True, slots=True)
class _Saved:
    """A step, as a policy of Orbax looks at it."""

    step: int
    time: datetime
    metrics: None = None


@final
class CheckpointWriter:
    """The one writer of a directory of checkpoints, while its context lasts.

    Args:
      directory: of the steps.
      keep: which steps stay.

    Raises:
      CheckpointWriterError: another process writes there.
      CheckpointError: the directory cannot be written.
    """

    def __init__(self, directory: str | Path, keep: Keep = 3) -> None:
        self.directory = checkpoint.absolute(directory)
        self._keep = keep
        self._lease = WriterLease(self.directory)

    def __enter__(self) -> Self:
        try:
            self._lease.acquire()
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to {self.directory}: "
                f"{error.strerror or error}; give a directory that you may write to",
                path=str(self.directory),
            ) from error
        steps_in(self.directory)  # puts back what was being replaced
        # Of writers that are gone: nobody else may be at it now.
        for path in self.directory.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                _LOG.info("removing %s, which was never finished", path)
                remove(path)
        return self

    def __exit__(self, *exc: object) -> None:
        self._lease.release()

    def save(self, step: int, tree: Tree, position: Position = None) -> Path:
        """Writes a step, or writes it anew; then deletes those that need not be kept.

        Raises:
          CheckpointError: the step cannot be written.
          CheckpointSpaceError: there is no room.
          CheckpointWriterError: another process has taken over.
        """
        self._lease.check()
        path = checkpoint.save(
            self.directory / str(step),
            tree,
            position,
            overwrite=True,
            generation=self._lease.generation,
            before_commit=self._lease.check,
        )
        self.prune()
        return path

    def prune(self) -> list[int]:
        """Deletes the steps that need not be kept, and returns them."""
        going = to_prune(self.directory, self._keep)
        for step in going:
            self._lease.check()
            # Renamed first: a step that is there is whole.
            failpoint("prune.begun")
            path = self.directory / f"{step}{_GOING}"
            (self.directory / str(step)).rename(path)
            failpoint("prune.renamed")
            remove(path)
            failpoint("prune.removed")
        return going


def put_aside_in(directory: Path) -> list[Path]:
    """Returns the damaged steps that ``newest_good`` renamed."""
    return sorted(checkpoint.absolute(directory).glob("*.corrupt*"))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is one checkpoint, not a directory of steps."""
    return (path / FILE).exists() or not steps_in(path)


def to_prune(directory: Path, keep: Keep) -> list[int]:
    """Returns the steps that a policy would delete; never the newest."""
    from orbax.checkpoint import checkpoint_managers as orbax

    policy = orbax.LatestN(keep) if isinstance(keep, int) else keep
    saved = [_saved(directory, step) for step in steps_in(directory)]
    stays = policy.should_preserve(saved, context=orbax.PreservationContext())
    chosen = zip(saved[:-1], stays[:-1], strict=True)
    return [one.step for one, stay in chosen if not stay]


def newest_good(
    directory: Path, read: Callable[[Path], _T], *, quarantine: bool = True
) -> tuple[int, _T]:
    """Reads the newest step that is not damaged; puts damaged ones aside.

    Args:
      directory: of the steps.
      read: reads a checkpoint.
      quarantine: rename damaged steps to ``<step>.corrupt``.

    Returns:
      The step, and what ``read`` returned.

    Raises:
      CheckpointError: there is no step, or it is of another model.
      CheckpointCorruptError: no step is good.
    """
    damaged: list[int] = []
    while left := [step for step in steps_in(directory) if step not in damaged]:
        step = left[-1]
        path = directory / str(step)
        try:
            return step, read(path)
        except CheckpointError as error:
            if not path.exists():
                continue  # its writer deleted it meanwhile, and has a newer one
            if not isinstance(error, CheckpointCorruptError):
                raise
            damaged.append(step)
            where = _put_aside(path) if quarantine else path
            _LOG.error("%s. It is now %s; the step before is used.", error, where)
    if not damaged:
        raise CheckpointError(f"there is no checkpoint in {directory}")
    raise CheckpointCorruptError(
        f"no step in {directory} is good: {', '.join(map(str, damaged))} are damaged; "
        "take another directory",
        path=str(directory),
    )


def copy(source: Path, target: Path) -> Path:
    """Copies a checkpoint, and verifies the copy.

    Raises:
      CheckpointError: the target exists, or cannot be written.
      CheckpointCorruptError: the copy is not what was once saved.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; choose another path")
    part = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    try:
        shutil.copytree(source, part)
        checkpoint.verify(part)
        return part.rename(target)
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"cannot copy {source} to {target}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put_aside(path: Path) -> Path:
    """Renames a damaged step, and returns where it is; there if that is forbidden."""
    number, aside = 1, path.with_name(f"{path.name}.corrupt")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.corrupt-{number}")
    try:
        return path.rename(aside)
    except OSError:
        return path


def _saved(directory: Path, step: int) -> _Saved:
    path = directory / str(step)
    try:
        time = datetime.fromisoformat(read_manifest(path).saved)
    except (CheckpointError, ValueError):
        time = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return _Saved(step, time)
