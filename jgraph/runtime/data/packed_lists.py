"""Lists of numbers that a Parquet file has as bytes, without levels.

A list of Parquet has two small numbers, its levels, beside each value, from which a
reader finds where lists begin. To decode them takes eight times what the values take.
``jg.Source.spark`` packs each list into the bytes of its numbers, little-endian, and
names their type in the metadata that Spark writes of a column.
"""

import json
from typing import Any, Final

import numpy as np

from jgraph.errors import SourceError
from jgraph.runtime.data.batches import Array

DTYPE: Final = "jgraph.dtype"
"""Key in the metadata of a column: the type of the numbers of its lists."""
DTYPES: Final = {
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}
"""Types of numbers that are packed, by Spark's names. Lists of bytes and booleans are
not: a list with a missing value has to have a length that no list of numbers has."""
_COLUMNS: Final = b"org.apache.spark.sql.parquet.row.metadata"


def packed_dtypes(schema: Any, file: str) -> dict[str, "np.dtype[Any]"]:
    """Returns the type of the numbers of each packed column of a Parquet file.

    Args:
      schema: of Arrow, with the metadata of the file.
      file: for messages.

    Raises:
      SourceError: a type that is not packed, or metadata that Spark did not write.
    """
    described = (schema.metadata or {}).get(_COLUMNS)
    if described is None or DTYPE.encode() not in described:
        return {}
    try:
        noted = {
            column["name"]: column["metadata"].get(DTYPE)
            for column in json.loads(described)["fields"]
        }
    except (
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise SourceError(
            f"{file} has metadata of Spark that cannot be read: {error!r}; "
            "write the file anew",
            file=file,
        ) from error
    types = {field.name: str(field.type) for field in schema}
    found: dict[str, np.dtype[Any]] = {}
    for name, dtype in noted.items():
        if dtype is None or types.get(name) != "binary":
            continue
        if dtype not in DTYPES.values():
            raise SourceError(
                f"column '{name}' of {file} has lists packed as {dtype!r}, "
                f"which is none of {', '.join(DTYPES.values())}; write the file anew",
                file=file,
            )
        found[name] = np.dtype(dtype).newbyteorder("<")
    return found


def unpacked(column: Any, dtype: "np.dtype[Any]") -> Array | None:
    """Returns lists of a column of bytes, where Arrow has them.

    Args:
      column: of Arrow's type binary, with no null.
      dtype: of the numbers.

    Returns:
      An array of a row for each list; None if they are of different lengths, or empty.

    Example:
      >>> import pyarrow as pa
      >>> unpacked(pa.array([b"abcd", b"efgh"]), np.dtype("S2"))
      array([[b'ab', b'cd'],
             [b'ef', b'gh']], dtype='|S2')
    """
    _, ends_of, values = column.buffers()
    count = len(column)
    ends = np.frombuffer(ends_of, np.int32)[column.offset : column.offset + count + 1]
    nbytes = np.diff(ends)
    if not count or not nbytes[0] or (nbytes != nbytes[0]).any():
        return None
    length, rest = divmod(int(nbytes[0]), dtype.itemsize)
    if rest:
        return None
    first = int(ends[0])
    return np.frombuffer(values, dtype, count * length, first).reshape(count, length)
