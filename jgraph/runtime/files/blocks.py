"""Checkpoint blocks: files of equally many rows, and their combinable checksums.

An array is cut along its first axis into blocks of equally many rows, a file each: the
chunks of a Zarr array without compression, so whoever has some rows can write and read
just these, at their offset.

The checksum of a block is CRC-32, which is linear: of a block whose rows several tasks
have, each tells the sum of its own rows, all others being zeros, and these sums make up
that of the whole block. So no task needs to see another's rows, neither to write the
sums nor to compare with them.
"""

import functools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Sums: TypeAlias = dict[int, int]
"""Checksums by block."""

BLOCK_BYTES: Final = 64 << 20
_ZEROS: Final = bytes(1 << 20)


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a slice that are in one block.

    Attributes:
      block: which.
      first: the row of the block that the first one is.
      at: the row of the slice that the first one is.
      count: how many.
    """

    block: int
    first: int
    at: int
    count: int


@final
@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an array of at least one element.

    Attributes:
      rows: of the array; 1 of a scalar.
      row_nbytes: bytes of each.
      block_rows: rows of each block; the last may have fewer.

    Example:
      >>> blocks = Blocks(rows=10, row_nbytes=4, block_rows=4)
      >>> [blocks.rows_in(block) for block in range(len(blocks))]
      [4, 4, 2]
      >>> [(run.block, run.first, run.count) for run in blocks.runs(3, 2, 3)]
      [(0, 3, 1), (1, 1, 2)]
    """

    rows: int
    row_nbytes: int
    block_rows: int

    @classmethod
    def of(cls, shape: Sequence[int], itemsize: int, block_rows: int = 0) -> "Blocks":
        """Returns the blocks of an array; of ``BLOCK_BYTES`` at most, if unset."""
        rows = shape[0] if shape else 1
        row_nbytes = math.prod(shape[1:]) * itemsize
        most = max(1, BLOCK_BYTES // max(row_nbytes, 1))
        return cls(rows, row_nbytes, block_rows or max(1, min(rows, most)))

    def __len__(self) -> int:
        return math.ceil(self.rows / self.block_rows)

    @property
    def file_nbytes(self) -> int:
        """Bytes of each file; Zarr pads the last one."""
        return self.block_rows * self.row_nbytes

    def rows_in(self, block: int) -> int:
        """Returns the rows of a block."""
        return min(self.block_rows, self.rows - block * self.block_rows)

    def runs(self, start: int, step: int, count: int) -> Iterator[Run]:
        """Cuts the rows ``start``, ``start + step``, and so on at the blocks."""
        done = 0
        while done < count:
            block, first = divmod(start + done * step, self.block_rows)
            here = min(count - done, -(-(self.rows_in(block) - first) // step))
            yield Run(block, first, done, here)
            done += here

    def checksum(self, run: Run, step: int, pieces: Iterable[Bytes]) -> int:
        """Returns the checksum of a block that has these rows, and zeros elsewhere.

        Args:
          run: where the rows are.
          step: how far apart.
          pieces: uint8[n, row_nbytes], which together are the rows, in their order.
        """
        size, between = self.row_nbytes, 0
        crc = _zeros(run.first * size)
        for rows in pieces:
            crc = _zeros(between, crc)
            if step == 1:
                crc = zlib.crc32(rows.reshape(-1).data, crc)
            else:
                crc = _apart(rows, step, crc)
            between = (step - 1) * size
        last = run.first + (run.count - 1) * step
        return _zeros((self.rows_in(run.block) - last - 1) * size, crc)

    def joined(self, parts: Sequence[Sums]) -> tuple[int, ...]:
        """Returns the checksum of each block, given those of all its rows.

        Example:
          >>> blocks = Blocks(rows=2, row_nbytes=1, block_rows=2)
          >>> rows = np.array([[7], [9]], np.uint8)
          >>> each = [blocks.sums(n, 1, rows[n : n + 1]) for n in range(2)]
          >>> blocks.joined(each) == (zlib.crc32(rows.data),)
          True
        """
        found = []
        for block in range(len(self)):
            sums = [part[block] for part in parts if block in part]
            crc = functools.reduce(int.__xor__, sums, 0)
            if len(sums) % 2 == 0:  # the constant part of CRC-32 has cancelled itself
                crc ^= _zeros(self.rows_in(block) * self.row_nbytes)
            found.append(crc)
        return tuple(found)

    def sums(self, start: int, step: int, rows: Bytes) -> Sums:
        """Returns the checksums of blocks that have these rows, and zeros elsewhere.

        Args:
          start: the first row.
          step: how far apart.
          rows: uint8[n, row_nbytes].
        """
        return {
            run.block: self.checksum(run, step, [rows[run.at : run.at + run.count]])
            for run in self.runs(start, step, len(rows))
        }


def as_rows(array: Any) -> Bytes:
    """Returns the bytes of an array by rows, uint8[rows, row_nbytes]; may be a view."""
    data = np.ascontiguousarray(array)
    count = len(data) if data.ndim else 1
    return data.reshape(-1).view(np.uint8).reshape(count, -1)


def _apart(rows: Bytes, step: int, crc: int) -> int:
    """Continues a checksum by rows with ``step - 1`` rows of zeros between them."""
    count, size = rows.shape
    at_once = max(1, len(_ZEROS) // (step * size))
    for at in range(0, count - 1, at_once):
        some = rows[at : min(at + at_once, count - 1)]
        padded = np.zeros((len(some), step, size), np.uint8)
        padded[:, 0] = some
        crc = zlib.crc32(padded.data, crc)
    return zlib.crc32(rows[-1].data, crc)


def _zeros(nbytes: int, crc: int = 0) -> int:
    """Continues a checksum by zeros."""
    while nbytes > 0:
        crc = zlib.crc32(_ZEROS[:nbytes] if nbytes < len(_ZEROS) else _ZEROS, crc)
        nbytes -= len(_ZEROS)
    return crc
