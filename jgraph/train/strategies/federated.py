"""Federated: options of training on clients whose data stays theirs."""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, final, get_args

import numpy as np
import optax

from jgraph.coordination.sync.rounds import RoundRule
from jgraph.counts import as_ints, is_count, is_duration
from jgraph.errors import ConfigError, hints
from jgraph.graph.sharding import Partitioner
from jgraph.plan.placement.spread import PlacementFunction
from jgraph.train.model.optimizer import Optimizer
from jgraph.train.privacy.options import Privacy, check_privacy
from jgraph.train.privacy.secure_sum import SecureSum
from jgraph.train.state.durability import Durability
from jgraph.train.step.compress import GradientDtype
from jgraph.train.step.local_steps import INNER_STATES, InnerState, LocalRule
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.local_sgd import (
    check_batch_stays,
    check_one_of,
    check_outer,
    check_own_state,
    check_staleness,
    one_by_one,
)
from jgraph.train.strategies.options import AsyncPS, SyncPS, check_private
from jgraph.view import markup

ClientWeight: TypeAlias = Literal["examples", "equal"]
"""What a client's contribution counts by."""

CLIENT_WEIGHTS: Final[tuple[ClientWeight, ...]] = get_args(ClientWeight)

_NO_MEAN: Final = "there is no mean of their states"


