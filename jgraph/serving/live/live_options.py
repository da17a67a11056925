"""Options of a live model: how fresh it is, and what a lost server means."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.counts import as_ints, is_count, is_duration, is_share
from jgraph.errors import ConfigError
from jgraph.serving.model_options import MOST_ROWS

OnLoss: TypeAlias = Literal["stale", "error"]
CACHE_ROWS: Final = 100_000
MAX_SHARE: Final = 0.5


@final
@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How a live model is served; see ``Run.serve``.

    Raises:
      ConfigError: an option has a value that means nothing.
    """

    refresh_s: float = 1.0
    on_loss: OnLoss = "stale"
    cache_rows: int = CACHE_ROWS
    max_share: float = MAX_SHARE
    max_rows: int = 64
    rtol: float = 1e-5

    def __post_init__(self) -> None:
        if not (is_duration(self.refresh_s) and self.refresh_s < float("inf")):
            raise ConfigError(
                f"refresh_s={self.refresh_s!r} is how often dense parameters are "
                "copied; give seconds, more than 0"
            )
        if self.on_loss not in ("stale", "error"):
            raise ConfigError(
                f"on_loss={self.on_loss!r}: give 'stale', to answer with what was "
                "there, or 'error', to refuse requests meanwhile"
            )
        if not (is_count(self.cache_rows, 0) and is_count(self.max_rows, 1)):
            raise ConfigError(
                f"cache_rows={self.cache_rows!r}, max_rows={self.max_rows!r}: give 0 "
                "or more, and 1 or more"
            )
        if self.max_rows > MOST_ROWS:
            raise ConfigError(
                f"max_rows={self.max_rows} is what one execution takes; give "
                f"{MOST_ROWS:,} at most"
            )
        if not is_share(self.rtol):
            raise ConfigError(f"rtol={self.rtol!r:.40}: give a number from 0 to 1")
        as_ints(self, "cache_rows", "max_rows")
        LookupShare(self.max_share)  # it checks that
