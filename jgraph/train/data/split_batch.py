"""Splitting of a batch into equal parts."""

import jax
import jax.numpy as jnp

from jgraph.errors import FeedError
from jgraph.train.model.trees import Tree


def split_batch(batch: Tree, count: int, what: str) -> list[Tree]:
    """Returns the parts of a batch, in order.

    Args:
      batch: arrays with the examples as first dimension.
      count: of the parts.
      what: the batch, for the message.

    Raises:
      FeedError: the arrays have different sizes, or ``count`` does not divide
        them.

    Example:
      >>> [part.tolist() for part in split_batch(jnp.arange(4), 2, "x")]
      [[0, 1], [2, 3]]
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = sorted({shape[0] if shape else 0 for shape in shapes})
    if len(sizes) != 1 or not sizes[0] or sizes[0] % count:
        found = " and ".join(map(str, sizes)) or "no"
        raise FeedError(
            f"{what} has {found} examples, which cannot be cut into {count} equal "
            f"parts; give a batch of a multiple of {count}",
            feed=what,
        )
    each = sizes[0] // count
    return [
        jax.tree.map(lambda leaf, n=n: leaf[n * each : (n + 1) * each], batch)
        for n in range(count)
    ]
