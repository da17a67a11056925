"""Conversion between JAX's avals and the plain types that nodes exchange."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.graph.sizes import assumed_shape, symbols_of
from jgraph.plan.program.nodes import ValueType


def is_key(aval: Any) -> bool:
    """Whether values of this aval are typed PRNG keys."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key))


def is_float0(aval: Any) -> bool:
    """Whether values of this aval are gradients of integers, which hold nothing."""
    return bool(getattr(aval, "dtype", None) == jax.dtypes.float0)


def is_plain(aval: Any) -> bool:
    """Whether the arrays between nodes are values of this aval just as they are."""
    return not (is_key(aval) or is_float0(aval))


def num_elements(aval: Any) -> int:
    """Returns the number of elements of an array type; names count ``ASSUMED_SIZE``."""
    return math.prod(assumed_shape(getattr(aval, "shape", ())))


def value_type(aval: Any, *, ragged: bool = False) -> ValueType:
    """Returns the plain type that stands for values of ``aval`` between nodes.

    Typed PRNG keys are their key data; float0 is bool, all False.

    Example:
      >>> str(value_type(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)))
      'bfloat16[2,3]'
      >>> str(value_type(jax.eval_shape(lambda: jax.random.key(0))))
      'uint32[2]'
    """
    plain = plain_type(aval)
    shape = tuple(plain.shape)
    symbols = symbols_of(shape)
    return ValueType(
        assumed_shape(shape) if symbols else shape, plain.dtype.name, ragged, symbols
    )


def plain_type(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the array that stands for a value between nodes, as JAX writes types."""
    if is_key(aval):
        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        aval = jax.eval_shape(jax.random.key_data, struct)
    dtype = "bool" if is_float0(aval) else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, jnp.dtype(dtype))


def to_plain(value: Any) -> Any:
    """Returns the plain array of a value: the key data of a typed key."""
    return jax.random.key_data(value) if is_key(value) else value


def from_plain(array: Any, aval: Any) -> Any:
    """Returns the value of type ``aval`` that the plain ``array`` stands for."""
    if is_key(aval):
        return jax.random.wrap_key_data(array, dtype=aval.dtype)
    return np.zeros(array.shape, aval.dtype) if is_float0(aval) else array
