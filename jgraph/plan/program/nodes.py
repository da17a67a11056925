"""The nodes that a task runs, over numbered values. Plain data, no code.

Every value between nodes is a plain array (``ValueType``): typed PRNG keys travel and
are stored as their key data (uint32); segments wrap and unwrap them inside.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, final

import numpy as np

from jgraph.graph.device import TaskName

if TYPE_CHECKING:
    from jgraph.graph.rows.rows import Layout

ValueId: TypeAlias = int
"""Index into ``Partition.values``; ids are per partition."""


@final
@dataclass(frozen=True, slots=True)
class ValueType:
    """Shape and numpy/ml_dtypes dtype name (``"float32"``, ``"bfloat16"``, …).

    A ``ragged`` value has at most ``shape[0]`` rows at run time: those that are there.
    Executables take it padded, see ``jgraph.plan.program.row_values.padded``.

    ``symbols`` has the text of each dimension whose size is known at run time only,
    such as ``"b"`` (``""`` for others); ``shape`` then has ``ASSUMED_SIZE`` for names.
    """

    shape: tuple[int, ...]
    dtype: str
    ragged: bool = False
    symbols: tuple[str, ...] = ()

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """The dtype as numpy knows it (ml_dtypes included)."""
        return _dtype_named(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire and in memory; of a ragged value the most there can be.

        Of sizes that are names, for ``ASSUMED_SIZE``.
        """
        return math.prod(self.shape) * self.np_dtype.itemsize

    def __str__(self) -> str:
        most = "≤" if self.ragged else ""
        names = self.symbols or ("",) * len(self.shape)
        sizes = [t or str(n) for t, n in zip(names, self.shape, strict=True)]
        return f"{self.dtype}[{most}{','.join(sizes)}]"