@final
@dataclass(frozen=True, slots=True)
class Federated:
    """Train on clients whose data stays theirs.

    The workers of the cluster are the clients, and the data of ``fit`` is a
    ``jg.Source`` that each opens on its own host: no example leaves it. In a round some
    clients are drawn. Each reads the parameters, trains ``local_epochs`` on its own
    data with the Trainer's optimizer, and contributes how far it came. The mean of
    that is applied like a gradient by ``outer``, which makes one update of the model.

    ``batch_size`` is that of one step of a client; ``steps`` of ``fit`` are rounds. A
    client that is lost, or not done within ``round_timeout_s``, is left out of the
    round; ``Run.rounds`` says who and why. It takes part again when it is there again.
    What a client contributes is seen by the ps. Tables of rows travel whole.

    With ``max_staleness`` rounds wait for nobody: each is of one client, and an update
    of its own.

    Args:
      local_epochs: passes over a client's data in a round.
      fraction: of the clients that are there, drawn anew for each round; rounded up.
      min_clients: contributions that a round needs; so many are drawn at least.
      outer: an optax optimizer whose gradient is the mean of what clients came;
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)`` adds what DiLoCo does. If unset,
        the parameters are the mean of those of the clients (FedAvg).
      proximal: how strongly a client is held to the parameters that it began with
        (FedProx): ``proximal / 2`` times the square of the distance is added to its
        loss.
      weight: ``"examples"``: a contribution counts by how many examples its client
        has; or ``"equal"``. If unset, by examples where an update is of several.
      inner_state: what becomes of the state of a client's optimizer after a round; see
        ``LocalSGD``.
      round_timeout_s: seconds after which a round goes on without those who are late.
        With fewer than ``min_clients`` contributions the run then fails, and says who
        was late. With ``max_staleness`` the limit of a round of one client, and of each
        turn that it waits for; one that is there and takes longer ends the run.
      max_staleness: rounds are asynchronous: what a client contributes is applied at
        once by ``outer``, and the client begins its next round. No contribution has
        more than so many updates since its client read the parameters, so at most one
        more than so many train at a time; others wait for their turn. ``outer`` needs a
        smaller rate, ``optax.sgd(0.5)``. If unset, an update is of all who were drawn.
      variable_partitioner: as for ``SyncPS``.
      partition_strategy: as for ``SyncPS``.
      placement: as for ``SyncPS``.
      gradient_dtype: as what contributions travel, as for ``SyncPS``.
      durability: what a run still has when a ps is lost, as for ``SyncPS``.
      elastic: lets clients join and leave between two rounds, as for ``SyncPS``. One
        that joins with more data than any had trains on as much as those.
      privacy: ``Privacy(unit="client", …)`` hides what each client contributes, and so
        its data as a whole; needs ``weight="equal"``. Each round counts for each
        client: who is drawn is no secret.
      secure_sum: ``SecureSum(…)``: the ps see the sum of what the clients of a round
        contribute, and nothing of each.

    Raises:
      ConfigError: an option outside what is possible.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", 2017; Li et al., "Federated Optimization in Heterogeneous
    Networks", 2020 (FedProx).

    Example:
      >>> Federated(local_epochs=5, fraction=0.1, min_clients=8).min_clients
      8
      >>> Federated(local_epochs=5, outer=optax.sgd(0.5), max_staleness=9).max_staleness
      9
    """

    local_epochs: int = 1
    fraction: float = 1.0
    min_clients: int = 1
    outer: optax.GradientTransformation | None = None
    proximal: float = 0.0
    weight: ClientWeight | None = None
    inner_state: InnerState = "reset"
    round_timeout_s: float = 600.0
    max_staleness: int | None = None
    variable_partitioner: Partitioner | None = None
    partition_strategy: str = "div"
    placement: PlacementFunction | None = None
    gradient_dtype: GradientDtype | None = None
    durability: Durability = "checkpoint"
    elastic: Elastic | None = None
    privacy: Privacy | None = None
    secure_sum: SecureSum | None = None

    def __post_init__(self) -> None:
        for name, what in [
            ("local_epochs", "passes over a client's data in a round"),
            ("min_clients", "contributions that a round needs"),
        ]:
            if not is_count(value := getattr(self, name), 1):
                raise ConfigError(
                    f"{name} is {value!r:.60}; give the {what}, 1 or more"
                )
        as_ints(self, "local_epochs", "min_clients")
        if not (_is_real(self.fraction) and 0 < self.fraction <= 1):
            raise ConfigError(
                f"fraction is {self.fraction!r:.60}; it is of the clients that are "
                "drawn for a round, more than 0 and 1 at most"
            )
        if not (_is_real(self.proximal) and self.proximal >= 0):
            raise ConfigError(
                f"proximal is {self.proximal!r:.60}; give how strongly clients are "
                "held to the parameters that they begin with, 0 or more"
            )
        if not is_duration(self.round_timeout_s):
            raise ConfigError(
                f"round_timeout_s is {self.round_timeout_s!r:.60}; give the seconds of "
                "a round, more than 0"
            )
        check_outer(self.outer)
        if self.weight is not None:
            check_one_of("weight", self.weight, CLIENT_WEIGHTS)
        check_one_of("inner_state", self.inner_state, INNER_STATES)
        _ = self.rounds  # refuses what a SyncPS does
        check_batch_stays(self.elastic, "Federated")
        self._check_staleness()
        self._check_privacy()
        self._check_secure()

    def _check_staleness(self) -> None:
        if self.max_staleness is None:
            return
        check_staleness(self.max_staleness, "client")
        as_ints(self, "max_staleness")
        for name, is_set, why in [
            ("fraction", self.fraction != 1, "none are drawn for it"),
            ("min_clients", self.min_clients > 1, "an update is of one"),
            ("weight='examples'", self.weight == "examples", "nothing else is weighed"),
            ("inner_state='average'", self.inner_state == "average", _NO_MEAN),
            ("privacy", self.privacy is not None, "noise hides one among several"),
            ("secure_sum", self.secure_sum is not None, "a sum hides one in a round"),
        ]:
            if is_set:
                raise ConfigError(
                    f"Federated(max_staleness={self.max_staleness}) applies what each "
                    f"client contributes alone, and {name} is of a round of several: "
                    f"{why}; leave out one of them"
                )

    def _check_secure(self) -> None:
        if self.secure_sum is None:
            return
        if not isinstance(self.secure_sum, SecureSum):
            raise ConfigError(
                f"secure_sum is {self.secure_sum!r:.60}; give jg.SecureSum(…)"
            )
        for option, is_set, why in [
            (
                "gradient_dtype",
                self.gradient_dtype is not None,
                "what rounding leaves of one cannot be told from masks",
            ),
            (
                "inner_state",
                self.inner_state == "average",
                "the state of an optimizer has no bound to cut it to",
            ),
            (
                "durability",
                self.durability != "checkpoint",
                "what is kept of an update would be of masked contributions",
            ),
        ]:
            value = getattr(self, option)
            if is_set:
                raise ConfigError(
                    f"Federated(secure_sum=…) with {option}={value!r:.40} needs what "
                    f"each client contributes, and the ps see the sum alone: {why}; "
                    f"leave out {option}="
                )

    def _check_privacy(self) -> None:
        check_privacy(self.privacy, "Federated", "client")
        if self.privacy is None:
            return
        check_private(self.rounds, "Federated")
        if self.weight != "equal":
            raise ConfigError(
                "Federated(privacy=…) with weight='examples': what a client adds, and "
                "how much it counts, would hang on how many examples it has; write "
                "weight='equal'"
            )
        check_own_state(self.inner_state, "Federated")

    @property
    def rounds(self) -> SyncPS:
        """How rounds are averaged: as synchronous steps are."""
        return SyncPS(
            step_timeout_s=self.round_timeout_s,
            variable_partitioner=self.variable_partitioner,
            partition_strategy=self.partition_strategy,
            placement=self.placement,
            gradient_dtype=self.gradient_dtype,
            durability=self.durability,
            elastic=self.elastic,
        )

    @property
    def apart(self) -> AsyncPS | None:
        """How rounds are applied where each is of one client; None: of all drawn."""
        return one_by_one(self, self.round_timeout_s)

    def apart_among(self, clients: int) -> AsyncPS | None:
        """Returns how rounds of one client are applied, for so many; see ``apart``.

        Args:
          clients: how many there are. They wait for turns, which take as long as
            rounds, and the time for which a loop waits counts as that of its step.
        """
        if (apart := self.apart) is None or apart.max_staleness is None:
            return apart
        if self.elastic is not None:
            clients = max(clients, self.elastic.most or 0)
        turns = 1 + math.ceil((clients - 1) / (apart.max_staleness + 1))
        return replace(apart, step_timeout_s=turns * self.round_timeout_s)

    @property
    def outer_optimizer(self) -> optax.GradientTransformation:
        """What applies the mean."""
        return optax.sgd(1.0) if self.outer is None else self.outer

    def rule(self, tx: Optimizer) -> LocalRule:
        """Returns how a client trains alone.

        Args:
          tx: the Trainer's optimizer.
        """
        return LocalRule(
            tx,
            weighs=self.weight != "equal" and self.max_staleness is None,
            inner_state=self.inner_state,
            epochs=self.local_epochs,
            proximal=float(self.proximal),
        )

    def invitations(self, seed: int, clients: int) -> RoundRule:
        """Returns how many clients a round has.

        Args:
          seed: of the Trainer.
          clients: how many there are.

        Raises:
          ConfigError: fewer than a round needs.
        """
        if self.min_clients > clients and self.elastic is None:
            raise ConfigError(
                f"Federated(min_clients={self.min_clients}) needs as many workers, and "
                f"the cluster has {clients}; start more, or write min_clients={clients}"
            )
        return RoundRule(float(self.fraction), self.min_clients, seed % 2**63)

    def _repr_html_(self) -> str:
        return markup.data(self)


hints.name_fields(Federated, hints.FEDERATED_ARGUMENTS)


def _is_real(value: object) -> bool:
    is_number = isinstance(value, float | int | np.floating | np.integer)
    return is_number and not isinstance(value, bool)
