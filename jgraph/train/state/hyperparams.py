"""Hyperparameters of an optimizer that are variables: ``optax.inject_hyperparams``."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Final, final

import numpy as np

from jgraph.errors import ConfigError
from jgraph.graph.variable import Variable

_PLACE: Final = "hyperparams"
_SCHEDULES: Final = "hyperparams_states"
_WRAPPERS: Final = frozenset({"inner_state", "inner_states", "inner_opt_state"})


@final
class Hyperparams:
    """The hyperparameters among the variables of a run, by the names users give them.

    A name is that of the argument. Where several parts of an optimizer have it, the
    part stands before it, ``generator/learning_rate``; the name alone is all of them.

    Args:
      variables: of the run.

    Example:
      >>> name = "opt/inner_states/judge/inner_state/hyperparams/learning_rate"
      >>> found = Hyperparams([Variable(name, np.float32(0.1))])
      >>> found.names
      {'learning_rate': 'opt/inner_states/judge/inner_state/hyperparams/learning_rate'}
      >>> found.values({"judge/learning_rate": 0.5})[name].item()
      0.5
    """

    def __init__(self, variables: Sequence[Variable]) -> None:
        paths = {v.name: v.name.split("/") for v in variables}
        self._variables = {
            v.name: v
            for v in variables
            if paths[v.name][0] == "opt" and paths[v.name][-2:-1] == [_PLACE]
        }
        self._schedules = {
            "/".join([*path[:at], _PLACE, path[at + 1]])
            for path in paths.values()
            for at, part in enumerate(path[:-2])
            if part == _SCHEDULES
        }
        whole = {_whole(name): name for name in self._variables}
        last = [name.rpartition("/")[2] for name in whole]
        self.names = {
            alone if last.count(alone) == 1 else name: whole[name]
            for name, alone in zip(whole, last, strict=True)
        }
        """The name of each one's variable."""

    def values(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what variables are to be set to, as arrays of their types.

        Args:
          wanted: numbers by the names of hyperparameters.

        Raises:
          ConfigError: there is no such one, a schedule sets it, or it is no number.
        """
        found: dict[str, Any] = {}
        for asked, value in wanted.items():
            for name in self._asked(asked):
                if name in self._schedules:
                    raise ConfigError(
                        f"{asked} is a schedule, which sets it anew in each update; to "
                        "set it yourself, give a number to optax.inject_hyperparams"
                    )
                found[name] = _checked(asked, value, self._variables[name])
        return found

    def _asked(self, asked: str) -> list[str]:
        names = [n for n in self._variables if f"/{_whole(n)}".endswith(f"/{asked}")]
        if names:
            return names
        if not self.names:
            raise ConfigError(
                f"the optimizer has no {asked} that can be set; make it with "
                "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), or give it "
                "a schedule. LocalSGD and Federated have only their outer optimizer "
                "here: the inner ones are on the workers, and need a schedule"
            )
        near = get_close_matches(asked, self.names, 1)
        hint = f": write {near[0]}" if near else f"; it has {', '.join(self.names)}"
        raise ConfigError(f"the optimizer has no hyperparameter '{asked}'{hint}")


def _whole(variable: str) -> str:
    """Returns the part of the optimizer, and the name in it."""
    parts = variable.split("/")
    return "/".join([*(p for p in parts[1:-2] if p not in _WRAPPERS), parts[-1]])


def _checked(name: str, value: Any, variable: Variable) -> Any:
    with suppress(TypeError, ValueError):
        array = np.asarray(value)
        is_finite = array.dtype.kind in "iuf" and bool(np.isfinite(array).all())
        if is_finite and array.shape in {(), variable.shape}:
            return np.broadcast_to(array.astype(variable.dtype), variable.shape)
    raise ConfigError(f"{name} is {value!r:.60}; give a number")
