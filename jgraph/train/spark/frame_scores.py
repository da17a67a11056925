"""Scores of record batches by an exported model, in a Python worker of Spark.

Sent there by value: it says so in words if that Python has no jgraph.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

ROWS: Final = 1024
"""A model is called with so many rows, or with a power of two of the last ones."""


def scorer(
    archive: str,
    name: str,
    signature: str,
    inputs: Sequence[tuple[str, str, str]],
    outputs: Sequence[tuple[str, Any]],
    num_columns: int,
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns what ``mapInArrow`` takes.

    Args:
      archive: what ``SparkFiles`` calls the directory of the model.
      name: path of the version in it.
      signature: which function of the model.
      inputs: an input of the model, its column, and what the user calls that.
      outputs: pairs of an output of the model and the field that it becomes.
      num_columns: how many columns stay, from the first on.
    """

    def scored(batches: Iterator[Any]) -> Iterator[Any]:
        import os

        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # others have the accelerators
        try:
            from jgraph.serving.exported_model import loaded
        except ImportError as error:
            import sys

            raise RuntimeError(
                f"jg.spark.predict needs jgraph in the Python of Spark, and "
                f"{sys.executable} cannot import it ({error}); set PYSPARK_PYTHON to "
                "one that has it before the session is made"
            ) from None
        import pyarrow as pa
        from pyspark import SparkFiles

        model = loaded(os.path.join(SparkFiles.get(archive), name))
        for batch in batches:
            columns, fields = _scores(model, batch, signature, inputs, outputs)
            schema = pa.schema([*list(batch.schema)[:num_columns], *fields])
            own_columns = batch.columns[:num_columns]
            yield pa.RecordBatch.from_arrays([*own_columns, *columns], schema=schema)

    return scored


def _scores(
    model: Any,
    batch: Any,
    signature: str,
    inputs: Sequence[tuple[str, str, str]],
    outputs: Sequence[tuple[str, Any]],
) -> tuple[list[Any], list[Any]]:
    """Returns the outputs for a record batch: columns, and their fields."""
    import numpy as np
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_type

    one = model.signatures[signature]
    specs = {spec.name: spec for spec in one.inputs}
    if not batch.num_rows:
        kinds = [(field.name, to_arrow_type(field.dataType)) for _, field in outputs]
        columns = [pa.array([], kind) for _, kind in kinds]
        return columns, [pa.field(*kind) for kind in kinds]
    arrays = {n: _array(batch.column(c), said, specs[n]) for n, c, said in inputs}
    parts: dict[str, list[Any]] = {name: [] for name, _ in outputs}
    for start in range(0, batch.num_rows, ROWS):
        count = min(ROWS, batch.num_rows - start)
        padded = 1 << (count - 1).bit_length()
        rows = np.minimum(np.arange(start, start + padded), start + count - 1)
        found = model.predict(
            {name: array[rows] for name, array in arrays.items()}, signature=signature
        )
        for name, done in parts.items():
            done.append(np.asarray(found[name])[:count])
    columns = []
    fields: list[Any] = []
    for name, field in outputs:
        kind = to_arrow_type(field.dataType)
        columns.append(_column(np.concatenate(parts[name]), field, kind))
        fields.append(pa.field(field.name, kind))
    return columns, fields


def _array(column: Any, name: str, spec: Any) -> Any:
    """Returns a column as an input of the model takes it."""
    import numpy as np
    import pyarrow as pa

    if column.null_count:
        raise ValueError(
            f"the column '{name}' has no value in {column.null_count} rows of a "
            "batch; fill them in: df.na.fill(0)"
        )
    if pa.types.is_list(column.type):
        lengths = np.unique(column.value_lengths().to_numpy())
        if len(lengths) > 1:
            raise ValueError(
                f"the column '{name}' has lists of {lengths[0]} to {lengths[-1]} "
                "values; pad them to one length"
            )
        flat = column.flatten()
        if flat.null_count:
            raise ValueError(
                f"the column '{name}' has lists with missing values; fill them in"
            )
        array = flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)
    else:
        array = column.to_numpy(zero_copy_only=False)
    wanted = np.dtype(spec.dtype)
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise ValueError(
            f"the column '{name}' is {array.dtype}, and the model takes {wanted} "
            "there; cast it in the DataFrame"
        )
    if np.issubdtype(wanted, np.integer):
        least, most, bounds = array.min(), array.max(), np.iinfo(wanted)
        if least < bounds.min or most > bounds.max:
            raise ValueError(
                f"the column '{name}' has values from {least} to {most}, too large for "
                f"the {wanted} that the model takes there; make smaller ones of them"
            )
    if array.shape[1:] != tuple(spec.shape[1:]) and array[:1].size != _size(spec):
        raise ValueError(
            f"the column '{name}' has {array[:1].size} values in a row, and the model "
            f"takes {_size(spec)}"
        )
    return array.astype(wanted).reshape(len(column), *spec.shape[1:])


def _size(spec: Any) -> int:
    """Returns how many numbers of a row an input takes."""
    import math

    return math.prod(spec.shape[1:])


def mismatch(shape: Sequence[Any], name: str, *, is_list: bool) -> str:
    """Returns why what a model gives for a row is no value of a column; empty: it is.

    Args:
      shape: of what it gives for each row.
      name: of the column.
      is_list: whether the column is declared to have lists.
    """
    if len(shape) == is_list:
        return ""
    said = "a list" if is_list else "one number"
    if len(shape) > 1:
        instead = "let fn= make one number, or a list of numbers, of each row"
    elif shape:
        instead = (
            f"write out='{name} array<double>', or take one of them: "
            "fn=lambda model, x: model(x)[:, 0]"
        )
    else:
        instead = f"write out='{name} double'"
    answer = f"an array of shape {tuple(shape)}" if shape else "one number"
    return (
        f"the model gives {answer} for each row, and out says {said} for '{name}'; "
        f"{instead}"
    )


def _column(values: Any, field: Any, kind: Any) -> Any:
    """Returns an output as a column of a declared type."""
    import numpy as np
    import pyarrow as pa

    is_list = pa.types.is_list(kind)
    if problem := mismatch(values.shape[1:], field.name, is_list=is_list):
        raise ValueError(problem)
    if not is_list:
        return pa.array(values).cast(kind)
    ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(ends, pa.array(values.reshape(-1))).cast(kind)
