"""Pipeline stages: Flax modules, or functions over parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import flax.linen as nn
import jax
from flax import nnx
from flax.core import meta, unfreeze

from jgraph.errors import JGError, PipelineError
from jgraph.plan.program.types import value_type
from jgraph.train.model.trees import Tree, named_state, string_keys

Apply: TypeAlias = Callable[[Tree, Tree], Tree]


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as pure functions.

    Attributes:
      what: the stage, for messages.
      apply: from (parameters, inputs) to outputs.
      make: from (key, types of inputs) to initial parameters; None for a function.
    """

    what: str
    apply: Apply
    make: Callable[[Any, Tree], Tree] | None = None

    def init(self, key: Any, inputs: Tree) -> Tree:
        """Returns initial parameters, for inputs of these types.

        Raises:
          PipelineError: it does not take them, has other state than parameters, or is
            a function.
        """
        if self.make is None:
            raise PipelineError(
                f"{self.what} is a function, which does not say how its parameters "
                "begin; make the list of parameters yourself"
            )
        return self._tried(self.make, key, inputs)

    def outputs(self, params: Tree, inputs: Tree) -> Tree:
        """Returns the types of what it gives."""
        return self._tried(partial(jax.eval_shape, self.apply), params, inputs)

    def applied(self, params: Tree, inputs: Tree) -> Tree:
        """Returns what it gives.

        Raises:
          PipelineError: it does not take the inputs.
        """
        return self._tried(self.apply, params, inputs)

    def _tried(self, fn: Callable[[Any, Any], Tree], first: Any, inputs: Tree) -> Tree:
        try:
            return fn(first, inputs)
        except JGError:
            raise
        except Exception as error:
            raise does_not_take(self.what, inputs, error) from error


def does_not_take(what: str, inputs: Tree, error: Exception) -> PipelineError:
    """Returns the error of a stage that cannot compute with such inputs."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return PipelineError(f"{what} does not take {types_text(inputs)}: {first}")


def as_stage(number: int, stage: Any, kind: str = "stage") -> Stage:
    """Returns a stage that is a Flax module or a function.

    Args:
      number: of the stage.
      stage: what the user gave.
      kind: what it is, for messages: a stage, or a layer of one.

    Raises:
      PipelineError: it is neither, or has other state than parameters.
    """
    what = f"{kind} {number} ('{getattr(stage, '__name__', type(stage).__name__)}')"
    if isinstance(stage, nn.Module):
        return Stage(what, _linen_apply(stage), partial(_linen_init, what, stage))
    if isinstance(stage, nnx.Module):
        return _nnx_stage(what, stage)
    if isinstance(stage, type) or not callable(stage):
        raise PipelineError(
            f"{what} is no {kind}; give a Flax module, or a function (params, x)"
        )
    return Stage(what, stage)


def without_targets(apply: Apply) -> Callable[[Tree, Tree, Tree], Tree]:
    """Returns the function of a stage as one that is given targets, too."""
    return lambda params, inputs, _: apply(params, inputs)


def types_text(tree: Tree) -> str:
    """Returns the types of a tree's arrays, for people.

    Example:
      >>> types_text({"a": jax.ShapeDtypeStruct((2, 3), "float32")})
      'float32[2,3]'
    """
    return ", ".join(str(value_type(x)) for x in jax.tree.leaves(tree)) or "nothing"


def _linen_apply(module: nn.Module) -> Apply:
    return lambda params, x: module.apply({"params": params}, x)


def _linen_init(what: str, module: nn.Module, key: Any, inputs: Tree) -> Tree:
    init = jax.jit(lambda key: module.lazy_init(key, inputs))
    variables = dict(unfreeze(meta.unbox(init(key))))
    params = string_keys(variables.pop("params", {}))
    if variables:
        raise _has_state(what, sorted(variables))
    return params


def _nnx_stage(what: str, module: nnx.Module) -> Stage:
    parts: Any = nnx.split(module, nnx.Param, ...)
    graph, params, state = parts
    if jax.tree.leaves(state):
        others = [v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Variable)]
        kinds = {type(v).__name__ for v in others if not isinstance(v, nnx.Param)}
        raise _has_state(what, sorted(kinds))
    by_name, back = named_state(params)

    def apply(params: Tree, x: Tree) -> Tree:
        return nnx.merge(graph, back(params), state)(x)

    return Stage(what, apply, lambda *_: by_name)


def _has_state(what: str, kinds: list[str]) -> PipelineError:
    return PipelineError(
        f"{what} has other state than parameters ({', '.join(kinds)}), which a "
        "pipeline does not carry; take BatchNorm and Dropout out of its stages"
    )
