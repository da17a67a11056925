"""Validation of a Trainer's arguments, before anything is done with them."""

from typing import Any, Final

import flax.linen as nn
import numpy as np
from flax import nnx

from jgraph.client.cluster import Cluster
from jgraph.errors import ConfigError
from jgraph.train.model.adapters import Model
from jgraph.train.model.losses import Loss, positional
from jgraph.train.model.optimizer import check_optimizer
from jgraph.train.pipeline.pipeline import Pipeline
from jgraph.train.strategies.strategies import Strategy, privacy_of
from jgraph.train.tables.row_step import SPARSE

MOST_STEPS: Final = 2**63 - 1
"""What messages count as whole numbers ends here."""


def check_counts(**counts: Any) -> None:
    """Refuses counts that are no whole numbers, or less than 1.

    Raises:
      ConfigError: names the argument.
    """
    for name, count in counts.items():
        if hasattr(count, "__len__") and not isinstance(count, str):
            raise ConfigError(
                f"{name} is a {type(count).__name__} of {len(count)}; inputs and "
                "targets are one argument: (x, y)"
            )
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise ConfigError(f"{name} is {count!r:.60}; it must be a whole number")
        if count < 1:
            raise ConfigError(f"{name} is {count}; it must be at least 1")
        if count > MOST_STEPS:
            raise ConfigError(f"{name} is more than {MOST_STEPS}; no run comes so far")


def check_arguments(
    model: Model,
    loss: Loss,
    tx: object,
    cluster: object,
    seed: object,
    sparse: object,
    wrt: Any,
) -> None:
    """Refuses arguments of a Trainer that cannot be.

    Raises:
      ConfigError: names the argument, and what to give.
    """
    check_model(model, loss)
    check_optimizer(tx)
    if not (cluster is None or isinstance(cluster, Cluster)):
        raise ConfigError(
            f"cluster is {cluster!r:.60}; give what jg.connect('jgraph://host:port')"
            " or jg.LocalCluster() returned"
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigError(f"seed is {seed!r:.60}; give a whole number, such as 0")
    if sparse not in SPARSE:
        raise ConfigError(f"sparse is {sparse!r:.60}; it is one of {SPARSE}")
    try:
        nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError):
        raise ConfigError(
            f"wrt is {wrt!r:.60}; give a filter of flax.nnx such as nnx.LoRAParam"
        ) from None
    if isinstance(model, nn.Module) and wrt is not nnx.Param:
        raise ConfigError(
            "wrt chooses among the variables of an nnx model, and this one is a "
            f"linen {type(model).__name__}; freeze its parameters with "
            "optax.multi_transform and optax.set_to_zero"
        )


def check_model(model: Model, loss: Loss) -> None:
    """Refuses what is not a Flax model with a loss.

    Raises:
      ConfigError: ``model`` is a class, a pipeline or no Flax module; ``loss`` cannot
        be called with (model or params, batch).
    """
    if isinstance(model, type):
        raise ConfigError(
            f"model is the class {model.__name__}, not a model; make one: "
            f"{model.__name__}(…)"
        )
    if isinstance(model, Pipeline):
        raise ConfigError(
            "model is a Pipeline, and these train in a session: write "
            "train = pipe.step(params, tx), then session.run(train.train, x, y)"
        )
    if hasattr(model, "apply_fn") and hasattr(model, "tx"):
        raise ConfigError(
            f"model is a {type(model).__name__}; give what it is made of: "
            "jg.Trainer(module, loss, state.tx, variables={'params': state.params})"
        )
    if not (isinstance(model, nnx.Module | nn.Module) or callable(model)):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a flax.nnx or flax.linen module"
        )
    if not callable(loss):
        raise ConfigError("loss is not a function; write def loss(model, batch): …")
    is_linen = isinstance(model, nn.Module)
    names = positional(loss)
    # What is called otherwise is likely a label: loss(model, x, y).
    words = ("rng", "key", "seed", "rand") if is_linen else ("rng",)
    takes_third = any(word in names[-1].lower() for word in words) if names else False
    if not 2 <= len(names) <= (3 if takes_third else 2):
        first, rng = ("params", "rng") if is_linen else ("model", "rngs")
        raise ConfigError(
            f"loss takes ({', '.join(names)}); it is called as loss({first}, batch) "
            f"or loss({first}, batch, {rng}); inputs and targets are one batch: "
            "x, y = batch"
        )


def check_private(strategy: Strategy, *, check_finite: bool, is_detached: bool) -> None:
    """Refuses to train privately where the account would be wrong.

    Raises:
      ConfigError: says why.
    """
    if privacy_of(strategy) is None:
        return
    if check_finite:
        raise ConfigError(
            "check_finite=True ends a run by what single examples do, and with "
            "privacy= that would tell of them; leave it out: an example whose gradient "
            "is not finite adds nothing to an update"
        )
    if is_detached:
        raise ConfigError(
            "with privacy= this process has to hear of each update: where a master and "
            "the task that decides updates are lost together nobody else knows of the "
            "last ones, and a detached run might pass its epsilon unseen. Leave out "
            "detached=True and give fit(checkpoint=…): a run whose client is gone is "
            "saved with its account, and trainer.restore(…) goes on from there"
        )


def check_detachable(cluster: Cluster | None, strategy: Strategy) -> None:
    """Refuses runs that cannot outlive their client.

    Raises:
      ConfigError: says why.
    """
    if cluster is not None and cluster.ends_with_client:
        raise ConfigError(
            "detached=True lets the run go on when this process is gone, and the tasks "
            "of a jg.LocalCluster end with it; start them with `jgraph up` and connect "
            "with jg.connect(…)"
        )
    _check_no_policy(strategy)
    if cluster is None:
        raise ConfigError(
            f"detached=True needs a cluster, and {type(strategy).__name__}() trains in "
            "this process, which ends with it; give Trainer(…, cluster=jg.connect(…))"
        )


def check_attachable(cluster: Cluster | None, strategy: Strategy) -> Cluster:
    """Returns the cluster on which a run is that another client began.

    Raises:
      ConfigError: there is none, or no run can be of this strategy.
    """
    if cluster is None:
        raise ConfigError(
            "attach finds a run on a cluster, and this Trainer has none; give "
            "Trainer(…, cluster=jg.connect(…))"
        )
    _check_no_policy(strategy)
    return cluster


def _check_no_policy(strategy: Strategy) -> None:
    elastic = getattr(strategy, "elastic", None)
    if elastic is not None and elastic.policy is not None:
        raise ConfigError(
            "jg.Elastic(policy=…) decides in the process that began the run, and "
            "detached=True lets that end; leave out one of them"
        )
