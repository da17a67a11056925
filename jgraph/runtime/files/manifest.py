"""Checkpoint manifest: every array with its type and checksum.

Orbax keeps no checksum of array data: a flipped bit comes back as another number. So
``jgraph_manifest.json`` is committed together with the arrays, and whoever restores
compares.
"""

import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final, final

import numpy as np

from jgraph import __version__
from jgraph.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointForeignError,
)
from jgraph.plan.program.nodes import ValueType
from jgraph.runtime.files.blocks import Blocks, as_rows

FILE: Final = "jgraph_manifest.json"
PROOF: Final = "jgraph_proof"
"""A file with random bytes: in every checkpoint of jgraph, beside Orbax's files."""
FORMAT: Final = 2
_OF_HOST: Final = (
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.ESTALE, errno.ETIMEDOUT),
)
"""What is wrong with a process, a host or a network, and not with files."""


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a checkpoint.

    Attributes:
      shape: its shape.
      dtype: its dtype's name.
      block_rows: rows of each of its blocks; the last may have fewer.
      crc32: checksum of each block, of its bytes in C order.
    """

    shape: tuple[int, ...]
    dtype: str
    block_rows: int
    crc32: tuple[int, ...]

    @classmethod
    def of(cls, array: Any, block_rows: int = 0) -> "Leaf":
        """Returns the description of an array.

        Args:
          array: with at least one element.
          block_rows: rows of each block; as many as are written together if unset.

        Example:
          >>> Leaf.of(np.zeros((2, 3), np.float32)).shape
          (2, 3)
        """
        shape = tuple(np.shape(array))
        blocks = Blocks.of(shape, array.dtype.itemsize, block_rows)
        # CRC-32 finds every single flipped bit, whatever the length, and is as fast as
        # reading; SHA-256 takes three times as long. Neither is a signature.
        sums = blocks.sums(0, 1, as_rows(array))
        return cls(shape, array.dtype.name, blocks.block_rows, tuple(sums.values()))

    @property
    def type(self) -> ValueType:
        """Its type."""
        return ValueType(self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return self.type.nbytes

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      step: updates of the model.
      leaves: each array, by its path: ``params/Dense_0/kernel``.
      position: where in the data the training was; see ``BatchBook.position``.
      generation: of the writer's lease; 0 without one.
      saved: when, as ISO 8601.
      jgraph: version that wrote it.
      evaluation: metrics of the copy that is saved, ``eval_loss``, if it was kept as
        the best one.
    """

    step: int
    leaves: Mapping[str, Leaf]
    position: Mapping[str, Any] | None = None
    generation: int = 0
    saved: str = ""
    jgraph: str = __version__
    evaluation: Mapping[str, float] | None = None

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def to_json(self) -> str:
        """Returns the manifest as JSON, with a checksum of its own."""
        body = {
            "format": FORMAT,
            "jgraph": self.jgraph,
            "saved": self.saved,
            "generation": self.generation,
            "step": self.step,
            "position": self.position,
            "leaves": {
                name: {
                    "shape": leaf.shape,
                    "dtype": leaf.dtype,
                    "block_rows": leaf.block_rows,
                    "crc32": leaf.crc32,
                }
                for name, leaf in self.leaves.items()
            },
        }
        if self.evaluation is not None:
            body["evaluation"] = dict(self.evaluation)
        return with_checksum(body)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Reads what ``to_json`` wrote.

        Raises:
          ValueError, KeyError, TypeError: it is something else.
        """
        body = checked_body(text, FORMAT)
        leaves = {
            name: Leaf(
                tuple(leaf["shape"]),
                leaf["dtype"],
                leaf["block_rows"],
                tuple(leaf["crc32"]),
            )
            for name, leaf in body.pop("leaves").items()
        }
        return cls(leaves=leaves, **body)

    def compare(
        self, names: Iterable[str], leaves: Mapping[str, Leaf], where: Path
    ) -> None:
        """Compares what was found of some leaves with what was written.

        Raises:
          CheckpointCorruptError: names the leaves that differ.
        """
        wrong = sorted(
            name
            for name in {*names, *leaves}
            if self.leaves.get(name) != leaves.get(name)
        )
        if wrong:
            raise damaged(where, f"leaf '{wrong[0]}' is not what was written", wrong)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
      CheckpointError: there is no checkpoint at ``path``.
      CheckpointForeignError: there is one of another program.
      CheckpointCorruptError: its manifest is missing or damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if not is_ours(path):
        raise CheckpointForeignError(
            f"{path} is no checkpoint of jgraph: it has no {FILE}. A checkpoint of "
            "Orbax or Flax is read by trainer.restore(…) and `jgraph ckpt import`",
            path=str(path),
        )
    try:
        return Manifest.from_json((path / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise damaged(path, f"its {FILE} is gone", []) from None
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        RecursionError,
    ) as error:
        raise unreadable(path, error, FILE) from error


def is_ours(path: Path) -> bool:
    """Whether jgraph wrote a checkpoint, whole or not.

    Raises:
      CheckpointError: the disk does not say.
    """
    with looking(path):
        if (path / FILE).is_file():
            return True
        # A directory of steps has a proof too: for the master that saves there.
        return (path / PROOF).is_file() and (path / "_METADATA").is_file()


@contextmanager
def looking(path: Path) -> Iterator[None]:
    """What the disk says of a directory of checkpoints, or of one, is one error."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot look for checkpoints in {path}: {error.strerror or error}; give "
            "a directory that you may read",
            path=str(path),
        ) from error


