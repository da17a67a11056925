"""AsyncPS and SyncPS: options of parameter-server training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final, get_args

from jgraph.counts import as_ints, is_count
from jgraph.errors import ConfigError, hints
from jgraph.graph.sharding import Partitioner
from jgraph.plan.auto.cost_model import CostModel
from jgraph.plan.placement.spread import PlacementFunction
from jgraph.train.privacy.options import Privacy, check_privacy
from jgraph.train.state.durability import Durability, check_durability
from jgraph.train.step.compress import GradientDtype, check_gradient_dtype
from jgraph.train.strategies.batch_share import BatchShare, check_share
from jgraph.train.strategies.elastic import Elastic, check_elastic
from jgraph.view import markup
from jgraph.view.units import count_text

Dense: TypeAlias = Literal["ps", "workers", "xla", "auto"]
"""Who holds dense parameters: see ``SyncPS``."""

DENSE: Final[tuple[Dense, ...]] = get_args(Dense)


@final
@dataclass(frozen=True, slots=True)
class AsyncPS:
    """Train on a cluster's workers against its parameter servers, asynchronously.

    Variables are spread over the ``ps`` tasks by bytes, and an update runs on the task
    of its variables. A worker may compute a gradient from parameters that other workers
    have updated meanwhile. The master deals out the data as workers ask for it: a slow
    worker gets less, and the batches of a lost worker go to the others.

    Args:
      step_timeout_s: limit for one step of a worker, in seconds.
      prefetch: 1: a worker is sent the parameters of its next step while it computes
        the gradient of this one, and waits for neither its update nor the way to the ps
        and back. Each gradient is then one update older, its worker's own one before,
        which ``max_staleness`` and ``Run.staleness`` count as any other. The worker
        holds the parameters twice. Rows of hash tables, which looking up may make, are
        not read ahead. 0: it reads when the step before is over.
      gradient_dtype: ``"bfloat16"`` or ``"int8"`` (a scale per array): gradients travel
        as that, and a worker adds what rounding took away to its next one. It then
        holds float32 left-overs of the size of these parameters, zeros at the start of
        a ``fit``. Gradients of rows travel as they are, without left-overs.
      max_staleness: how many updates a ps may apply between a worker's read of the
        parameters and the update by its gradient; a worker that would run ahead waits.
        0 makes workers take turns. None: no bound. See ``Run.staleness``.
      durability: what a run still has when a ps is lost. ``"checkpoint"``: the state
        that ``fit(checkpoint=…)`` saved last. ``"replica"`` and ``"log"``: every update
        that was acknowledged to a worker. With ``"replica"`` each ps has a copy on the
        next ps, which applies the same updates in the same order. With ``"log"`` each
        ps writes its updates to a disk, below ``JGRAPH_RECORDS_DIR`` of its
        environment, in a ``LocalCluster`` to a temporary directory if there is none.
        A step is done when the copy or the disk has its updates too.
      variable_partitioner: cuts parameters into shards, for example
        ``jg.fixed_size_partitioner(2)``; the optimizer's state is cut alike.
      partition_strategy: which rows a shard has: ``"div"`` (consecutive ones) or
        ``"mod"`` (every n-th).
      placement: chooses the ps of each parameter or shard: ``jg.RoundRobin()``,
        ``jg.GreedyLoadBalancing()``, or a function of (bytes by name, tasks); by
        bytes, largest first, if unset.
      elastic: lets workers join and leave a run that goes on; None: it keeps those that
        it began with, and takes lost ones back.

    Raises:
      ConfigError: an option outside what is possible.

    Example:
      >>> AsyncPS(max_staleness=8, prefetch=1).max_staleness
      8
    """

    step_timeout_s: float = 60.0
    max_staleness: int | None = None
    variable_partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    placement: PlacementFunction | None = None
    gradient_dtype: GradientDtype | None = None
    durability: Durability = "checkpoint"
    prefetch: int = 0
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        _check_shared(self)
        if self.elastic is not None and self.elastic.batch == "global":
            raise ConfigError(
                "AsyncPS with jg.Elastic(batch='global'): an update is of the batch of "
                "one worker, however many there are; leave out batch="
            )
        bound = self.max_staleness
        if bound is not None and not is_count(bound, 0):
            raise ConfigError(
                f"max_staleness is {bound!r}; give a whole number, 0 or more, or None "
                "for no bound"
            )
        if not is_count(self.prefetch, 0) or self.prefetch > 1:
            raise ConfigError(
                f"prefetch is {self.prefetch!r}; give 1 to read the parameters of the "
                "next step while one is computed, or 0"
            )
        as_ints(self, "max_staleness", "prefetch")
        if self.prefetch and self.max_staleness == 0:
            raise ConfigError(
                "prefetch=1 makes each gradient one update older, and max_staleness=0 "
                "allows none; leave out one of them, or give max_staleness=1 or more"
            )

    def _repr_html_(self) -> str:
        return markup.data(self)


@final
@dataclass(frozen=True, slots=True)
class SyncPS:
    """Train on a cluster's workers in step: each update averages a set of gradients.

    With ``b`` backup workers, the first ``workers - b`` contributions of a step count;
    later ones are dropped, counted for their worker, and that worker goes on with the
    newest parameters. When a worker goes away, a step takes as many contributions as
    workers are left; the metric ``contributions`` says how many each step had.

    ``batch_size`` is that of one worker: a step of ``n`` workers is one step of one
    process on their ``n`` batches together, which are neighbours in the order of the
    epoch. Every batch of an epoch counts exactly once: that of a late contribution, or
    of a worker that went away, is dealt again, and may then count in the next epoch's
    first steps. With backup workers a slow worker gets fewer batches.

    The model's state, such as BatchNorm statistics, is averaged like the gradients. Of
    a table of rows (see ``Trainer(sparse=…)``) each worker contributes the rows that it
    looked up, and one update is made of all these. The mean of a row is the sum of its
    gradients over the number of contributions: who did not look it up adds zeros. The
    same goes for hash tables, by keys.

    Args:
      replicas_to_aggregate: contributions of a step; all workers but the backups if
        unset.
      backup_workers: how many workers a step does not wait for.
      step_timeout_s: limit for one step, in seconds.
      variable_partitioner: cuts parameters into shards, as for ``AsyncPS``.
      partition_strategy: which rows a shard has, as for ``AsyncPS``.
      placement: chooses the ps of each parameter or shard, as for ``AsyncPS``.
      gradient_dtype: what gradients travel as, as for ``AsyncPS``. They are summed in
        float32. A late contribution is dropped, but not the left-overs that it carried:
        the next contribution of the worker has them.
      durability: what a run still has when a ps is lost, as for ``AsyncPS``. All ps go
        on from the same update; for that, with ``"replica"`` each ps also keeps its
        variables as they were before the newest update.
      dense: who holds dense parameters and their optimizer state. ``"ps"``. Or
        ``"workers"``: each large one is cut evenly over the workers, which sum the
        gradients of their part, update it, and send it to the others; tables of which
        rows travel stay on the ps, and without tables no ps is needed. What is
        computed is the same, but for rounding where several hosts have several workers:
        their gradients are summed on each host before they leave it. A worker that is
        lost is then lost as a ps is. Or
        ``"xla"``: as ``"workers"``, and gradients in float32 are summed by XLA's own
        collectives (NCCL on GPUs, gloo on CPUs), in a child process of each worker's
        server. Or ``"auto"``: on ps or workers, where the busiest link is busy for
        less time; ``plan()`` says why.
      cost_model: how fast the links are, for ``dense="auto"``; if unset, that is
        measured, which takes some seconds, once per cluster.
      elastic: lets workers join and leave between two updates, as for ``AsyncPS``. An
        update is of all workers there are then, but the backups, unless
        ``replicas_to_aggregate`` says how many.
      batch_share: ``"even"``: each worker computes a batch of ``batch_size``. Or
        ``"measured"``: the workers' batches together are cut into pieces of one size,
        at most eight for each worker, and each worker computes as many as fit to its
        speed; an update is of the same examples. A worker's model state, and what it
        draws at random, are those of pieces. Needs a ``batch_size`` that can be cut,
        data that workers read, and tables that travel whole.
      privacy: hides what each example adds to the model, see ``Privacy``. The noise is
        drawn on the ps that counts the updates, once for each.
      max_readers: how many workers read from a ps at a time; the others wait for their
        turn. So the first ones compute and send while others still read, and the
        network of a ps is busy both ways: for large models and many more workers than
        ps, where that network is the limit. One and a half times as many as ps are
        enough if all hosts have the same network, and too few if that of a ps is
        faster than a worker's; ``jgraph simulate --max-readers`` tells what it brings.
        None: all read at once. Only with ``dense="ps"``.

    Raises:
      ConfigError: a number outside what is possible.

    Example:
      >>> SyncPS(backup_workers=1).contributions(4)
      3
    """

    replicas_to_aggregate: int | None = None
    backup_workers: int = 0
    step_timeout_s: float = 60.0
    variable_partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    placement: PlacementFunction | None = None
    gradient_dtype: GradientDtype | None = None
    durability: Durability = "checkpoint"
    dense: Dense = "ps"
    cost_model: CostModel | None = None
    elastic: Elastic | None = None
    batch_share: BatchShare = "even"
    privacy: Privacy | None = None
    max_readers: int | None = None

    def __post_init__(self) -> None:
        _check_shared(self)
        self._check_dense()
        replicas = self.replicas_to_aggregate
        if replicas is not None and not is_count(replicas, 1):
            raise ConfigError(
                f"replicas_to_aggregate is {replicas!r}; a step averages at least 1 "
                "gradient, leave it out to average those of all workers"
            )
        backups = self.backup_workers
        if not is_count(backups, 0):
            raise ConfigError(
                f"backup_workers is {backups!r}; give a whole number, 0 or more"
            )
        readers = self.max_readers
        if readers is not None and not is_count(readers, 1):
            raise ConfigError(
                f"max_readers is {readers!r}; at least 1 worker reads at a time, leave "
                "it out to let all read at once"
            )
        as_ints(self, "replicas_to_aggregate", "backup_workers", "max_readers")
        check_share(
            *(self.batch_share, self.elastic),
            replicas_to_aggregate=replicas,
            backup_workers=backups,
        )
        if self.elastic is not None and self.elastic.workers[0] <= backups:
            raise ConfigError(
                f"SyncPS(backup_workers={backups}) with jg.Elastic(workers="
                f"{self.elastic.workers}): of the least workers none would be left to "
                f"wait for; write workers=({backups + 1}, …), or fewer backup workers"
            )
        check_privacy(self.privacy, "SyncPS", "example")
        if self.privacy is not None:
            check_private(self, "SyncPS")

    def _check_dense(self) -> None:
        if self.dense not in DENSE:
            raise ConfigError(
                f"dense is {self.dense!r:.60}; it says who holds dense parameters: "
                f"{', '.join(map(repr, DENSE[:-1]))} or {DENSE[-1]!r}"
            )
        if self.dense in ("workers", "xla") and self.elastic is not None:
            raise ConfigError(
                f"SyncPS(dense={self.dense!r}) with elastic=: each worker holds its "
                "part of the parameters, so none may join or leave a run that goes "
                "on; leave out elastic=, or write dense='ps'"
            )
        if self.dense != "ps" and self.max_readers is not None:
            raise ConfigError(
                f"SyncPS(dense={self.dense!r}) with max_readers={self.max_readers}: "
                "workers that hold parameters read from each other, and who waits for "
                "a turn would keep what others wait for; leave out max_readers=, or "
                "write dense='ps'"
            )
        if self.dense == "xla":
            _check_collectives(self)
        if self.dense != "ps" and self.elastic is not None and self.elastic.ps:
            raise ConfigError(
                f"SyncPS(dense={self.dense!r}) with jg.Elastic(ps={self.elastic.ps}): "
                "what moves lies on parameter servers; write dense='ps'"
            )
        model: object = self.cost_model
        if not (model is None or isinstance(model, CostModel)):
            raise ConfigError(
                f"cost_model is {model!r:.60}; give what jg.CostModel.load(path) reads"
            )

    @property
    def notes(self) -> list[str]:
        """Lines for the plan."""
        if self.max_readers is None:
            return []
        who = count_text(self.max_readers, "worker")
        return [f"max_readers: at most {who} at a time, where more may read from a ps"]

    def contributions(self, workers: int) -> int:
        """Returns how many contributions a step of so many workers takes.

        Raises:
          ConfigError: more than there are workers.

        Example:
          >>> SyncPS(backup_workers=1).contributions(4)
          3
        """
        backups = self.backup_workers
        replicas = self.replicas_to_aggregate or workers - backups
        if replicas < 1 or replicas + backups > workers:
            count_text = (
                "" if self.replicas_to_aggregate is None else f"{replicas} workers "
            )
            raise ConfigError(
                f"SyncPS is to average {count_text}with {backups} backup workers, and "
                f"the cluster has {workers} workers; start more, or ask for less"
            )
        return replicas

    def _repr_html_(self) -> str:
        return markup.data(self)


hints.name_fields(AsyncPS, hints.ASYNC_ARGUMENTS)
hints.name_fields(SyncPS, hints.SYNC_ARGUMENTS)

ParameterServers: TypeAlias = AsyncPS | SyncPS


def _check_shared(strategy: ParameterServers) -> None:
    check_gradient_dtype(strategy.gradient_dtype)
    check_durability(strategy.durability)
    check_elastic(strategy.elastic)
    _check_ps_join(strategy)
    if not strategy.step_timeout_s > 0:
        raise ConfigError(
            f"step_timeout_s is {strategy.step_timeout_s}; it must be over 0 seconds"
        )


def _check_collectives(strategy: SyncPS) -> None:
    """Refuses what sums of all workers at once cannot be combined with.

    Raises:
      ConfigError: names the option, and why.
    """
    all_in = "a sum of XLA's collectives is of all workers"
    reasons = {
        "backup_workers": (strategy.backup_workers != 0, all_in),
        "replicas_to_aggregate": (strategy.replicas_to_aggregate is not None, all_in),
        "gradient_dtype": (
            strategy.gradient_dtype is not None,
            "XLA's collectives sum float32, and what rounding takes away is kept for "
            "gradients that travel as messages",
        ),
        "durability": (
            strategy.durability == "replica",
            "who has the copy of a lost worker would go on without it, and a sum of "
            "XLA's collectives is of all workers",
        ),
    }
    _refuse_set(strategy, "SyncPS(dense='xla')", reasons, ", or write dense='workers'")


def check_private(strategy: SyncPS, name: str) -> None:
    """Refuses options with which nobody knows what an update tells of one unit.

    Args:
      strategy: how contributions are averaged.
      name: of the strategy that the user wrote.

    Raises:
      ConfigError: names the option, and why.
    """
    replicas = strategy.replicas_to_aggregate
    reasons = {
        "backup_workers": (
            strategy.backup_workers != 0,
            "who is late hangs on what it has drawn, and its part would be left out",
        ),
        "replicas_to_aggregate": (
            replicas is not None,
            "who is late hangs on what it has drawn, and its part would be left out",
        ),
        "batch_share": (
            strategy.batch_share != "even",
            "each worker draws as many examples as the others, and not what it can do",
        ),
        "elastic": (
            strategy.elastic is not None,
            "each worker draws from examples of its own, as many as it begins with",
        ),
        "gradient_dtype": (
            strategy.gradient_dtype is not None,
            "what rounding takes away would be in the next update, and counted nowhere",
        ),
        "dense": (
            strategy.dense != "ps",
            "the noise would be known to a worker",
        ),
        "durability": (
            strategy.durability != "checkpoint",
            "what the noise is made of would be kept beside gradients without noise",
        ),
    }
    _refuse_set(strategy, f"{name}(privacy=…)", reasons)


def _refuse_set(
    strategy: SyncPS, what: str, reasons: Mapping[str, tuple[bool, str]], but: str = ""
) -> None:
    """Refuses the first option that is set, and cannot be beside something else.

    Args:
      strategy: with the options.
      what: does not go with them, as the user wrote it.
      reasons: by option whether it is set, and why it must not be.
      but: what to write else than to leave it out.

    Raises:
      ConfigError: names the option, and why.
    """
    for option, (is_set, why) in reasons.items():
        if is_set:
            value = getattr(strategy, option)
            raise ConfigError(
                f"{what} with {option}={value!r:.40}: {why}; leave out {option}={but}"
            )


def _check_ps_join(strategy: ParameterServers) -> None:
    """Refuses what ps that join and leave cannot be combined with.

    Raises:
      ConfigError: says what to write.
    """
    if strategy.elastic is None or strategy.elastic.ps is None:
        return
    where = f"jg.Elastic(ps={strategy.elastic.ps})"
    least, most = strategy.elastic.ps
    if strategy.durability == "replica" and least < 2:
        raise ConfigError(
            f"durability='replica' with {where}: a ps that is alone has none to keep a "
            f"copy of it; write ps=(2, {max(2, most)}), or durability='log'"
        )
    if strategy.partition_strategy != "div":
        raise ConfigError(
            f"partition_strategy={strategy.partition_strategy!r} with {where}: what "
            "moves is a range of rows; write partition_strategy='div'"
        )
    if strategy.placement is not None:
        raise ConfigError(
            f"placement= with {where}: where variables lie follows from the number of "
            "ps, so that few of them move; leave out placement="
        )
    if strategy.gradient_dtype is not None:
        raise ConfigError(
            f"gradient_dtype={strategy.gradient_dtype!r} with {where}: what rounding "
            "leaves over is kept for each ps; leave out gradient_dtype=, or ps="
        )
