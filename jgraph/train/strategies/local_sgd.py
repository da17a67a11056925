"""LocalSGD: options of training that talks once in many steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final, get_args

import optax

from jgraph.counts import as_ints, is_count, is_duration, is_share
from jgraph.errors import ConfigError, hints
from jgraph.graph.sharding import Partitioner
from jgraph.plan.placement.spread import PlacementFunction
from jgraph.train.model.optimizer import Optimizer
from jgraph.train.privacy.options import Privacy, check_privacy
from jgraph.train.state.durability import Durability
from jgraph.train.step.compress import GradientDtype
from jgraph.train.step.local_steps import INNER_STATES, InnerState, LocalRule
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.options import AsyncPS, Dense, SyncPS, check_private
from jgraph.view import markup

StepWeight: TypeAlias = Literal["steps", "equal"]
"""What a worker's contribution counts by."""

WEIGHTS: Final[tuple[StepWeight, ...]] = get_args(StepWeight)


@final
@dataclass(frozen=True, slots=True)
class LocalSGD:
    """Train on a cluster's workers apart, and bring them together now and then.

    In a round each worker reads the parameters, takes ``sync_every`` steps with the
    Trainer's optimizer, and contributes how far it came. The mean of that is applied
    like a gradient by ``outer``, which makes one update of the model. So a step costs
    no message, and an update one read and one contribution for ``sync_every`` steps.

    With ``fragments`` and ``overlap`` a part of the parameters is exchanged at a time,
    and workers train on meanwhile: "Streaming DiLoCo" (Douillard et al., 2025).

    ``batch_size`` is that of one step; ``steps`` of ``fit`` are updates, each of
    ``sync_every`` steps of every worker. What a round is trained on is dealt out, and
    counts, as a whole: exactly once, however many workers are lost. What is left of an
    epoch after its whole rounds is left out. The model's state, such as BatchNorm
    statistics, is averaged.

    Of a table of rows those travel that some step of the round looks up: they are read
    once, and how far they came is contributed. Other rows take no part in a round, so
    that momentum and decay of the workers' optimizer wait until they are looked up.
    What it keeps for rows is as large on each worker as the table is, unless
    ``inner_state="reset"``. Tables whose rows hang on each other, as with
    ``optax.lamb``, travel whole, and all do with ``sparse="exact"`` if rows without a
    gradient would move; ``plan()`` says which and why.

    Args:
      sync_every: steps of a round.
      outer: an optax optimizer whose gradient is the mean of what workers came;
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)`` is DiLoCo. If unset, the
        parameters are the mean of those of the workers.
      sync_every_s: seconds of computing of a round: each worker takes as many steps as
        it can, ``sync_every`` at most. What is left of the batches that it was dealt is
        left out of the epoch. If unset, all take ``sync_every``.
      weight: ``"steps"``: a contribution counts by the steps that it is made of; or
        ``"equal"``.
      inner_state: what becomes of the state of a worker's optimizer after a round.
        ``"keep"``: the worker goes on with it, in the next ``fit`` too; it is no part
        of a checkpoint, and begins anew after ``restore``, on a worker that was lost,
        and on all when the run goes back. ``"average"``: all go on with the mean, which
        travels, and is saved as the state of ``outer`` is. ``"reset"``: it begins anew.
      max_staleness: rounds are asynchronous: what a worker contributes is applied at
        once by ``outer``, and nobody waits for all. No contribution has more than so
        many updates since its worker read the parameters: one that would run ahead
        waits, as with ``AsyncPS``. As an update is of one worker, ``outer`` needs a
        rate that is smaller, ``optax.sgd(0.5)``. If unset, an update is of all workers.
      fragments: into how many the parameters are cut, by bytes. One after the other is
        exchanged, each after as many steps (``sync_every / fragments``), so that the
        bytes of an exchange, the most at once, fall by their number. An update is then
        of one fragment, and of so many steps; ``outer`` counts rounds. A worker keeps
        its own parameters from one round to the next, and its optimizer's state. What
        all count by, such as a norm, ``outer`` sees of one fragment alone.
      overlap: steps that a worker takes on while its contribution travels and is
        applied, ``sync_every / fragments`` at most; then the fragment of all is mixed
        into its own (Streaming DiLoCo).
      mix: how much of its own parameters a worker keeps then, 0 to 1.
      row_budget: how many rows of a table a worker may hold in a round; a round that
        looks up more ends the run (``RowBudgetError``). If unset, any number.
      backup_workers: how many workers a round does not wait for.
      step_timeout_s: limit for one round, in seconds.
      variable_partitioner: as for ``SyncPS``.
      partition_strategy: as for ``SyncPS``.
      placement: as for ``SyncPS``.
      gradient_dtype: as what contributions travel, as for ``SyncPS``.
      durability: what a run still has when a ps is lost, as for ``SyncPS``.
      dense: who holds the parameters and the state of ``outer``, as for ``SyncPS``.
      elastic: lets workers join and leave between two rounds, as for ``SyncPS``.
      privacy: ``Privacy(unit="client", …)`` hides what each worker contributes.

    Raises:
      ConfigError: an option outside what is possible.

    Example:
      >>> LocalSGD(sync_every=20).sync_every
      20
      >>> LocalSGD(sync_every=100, fragments=4, overlap=10).mix  # Streaming DiLoCo
      0.5
    """

    sync_every: int = 1
    outer: optax.GradientTransformation | None = None
    sync_every_s: float | None = None
    weight: StepWeight = "steps"
    inner_state: InnerState = "keep"
    max_staleness: int | None = None
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.5
    row_budget: int | None = None
    backup_workers: int = 0
    step_timeout_s: float = 600.0
    variable_partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    placement: PlacementFunction | None = None
    gradient_dtype: GradientDtype | None = None
    durability: Durability = "checkpoint"
    dense: Dense = "ps"
    elastic: Elastic | None = None
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        if not is_count(self.sync_every, 1):
            raise ConfigError(
                f"sync_every is {self.sync_every!r:.60}; give the steps of a round, 1 "
                "or more"
            )
        as_ints(self, "sync_every")
        if self.row_budget is not None:
            if not is_count(self.row_budget, 1):
                raise ConfigError(
                    f"row_budget is {self.row_budget!r:.60}; give how many rows of a "
                    "table a worker may hold in a round, 1 or more"
                )
            as_ints(self, "row_budget")
        self._check_pace()
        check_outer(self.outer)
        for name, value, known in [
            ("weight", self.weight, WEIGHTS),
            ("inner_state", self.inner_state, INNER_STATES),
        ]:
            check_one_of(name, value, known)
        _ = self.rounds  # refuses what a SyncPS does
        check_batch_stays(self.elastic, "LocalSGD")
        self._check_privacy()
        self._check_staleness()
        self._check_fragments()

    def _check_staleness(self) -> None:
        if self.max_staleness is None:
            return
        check_staleness(self.max_staleness, "worker")
        as_ints(self, "max_staleness")
        for name, is_set in [
            ("sync_every_s", self.sync_every_s is not None),
            ("inner_state='average'", self.inner_state == "average"),
            ("backup_workers", self.backup_workers > 0),
            ("dense", self.dense != "ps"),
            ("privacy", self.privacy is not None),
        ]:
            if is_set:
                raise ConfigError(
                    f"LocalSGD(max_staleness={self.max_staleness}) applies what each "
                    f"worker contributes alone, and {name} is of contributions of all; "
                    "leave out one of them"
                )

    def _check_fragments(self) -> None:
        for name, value, least in [
            ("fragments", self.fragments, 1),
            ("overlap", self.overlap, 0),
        ]:
            if not is_count(value, least):
                raise ConfigError(
                    f"{name} is {value!r:.60}; give a whole number, {least} or more"
                )
        as_ints(self, "fragments", "overlap")
        if not is_share(self.mix):
            raise ConfigError(
                f"mix is {self.mix!r:.60}; give how much of its own parameters a "
                "worker keeps, 0 to 1"
            )
        if self.sync_every % self.fragments:
            raise ConfigError(
                f"sync_every={self.sync_every} is no multiple of fragments="
                f"{self.fragments}, and each is exchanged after as many steps; write "
                f"sync_every={-(-self.sync_every // self.fragments) * self.fragments}"
            )
        piece = self.sync_every // self.fragments
        if self.overlap > piece:
            raise ConfigError(
                f"overlap={self.overlap} is more than the {piece} steps between two "
                f"exchanges (sync_every / fragments); write overlap={piece} or less"
            )
        if self.fragments == 1 and not self.overlap:
            return
        for option, is_set in [
            ("sync_every_s", self.sync_every_s is not None),
            (f"inner_state={self.inner_state!r}", self.inner_state != "keep"),
            ("max_staleness", self.max_staleness is not None),
            ("dense", self.dense != "ps"),
            ("privacy", self.privacy is not None),
        ]:
            if is_set:
                raise ConfigError(
                    f"LocalSGD(fragments={self.fragments}, overlap={self.overlap}) "
                    "lets each worker go on with parameters of its own, which does "
                    f"not go with {option}; leave out one of them"
                )

    def _check_privacy(self) -> None:
        check_privacy(self.privacy, "LocalSGD", "client")
        if self.privacy is None:
            return
        check_private(self.rounds, "LocalSGD")
        check_own_state(self.inner_state, "LocalSGD")
        if self.sync_every_s is not None and self.weight != "equal":
            raise ConfigError(
                "LocalSGD(privacy=…) with sync_every_s= and weight='steps': how much a "
                "worker counts would tell of it, without noise; write weight='equal'"
            )

    def _check_pace(self) -> None:
        seconds = self.sync_every_s
        if seconds is None:
            return
        if not is_duration(seconds):
            raise ConfigError(
                f"sync_every_s is {seconds!r:.60}; give the seconds of a round, more "
                "than 0"
            )
        if self.sync_every == 1:
            raise ConfigError(
                "sync_every_s needs to know how many steps a round has at most; write "
                f"sync_every=500, sync_every_s={seconds}"
            )

    @property
    def rounds(self) -> SyncPS:
        """How rounds are averaged: as synchronous steps are."""
        return SyncPS(
            backup_workers=self.backup_workers,
            step_timeout_s=self.step_timeout_s,
            variable_partitioner=self.variable_partitioner,
            partition_strategy=self.partition_strategy,
            placement=self.placement,
            gradient_dtype=self.gradient_dtype,
            durability=self.durability,
            dense=self.dense,
            elastic=self.elastic,
        )

    @property
    def apart(self) -> AsyncPS | None:
        """How rounds are applied where each is of one worker; None: of all."""
        return one_by_one(self, self.step_timeout_s)

    def rule(self, tx: Optimizer) -> LocalRule:
        """Returns how a worker trains alone.

        Args:
          tx: the Trainer's optimizer.
        """
        paced = self.sync_every_s is not None
        weighs = paced and self.weight == "steps"
        return LocalRule(
            *(tx, self.sync_every // self.fragments, paced, weighs, self.inner_state),
            row_budget=self.row_budget or 0,
            fragments=self.fragments,
            overlap=self.overlap,
            mix=self.mix,
        )

    @property
    def outer_optimizer(self) -> optax.GradientTransformation:
        """What applies the mean."""
        return optax.sgd(1.0) if self.outer is None else self.outer

    def _repr_html_(self) -> str:
        return markup.data(self)


hints.name_fields(LocalSGD, hints.LOCAL_ARGUMENTS)


def check_outer(outer: object) -> None:
    """Refuses what applies no update.

    Raises:
      ConfigError: it is no optax optimizer.
    """
    if outer is not None and not (hasattr(outer, "init") and hasattr(outer, "update")):
        raise ConfigError(
            f"outer is {outer!r:.60}; give an optax optimizer, for example "
            "optax.sgd(0.7, momentum=0.9, nesterov=True)"
        )


def one_by_one(options: Any, step_timeout_s: float) -> AsyncPS | None:
    """Returns how rounds of one worker each are applied; None: an update is of all.

    Args:
      options: a ``LocalSGD`` or a ``Federated``, which call what they share alike.
      step_timeout_s: the limit of a round.
    """
    if options.max_staleness is None:
        return None
    return AsyncPS(
        step_timeout_s=step_timeout_s,
        max_staleness=options.max_staleness,
        variable_partitioner=options.variable_partitioner,
        partition_strategy=options.partition_strategy,
        placement=options.placement,
        gradient_dtype=options.gradient_dtype,
        durability=options.durability,
        elastic=options.elastic,
    )


def check_staleness(bound: object, who: str) -> None:
    """Refuses what is no bound of how old a contribution is.

    Raises:
      ConfigError: says what one is.
    """
    if not is_count(bound, 0):
        raise ConfigError(
            f"max_staleness is {bound!r:.60}; give how many updates a {who} may be "
            "behind, 0 or more, or leave it out to wait for all"
        )


def check_batch_stays(elastic: Elastic | None, name: str) -> None:
    """Refuses that who joins takes some of a batch of all, as each has its own.

    Raises:
      ConfigError: it would.
    """
    if elastic is not None and elastic.batch == "global":
        raise ConfigError(
            f"{name} with jg.Elastic(batch='global'): a worker takes batches of its "
            "own, however many workers there are; leave out batch="
        )


def check_own_state(inner_state: InnerState, name: str) -> None:
    """Refuses, of private training, that the state of workers' optimizers travels.

    Raises:
      ConfigError: it would.
    """
    if inner_state == "average":
        raise ConfigError(
            f"{name}(privacy=…) with inner_state='average': the state of the workers' "
            "optimizers would travel without noise; leave out inner_state="
        )


def check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Refuses an option that is none of these.

    Raises:
      ConfigError: says what there is.
    """
    if value not in known:
        raise ConfigError(
            f"{name} is {value!r:.60}; give {', '.join(map(repr, known[:-1]))} or "
            f"{known[-1]!r}"
        )
