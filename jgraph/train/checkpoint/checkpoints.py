"""A directory of checkpoints, one per step: written by one run, verified, pruned.

``runs/mlp/500`` is a checkpoint as ``Run.save`` writes it. Beside the steps are the
writer's lease, and ``500.corrupt`` where a step turned out to be damaged. Steps that
other programs saved there are never renamed, replaced or deleted.
"""

import logging
import math
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar, final

import numpy as np

from jgraph.counts import as_ints, check_flags
from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointWriterError,
    ConfigError,
)
from jgraph.failpoints import failpoint
from jgraph.runtime.files.manifest import is_ours, read_manifest
from jgraph.runtime.files.step_files import (
    BEST,
    best_in,
    beyond,
    clear_unfinished,
    is_whole,
    mark_best,
    our_steps,
    put_aside,
    remove,
    steps_in,
    sync_tree,
)
from jgraph.runtime.files.writer_lease import WriterLease
from jgraph.train.checkpoint import checkpoint
from jgraph.train.model.trees import Tree
from jgraph.train.state.runner import Position
from jgraph.view import markup

_LOG = logging.getLogger("jgraph.checkpoint")
_GOING: Final = ".going"
"""Ends the name of a step that is being deleted."""
_CORRUPT: Final = re.compile(r"\d+\.corrupt(-\d+)?")
"""The name of a damaged step that was put aside."""
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

    A run saves at multiples of ``every`` updates and at its end, in a thread of its
    own: training goes on as soon as the state is copied. The directory has one writer
    at a time. If the disk is full, the log says so and training goes on.

    In one process and in synchronous training a checkpoint holds the state after
    exactly one update, and the position in the data at that update. In asynchronous
    training each worker may have two steps under way: after a restore, ``Run.repeated``
    counts the batches that may be trained on twice.

    Args:
      directory: made if it is not there.
      every: how many updates from one save to the next; an asynchronous run saves soon
        after that. On a cluster a save is left out while the one before it is under
        way; in one process it waits for that one.
      keep: how many to keep, the newest ones; or a policy of Orbax, such as
        ``orbax.checkpoint.checkpoint_managers.EveryNSteps(1000)``. The newest stays.
      best: a metric of ``eval_data``, such as ``eval_loss``: the copy of the model that
        had the best one is saved as it was evaluated, and stays beside the others;
        ``trainer.restore("runs/mlp/best")``. This process evaluates then.
      higher_is_better: for accuracy and the like.

    Raises:
      ConfigError: ``every`` or ``keep`` is less than 1; ``best`` is no metric of an
        evaluation.

    Example:
      >>> Checkpoints("runs/mlp", every=500).keep
      3
    """

    directory: str | Path
    every: int = 1000
    keep: Keep = 3
    best: str | None = None
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        check_flags(higher_is_better=self.higher_is_better)
        for name in ("every", "keep"):
            value = getattr(self, name)
            if name == "keep" and hasattr(value, "should_preserve"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                policy = ", or a policy of Orbax" if name == "keep" else ""
                raise ConfigError(
                    f"{name} is {value!r:.60}; it must be a whole number{policy}"
                )
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        as_ints(self, "every", "keep")
        if self.best is not None and not str(self.best).startswith("eval_"):
            raise ConfigError(
                f"best is {self.best!r:.60}; give a metric of eval_data, such as "
                "best='eval_loss'"
            )

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value of the metric ``best`` is better than the best so far.

        Example:
          >>> Checkpoints("runs/mlp", best="eval_loss").is_better(0.1, 0.2)
          True
        """
        if best is None or math.isnan(value):
            return not math.isnan(value)
        return value > best if self.higher_is_better else value < best

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
        with _writing(self.directory):
            self._lease.acquire()
            try:
                clear_unfinished(self.directory)
            except BaseException:
                self._lease.release()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._lease.release()

    def save(
        self,
        step: int,
        tree: Tree,
        position: Position = None,
        before_commit: Callable[[], None] | None = None,
        evaluation: Mapping[str, float] | None = None,
    ) -> Path:
        """Writes a step, or writes it anew; then deletes those that need not be kept.

        Args:
          step: updates of it.
          tree: see ``checkpoint.save``.
          position: likewise.
          before_commit: called when all is on disk; what it raises stops the save.
          evaluation: of the best copy so far, which this is; it stays.

        Raises:
          CheckpointError: the step cannot be written.
          CheckpointSpaceError: there is no room.
          CheckpointWriterError: another process has taken over.
        """

        def check() -> None:
            self._lease.check()
            if before_commit is not None:
                before_commit()

        with _writing(self.directory):
            self._lease.check()
            path = checkpoint.save(
                self.directory / str(step),
                tree,
                position,
                overwrite=True,
                generation=self._lease.generation,
                before_commit=check,
                evaluation=evaluation,
            )
        if evaluation is not None:
            try:
                mark_best(self.directory, step)
            except OSError as error:
                raise CheckpointError(
                    f"cannot make {self.directory / BEST} a link to step {step}: "
                    f"{error.strerror}; the best step is not kept",
                    path=str(self.directory),
                ) from error
        try:
            self.prune()
        except CheckpointWriterError:
            raise
        except (CheckpointError, OSError) as error:  # the step is there all the same
            _LOG.warning("could not delete steps of %s: %s", self.directory, error)
        return path

    def best(self, metric: str) -> float | None:
        """Returns the metric of the best step there is; None: there is none.

        Raises:
          CheckpointForeignError: what is called ``best`` there is no link to a step.
        """
        step, link = best_in(self.directory), self.directory / BEST
        if step is None and (link.is_symlink() or link.exists()):
            raise CheckpointForeignError(
                f"{link} is of another program, and the best step of this run would "
                "take its place; give another directory",
                path=str(link),
            )
        if step is None or not is_whole(self.directory / str(step)):
            return None
        evaluation = read_manifest(self.directory / str(step)).evaluation
        return None if evaluation is None else evaluation.get(metric)

    def prune(self, is_good: Callable[[Path], bool] = is_whole) -> list[int]:
        """Deletes the steps that need not be kept, and returns them."""
        going = to_prune(self.directory, self._keep, is_good)
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


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Whatever the disk says about a directory of checkpoints is one error."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {directory}: {error.strerror or error}; give "
            "a directory that you may write to",
            path=str(directory),
        ) from error