def is_committed(path: Path) -> bool:
    """Whether Orbax wrote all of a checkpoint: it then has a description, or a mark."""
    if ".orbax-checkpoint-tmp" in path.name:
        return False
    marks = ("_CHECKPOINT_METADATA", "commit_success.txt", "_METADATA")
    return any((path / mark).is_file() for mark in marks)


def directory_of(name: str) -> str:
    """Returns the directory of an array, as Orbax calls it.

    Example:
      >>> directory_of("params/Dense_0/kernel")
      'params.Dense_0.kernel'
    """
    return name.replace("/", ".")


def damaged(path: Path, what: str, leaves: list[str]) -> CheckpointCorruptError:
    """Returns the error of a checkpoint that is not what was written."""
    others = f", and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    return CheckpointCorruptError(
        f"the checkpoint at {path} is damaged: {what}{others}; use another one "
        f"(`jgraph ckpt ls {quote(str(path.parent))}` lists them)",
        path=str(path),
        leaves=leaves,
    )


def unreadable(path: Path, error: Exception, what: str = "it") -> CheckpointError:
    """Returns the error of a checkpoint that a library or the disk does not read.

    It is damaged, unless it may be read elsewhere, or later.

    Args:
      path: of the checkpoint.
      error: what was raised.
      what: cannot be read.
    """
    why = f"{what} cannot be read ({type(error).__name__}: {str(error)[:200]})"
    if not is_of_host(error):
        return damaged(path, why, [])
    return CheckpointError(
        f"the checkpoint at {path} is not read here, and may be good: {why}; mend "
        "that, or read it elsewhere",
        path=str(path),
    )


def is_of_host(error: Exception) -> bool:
    """Whether files cannot be read for a reason that is not in them.

    Example:
      >>> is_of_host(PermissionError(errno.EACCES, "Permission denied"))
      True
    """
    # TensorStore tells of the disk by text alone.
    texts = map(os.strerror, _OF_HOST)
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def checksum(body: Mapping[str, Any]) -> int:
    """Returns the checksum of a manifest without its own."""
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def with_checksum(body: Mapping[str, Any]) -> str:
    """Returns JSON with a checksum of its own, as ``checked_body`` reads it.

    Example:
      >>> checked_body(with_checksum({"format": 2, "step": 3}), 2)
      {'step': 3}
    """
    return json.dumps({**body, "crc32": checksum(body)}, indent=1, sort_keys=True)


def checked_body(text: str, version: int) -> dict[str, Any]:
    """Returns what ``with_checksum`` was given, without its format.

    Args:
      text: of a file.
      version: of the format that this version of jgraph reads.

    Raises:
      ValueError, KeyError, TypeError: it is something else.
    """
    body: dict[str, Any] = json.loads(text)
    if body.pop("crc32") != checksum(body):
        raise ValueError("its checksum is of other content")
    if body.pop("format") != version:
        raise ValueError("it is of the format of another version of jgraph")
    return body
