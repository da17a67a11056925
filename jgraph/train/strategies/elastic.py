"""Elastic: how many workers and ps a run may have, while they join and leave."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final, get_args

from jgraph.counts import is_count, is_duration
from jgraph.errors import ConfigError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.strategies.autoscale import AutoScale, ScalePolicy, check_policy
from jgraph.view import markup

_WAIT_S: Final = 3600.0
_MOST_PS: Final = 64

Batch: TypeAlias = Literal["each", "global"]
"""What keeps its size while workers come and go: see ``Elastic``."""

_BATCHES: Final[tuple[Batch, ...]] = get_args(Batch)


@final
@dataclass(frozen=True, slots=True)
class Elastic:
    """Let workers, and parameter servers, join a run that goes on, and leave it.

    A worker that joins the cluster (``cluster.scale``, ``jgraph server --join``) takes
    part as soon as it has the data and has compiled the step; one that is told to leave
    hands over. With ``AsyncPS`` the others notice nothing. With ``SyncPS`` each change
    is a pause between two updates, and an update is of all workers there are.

    Args:
      workers: the least and the most. With fewer the run waits; more do not take part.
        None: any number.
      wait_s: how long it waits so, in seconds; then it fails.
      ps: the least and the most parameter servers. When there are more, variables move
        to them; before some leave, theirs move to those that stay. No step is lost or
        done again; all loops pause while variables move. None: it keeps those that it
        begins with.
      vshards_per_ps: into how many pieces of equal bytes the variables of one ps are
        cut when there are the most ps: what moves is a piece.
      batch: of ``SyncPS``: what stays as it is while workers come and go. ``"each"``:
        the batch of a worker, so with more of them an update is of more examples.
        ``"global"``: the batch of an update, which is ``batch_size`` times the workers
        that a ``fit`` begins with. It is cut into pieces of one size, at least as many
        as the most workers; each worker computes as many as others, and the first ones
        what remains.
      policy: decides how many workers there are, see ``jg.AutoScale``; or an object
        whose ``handle(sample)`` returns a ``Scale``, or None, each half a minute. None:
        who calls ``cluster.scale`` does.

    Raises:
      ConfigError: numbers that cannot be.

    Example:
      >>> Elastic(workers=(1, 16)).workers
      (1, 16)
    """

    workers: tuple[int, int | None] = (1, None)
    wait_s: float = _WAIT_S
    ps: tuple[int, int] | None = None
    batch: Batch = "each"
    policy: AutoScale | ScalePolicy | None = None
    vshards_per_ps: int = 4

    def __post_init__(self) -> None:
        self._check_ps()
        least, most = self._bounds()
        object.__setattr__(self, "workers", (least, most))
        self._check_batch()
        check_policy(self.policy)
        if not is_duration(self.wait_s):
            raise ConfigError(
                f"Elastic(wait_s={self.wait_s!r:.40}) is how many seconds a run waits "
                "for workers; give a number above 0"
            )

    def _check_ps(self) -> None:
        bounds: object = self.ps
        if bounds is None:
            return
        what = f"Elastic(ps={bounds!r:.60})"
        is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2
        if not is_pair or not all(is_count(one, 1) for one in self.ps or ()):
            raise ConfigError(
                f"{what} is the least and the most parameter servers of a run, whole "
                "numbers, 1 or more; write for example ps=(1, 4)"
            )
        least, most = (int(one) for one in self.ps or ())
        if least > most:
            raise ConfigError(
                f"{what}: the least is more than the most; write ps=({most}, {least})"
            )
        if most > _MOST_PS:
            raise ConfigError(
                f"{what}: an arrangement is planned for each number of ps, of which "
                f"there may be {_MOST_PS}; write ps=({min(least, _MOST_PS)}, "
                f"{_MOST_PS})"
            )
        object.__setattr__(self, "ps", (least, most))
        if not is_count(self.vshards_per_ps, 1):
            raise ConfigError(
                f"Elastic(vshards_per_ps={self.vshards_per_ps!r:.40}) is a whole "
                "number, 1 or more; leave it out for 4"
            )

    def _check_batch(self) -> None:
        if self.batch not in _BATCHES:
            raise ConfigError(
                f"Elastic(batch={self.batch!r:.40}) says what keeps its size while "
                "workers come and go; write batch='each' for the batch of a worker, or "
                "'global' for that of an update"
            )
        if self.batch == "global" and self.workers[1] is None:
            raise ConfigError(
                f"Elastic(workers={self.workers}, batch='global') cuts the batch of an "
                "update into pieces, at least one for each worker; say how many there "
                f"are at most: workers=({self.workers[0]}, 16)"
            )

    def _bounds(self) -> tuple[int, int | None]:
        bounds: object = self.workers
        what = f"Elastic(workers={bounds!r:.60})"
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise ConfigError(
                f"{what} is the least and the most workers of a run; write for "
                "example workers=(1, 16), or workers=(1, None) for any number"
            )
        least, most = bounds
        if not is_count(least, 1) or not (most is None or is_count(most, 1)):
            raise ConfigError(
                f"{what}: the least and the most are whole numbers, 1 or more; write "
                "for example workers=(1, 16)"
            )
        if most is not None and least > most:
            raise ConfigError(
                f"{what}: the least is more than the most; write workers=({most}, "
                f"{least})"
            )
        return int(least), None if most is None else int(most)

    def check_count(self, workers: int) -> None:
        """Refuses a cluster of too few workers, or too many, to begin with.

        Raises:
          ConfigError: names the bounds.
        """
        least, most = self.workers
        if workers < least or (most is not None and workers > most):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise ConfigError(
                f"the cluster has {workers} workers, and the run may have {bounds}; "
                f"change that: cluster.scale(workers={max(least, 1)}), or give "
                "jg.Elastic other workers="
            )

    def check_ps_count(self, ps: int) -> None:
        """Refuses a cluster of too few ps, or too many, to begin with.

        Raises:
          ConfigError: names the bounds.
        """
        if self.ps is None:
            return
        least, most = self.ps
        if not least <= ps <= most:
            raise ConfigError(
                f"the cluster has {ps} parameter servers, and the run may have {least} "
                f"to {most}; change that: cluster.scale(ps={least}), or give "
                "jg.Elastic another ps="
            )

    @property
    def most(self) -> int | None:
        """How many workers take part at most."""
        return self.workers[1]

    def _repr_html_(self) -> str:
        return markup.data(self)


def elastic_order(
    elastic: Elastic | None, *, contributions: int = 0, backup_workers: int = 0
) -> pb.RunElastic | None:
    """Returns what the master is told of it.

    Args:
      elastic: None: the run keeps the workers that it begins with.
      contributions: of each update, whoever is there; 0: of all but the backups.
      backup_workers: how many an update does not wait for.
    """
    if elastic is None:
        return None
    least, most = elastic.workers
    return pb.RunElastic(
        least=least,
        most=most or 0,
        contributions=contributions,
        backup_workers=backup_workers,
    )


def check_elastic(elastic: object) -> None:
    """Refuses what is no ``Elastic``.

    Raises:
      ConfigError: says what to write.
    """
    if elastic is not None and not isinstance(elastic, Elastic):
        raise ConfigError(
            f"elastic={elastic!r:.60} is not what a strategy takes; write "
            "elastic=jg.Elastic(workers=(1, 16))"
        )
