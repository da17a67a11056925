"""Errors of code that needs the concrete value of a traced array, in a user's words."""

from types import TracebackType

import jax

from jgraph.errors import GraphError

# What each error of JAX means in the user's code, and what to write there instead.
_ASKED: tuple[tuple[type[Exception], str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "uses an array as a condition of Python (if, while, and, or, assert)",
        "write jnp.where(condition, a, b), or jax.lax.cond and jax.lax.while_loop",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "gives an array to NumPy",
        "use jax.numpy in place of numpy there",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "uses an array where Python needs a whole number (range, a list's index)",
        "use jnp.arange or jax.lax.fori_loop, or make the list an array",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "needs the value of an array (float(x), int(x), x.item(), a shape)",
        "compute with the array itself, and read values from what a step returns",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "picks elements by a mask, and how many depends on the values",
        "write jnp.where(mask, x, 0)",
    ),
)
_SIZE: tuple[type[Exception], str, str] = (
    jax.errors.InconclusiveDimensionOperation,
    "needs the number that a symbolic size stands for (if, range, a list's length, or "
    "an operation that JAX does for known sizes only)",
    "write it with operations on the whole array (jnp.where, jax.lax.fori_loop), or "
    "leave that argument out of symbolic: it is then traced for each size",
)
_WHY = dict.fromkeys(
    [kind for kind, _, _ in _ASKED], "while it is traced, arrays have no values: "
) | {_SIZE[0]: "it is traced once for all sizes: "}
_NOT_THE_USERS = {"chex", "flax", "jax", "jaxlib", "jgraph", "numpy", "optax"}


def as_graph_error(error: Exception, title: str) -> GraphError | None:
    """Returns the error to raise instead, with the user's line; None for others.

    Args:
      error: what JAX raised while it traced.
      title: name of the traced function.
    """
    of_size = isinstance(error, TypeError) and "_DimExpr" in str(error)
    for kind, what, instead in (*_ASKED, _SIZE):
        if isinstance(error, kind) or (of_size and kind is _SIZE[0]):
            line = users_line(error.__traceback__)
            where = f" at {line}" if line else ""
            return GraphError(
                f"{title} {what}{where}; {_WHY[kind]}{instead}", line=line
            )
    return None


def failure(error: BaseException) -> str:
    """Returns where a user's code failed, and as what: ``, at f.py:3: KeyError: x``."""
    first, line = str(error).partition("\n")[0], users_line(error.__traceback__)
    return f"{line and f', at {line}'}: {type(error).__name__}: {first}"


def users_line(traceback: TracebackType | None) -> str:
    """Returns ``file:number`` of the innermost frame in the user's own code."""
    found = ""
    while traceback is not None:
        frame = traceback.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_USERS:
            found = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
