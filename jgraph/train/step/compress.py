"""Gradient compression between a worker and the ps, with error feedback.

What rounding takes from a gradient stays on the worker and is added to its next one, so
that nothing is lost for good and training converges as without. In synchronous training
a contribution may come too late, and is dropped with what was added to it. So a ps
counts the contributions that were summed, and a worker whose last one was not among
them goes on with what was left over before it.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.graph.device import DeviceSpec, device
from jgraph.graph.graph import Graph
from jgraph.graph.variable import Variable
from jgraph.plan.program.accumulate import MEAN
from jgraph.plan.program.replicas import own_prefix
from jgraph.train.step.fragments import placed_rows, rows_at

GradientDtype: TypeAlias = Literal["bfloat16", "int8"]
GRADIENT_DTYPES = ("bfloat16", "int8")

_LARGEST = 127.0
_BEFORE, _SEEN = "before/", "seen"
_COUNTED = "counted"


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


def expanded(payload: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the float32 array that ``compressed`` ones stand for.

    Example:
      >>> expanded(compressed(jnp.array([0.0, 2.0]), "int8")).tolist()
      [0.0, 2.0]
    """
    value = payload[0].astype(jnp.float32)
    return value * payload[1] if len(payload) > 1 else value


@final
@dataclass(frozen=True, slots=True)
class PackedRows:
    """Compressed rows of a gradient, which are cut by shard before they travel.

    Attributes:
      values: what travels of each row.
      rest: what travels of all of them.
    """

    values: jax.Array
    rest: tuple[jax.Array, ...]

    def unpacked(self, values: jax.Array) -> jax.Array:
        """Returns some of the rows as float32 ones; where they have arrived."""
        return expanded((values, *self.rest))


@final
class Compression:
    """What is left over on a worker, and how gradients are sent.

    Left-overs are variables of each worker: ``residual/0/params/w`` on its first one.
    Where contributions may be dropped (see ``Counted``), ``residual/0/before/params/w``
    is what was left over before its last step. They begin at zero in each ``fit`` and
    are not part of a checkpoint. Gradients of looked up rows travel as they are, and so
    do those that are not float32; those of a fragment are compressed.

    Args:
      parameters: the variables of the parameters, in the order of their leaves.
      dtype: of what travels.
      container: of the variables.
    """

    def __init__(
        self, parameters: Sequence[Variable], dtype: GradientDtype, container: str
    ) -> None:
        check_gradient_dtype(dtype)
        self._dtype: GradientDtype = dtype
        self._parameters = parameters
        self.residuals = self._make_residuals(container)
        """Those of the worker that the step is planned for."""

    @property
    def note(self) -> str:
        """A line for the plan."""
        scale = " with a scale each" if self._dtype == "int8" else ""
        return (
            f"gradients travel as {self._dtype}{scale}; what rounding takes away is "
            "added to the worker's next one"
        )

    def _make_residuals(self, container: str) -> tuple[Variable, ...]:
        parameters = [
            variable
            for variable in self._parameters
            if variable.dtype == jnp.float32 and variable.spec.table is None
        ]
        types: list[tuple[str, tuple[int, ...], Any]] = [
            (prefix + variable.name, variable.shape, jnp.float32)
            for prefix in ("", _BEFORE)
            for variable in parameters
        ]
        return tuple(
            Variable(
                f"{own_prefix(0)}{name}",
                (shape, dtype, jnp.zeros),
                device="/job:worker/task:0",
                container=container,
            )
            for name, shape, dtype in [*types, (_SEEN, (), jnp.int32)]
        )

    def sent(
        self,
        grads: Any,
        by_rows: Collection[str],
        has_counted: jax.Array | None = None,
        pieces: Mapping[str, jax.Array] | None = None,
    ) -> Any:
        """Returns gradients as they arrive; called inside a graph.

        Args:
          grads: like the parameters.
          by_rows: names of parameters whose gradients travel as they are.
          has_counted: from ``last_counted``; None: what is sent always counts.
          pieces: by name, of parameters of which a piece is sent, the numbers of its
            rows, padded with one past the last. Their gradients are of those rows, and
            arrive as ``PackedRows``.
        """
        rows_of = pieces or {}
        leaves, tree = jax.tree.flatten(grads)
        residuals = {v.name.split("/", 2)[2]: v for v in self.residuals}

        def sent(grad: jax.Array, name: str) -> "jax.Array | PackedRows":
            if name in by_rows or name not in residuals:
                return grad
            with device("/job:worker"):
                residual = residuals[name][...]
                if has_counted is not None:
                    before = residuals[_BEFORE + name]
                    residual = jnp.where(has_counted, residual, before[...])
                    before[...] = residual
                rows = rows_of.get(name)
                old = residual if rows is None else rows_at(residual, rows)
                total = grad + old
                payload = compressed(total, self._dtype)
                rest = total - expanded(payload)
                residuals[name][...] = placed_rows(residual, rows, rest)
            if rows is not None:
                return PackedRows(payload[0], payload[1:])
            # Not placed: where the update is, so that what crosses is packed.
            return expanded(payload)

        names = [variable.name for variable in self._parameters]
        arrivals = [sent(g, name) for g, name in zip(leaves, names, strict=True)]
        return jax.tree.unflatten(tree, arrivals)

    def last_counted(self, times: jax.Array) -> jax.Array:
        """Returns whether the worker's last contribution counted, a bool.

        Called once in a step, inside a graph. A step begins only after it was decided
        what became of the worker's contribution before.

        Args:
          times: int32: how many contributions of this worker have counted.
        """
        last_times = self.residuals[-1]
        with device("/job:worker"):
            has_counted: jax.Array = times != last_times[...]
            last_times[...] = times
        return has_counted


@final
class Counted:
    """How many contributions of each worker have counted: ``counted``, int32[replicas].

    It lies beside the number of updates. Each contribution names its worker in an array
    that is averaged like gradients, so the mean says who is among those that count.

    Args:
      replicas: workers.
      home: the task that counts updates.
      container: of the variables.
    """

    def __init__(self, replicas: int, home: DeviceSpec, container: str) -> None:
        where: Any = {"device": home, "container": container}
        self.times = Variable(_COUNTED, ((replicas,), jnp.int32, jnp.zeros), **where)
        self.who = Variable(MEAN + _COUNTED, ((replicas,), jnp.float32, None), **where)

    def of(self, replica: Any) -> jax.Array:
        """Returns how many of one worker have; called inside its graph."""
        times = self.times[...]
        with device("/job:worker"):
            mine: jax.Array = times[replica]
        return mine

    def named(self, replica: Any) -> jax.Array:
        """Returns what a contribution of a worker adds to the mean."""
        return jax.nn.one_hot(replica, *self.who.shape, dtype=jnp.float32)

    def count(self) -> None:
        """Counts those of which the mean was made; called inside the graph of that."""
        self.times[...] = self.times[...] + (self.who[...] > 0).astype(jnp.int32)


def begun(graph: Graph, replica: int | None) -> list[Variable]:
    """Returns the variables of a graph that are zeros when a run begins.

    Args:
      graph: planned for worker 0.
      replica: those that this worker has; None: those of the ps.
    """
    old, new = own_prefix(0), own_prefix(replica or 0)
    return [
        Variable(
            spec.name.replace(old, new, 1),
            (spec.shape, spec.dtype, jnp.zeros),
            device=spec.device if replica is None else f"/job:worker/task:{replica}",
            container=spec.container,
        )
        for spec in graph.variables
        if (spec.name == _COUNTED if replica is None else spec.name.startswith(old))
    ]
