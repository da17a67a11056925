"""Public helpers for tests of programs that use jgraph, and simulated clusters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jgraph.testing.scale.computing import Computing
    from jgraph.testing.scale.costs import Costs, load_costs
    from jgraph.testing.scale.simulate import Simulated, dense_step, simulate

# Imported at first use: most tests need only one of all helpers.
_HOMES = {
    "Computing": "jgraph.testing.scale.computing",
    "Costs": "jgraph.testing.scale.costs",
    "Simulated": "jgraph.testing.scale.simulate",
    "dense_step": "jgraph.testing.scale.simulate",
    "load_costs": "jgraph.testing.scale.costs",
    "simulate": "jgraph.testing.scale.simulate",
}

__all__ = ["Computing", "Costs", "Simulated", "dense_step", "load_costs", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jgraph.testing' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
