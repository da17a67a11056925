"""Detection of whole-row accesses to a variable, and of the ids that name the rows."""

import jax

from jgraph._compat import Equation, Literal, Var


def row_ids(equation: Equation) -> Var | None:
    """Returns the ids of a read or write of whole rows; None for other accesses."""
    operands = {"get": 1, "swap": 2}.get(equation.primitive.name)
    if operands is None or len(equation.invars) != operands + 1:
        return None
    ids = equation.invars[-1]
    indexers = jax.tree.unflatten(equation.params["tree"], [ids])
    if len(indexers) != 1 or type(indexers[0]).__name__ != "NDIndexer":
        return None
    first, *others = indexers[0].indices
    if first is not ids or isinstance(ids, Literal) or ids.aval.ndim != 1:
        return None
    sizes = equation.invars[0].aval.shape[1:]
    whole = [
        (getattr(s, "start", None), getattr(s, "size", None), getattr(s, "stride", 1))
        for s in others
    ]
    return ids if whole == [(0, size, 1) for size in sizes] else None
