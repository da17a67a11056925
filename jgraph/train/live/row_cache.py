"""Row cache: the last rows that were looked up, one for each place of an id."""

from typing import Any, TypeAlias, final

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
_NONE = -1


@final
class RowCache:
    """Rows of one table by id; of two ids of one place the newer stays.

    Args:
      rows: of the table; a table that has no more than ``places`` is held whole.
      places: rows that are held at most.
      shape: of a row.
      dtype: of a row.

    Example:
      >>> cache = RowCache(10, 4, (2,), np.dtype("float32"))
      >>> cache.put(np.array([1, 6]), np.array([[1, 1], [6, 6]], "float32"))
      >>> rows, found = cache.get(np.array([1, 2, 6]))
      >>> rows.tolist(), found.tolist()
      ([[1.0, 1.0], [0.0, 0.0], [6.0, 6.0]], [True, False, True])
    """

    def __init__(
        self, rows: int, places: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._places = max(1, min(rows, places))
        self._ids = np.full(self._places, _NONE, np.int64)
        self._rows = np.zeros((self._places, *shape), dtype)

    def put(self, ids: Array, rows: Array) -> None:
        """Takes the rows of ids, int[n], each of which is there once."""
        places = ids % self._places
        self._ids[places] = ids
        self._rows[places] = rows
        # Of ids of one place numpy writes one, and the same one both times.

    def get(self, ids: Array) -> tuple[Array, Array]:
        """Returns ``[n, …]`` rows, and which of them are those of their ids."""
        places = ids % self._places
        found: Array = self._ids[places] == ids
        rows: Array = self._rows[places]
        rows[~found] = 0
        return rows, found
