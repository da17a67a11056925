"""How a Trainer calls an optimizer: what it is given, and what its errors say."""

import inspect
from typing import Any

import optax

from jgraph.errors import ConfigError, JGError


def called_by_trainer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes ``value``, the loss, whether ``tx`` does or not.

    Its update raises:
      ConfigError: it wants more than a step has, or does not go with the parameters.

    Example:
      >>> tx = called_by_trainer(optax.sgd(0.5))
      >>> updates, _ = tx.update(1.0, tx.init(0.0), 0.0, value=2.0)
      >>> float(updates)
      -0.5
    """
    tx = optax.with_extra_args_support(tx)
    wanted = inspect.signature(tx.update).parameters
    kinds = {parameter.kind for parameter in wanted.values()}
    takes_value = "value" in wanted or inspect.Parameter.VAR_KEYWORD in kinds

    def update(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        given = {"value": value} if takes_value else {}
        try:
            return tx.update(updates, state, params, **given)
        except (TypeError, ValueError) as error:
            if isinstance(error, JGError):
                raise
            first = str(error).partition("\n")[0]
            raise ConfigError(
                f"the optimizer tx failed: {type(error).__name__}: {first}; a step "
                "gives it gradients, its state, the parameters and value=loss, but no "
                "function to evaluate: choose an optimizer that needs none, such as "
                "optax.adam, or optax.lbfgs(…, linesearch=None)"
            ) from error

    return optax.GradientTransformationExtraArgs(tx.init, update)
