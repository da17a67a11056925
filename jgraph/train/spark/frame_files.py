"""Parquet files of a Spark DataFrame: written once by Spark, checked, then only read.

Rows are not fed: a queue from each partition to one consumer hangs when either dies,
and nothing is dealt again. Files are dealt, shuffled and counted as any others are.
"""

import atexit
import difflib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.client.spark.failures import has_ended, writing
from jgraph.client.spark.slots import check_slot
from jgraph.errors import ConfigError, DataError
from jgraph.runtime.data.packed_lists import DTYPE
from jgraph.train.spark.list_packing import with_packed_lists

_OfColumn: TypeAlias = Callable[[Any], Any]

_COLUMN_BYTES: Final = 64 << 10
_GROUP_BYTES: Final = (1 << 20, 8 << 20)
"""Bytes of a row group: small, as a worker decodes whole ones for some batches; not too
small, as files list each column of each."""
_SHOWN: Final = 5
_NUMBERS: Final = ("tinyint", "smallint", "int", "bigint", "float", "double", "boolean")
_INSTEAD: Final = {
    "decimal": 'cast it: F.col("{0}").cast("double")',
    "string": 'make numbers of it: F.pmod(F.xxhash64("{0}"), F.lit(1000)), or those of '
    "a StringIndexer",
    "date": 'make a number of it: F.unix_date("{0}")',
    "timestamp": 'make a number of it: F.unix_timestamp("{0}")',
    "timestamp_ntz": 'make a number of it: F.unix_timestamp("{0}")',
}
_PATTERN: Final = "*?[{\\"


def check_frame(frame: object, what: str) -> None:
    """Refuses what is no DataFrame of Spark.

    Raises:
      ConfigError: it is not, or PySpark is not installed.
    """
    try:
        from pyspark.sql import DataFrame
    except ImportError as error:
        raise ConfigError(
            f"{what} needs PySpark, which cannot be imported here ({error}); type: "
            "pip install 'jgraph[spark]'"
        ) from error
    if not isinstance(frame, DataFrame):
        raise ConfigError(
            f"{what} takes a DataFrame of Spark, not {type(frame).__name__}; "
            "spark.createDataFrame(…) makes one of pandas, and fit takes arrays as "
            "they are"
        )
    context = getattr(frame.sparkSession, "_sc", None)  # none of Spark Connect
    if context is not None and has_ended(context):
        raise ConfigError(
            f"{what} was given a DataFrame of a session that was stopped; make another "
            "session with SparkSession.builder.getOrCreate(), and the DataFrame there"
        )


def check_columns(frame: Any, columns: Sequence[str] | None) -> list[str]:
    """Returns the names of columns that are there; all if none are named.

    Raises:
      ConfigError: there is none of that name, or it comes twice.
    """
    if isinstance(columns, str):
        raise ConfigError(
            f"columns is '{columns}'; write a list of names: columns=['{columns}']"
        )
    chosen = frame.columns if columns is None else columns
    names = list(chosen) if isinstance(chosen, Iterable) else [chosen]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"columns is {columns!r:.60}; write a list of names: "
            f"columns={frame.columns[:2]!r}"
        )
    if not names:
        raise ConfigError(
            f"no column is named; the DataFrame has {', '.join(frame.columns)}"
        )
    names_there = {one.lower(): one for one in frame.columns}
    for name in names:
        if name not in frame.columns:
            near = difflib.get_close_matches(name.lower(), names_there, 1)
            hint = f"; did you mean '{names_there[near[0]]}'?" if near else ""
            raise ConfigError(
                f"the DataFrame has no column '{name}'{hint or '.'} It has "
                f"{', '.join(frame.columns)}"
            )
        if names.count(name) > 1 or frame.columns.count(name) > 1:
            raise ConfigError(f"the column '{name}' comes twice; give it another name")
        alike = [one for one in frame.columns if one.lower() == name.lower()]
        if len(alike) > 1 and not _tells_case(frame):
            raise ConfigError(
                f"the columns {' and '.join(alike)} differ in capital letters alone, "
                "and Spark takes them for one; give one of them another name"
            )
    return names


def _tells_case(frame: Any) -> bool:
    return _setting(frame, "spark.sql.caseSensitive", "false").lower() == "true"


