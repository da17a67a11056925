"""Step directories of checkpoints: created from the newest, committed, pruned.

Every step of a run has the same arrays, so all but their content is known from one that
is there: what describes the tree, in Orbax's words, is copied as it is.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointSpaceError,
)
from jgraph.failpoints import failpoint
from jgraph.runtime.files.manifest import (
    FILE,
    PROOF,
    Manifest,
    directory_of,
    is_ours,
    looking,
    read_manifest,
)
from jgraph.runtime.files.shard_files import Slice, make_array

_LOG = logging.getLogger("jgraph.checkpoint")
TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""Ends the name of what Orbax writes; of others without ``.new-``."""
BEST: Final = "best"
"""Links to the step that was evaluated as the best one."""
ITEM: Final = "default"
"""Where ``CheckpointManager`` of Orbax looks for the only tree of a checkpoint."""
_TOKEN: Final = r"(?=\d*[a-f])[0-9a-f]{8}"
"""Is not the date of somebody's own copy."""
_UNFINISHED: Final = re.compile(
    rf"\d+\.(new|old)-{_TOKEN}(\..*)?|\d+\.going|\.jgraph_writer\..*"
)
"""What a writer of jgraph leaves beside the steps if it is killed; also of a lease."""
_OLD: Final = re.compile(rf"(.+)\.old-{_TOKEN}")
"""The name of a checkpoint while another takes its place."""
_ROOM: Final = 1 << 20
_SYNCS: Final = 8
_MOST_BYTES: Final = 64 << 20
"""Of what describes a tree."""


def steps_in(directory: Path) -> list[int]:
    """Returns the steps of a directory, oldest first; reads the disk each time.

    Those of other programs too. One that was being replaced when its writer was killed
    has its name again.

    Raises:
      CheckpointError: the directory cannot be read.
    """
    with looking(directory):
        if not directory.is_dir():
            return []
        for path in list(directory.glob("*.old-*")):
            if (old := _OLD.fullmatch(path.name)) and old[1].isdecimal():
                put_back(directory / old[1])
        found = [p for p in directory.iterdir() if p.name.isdecimal() and p.is_dir()]
    return sorted(int(path.name) for path in found)


def our_steps(directory: Path) -> list[int]:
    """Returns the steps that jgraph wrote, oldest first.

    Raises:
      CheckpointError: the directory, or a step, cannot be read.
    """
    return [step for step in steps_in(directory) if is_ours(directory / str(step))]


def is_whole(path: Path) -> bool:
    """Whether a checkpoint of jgraph has all its files; their content is not read."""
    try:
        for name, leaf in read_manifest(path).leaves.items():
            array = Slice.whole(directory_of(name), leaf.type, leaf.block_rows)
            for block in range(len(array.blocks)):
                found = (path / array.array / array.file(block)).stat()
                if found.st_size != array.blocks.file_nbytes:
                    return False
    except (CheckpointError, OSError):
        return False
    return True


def begin_step(directory: Path) -> tuple[Path, Manifest]:
    """Makes the files of a step like the newest good one; arrays have no content.

    Returns:
      Where they are, and what the other step holds.

    Raises:
      CheckpointError: there is no step to be like, or it cannot be read.
      CheckpointSpaceError: there is no room.
      OSError: what the disk says.
    """
    like, manifest = _newest_manifest(directory)
    free = shutil.disk_usage(directory).free
    if free < manifest.nbytes + _ROOM:
        raise CheckpointSpaceError(
            f"the next checkpoint in {directory} needs {manifest.nbytes + _ROOM:,} "
            f"bytes, and {free:,} are free there; make room, or keep fewer (`jgraph "
            "ckpt prune`). Nothing that was there is lost",
            path=str(directory),
            needed=manifest.nbytes + _ROOM,
        )
    started = unfinished(like)
    started.mkdir()
    try:
        _fill_like(started, like, manifest)
    except BaseException:
        shutil.rmtree(started, ignore_errors=True)
        raise
    return started, manifest


def _newest_manifest(directory: Path) -> tuple[Path, Manifest]:
    damaged = CheckpointError(f"there is no checkpoint in {directory} to be like")
    for step in reversed(our_steps(directory)):
        try:
            return directory / str(step), read_manifest(directory / str(step))
        except CheckpointCorruptError as error:
            damaged = error
    raise damaged


def _fill_like(started: Path, like: Path, manifest: Manifest) -> None:
    for path in like.iterdir():
        if path.name not in {FILE, PROOF} and not path.is_dir():
            _copy(path, started / path.name)
    for name, leaf in manifest.leaves.items():
        make_array(started, Slice.whole(directory_of(name), leaf.type, leaf.block_rows))
    make_item(started)


def make_item(step: Path) -> None:
    """Makes the directory in which ``CheckpointManager`` of Orbax looks for the tree.

    It has links to what is beside it. A file system without them has a checkpoint that
    only the other readers of Orbax know.
    """
    names = [path.name for path in step.iterdir() if path.is_dir()]
    item = step / ITEM
    try:
        item.mkdir()
        for name in [*names, "_METADATA"]:
            (item / name).symlink_to(Path("..", name))
    except OSError:
        shutil.rmtree(item, ignore_errors=True)


