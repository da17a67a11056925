"""Patches of a view from look to look: computed once for all who read it."""

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
    """Tells what changed; all readers of a view share its patch.

    Args:
      source: what is shown.

    Attributes:
      newest: the view that was seen last; the same object until another one differs.
    """

    def __init__(self, source: Viewed) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._seen = -1
        self._before: View | None = None
        self._patch = ""
        self.newest: View = {}

    @property
    def is_old(self) -> bool:
        """Whether the source has had a change since the last look."""
        return self._source.changes != self._seen

    def look(self) -> bool:
        """Looks at the source; returns whether there is another view."""
        with self._lock:
            if not self.is_old:
                return False
            is_first, self._seen = self._seen < 0, self._source.changes
            view = self._source.view(None)
            if not is_first:
                change = difference(self.newest, view)
                if not change:
                    return False
                self._before, self._patch = self.newest, as_json(change)
            self.newest = view
            return True

    def has(self, before: View) -> bool:
        """Whether ``after`` has its answer already."""
        return before is self.newest or before is self._before

    def after(self, before: View) -> tuple[View, str]:
        """Returns the newest view, and as JSON what changed; empty: nothing did.

        Args:
          before: the view that the reader has.
        """
        with self._lock:
            if before is self.newest:
                return before, ""
            if before is self._before:
                return self.newest, self._patch
            change = difference(before, self.newest)  # of one that has missed a look
            return self.newest, as_json(change) if change else ""


def as_json(value: Mapping[str, Any]) -> str:
    """Returns JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
