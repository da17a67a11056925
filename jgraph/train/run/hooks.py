"""Callbacks of a run as users give them: functions, and objects with hooks."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from jgraph.errors import ConfigError
from jgraph.train.run.report import Report
from jgraph.train.run.run import Run


@runtime_checkable
class Hooks(Protocol):
    """What is told that a run begins, and that it has ended, however it did.

    A callback may have either method, or both, and ``close()``, which is called after
    ``end``; it need not be a function then.
    """

    def begin(self, run: Run) -> None:
        """Called before the first step."""

    def end(self, run: Run) -> None:
        """Called when no step comes any more."""


Callback: TypeAlias = Callable[[Run, Report], None] | Hooks
"""A function is called with each report. All are called in the thread of the run; what
they raise ends it."""

_HOOKS = ("begin", "end")
_KERAS = ("on_train_begin", "on_epoch_end", "on_train_batch_end", "set_model")


def as_callbacks(argument: Callback | Sequence[Callback]) -> tuple[Callback, ...]:
    """Returns the callbacks of a run; one may come alone.

    Raises:
      ConfigError: one is none; says how it is called.

    Example:
      >>> len(as_callbacks(lambda run, report: None))
      1
    """
    alone = callable(argument) or any(
        hasattr(argument, name) for name in (*_HOOKS, *_KERAS)
    )
    callbacks: Any = (argument,) if alone else argument
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks is {argument!r:.60}; {_INSTEAD}")
    for callback in callbacks:
        _check(callback)
    return tuple(callbacks)


def hook(callback: object, name: str, *arguments: object) -> None:
    """Calls a method of a callback, if it has one of that name."""
    getattr(callback, name, lambda *_: None)(*arguments)


_INSTEAD = (
    "give functions that are called as callback(run, report), or objects with "
    "begin(run) or end(run)"
)


def _check(callback: object) -> None:
    name = getattr(callback, "__name__", None) or f"{callback!r:.60}"
    if isinstance(callback, type):
        raise ConfigError(
            f"the callback {name} is a class; make one: jg.{name}(…)"
            if callback.__module__.startswith("jgraph.")
            else f"the callback {name} is a class; make one: {name}(…)"
        )
    if any(hasattr(callback, hook) for hook in _KERAS):
        raise ConfigError(
            f"{name} has the hooks of Keras, which are called for each epoch and "
            f"batch; workers train those, and not this process; {_INSTEAD}"
        )
    if not callable(callback):
        if any(hasattr(callback, hook) for hook in _HOOKS):
            return
        raise ConfigError(f"a callback is {name}; {_INSTEAD}")
    try:
        inspect.signature(callback).bind(None, None)
    except ValueError:  # a function of C tells nothing
        return
    except TypeError:
        raise ConfigError(
            f"the callback {name} does not take two arguments; it is called as "
            "callback(run, report)"
        ) from None