@functools.cache
def _dtype_named(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


@final
@dataclass(frozen=True, slots=True)
class FeedNode:
    """Takes the step's feed ``name`` (driver only)."""

    name: str
    out: ValueId


@final
@dataclass(frozen=True, slots=True)
class FetchNode:
    """Gives the step's fetches, in order (driver only; one per program)."""

    values: tuple[ValueId, ...]


@final
@dataclass(frozen=True, slots=True)
class ConstNode:
    """Gives an array that the function closed over; shipped once with the program."""

    value: np.ndarray[Any, Any]
    out: ValueId


@final
@dataclass(frozen=True, slots=True)
class ReadNode:
    """Reads whole variables, all at one version of the task's store.

    ``after`` names earlier nodes of this partition (by index) that must be done
    first: program order of state operations inside the step. ``packs`` are lengths of
    runs of ``variables``, from the first on, that are read as one flat array each;
    ``outs`` has these arrays, then the values of the other variables.
    """

    variables: tuple[int, ...]
    outs: tuple[ValueId, ...]
    after: tuple[int, ...] = ()
    packs: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class WriteNode:
    """Replaces whole variables, all at one version of the task's store.

    With ``absent`` only those that are not there: of two clients that make a variable,
    the second does not undo what the first one has done with it since.
    """

    variables: tuple[int, ...]
    values: tuple[ValueId, ...]
    after: tuple[int, ...] = ()
    absent: bool = False


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a variable that a ragged value of ids names, each once."""

    variable: int
    ids: ValueId


@final
@dataclass(frozen=True, slots=True)
class SegmentNode:
    """Runs one XLA executable.

    The executable's flat arguments are: the ``updates`` variables (donated), the
    ``reads`` variables, the rows of ``row_updates`` and of ``row_reads``, padded, then
    ``inputs``. Its flat results are: the new values of ``updates``, the new rows of
    ``row_updates``, then ``outs``. Taking variables and rows and putting back the new
    ones is atomic per task: no other step sees or changes them in between. ``donate``
    are positions in ``inputs`` whose buffers may be reused.

    ``packs`` are lengths of runs of ``updates``, from the first on, and ``read_packs``
    of ``reads``: each run is one flat argument, and one flat result if it is updated.
    """

    digest: str
    updates: tuple[int, ...]
    reads: tuple[int, ...]
    inputs: tuple[ValueId, ...]
    outs: tuple[ValueId, ...]
    donate: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    row_updates: tuple[Rows, ...] = ()
    row_reads: tuple[Rows, ...] = ()
    packs: tuple[int, ...] = ()
    read_packs: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class RouteNode:
    """Finds the rows of a sharded table that ids need (``route_rows``).

    Gives the position of each id among the merged rows, and per shard the rows there:
    each once, ascending, only those that are needed, ``most`` at most (0: any number).
    """

    ids: ValueId
    layout: "Layout"
    feature: str
    drop: bool
    positions: ValueId
    local: tuple[ValueId, ...]
    most: int = 0


@final
@dataclass(frozen=True, slots=True)
class CheckNode:
    """Refuses ids without a row of a table that is read whole (``checked_ids``).

    Gives the values, and a number for what waits for the look at them. Ids are those
    from ``starts`` to ``ends`` along each axis.
    """

    values: ValueId
    rows: int
    feature: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    outs: tuple[ValueId, ...]


@final
@dataclass(frozen=True, slots=True)
class LookupNode:
    """Reads rows of variables, all at one version of the task's store.

    Keys that are looked up may come into a hash table, and others go for them. If it
    ``peeks``, nothing changes, and keys without a row have that of all others.
    """

    rows: tuple[Rows, ...]
    outs: tuple[ValueId, ...]
    after: tuple[int, ...] = ()
    peeks: bool = False


@final
@dataclass(frozen=True, slots=True)
class MergeNode:
    """Puts the rows of all shards one after the other, padded (``merge_rows``)."""

    local: tuple[ValueId, ...]
    values: tuple[ValueId, ...]
    out: ValueId


@final
@dataclass(frozen=True, slots=True)
class SplitNode:
    """Cuts merged rows into those of each shard (``split_rows``)."""

    value: ValueId
    local: tuple[ValueId, ...]
    outs: tuple[ValueId, ...]


@final
@dataclass(frozen=True, slots=True)
class UnpackNode:
    """Cuts a flat array into the values that lie in it, one after the other."""

    value: ValueId
    outs: tuple[ValueId, ...]


@final
@dataclass(frozen=True, slots=True)
class JoinNode:
    """Puts arrays one after the other along their first axis.

    Where they lie in shared memory they are mapped so, and nothing is copied.
    """

    values: tuple[ValueId, ...]
    out: ValueId


@final
@dataclass(frozen=True, slots=True)
class SendNode:
    """Sends values to one task in one message; never blocks the partition."""

    dst: TaskName
    key: str
    values: tuple[ValueId, ...]


@final
@dataclass(frozen=True, slots=True)
class RecvNode:
    """Takes the message of the same ``key`` from ``src``."""

    src: TaskName
    key: str
    outs: tuple[ValueId, ...]


@final
@dataclass(frozen=True, slots=True)
class ContributeNode:
    """Gives the gate a step's values for variables; ``slot`` names its piece of data.

    The variables themselves change only in an ``AggregateNode``.
    """

    variables: tuple[int, ...]
    values: tuple[ValueId, ...]
    slot: ValueId


@final
@dataclass(frozen=True, slots=True)
class RowMean:
    """The variables of the mean of rows that contributions have of one table.

    ``ids`` is set to the ids that any has, ``rows`` to the sums of their rows over the
    number of contributions: one without a row counts as zeros.
    """

    ids: int
    rows: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class AggregateNode:
    """Sets variables to the means of the contributions that the gate has chosen."""

    variables: tuple[int, ...]
    row_means: tuple[RowMean, ...] = ()

    @property
    def all_variables(self) -> tuple[int, ...]:
        """Everything that it sets."""
        rows = [v for mean in self.row_means for v in (mean.ids, *mean.rows)]
        return (*self.variables, *rows)


Node: TypeAlias = (
    FeedNode
    | FetchNode
    | ConstNode
    | ReadNode
    | WriteNode
    | SegmentNode
    | RouteNode
    | CheckNode
    | LookupNode
    | MergeNode
    | SplitNode
    | UnpackNode
    | JoinNode
    | SendNode
    | RecvNode
    | ContributeNode
    | AggregateNode
)


def inputs_of(node: Node) -> tuple[ValueId, ...]:
    """Returns the values a node takes."""
    match node:
        case SegmentNode():
            rows = *node.row_updates, *node.row_reads
            return (*(r.ids for r in rows), *node.inputs)
        case RouteNode():
            return (node.ids,)
        case CheckNode():
            return (node.values,)
        case LookupNode():
            return tuple(r.ids for r in node.rows)
        case MergeNode():
            return (*node.local, *node.values)
        case SplitNode():
            return (node.value, *node.local)
        case UnpackNode():
            return (node.value,)
        case SendNode() | WriteNode() | FetchNode() | JoinNode():
            return node.values
        case ContributeNode():
            return (*node.values, node.slot)
        case _:
            return ()


def after_of(node: Node) -> tuple[int, ...]:
    """Returns the earlier nodes that a node waits for beside what it takes."""
    match node:
        case SegmentNode() | ReadNode() | WriteNode() | LookupNode():
            return node.after
        case _:
            return ()


def outputs_of(node: Node) -> tuple[ValueId, ...]:
    """Returns the values a node makes."""
    match node:
        case (
            SegmentNode()
            | ReadNode()
            | RecvNode()
            | LookupNode()
            | CheckNode()
            | SplitNode()
            | UnpackNode()
        ):
            return node.outs
        case FeedNode() | ConstNode() | MergeNode() | JoinNode():
            return (node.out,)
        case RouteNode():
            return (node.positions, *node.local)
        case _:
            return ()


PACKABLE: Final = frozenset({"float32", "bfloat16", "float16", "int32", "uint32"})
"""Dtypes of which values may lie in one flat array."""


PACK_BYTES: Final = 64
"""Where a value in a flat array begins is a multiple: XLA takes it without a copy."""


def packed_starts(types: Sequence[ValueType]) -> list[int]:
    """Returns where values of one dtype begin in a flat array, and how long that is.

    What lies between them is nobody's.

    Example:
      >>> packed_starts([ValueType((2, 3), "float32"), ValueType((17,), "float32")])
      [0, 16, 48]
    """
    step = PACK_BYTES // types[0].np_dtype.itemsize
    sizes = (-(-math.prod(type_.shape) // step) * step for type_ in types)
    return [0, *accumulate(sizes)]


def packed_type(types: Sequence[ValueType]) -> ValueType:
    """Returns the type of the flat array in which values of one dtype lie.

    Example:
      >>> str(packed_type([ValueType((2, 3), "float32"), ValueType((), "float32")]))
      'float32[32]'
    """
    return ValueType((packed_starts(types)[-1],), types[0].dtype)


Item = TypeVar("Item")


def runs(
    items: Sequence[Item], packs: Sequence[int]
) -> tuple[list[Sequence[Item]], Sequence[Item]]:
    """Returns the runs of these lengths that items begin with, and the other items.

    Example:
      >>> runs("abcde", [2, 1])
      (['ab', 'c'], 'de')
    """
    found, start = [], 0
    for length in packs:
        found.append(items[start : start + length])
        start += length
    return found, items[start:]


def packed_types(types: Sequence[ValueType], packs: Sequence[int]) -> list[ValueType]:
    """Returns the types of what stands for values of which runs are packed."""
    packed, others = runs(types, packs)
    return [*map(packed_type, packed), *others]
