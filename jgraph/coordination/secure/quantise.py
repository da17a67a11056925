"""Fixed-point numbers of a secure sum: real values as uint32, which sum exactly.

A sum modulo 2^32 of whole numbers has no rounding and no order. The sum of all must
have room: ``bits`` of each value, and those of the total weight.
"""

import math
from typing import Any

import numpy as np

from jgraph.errors import ConfigError, SecureSumError


def check_room(bits: int, members: int, most_weight: int) -> None:
    """Refuses sums that could pass 2^32.

    Args:
      bits: of a value.
      members: how many may contribute.
      most_weight: of one.

    Raises:
      ConfigError: says what there is room for.

    Example:
      >>> check_room(20, 100, 32)
    """
    needs = bits + math.ceil(math.log2(members * most_weight))
    if needs > 32:
        raise ConfigError(
            f"a secure sum of {bits} bits by {members} members of a weight up to "
            f"{most_weight} needs {needs} bits, and there are 32; write bits="
            f"{max(1, bits - (needs - 32))}, or a smaller weight"
        )


def quantised(values: Any, weight: int, *, clip: float, bits: int) -> Any:
    """Returns values as whole numbers times a weight, uint32.

    Args:
      values: float array; what is outside of ``[-clip, clip]`` is cut to that.
      weight: of them.
      clip: largest value.
      bits: of a value; it is off by ``clip / 2**bits`` at most.

    Raises:
      SecureSumError: a value is not finite.

    Example:
      >>> quantised(np.float32([-1, 0, 1]), 3, clip=1.0, bits=2).tolist()
      [0, 6, 9]
    """
    values = np.asarray(values, np.float64)
    if not np.isfinite(values).all():
        raise SecureSumError(
            "a value that is not finite cannot be part of a secure sum: it would spoil "
            "that of all; look at the loss and the learning rate of this member"
        )
    steps = (1 << bits) - 1
    places = (np.clip(values, -clip, clip) + clip) * (steps / (2 * clip))
    return np.rint(places).astype(np.uint32) * np.uint32(weight)


def mean_of(total: Any, weight: int, *, clip: float, bits: int) -> Any:
    """Returns the weighted mean of what was quantised and summed, float64.

    Args:
      total: the sum, uint32.
      weight: that of all together.
      clip: as for ``quantised``.
      bits: as for ``quantised``.

    Example:
      >>> mean_of(np.uint32([0, 6, 9]), 3, clip=1.0, bits=2).round(2).tolist()
      [-1.0, 0.33, 1.0]
    """
    steps = (1 << bits) - 1
    return np.asarray(total, np.float64) / weight * (2 * clip / steps) - clip
