"""A function of a module that stands still when it is called first."""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class HeldCall:
    """Holds the first call of a function until others were answered.

    Args:
      monkeypatch: of the test.
      module: has the function.
      name: of the function.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
    ) -> None:
        self._function: Callable[..., Any] = getattr(module, name)
        self._is_at_it = threading.Event()
        self._may_go_on = threading.Event()
        monkeypatch.setattr(module, name, self._call)

    def _call(self, *args: Any) -> Any:
        if not self._is_at_it.is_set():
            self._is_at_it.set()
            assert self._may_go_on.wait(10), "nobody else was answered meanwhile"
        return self._function(*args)

    def __enter__(self) -> None:
        assert self._is_at_it.wait(10)

    def __exit__(self, *error: object) -> None:
        self._may_go_on.set()
