"""Loading of modules: without garbage collection meanwhile, and in another process."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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


def module_command(module: str) -> list[str]:
    """Returns the first words of a command that runs a module in another process.

    Python would look for all modules, its own too, in the current directory first,
    where a file ``random.py`` may be anybody's. That process does so only if this one
    looks there.

    Example:
      >>> module_command("jgraph")[-2:]
      ['-m', 'jgraph']
    """
    here = {""}
    with suppress(FileNotFoundError):  # it is gone
        here.add(os.getcwd())
    return [sys.executable, *([] if here & {*sys.path} else ["-P"]), "-m", module]
