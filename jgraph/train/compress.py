"""Gradients in fewer bits between a worker and the ps, with error feedback.

What rounding takes from a gradient stays on the worker and is added to its next one, so
that nothing is lost for good and training converges as without.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.device import device
from jgraph.graph.ir import Graph
from jgraph.graph.variable import Variable
from jgraph.plan.program import Program

GradientDtype: TypeAlias = Literal["bfloat16", "int8"]
GRADIENT_DTYPES = ("bfloat16", "int8")

_LARGEST = 127.0
_PREFIX = "residual/"


def check_gradient_dtype(dtype: object) -> None:
    """Refuses what gradients cannot travel as.

    Raises:
      ConfigError: says what there is.
    """
    if dtype is not None and dtype not in GRADIENT_DTYPES:
        raise ConfigError(
            f"gradient_dtype is {dtype!r:.60}; give 'bfloat16', 'int8', or None to "
            "send gradients as they are"
        )


def compressed(value: jax.Array, dtype: GradientDtype) -> tuple[jax.Array, ...]:
    """Returns what travels for a float32 array of any shape.

    Args:
      value: what to send.
      dtype: ``"bfloat16"``; or ``"int8"``, with one float32 scale for the array.

    Example:
      >>> values, scale = compressed(jnp.array([0.5, -1.0]), "int8")
      >>> values.tolist(), round(float(scale), 6)
      ([64, -127], 0.007874)
    """
    if dtype == "bfloat16":
        return (value.astype(jnp.bfloat16),)
    largest = jnp.abs(value).max(initial=0.0)
    # What is not finite must not arrive as if it were.
    scale = jnp.where(largest == 0, 1.0, largest) / _LARGEST
    return jnp.round(value / scale).astype(jnp.int8), scale


def expanded(packed: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the float32 array that ``compressed`` ones stand for.

    Example:
      >>> expanded(compressed(jnp.array([0.0, 2.0]), "int8")).tolist()
      [0.0, 2.0]
    """
    value = packed[0].astype(jnp.float32)
    return value * packed[1] if len(packed) > 1 else value


@final
class Compression:
    """What is left over on a worker, and how gradients are sent.

    Left-overs are variables of each worker: ``residual/0/params/w`` on its first one.
    They begin at zero in each ``fit`` and are not part of a checkpoint. Gradients of
    rows travel as they are, and so do those that are not float32.

    Args:
      parameters: the variables of the parameters, in the order of their leaves.
      dtype: of what travels.
    """

    def __init__(self, parameters: Sequence[Variable], dtype: GradientDtype) -> None:
        check_gradient_dtype(dtype)
        self._dtype: GradientDtype = dtype
        self._parameters = parameters
        self.residuals = self._of(0)
        """Those of the worker that the step is planned for."""

    @property
    def note(self) -> str:
        """A line for the plan."""
        scale = " with a scale each" if self._dtype == "int8" else ""
        return (
            f"gradients travel as {self._dtype}{scale}; what rounding takes away is "
            "added to the worker's next one"
        )

    def residuals_of(self, replica: int, graph: Graph) -> list[Variable]:
        """Returns the left-overs of one worker that a graph uses, zeros at first."""
        used = {variable.key for variable in graph.variables}
        pairs = zip(self.residuals, self._of(replica), strict=True)
        return [mine for planned, mine in pairs if planned.spec.key in used]

    def _of(self, replica: int) -> tuple[Variable, ...]:
        return tuple(
            Variable(
                f"{_PREFIX}{replica}/{variable.name}",
                (variable.shape, jnp.float32, jnp.zeros),
                device=f"/job:worker/task:{replica}",
                container=variable.spec.container,
            )
            for variable in self._parameters
            if variable.dtype == jnp.float32 and variable.spec.table is None
        )

    def sent(self, grads: Any, by_rows: Collection[str]) -> Any:
        """Returns gradients as they arrive; called inside a graph.

        Args:
          grads: like the parameters.
          by_rows: names of parameters whose gradients are of rows.
        """
        leaves, tree = jax.tree.flatten(grads)
        left = {v.name.split("/", 2)[2]: v for v in self.residuals}
        found = [
            grad
            if variable.name in by_rows or variable.name not in left
            else self._sent(grad, left[variable.name])
            for variable, grad in zip(self._parameters, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, found)

    def _sent(self, grad: jax.Array, residual: Variable) -> jax.Array:
        with device("/job:worker"):
            wanted = grad + residual[...]
            packed = compressed(wanted, self._dtype)
            residual[...] = wanted - expanded(packed)
        # Not placed: where the update is, so that what crosses is packed.
        return expanded(packed)


def for_replica(program: Program, replica: int) -> Program:
    """Returns a program planned for worker 0 with the left-overs of another."""
    old, new = f"{_PREFIX}0/", f"{_PREFIX}{replica}/"
    return replace(
        program,
        partitions=tuple(
            replace(
                partition,
                variables=tuple(
                    replace(v, name=new + v.name.removeprefix(old))
                    if v.name.startswith(old)
                    else v
                    for v in partition.variables
                ),
            )
            for partition in program.partitions
        ),
    )
