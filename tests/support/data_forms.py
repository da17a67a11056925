"""Data as other libraries hand it out: batches, data sets, loaders."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def batch(number: int, size: int = 4) -> tuple[Any, Any]:
    y = np.arange(size * number, size * (number + 1))
    return np.stack([y, y], axis=1).astype(np.float32), y


def batches(count: int = 3, last: int = 4) -> Iterator[tuple[Any, Any]]:
    for number in range(count):
        x, y = batch(number)
        rows = last if number == count - 1 else 4
        yield x[:rows], y[:rows]


class Examples:
    """As a map-style ``torch.utils.data.Dataset``: a length, and examples by number."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[Any, int]:
        if not 0 <= row < 10:
            raise IndexError(row)
        return np.full(2, row, np.float32), row


class Tensor:
    """As a tensor of another library: an array by protocol only."""

    def __init__(self, value: Any) -> None:
        self.value, self.shape = np.asarray(value), np.shape(value)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value


class Loader:
    """As a torch ``DataLoader``: a length, and lists of tensors, anew in each pass."""

    dataset, batch_size = Examples(), 4

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[Tensor]]:
        for pair in batches(3, last=2):
            yield [Tensor(value) for value in pair]