def write_frame(
    frame: Any, columns: Sequence[str] | None, directory: str | os.PathLike[str] | None
) -> tuple[Path, list[str]]:
    """Writes columns of a DataFrame as Parquet files, and looks through them.

    Args:
      frame: the DataFrame.
      columns: which; all if unset.
      directory: where to; a temporary one if unset, which goes with this process.

    Returns:
      The directory, and the columns.

    Raises:
      ConfigError: no such column, one of a type that is no number, or a directory that
        will not do.
      DataError: no rows, or some without a value, or lists of different lengths; says
        how many. Nothing of it is left.
    """
    check_frame(frame, "jg.Source.spark")
    if frame.isStreaming:
        raise ConfigError(
            "jg.Source.spark was given a DataFrame of a stream, which has no end; let "
            "df.writeStream write files, and give those that are there: "
            "spark.read.parquet(…)"
        )
    names = check_columns(frame, columns)
    check_slot(frame.sparkSession, "jg.Source.spark")
    chosen = [numbers_of(frame, name) for name in names]
    where = _directory(frame, directory)
    had_one = where.exists()
    try:
        numbers = with_packed_lists(frame.select(*chosen))
        nbytes = group_bytes(len(names))
        to_write = numbers.write.mode("append").options(
            **{
                "parquet.block.size": nbytes,
                "parquet.page.size": 2 * nbytes,  # one of a column, in each row group
                # Nobody asks for the least and the greatest row of each group.
                "parquet.column.statistics.enabled": "false",
                "compression": "none",  # to read takes half the time
            }
        )
        with writing(where):
            to_write.parquet(_for_spark(where))
        written = frame.sparkSession.read.parquet(_for_spark(where))
        _check_rows(written, frame, names)
    except BaseException:
        _forget(where, keep=had_one)
        raise
    if directory is None:
        atexit.register(shutil.rmtree, where, ignore_errors=True)
    return where, names


def _for_spark(where: Path) -> str:
    # Hadoop takes what is there for the path itself: nothing is quoted in it.
    return f"file://{where}"


def quoted(name: str) -> str:
    """Returns the name of a column as Spark takes it where dots have a meaning.

    Example:
      >>> quoted("a.b"), quoted("a`b")
      ('`a.b`', '`a``b`')
    """
    return f"`{name.replace('`', '``')}`"


def group_bytes(num_columns: int) -> int:
    """Returns how large a row group should be.

    Example:
      >>> [group_bytes(count) >> 10 for count in (1, 40, 1000)]
      [1024, 2560, 8192]
    """
    least, most = _GROUP_BYTES
    return min(max(least, num_columns * _COLUMN_BYTES), most)


def is_vector(frame: Any, name: str) -> bool:
    """Whether a column has vectors of Spark's machine learning."""
    return type(frame.schema[name].dataType).__name__ == "VectorUDT"


def numbers_of(frame: Any, name: str) -> Any:
    """Returns a column as numbers, or lists of them; sparse vectors as empty ones.

    Raises:
      ConfigError: it has neither.
    """
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType

    column, kind = functions.col(quoted(name)), frame.schema[name].dataType
    if is_vector(frame, name):
        # A sparse one is written as an empty list, which is looked for.
        parts = functions.unwrap_udt(column)
        dense = functions.when(parts["type"] == 1, parts["values"])
        filled = functions.coalesce(dense, functions.array())
        listed = functions.when(column.isNotNull(), filled)
        return listed.cast("array<double>").alias(name)
    inner = kind.elementType if isinstance(kind, ArrayType) else kind
    if inner.simpleString() not in _NUMBERS:
        raise _not_numbers(name, kind.simpleString())
    return column.alias(name)


def _not_numbers(name: str, kind: str) -> ConfigError:
    word = kind.partition("(")[0]
    hint = _INSTEAD.get(word, "leave it out of columns=[…], or make numbers of it")
    return ConfigError(
        f"the column '{name}' is of type {kind}, and a model takes numbers, booleans, "
        f"lists of them of one length, and dense vectors; {hint.format(name)}"
    )