def commit_step(
    step: Path,
    manifest: Manifest,
    before_commit: Callable[[], None],
    *,
    overwrite: bool = False,
) -> Path:
    """Gives a step that is written its name; then it is there, and whole.

    Args:
      step: where ``begin_step`` made it.
      manifest: of it.
      before_commit: called when everything is on disk; what it raises stops the save.
      overwrite: replace a step that is there.

    Raises:
      CheckpointError: the step is there already.
      OSError: what the disk says.
    """
    target = step.with_name(str(manifest.step))
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists", path=str(target))
    (step / FILE).write_text(manifest.to_json(), encoding="utf-8")
    sync_tree(step)
    failpoint("handed.on_disk")
    before_commit()
    put_in_place(step, target)
    failpoint("handed.committed")
    return target


def put_in_place(step: Path, target: Path) -> None:
    """Gives a checkpoint that is whole its name; another that has it goes last.

    Raises:
      CheckpointForeignError: the other is not of jgraph.
      OSError: what the disk says; the other has its name again.
    """
    check_replaceable(target)
    while True:
        if target.exists():
            target.rename(f"{target}.old-{_token()}")
            failpoint("checkpoint.old_put_away")
        try:
            step.rename(target)
            break
        except OSError as error:
            put_back(target)
            # Unless somebody who looked just then had put it back already.
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
    _sync(target.parent)
    for path in _put_away(target):
        failpoint("checkpoint.replaced")
        remove(path)


def unfinished(target: Path) -> Path:
    """Returns a path beside a checkpoint, to write what will have its name."""
    return target.with_name(f"{target.name}.new-{_token()}")


def _token() -> str:
    return f"{secrets.randbits(28):07x}{secrets.choice('abcdef')}"


def check_replaceable(target: Path) -> None:
    """Refuses to take the place of what jgraph did not write.

    Raises:
      CheckpointForeignError: that is there.
    """
    if is_ours(target) or not target.exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise CheckpointForeignError(
            f"{target} is not of jgraph, so it is not replaced; give another directory",
            path=str(target),
        )


def put_back(target: Path) -> None:
    """Gives a checkpoint its name again, if its writer was killed while replacing it.

    What was to replace it was not saved before it had the name.
    """
    if not target.exists():
        for path in _put_away(target):
            with suppress(OSError):  # somebody else did it, or may not
                path.rename(target)


def _put_away(target: Path) -> list[Path]:
    """Returns where a checkpoint is, or was, that another takes the place of."""
    found = [(p, _OLD.fullmatch(p.name)) for p in target.parent.glob("*.old-*")]
    return [path for path, old in found if old and old[1] == target.name]


def remove(path: Path) -> None:
    """Deletes a checkpoint, or whatever else there is, if there is something."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def put_aside(path: Path) -> Path:
    """Renames a damaged step, and returns where it is; there if that is forbidden."""
    number, aside = 1, path.with_name(f"{path.name}.corrupt")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.corrupt-{number}")
    try:
        return path.rename(aside)
    except OSError:
        return path


def beyond(directory: Path, keep: int, is_good: Callable[[Path], bool]) -> list[int]:
    """Returns the steps of jgraph before its newest good ones, oldest first.

    Without the best one; see ``best_in``.
    """
    steps, best = our_steps(directory), best_in(directory)
    while steps and keep:
        keep -= is_good(directory / str(steps.pop()))
    return [step for step in steps if step != best]


def best_in(directory: Path) -> int | None:
    """Returns the step that was evaluated as the best one; None: there is none."""
    try:
        name = os.readlink(directory / BEST)
    except OSError:
        return None
    return int(name) if name.isdecimal() else None


def mark_best(directory: Path, step: int) -> None:
    """Makes a step of the directory the best one: a link to it."""
    link = directory / f"{step}.new-{_token()}"
    link.symlink_to(str(step))
    link.replace(directory / BEST)


def clear_unfinished(directory: Path) -> None:
    """Removes what writers left that were killed; the caller is the only writer now."""
    steps_in(directory)  # puts back what was being replaced
    for path in directory.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            _LOG.info("removing %s, which was never finished", path)
            remove(path)


def prune(directory: Path, keep: int, check: Callable[[], None]) -> None:
    """Deletes all but the newest whole steps of jgraph."""
    for step in beyond(directory, keep, is_whole):
        check()
        failpoint("handed.prune_begun")
        # Renamed first: a step that is there is whole.
        going = directory / f"{step}.going"
        (directory / str(step)).rename(going)
        failpoint("handed.prune_renamed")
        shutil.rmtree(going, ignore_errors=True)
        failpoint("handed.pruned")


def _copy(source: Path, target: Path) -> None:
    """Copies a small regular file with no other name: who put it there can read it.

    Raises:
      OSError: it is something else.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(source, flags), "rb") as file:
        about = os.fstat(file.fileno())
        regular = stat.S_ISREG(about.st_mode) and about.st_nlink == 1
        if not regular or about.st_size > _MOST_BYTES:
            raise OSError(errno.EINVAL, f"{source.name} is not a file of a checkpoint")
        target.write_bytes(file.read(_MOST_BYTES))


def sync_tree(step: Path) -> None:
    """Waits until all files of a checkpoint are on the disk, those of libraries too.

    Several at a time: the disk does most of that at once then.

    Raises:
      OSError: what the disk says.
    """
    found = [
        path
        for root, _, names in os.walk(step)
        for path in (Path(root), *(Path(root, name) for name in names))
        if path.is_dir() or (path.is_file() and not path.is_symlink())
    ]
    with ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(_sync, found))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
