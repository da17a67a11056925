"""A variable: a named, placed array on a task; in a traced function, a Ref."""

import contextvars
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Final, NoReturn, TypeAlias, final
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph.errors import (
    GraphError,
    PlacementError,
    UninitializedError,
    VariableMismatchError,
)
from jgraph.graph.device import (
    DeviceSpec,
    as_spec,
    current_device,
    device as device_scope,
)
from jgraph.graph.ir import VariableSpec
from jgraph.graph.rows.hash_spec import HashSpec
from jgraph.graph.rows.rows import Layout
from jgraph.graph.sharding import Partitioner, Sharding, check_devices, sharding_of
from jgraph.view import markup

Initializer: TypeAlias = Callable[[], Any]

KINDS: Final[Mapping[str, type]] = {
    "b": np.generic,
    "i": jnp.number,
    "u": jnp.number,
    "f": jnp.inexact,
    "c": jnp.complexfloating,
}
"""Kinds of Python's numbers, and the dtypes that hold them without loss of kind."""

# What stands for each variable while a function is traced; see trace.py.
Binding: TypeAlias = Callable[["Variable"], Any]
_BINDING: contextvars.ContextVar[Binding | None] = contextvars.ContextVar(
    "jgraph_binding", default=None
)


@final
class Variable:
    """A named, placed array with state, shared by all graphs that name it.

    Inside a function traced by ``jg.function`` a variable is a ``jax.Ref``:
    ``w[...]`` reads it, ``w[ids]`` reads rows, ``w[...] = x`` writes it.

    Args:
      name: name of the variable, unique in its container.
      initial_value: an array (its shape and dtype are the variable's), or a tuple
        ``(shape, dtype, init)`` where ``init(shape, dtype)`` makes the value on the
        task that holds it (the client never has it); ``init`` None leaves it
        uninitialised.
      device: where it lives, for example ``"/job:ps/task:0"``; merged over the
        ``jg.device`` scope around the call. Unset fields are chosen by the plan.
      container: variables of equal name in different containers are different.
      partitioner: cuts the variable into shards, ``<name>/part_<k>``, which may live
        on different tasks; functions use the variable as if it were whole.
      partition_strategy: which rows a shard has: ``"div"`` (consecutive ones) or
        ``"mod"`` (every n-th).
      sharding: how it is cut, in place of a partitioner.
      shard_devices: where each shard lives, merged over ``device``.
      table: the column of a hash table that the variable is; it is then used by rows
        only, and its initial value, of one row per shard, is not used. With
        ``shard_devices`` the table has a shard on each of them.

    Attributes:
      spec: name, shape, dtype and device, as graphs know them.
      init: makes the initial value, or None.
      is_given: the initial value is an array.

    Raises:
      GraphError: no name, or an initial value that is none.
      DeviceSpecError: ``device`` is not a device string.
      ShardingError: ``partitioner`` wants shards that cannot be.

    Example:
      >>> import jax.numpy as jnp
      >>> w = Variable("w", jnp.zeros((784, 10)), device="/job:ps/task:0")
      >>> w
      Variable('w', float32[784,10], device='/job:ps/task:0')
      >>> halves = lambda shape, dtype: [2, 1]
      >>> Variable("v", jnp.zeros((5, 2)), partitioner=halves).shards
      (Variable('v/part_0', float32[3,2]), Variable('v/part_1', float32[2,2]))
    """

    __slots__ = ("init", "is_given", "spec")

    # Without this, Python would iterate by w[0], w[1], ... and JAX's indexing, which
    # clamps, would never end it.
    __iter__: ClassVar[None] = None

    def __init__(
        self,
        name: str,
        initial_value: Any,
        *,
        device: str | DeviceSpec = "",
        container: str = "",
        partitioner: Partitioner | None = None,
        partition_strategy: str = "div",
        sharding: Sharding | None = None,
        shard_devices: Sequence[str | DeviceSpec] = (),
        table: HashSpec | None = None,
    ) -> None:
        if not name or str(name).strip() != name:
            raise GraphError(
                f"a variable needs a name, not {name!r}; write for example "
                "jg.Variable('w', jnp.zeros((3,)))"
            )
        if not isinstance(container, str):
            raise GraphError(
                f"variable '{name}': its container is {container!r:.60}; give a name, "
                "or leave it out"
            )
        aval, self.init = _shape_and_init(name, initial_value)
        self.is_given = not isinstance(initial_value, tuple)
        place = current_device().merge(as_spec(device))
        shape = tuple(aval.shape)
        if partitioner is not None:
            counts = partitioner(shape, aval.dtype)
            sharding = sharding_of(name, shape, counts, partition_strategy)
        if table is not None and shard_devices:
            sharding = Sharding(Layout((1,) * len(shard_devices), "hash"))
        devices = tuple(map(as_spec, shard_devices))
        check_devices(name, sharding, devices)
        self.spec = VariableSpec(
            name, shape, aval.dtype, place, container, sharding, devices, table
        )

    @property
    def name(self) -> str:
        """The variable's name."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The variable's shape."""
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        """The variable's dtype."""
        return self.spec.dtype

    @property
    def device(self) -> DeviceSpec:
        """Where the variable was asked to live; unset fields are the plan's choice."""
        return self.spec.device

    @property
    def shards(self) -> "tuple[Variable, ...]":
        """The variables that hold it on their tasks; itself if it is whole."""
        if self.spec.sharding is None:
            return (self,)
        return tuple(self._shard(n) for n in range(self.spec.sharding.shards))

    def _shard(self, number: int) -> "Variable":
        spec = self.spec.shards[number]
        init = None if self.init is None else lambda *_: self._part(number)
        shard = Variable(spec.name, (spec.shape, spec.dtype, init))
        shard.spec, shard.is_given = spec, self.is_given
        return shard

    def with_container(self, container: str) -> "Variable":
        """Returns a variable like this one in another container."""
        other = copy(self)
        other.spec = replace(self.spec, container=container)
        return other

    def _part(self, number: int) -> Any:
        assert self.init is not None
        assert self.spec.sharding is not None
        if not self.is_given:
            # Made and cut on the shard's task; of a large one only its rows are made.
            return self.spec.sharding.part(self.init(), number)
        with jax.ensure_compile_time_eval():
            return self.spec.sharding.part(self.init(), number)

    def __getitem__(self, index: Any) -> Any:
        if _is_for_arrays(index):
            return self._ref()[...][index]
        ref = self._ref()
        try:
            return ref[index]
        except (TypeError, ValueError, IndexError) as error:
            raise self._no_place(index, error) from error

    def __setitem__(self, index: Any, value: Any) -> None:
        ref = self._ref()
        try:
            value = self.typed(value, index)
            if _is_for_arrays(index):
                ref[...] = _with_rows(ref[...], index, value)
            else:
                ref[index] = value
        except (TypeError, ValueError, IndexError) as error:
            if _goes_backward(index):
                raise self._no_place(index, error) from error
            place = "..." if index is Ellipsis else index
            raise VariableMismatchError(
                f"variable '{self.name}' is {_type_text(self)}, and "
                f"{self.name}[{place}] = value cannot take {_type_text(value)}; write "
                "a value of the variable's shape and dtype, for example with "
                ".reshape(…) and .astype(…)",
                variable=self.name,
            ) from error

    def _no_place(self, index: Any, error: Exception) -> GraphError:
        why = (str(error).splitlines() or [""])[0]
        return GraphError(
            f"variable '{self.name}' is {_type_text(self)}, and {index!r:.60} is no "
            f"place in it ({why}); index its value, {self.name}[...][index], and write "
            f"{self.name}[...] = {self.name}[...].at[index].set(value)",
            variable=self.name,
        )

    def _ref(self) -> Any:
        binding = _BINDING.get()
        if binding is None:
            raise UninitializedError(
                f"variable '{self.name}' has a value only inside a jg.function run by "
                "a session; wrap the code: step = jg.function(fn); sess.run(step, …)",
                variable=self.name,
                outside=True,
            )
        return binding(self)

    def typed(self, value: Any, index: Any = ...) -> Any:
        """Returns Python's numbers as an array to write at ``index``.

        They get the dtype and the shape that they would get in a numpy array, where
        that loses no part of them; other values are returned as they are.

        Raises:
          VariableMismatchError: whole numbers that the dtype does not have.
        """
        if hasattr(value, "dtype"):
            return value
        array = np.asarray(value)
        wider = KINDS.get(array.dtype.kind)
        if wider is None or not jnp.issubdtype(self.dtype, wider):
            return value
        wide = _compat.is_wide(self.dtype)
        with _compat.wide_types() if wide else nullcontext():
            part = jax.eval_shape(lambda whole: whole[index], self.spec.aval)
            shape = part.shape if array.ndim == 0 else array.shape
            try:
                return jnp.broadcast_to(jnp.asarray(value, self.dtype), shape)
            except OverflowError:
                limits: Any = jnp.iinfo(self.dtype)  # type: ignore[no-untyped-call]
                raise VariableMismatchError(
                    f"variable '{self.name}' is {self.dtype}, which has {limits.min} "
                    f"to {limits.max}, and the value has {array.min()} to "
                    f"{array.max()}; give others, or make the variable of a wider type",
                    variable=self.name,
                ) from None

    def _refuse(self, *_: object) -> NoReturn:
        raise GraphError(
            f"variable '{self.name}' is not an array; its value is {self.name}[...]: "
            f"write for example {self.name}[...] + 1, jnp.sum({self.name}[...])"
        )

    # What an array has and a variable has not, as one reads it explicitly.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __neg__ = __float__ = __array__ = _refuse

    def __repr__(self) -> str:
        device = f", device='{self.device}'" if self.device else ""
        return f"Variable('{self.name}', {_type_text(self)}{device})"

    def _repr_html_(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "scalar"
        cells = (self.name, str(self.dtype), shape, str(self.device) or "chosen later")
        return markup.table(("variable", "dtype", "shape", "device"), [cells])


def colocate_with(variable: Variable) -> AbstractContextManager[None]:
    """Places what is traced or made inside on the task of a variable.

    Where that is may be the plan's choice, as it is for a variable without a device. It
    holds for operations, and for variables made inside.

    Args:
      variable: a whole one; used in the same function, or placed by an earlier one.

    Raises:
      PlacementError: the variable is sharded, so that it has no one task.

    Example:
      >>> w = Variable("w", jnp.ones(3))
      >>> with colocate_with(w):
      ...     moments = Variable("m", jnp.zeros(3))
      >>> str(moments.device)
      '/with:w'

    Source: ``tf.compat.v1.colocate_with``.
    """
    if variable.spec.sharding is not None:
        raise PlacementError(
            f"colocate_with('{variable.name}') needs a variable of one task, and this "
            "one is sharded; name a task, jg.device('/job:ps/task:0')",
            variable=variable.name,
        )
    if variable.device.task_name is not None:
        return device_scope(variable.device)
    return device_scope(DeviceSpec(beside=quote(variable.name, safe="")))


def _goes_backward(index: Any) -> bool:
    """Whether an index has a slice that JAX's Refs do not take, and arrays do."""
    parts = index if isinstance(index, tuple) else (index,)
    steps = [part.step for part in parts if isinstance(part, slice)]
    return any(isinstance(step, int) and step < 1 for step in steps)


def _is_for_arrays(index: Any) -> bool:
    """Whether JAX compiles an index for arrays, and not for Refs.

    With an array of a size that is a name, or with a number beside a slice that jumps.
    """
    parts = index if isinstance(index, tuple) else (index,)
    sizes = (size for part in parts for size in getattr(part, "shape", ()))
    steps = [part.step for part in parts if isinstance(part, slice)]
    jumps = any(isinstance(step, int) and step > 1 for step in steps)
    at_number = any(isinstance(part, int | np.integer) for part in parts)
    return (jumps and at_number) or any(map(_compat.is_symbolic, sizes))


def _with_rows(whole: jax.Array, index: Any, value: Any) -> jax.Array:
    value = jnp.asarray(value)
    if value.dtype != whole.dtype:
        raise TypeError(f"{value.dtype} is not {whole.dtype}")
    return whole.at[index].set(value)


def _type_text(value: Any) -> str:
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return f"a {type(value).__name__}"
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _shape_and_init(name: str, value: Any) -> tuple[Any, Initializer | None]:
    if not isinstance(value, tuple):
        array = _as_array(name, value)
        return jax.ShapeDtypeStruct(array.shape, array.dtype), lambda: array
    if len(value) != 3:
        raise GraphError(
            f"variable '{name}': the initial value is an array or (shape, dtype, init "
            f"function), not a {len(value)}-tuple"
        )
    shape, dtype, init = value
    aval, reason = None, ""
    try:
        aval = jax.ShapeDtypeStruct(tuple(map(operator.index, shape)), dtype)
    except (TypeError, ValueError) as error:
        reason = str(error)
    if aval is not None and min(aval.shape, default=0) < 0:
        reason = "a size is below 0"
    elif aval is not None and not (init is None or callable(init)):
        reason = f"{init!r:.40} is no function"
    if aval is None or reason:
        raise GraphError(
            f"variable '{name}': ({shape!r}, {dtype!r}, …) is not (shape, dtype, init "
            f"function): {reason}; write for example ((784, 10), 'float32', "
            "jnp.zeros)"
        )
    if init is None:
        return aval, None
    return aval, lambda: _checked(name, aval, init(aval.shape, aval.dtype))


def _as_array(name: str, value: Any) -> jax.Array:
    if isinstance(value, jax.core.Tracer):
        raise GraphError(
            f"variable '{name}' is made from a traced value, which is gone after the "
            "trace; make variables outside of jg.function, jax.jit and jax.grad"
        )
    if isinstance(value, jax.Array):
        return value
    try:
        # A copy, as JAX would alias the caller's numpy array, which may change.
        return jnp.array(value, copy=True)
    except (TypeError, ValueError, OverflowError, jax.errors.JaxRuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GraphError(
            f"variable '{name}': the initial value {value!r:.60} is not an array that "
            f"JAX can have here ({reason})"
        ) from None


def _checked(name: str, aval: Any, value: Any) -> Any:
    array = value if hasattr(value, "dtype") else jnp.asarray(value)
    if (tuple(array.shape), array.dtype) != (aval.shape, aval.dtype):
        raise VariableMismatchError(
            f"variable '{name}' is {aval.dtype}{list(aval.shape)}, and its init "
            f"function made {array.dtype}{list(array.shape)}; init(shape, dtype) must "
            "return what it is asked for",
            variable=name,
        )
    return value