def put_aside_in(directory: Path) -> list[Path]:
    """Returns the damaged steps that ``newest_good`` renamed."""
    where = checkpoint.absolute(directory)
    return sorted(p for p in where.glob("*.corrupt*") if _CORRUPT.fullmatch(p.name))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is one checkpoint, not a directory of steps."""
    return is_ours(path) or not steps_in(path)


def is_good(path: Path) -> bool:
    """Whether a checkpoint is what was written; reads all of it."""
    try:
        checkpoint.verify(path)
    except CheckpointError:
        return False
    return True


def to_prune(
    directory: Path, keep: Keep, is_good: Callable[[Path], bool] = is_whole
) -> list[int]:
    """Returns the steps of jgraph that need not be kept; never the newest good one.

    Args:
      directory: of the steps.
      keep: how many good ones to keep, or a policy.
      is_good: looks at a step.
    """
    if isinstance(keep, int):
        return beyond(directory, keep, is_good)
    from orbax.checkpoint import checkpoint_managers as orbax

    good = [step for step in our_steps(directory) if is_good(directory / str(step))]
    infos = [_saved(directory, step) for step in good]
    stays = keep.should_preserve(infos, context=orbax.PreservationContext())
    decisions, best = zip(infos[:-1], stays[:-1], strict=True), best_in(directory)
    return [one.step for one, stay in decisions if not (stay or one.step == best)]


def newest_good(
    directory: Path, read: Callable[[Path], _T], *, quarantine: bool = True
) -> tuple[int, _T]:
    """Reads the newest step of jgraph that is not damaged; puts damaged ones aside.

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
    bad_steps: list[int] = []
    _tell_of_newer(directory)
    while steps := [step for step in our_steps(directory) if step not in bad_steps]:
        step = steps[-1]
        path = directory / str(step)
        try:
            return step, read(path)
        except CheckpointError as error:
            if not path.exists():
                continue  # its writer deleted it meanwhile, and has a newer one
            if not isinstance(error, CheckpointCorruptError):
                raise
            bad_steps.append(step)
            now = put_aside(path) if quarantine else path
            where = "stays where it is" if now == path else f"is now {now}"
            _LOG.error("%s. It %s; the step before is used.", error, where)
    if not bad_steps and (others := steps_in(directory)):
        raise CheckpointForeignError(
            f"the steps in {directory} are of another program: "
            f"{', '.join(map(str, others))}; `jgraph ckpt import` makes one of jgraph",
            path=str(directory),
        )
    if not bad_steps:
        raise CheckpointError(f"there is no checkpoint in {directory}")
    raise CheckpointCorruptError(
        f"no step in {directory} is good: {', '.join(map(str, bad_steps))} are "
        "damaged; take another directory",
        path=str(directory),
    )


def _tell_of_newer(directory: Path) -> None:
    """Tells of the steps of other programs after the newest of jgraph."""
    steps, ours = steps_in(directory), our_steps(directory)
    newer = [step for step in steps if step not in ours and step > max(ours, default=0)]
    if ours and newer:
        _LOG.warning(
            "%s has newer steps of another program, which are left alone: %s. To take "
            "one of them name it: trainer.restore('%s')",
            *(directory, ", ".join(map(str, newer)), directory / str(newer[-1])),
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
        shutil.copytree(source, part, symlinks=True)
        checkpoint.verify(part)
        sync_tree(part)
        return part.rename(target)
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"cannot copy {source} to {target}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _saved(directory: Path, step: int) -> _Saved:
    path = directory / str(step)
    try:
        time = datetime.fromisoformat(read_manifest(path).saved)
    except (CheckpointError, ValueError):
        time = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return _Saved(step, time)
