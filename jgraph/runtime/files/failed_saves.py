"""Log messages about failed saves: the second in a row is logged as an error.

The first that fails because a task was lost is no news: the run tells of that.
"""

import logging
from pathlib import Path
from typing import Final, final

from jgraph.errors import ClusterError

_LOG = logging.getLogger("jgraph.checkpoint")
_LOUD: Final = 2
"""So many saves in a row may fail before that is an error in the log."""


@final
class FailedSaves:
    """Counts the saves of a run that failed since the last good one.

    Args:
      directory: of the steps.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._failed = 0

    def tell(self, error: Exception) -> None:
        """Tells of one more."""
        self._failed += 1
        first = logging.INFO if isinstance(error, ClusterError) else logging.WARNING
        _LOG.log(
            logging.ERROR if self._failed >= _LOUD else first,
            "not saved in %s: %s. Training goes on; %d saves failed.",
            *(self._directory, str(error).rstrip("."), self._failed),
        )

    def forget(self) -> None:
        """Begins anew, after a save that did not fail."""
        self._failed = 0
