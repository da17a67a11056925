"""Batch shares: how the batches of a synchronous run are cut for unequal workers."""

from typing import Any, Final, Literal, TypeAlias, get_args

from jgraph.coordination.data.shares import Cut, pieces_of
from jgraph.errors import ConfigError
from jgraph.train.data.data import Dataset
from jgraph.train.strategies.elastic import Elastic

BatchShare: TypeAlias = Literal["even", "measured"]
"""Who computes how much of an update: see ``SyncPS``."""

BATCH_SHARES: Final[tuple[BatchShare, ...]] = get_args(BatchShare)

_MOST: Final = 4
"""Times its even share, one worker computes at most: it has memory for so much."""


def check_share(share: object, elastic: Elastic | None, **counts: int | None) -> None:
    """Refuses options that do not go together.

    Args:
      share: as for ``SyncPS``.
      elastic: likewise.
      counts: of contributions that are not of all workers; None or 0: none.

    Raises:
      ConfigError: says what to write.
    """
    if share not in BATCH_SHARES:
        raise ConfigError(
            f"batch_share is {share!r:.60}; write batch_share='measured' to let each "
            "worker compute as much of a batch as it can, or 'even'"
        )
    what = _why_cut(share, elastic)
    if not what:
        return
    for name, count in counts.items():
        if count:
            raise ConfigError(
                f"SyncPS({what}, {name}={count}): an update is of the shares of all "
                f"workers, and waits for each; leave out {name}="
            )


def _why_cut(share: object, elastic: Elastic | None) -> str:
    if share == "measured":
        return "batch_share='measured'"
    if elastic is not None and elastic.batch == "global":
        return "elastic=jg.Elastic(batch='global')"
    return ""


def cut_for(
    share: BatchShare, elastic: Elastic | None, batch_size: int, workers: int
) -> Cut | None:
    """Returns how batches are cut; None: they are not.

    Args:
      share: as for ``SyncPS``.
      elastic: likewise.
      batch_size: examples of one worker's batch, as the run begins.
      workers: that it begins with.

    Raises:
      ConfigError: no pieces of one size are enough for all.

    Example:
      >>> cut_for("measured", None, batch_size=40, workers=3)
      Cut(each=8, total=0, most=24, measured=True)
    """
    what, measured = _why_cut(share, elastic), share == "measured"
    if not what:
        return None
    if elastic is None or elastic.batch == "each":
        each = pieces_of(batch_size)
        if each == 1:
            raise ConfigError(
                f"{what} cuts the batch of a worker into 2 to 8 pieces of one size, "
                f"and batch_size={batch_size} has no such; choose a multiple of 8"
            )
        others = workers if elastic is None else elastic.most or _MOST
        return Cut(each, most=each * min(others, _MOST), measured=measured)
    least, most = elastic.workers
    assert most is not None  # checked
    each = pieces_of(batch_size, -(-most // workers))
    total = each * workers
    if total < most:
        raise ConfigError(
            f"{what}: an update is of {workers} batches of {batch_size} examples, "
            f"which cannot be cut for {most} workers; choose a larger batch_size, a "
            f"multiple of 8, or write workers=({least}, {max(least, total)})"
        )
    room = max(min(total, _MOST * each), -(-total // least))
    return Cut(each, total, room, measured)


def check_data(dataset: Dataset) -> None:
    """Refuses data that only this process can read.

    Raises:
      ConfigError: says what to give.
    """
    if dataset.fed is not None:
        raise ConfigError(
            "workers that share the batch of an update read their pieces themselves, "
            "and this data is read by this process; give arrays, or a jg.Source that "
            "the workers read"
        )


def check_rows(row_step: Any) -> None:
    """Refuses tables of which rows travel.

    Args:
      row_step: as ``TrainStep.row_step`` returns it.

    Raises:
      ConfigError: says what to write.
    """
    if row_step is None:
        return
    found = row_step.tables
    if tables := [*(table.name for table in found.tables), *sorted(found.small)]:
        names = ", ".join(tables)
        raise ConfigError(
            f"of {names} only rows travel, whose number hangs on the batch, and "
            "workers that share a batch have none of one size; write "
            "jg.Trainer(…, sparse='off'), or leave out batch_share= and batch="
        )
