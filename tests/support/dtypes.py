"""All dtypes that JAX has."""

import jax.numpy as jnp
import numpy as np


def _all() -> dict[str, np.dtype]:
    found = {}
    for name in dir(jnp):
        kind = getattr(jnp, name)
        dtype = getattr(kind, "dtype", None)
        if isinstance(kind, type(jnp.float32)) and isinstance(dtype, np.dtype):
            found[dtype.name] = dtype
    return found


DTYPES = _all()
WIDE = frozenset(("float64", "int64", "uint64", "complex128"))
NARROW = {name: dtype for name, dtype in DTYPES.items() if name not in WIDE}
