"""Size limits for bringing values to the client."""

from collections.abc import Sequence

from jgraph.errors import TooLargeError
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of

KEPT_BYTES = 1 << 30
"""A run keeps its last values if they are no more than this, together."""

VARIABLE_BYTES = 2 << 30
"""A larger variable does not come to the client to evaluate a model or to make one."""


def total_nbytes(variables: Sequence[Variable]) -> int:
    """Returns the bytes of all values."""
    return sum(nbytes_of(variable.spec) for variable in variables)


def check_sizes(variables: Sequence[Variable], limit: int = VARIABLE_BYTES) -> None:
    """Refuses to bring variables that are too large to the client.

    Raises:
      TooLargeError: names the first one.
    """
    for variable in variables:
        if (size := nbytes_of(variable.spec)) > limit:
            raise TooLargeError(
                f"variable '{variable.name}' has {size / 1e9:.1f} GB, and model(), "
                "evaluate(…), predict(…) and eval_data need the whole model in this "
                f"process, where a variable may have {limit / 1e9:.1f} GB; for "
                "eval_data start an evaluator, jg.LocalCluster(…, evaluators=1), which "
                "asks the ps for the rows that it looks up; else write the model to "
                "files with save(path)",
                variable=variable.name,
            )
