"""Lists of numbers as bytes, packed by record batches in the Python of Spark.

Sent there by value, so that Python needs what Spark asks for alone: pyarrow and pandas.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jgraph.client.spark.by_value import by_value
from jgraph.runtime.data.packed_lists import DTYPE, DTYPES


def packer(widths: Sequence[int]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns what ``mapInArrow`` takes.

    Args:
      widths: bytes of a number of each column that is packed; 0 of the others.
    """

    def packed(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            columns = [
                _bytes_of(column, width) if width else column
                for column, width in zip(batch.columns, widths, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    return packed


def _bytes_of(lists: Any, width: int) -> Any:
    """Returns lists of Arrow as bytes; one that has a missing value as a single byte.

    A list that is missing stays so. No copy is made of the values.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    values = lists.values
    if values.null_count:
        return pa.array(
            [
                None
                if one is None
                else b"?"
                if one.null_count
                else bytes(one.to_numpy().tobytes())
                for one in (row.values for row in lists)
            ],
            pa.binary(),
        )
    ends = pc.multiply_checked(lists.offsets, pa.scalar(width, pa.int32()))
    is_there = lists.is_valid().buffers()[1] if lists.null_count else None
    held = values.buffers()[1] or pa.py_buffer(b"")
    data = held.slice(values.offset * width)
    return pa.Array.from_buffers(
        pa.binary(), len(lists), [is_there, ends.buffers()[1], data]
    )


def lacking() -> Callable[[Any], str]:
    """Returns a function that says what its Python lacks to map record batches."""

    def lacks(_: Any) -> str:
        from pyspark.sql.pandas.utils import (
            require_minimum_pandas_version,
            require_minimum_pyarrow_version,
        )

        try:
            require_minimum_pyarrow_version()
            with warnings.catch_warnings(action="ignore"):  # that pandas is a new one
                require_minimum_pandas_version()
        except ImportError as error:
            return str(error)
        return ""

    return lacks


def with_packed_lists(frame: Any) -> Any:
    """Returns a DataFrame with lists of numbers as bytes, where Spark's Python can.

    The metadata of such a column has the type of the numbers. Where that Python lacks
    pyarrow, a warning says so and the DataFrame stays as it is.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType, BinaryType, StructField, StructType

    dtypes = [
        DTYPES.get(field.dataType.elementType.simpleString(), "")
        if isinstance(field.dataType, ArrayType)
        else ""
        for field in frame.schema
    ]
    if not any(dtypes):
        return frame
    if reason := _asked(frame.sparkSession):
        warnings.warn(
            "workers will take longer to read the lists of this DataFrame, since the "
            f"Python of Spark cannot pack them ({reason}); before the session is made, "
            f"type: export PYSPARK_PYTHON={sys.executable}",
            UserWarning,
            stacklevel=4,  # who wrote jg.Source.spark
        )
        return frame
    # PySpark maps no columns with dots in their names: they have others meanwhile.
    names = [f"column_{place}" for place in range(len(dtypes))]
    schema = StructType(
        [
            StructField(name, BinaryType() if dtype else field.dataType)
            for name, dtype, field in zip(names, dtypes, frame.schema, strict=True)
        ]
    )
    sizes = [np.dtype(dtype).itemsize if dtype else 0 for dtype in dtypes]
    with by_value(sys.modules[__name__]):
        mapped = frame.toDF(*names).mapInArrow(packer(sizes), schema)
    return mapped.select(
        *(
            functions.col(name).alias(column, metadata={DTYPE: dtype} if dtype else {})
            for name, dtype, column in zip(names, dtypes, frame.columns, strict=True)
        )
    )


def _asked(session: Any) -> str:
    """Returns why the Python of Spark maps no record batches; empty if it does."""
    from pyspark.sql import functions

    try:
        with by_value(sys.modules[__name__]):
            lacks = functions.udf(lacking(), "string", useArrow=False)
            asked = session.range(1).select(lacks("id"))
        return str(asked.first()[0])
    except Exception as error:  # noqa: BLE001  # whatever it is, lists stay lists
        lines = str(error).strip().splitlines()
        return lines[-1].strip() if lines else type(error).__name__
