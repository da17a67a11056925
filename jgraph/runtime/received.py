"""Type check of values received from another task."""

from collections.abc import Sequence
from typing import Any

from jgraph.errors import MalformedMessageError
from jgraph.plan.nodes import RecvNode, ValueType


def check_received(
    node: RecvNode, values: Sequence[Any], types: Sequence[ValueType]
) -> None:
    """Refuses values that are not those of a message, before anything uses them.

    Args:
      node: takes the message.
      values: what came.
      types: of all values of the partition.

    Raises:
      MalformedMessageError: names the sender, the message, and the first value that is
        not what it should be.
    """
    if len(values) != len(node.outs):
        raise MalformedMessageError(
            f"{node.src} sent {len(values)} values in message '{node.key}', which has "
            f"{len(node.outs)}; its program is another one",
            task=node.src,
        )
    for index, (value, out) in enumerate(zip(values, node.outs, strict=True)):
        type_ = types[out]
        if value.dtype != type_.np_dtype or not _fits(value.shape, type_):
            found = ValueType(tuple(value.shape), value.dtype.name)
            raise MalformedMessageError(
                f"{node.src} sent {found} as value {index} of message '{node.key}', "
                f"which is {type_}; its program is another one",
                task=node.src,
            )


def _fits(shape: tuple[int, ...], type_: ValueType) -> bool:
    if shape == type_.shape:
        return True
    if len(shape) != len(type_.shape):
        return False
    if type_.ragged:
        return shape[0] <= type_.shape[0] and shape[1:] == type_.shape[1:]
    return bool(type_.symbols) and all(
        text or size == wanted
        for size, wanted, text in zip(shape, type_.shape, type_.symbols, strict=True)
    )