def _directory(frame: Any, directory: str | os.PathLike[str] | None) -> Path:
    if directory is None:
        master = _setting(frame, "spark.master", "local")
        if not master.startswith("local"):
            raise ConfigError(
                f"the executors of {master} are on other hosts: name a directory that "
                "all of them see under one path, such as "
                'jg.Source.spark(df, directory="/mnt/share/train")'
            )
        return Path(tempfile.mkdtemp(prefix="jgraph-frame-"))
    try:
        text = os.fsdecode(directory)
    except TypeError:
        raise ConfigError(
            f"directory is {directory!r:.60}; write a path, for example "
            'directory="/mnt/share/train"'
        ) from None
    scheme, _, rest = text.partition("://")
    if rest and scheme != "file":
        raise ConfigError(
            f"directory is {text}, and workers read files by their path: mount "
            f"{scheme} on all hosts, and give the path there, such as "
            '"/mnt/share/train"'
        )
    path = Path(rest or text)
    if not path.is_absolute() or ".." in path.parts or set(text) & set(_PATTERN):
        raise ConfigError(
            f"directory is '{text}'; write a whole path from / on, the same on all "
            f"hosts, without '..' or any of {_PATTERN}"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"there is something in {path} already, and other files would be read "
            "with those of this DataFrame; name a new directory, or read it as "
            f'jg.Source.parquet("{path}/*.parquet")'
        )
    return path


def _setting(frame: Any, key: str, default: str) -> str:
    return str(frame.sparkSession.conf.get(key, default))


def _forget(where: Path, *, keep: bool) -> None:
    """Removes what was written; the directory too, unless it was there before."""
    shutil.rmtree(where, ignore_errors=True)
    if keep and not where.name.startswith("jgraph-frame-"):
        where.mkdir(exist_ok=True)


def _check_rows(written: Any, frame: Any, names: Sequence[str]) -> None:
    """Refuses rows that no batch can be made of; says how many there are."""
    from pyspark.sql import functions

    lists = {name: found for name in names if (found := _lists(written.schema[name]))}
    asked = [functions.count(functions.lit(1)).alias("rows")]
    count: _OfColumn = lambda is_so: functions.sum(is_so.cast("long"))
    for index, name in enumerate(names):
        column = functions.col(quoted(name))
        asked.append(count(column.isNull()).alias(f"null{index}"))
        if name in lists:
            size = lists[name].length
            asked += [
                functions.min(size).alias(f"least{index}"),
                functions.max(size).alias(f"most{index}"),
                count(lists[name].has_hole).alias(f"holes{index}"),
                count(size == 0).alias(f"empty{index}"),
            ]
    found = written.agg(*asked).first()
    rows = found["rows"]
    if not rows:
        raise DataError("the DataFrame has no rows")
    problems: list[str] = []
    for index, name in enumerate(names):
        if found[f"null{index}"]:
            problems.append(f"'{name}' has no value in {found[f'null{index}']:,}")
        elif name in lists:
            size, of_vectors = lists[name].length, is_vector(frame, name)
            problems += _of_lists(
                written, found, index, name, size, of_vectors=of_vectors
            )
    if problems:
        raise DataError(
            f"{'; '.join(problems)} of {rows:,} rows. Fill in or drop them "
            "(df.na.fill, df.na.drop), pad lists to one length, and make sparse "
            "vectors dense (pyspark.ml.functions.vector_to_array)"
        )


@final
@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of a column, as Spark computes with them.

    Attributes:
      length: of a list.
      has_hole: whether a value of a list is missing.
    """

    length: Any
    has_hole: Any


def _lists(field: Any) -> _Lists | None:
    """Returns the lists of a column as it was written, packed or not."""
    from pyspark.sql import functions
    from pyspark.sql.types import ArrayType

    column = functions.col(quoted(field.name))
    if (dtype := field.metadata.get(DTYPE)) is not None:
        nbytes = functions.octet_length(column)
        width = np.dtype(dtype).itemsize
        return _Lists((nbytes / width).cast("int"), nbytes % width > 0)
    if not isinstance(field.dataType, ArrayType):
        return None
    is_hole: _OfColumn = lambda item: item.isNull()
    return _Lists(functions.size(column), functions.exists(column, is_hole))


def _of_lists(
    written: Any, facts: Any, index: int, name: str, size: Any, *, of_vectors: bool
) -> list[str]:
    """Returns what is wrong with a column of lists that are all there."""
    from pyspark.sql import functions

    if facts[f"holes{index}"]:
        return [f"'{name}' has lists with missing values in {facts[f'holes{index}']:,}"]
    if of_vectors and facts[f"empty{index}"]:
        return [f"'{name}' has sparse vectors in {facts[f'empty{index}']:,}"]
    if facts[f"least{index}"] == facts[f"most{index}"] > 0:
        return []
    counts = (
        written.groupBy(size.alias("length"))
        .count()
        .orderBy(functions.desc("count"))
        .limit(_SHOWN)
    )
    lengths = ", ".join(
        f"{row['length']} in {row['count']:,}" for row in counts.collect()
    )
    return [f"'{name}' has lists of different lengths, or empty ones ({lengths})"]
