"""Patches of a view from tick to tick: computed once for all who read it."""

import json
import threading
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, final

from jgraph.dashboard.merge_patch import difference

View: TypeAlias = Mapping[str, Any]


class Viewed(Protocol):
    """What is shown."""

    @property
    def changes(self) -> int:
        """Grows with each fact."""

    def view(self, at: float | None) -> View:
        """Returns the view; of a time, if it is of the past."""


@final
class Patches:
    """Tells what changed; a tick has one view, and two views one patch.

    Args:
      source: what is shown.
    """

    def __init__(self, source: Viewed) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._tick = self._seen = -1
        self._view: View = {}
        self._before: View | None = None
        self._patch = ""

    def view(self, tick: int) -> View:
        """Returns the view of a tick."""
        with self._lock:
            return self._look(tick)

    def after(self, before: View, tick: int) -> tuple[View, str]:
        """Returns the view of a tick, and as JSON what changed; empty: nothing did.

        Args:
          before: the view that the reader has.
          tick: of now.
        """
        with self._lock:
            view = self._look(tick)
            if before is view:
                return view, ""
            if before is not self._before:
                self._before, change = before, difference(before, view)
                self._patch = as_json(change) if change else ""
            return view, self._patch

    def _look(self, tick: int) -> View:
        if tick > self._tick and self._source.changes != self._seen:
            self._seen, self._before = self._source.changes, None
            self._view = self._source.view(None)
        self._tick = max(self._tick, tick)
        return self._view


def as_json(value: Mapping[str, Any]) -> str:
    """Returns JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
