"""Contexts of MLIR that serve several lowerings: JAX makes one for each, in 3 ms."""

import threading
from typing import Any, Final

from jax._src.interpreters import mlir  # noqa: TID251  # what nobody else replaces

_USES: Final = 50
"""Of a context: it keeps the constants of all that was lowered in it."""


def reuse_contexts() -> None:
    """Has each thread of this process lower in a context of before.

    A fifth of the time of tests that plan and train. What is in a module does not
    depend on what else its context has.
    """
    made: Any = mlir.make_ir_context
    kept = threading.local()

    def make() -> Any:
        if not getattr(kept, "left", 0):
            kept.context, kept.left = made(), _USES
        kept.left -= 1
        return kept.context

    mlir.make_ir_context = make
