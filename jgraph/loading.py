"""Imports and traces without garbage collection meanwhile, which makes them faster."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's garbage collector still; also as a decorator.

    Loading JAX and a few hundred modules makes a million objects that stay. The
    collector looks at them again and again: a seventh of the time. Tracing and planning
    a step makes objects by the thousand that stay as well, a quarter of whose time it
    would take.

    Example:
      >>> with uncollected():
      ...     gc.isenabled()
      False
      >>> gc.isenabled()
      True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_uncollected() -> None:
    """Lets this process end without a last look for garbage in all that it loaded.

    That look is a fifth of what a process costs that loads JAX, serves nothing and
    ends. For processes of ours only: of others, it may be the end of more than memory.
    """
    atexit.register(gc.freeze)
