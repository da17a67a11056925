"""Tables of tests are tiny, and stand for large ones, of which only rows travel."""

from collections.abc import Iterator

import pytest

from jgraph.plan.lowering import lanes
from jgraph.train.tables import row_tables


def travel_whole(patch: pytest.MonkeyPatch) -> None:
    """Lets small tables travel whole, as they do for users."""
    patch.setattr(row_tables, "SMALL_BYTES", lanes.SMALL_BYTES)


@pytest.fixture(scope="module", autouse=True)
def rows_travel_of_small_tables_too() -> Iterator[None]:
    """No table is small; a module whose tables are has a fixture of this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_tables, "SMALL_BYTES", -1)
        yield
