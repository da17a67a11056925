"""Data source readers of a task: npz, Parquet, records, and allowed functions."""

import fnmatch
import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from jgraph.coordination.data.slots import Part, Rows, Shuffle
from jgraph.errors import ForbiddenSourceError, JGError, SourceError
from jgraph.runtime.data.batches import Array, ArrayReader, Field, Reader
from jgraph.runtime.data.client_rounds import RoundReader
from jgraph.runtime.data.jax_types import as_jax_type
from jgraph.runtime.data.parquet_files import ParquetReader
from jgraph.runtime.data.record_files import (
    ArrayRecordFile,
    RecordReader,
    TFRecordFile,
)


def open_source(
    spec: Mapping[str, Any], allowed: Sequence[str], index: int | None = None
) -> Reader:
    """Opens a source.

    Args:
      spec: ``kind`` and what that needs; see ``jgraph.train.data.source``. ``wide``:
        the program has 64-bit types, whatever this task has by itself.
      allowed: patterns of import paths that may be called.
      index: of the task, for which ``{task}`` in a path stands; None: nothing does.

    Raises:
      SourceError: no such file, a damaged one, or files of different schemas.
      ForbiddenSourceError: an import path that no pattern matches.
    """
    if missing := [field for field in _fields(spec) if field not in spec]:
        raise SourceError(f"a data source comes without its '{missing[0]}'")
    wide = bool(spec.get("wide"))
    if index is not None and "{task}" in str(spec.get("path")):
        spec = {**spec, "path": str(spec["path"]).replace("{task}", str(index))}
    match spec["kind"]:
        case "rounds":
            return RoundReader(
                open_source(spec["of"], allowed, index),
                epochs=int(spec["epochs"]),
                batch_size=int(spec["batch_size"]),
                steps=int(spec["steps"]),
                seed=int(spec["seed"]) + (index or 0),
                each=int(spec["each"]),
            )
        case "npz":
            return ArrayReader(_npz(str(spec["path"]), wide))
        case "parquet":
            return ParquetReader(_files(spec["path"]), spec["columns"], wide)
        case "tfrecord" | "array_record" as kind:
            files = _files(spec["path"])
            open_file = TFRecordFile if kind == "tfrecord" else ArrayRecordFile
            features = {
                name: Field(np.dtype(dtype), tuple(shape))
                for name, (dtype, shape) in spec["features"].items()
            }
            return RecordReader(files, [open_file(file) for file in files], features)
        case "grain":
            path = str(spec["function"])
            reader = _call(path, spec["arguments"], allowed)
            return IndexedReader(reader, path, wide)
        case kind:
            raise SourceError(f"'{kind}' is no kind of data source that this task has")


def _fields(spec: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = {
        "npz": ("path",),
        "parquet": ("path", "columns"),
        "tfrecord": ("path", "features"),
        "array_record": ("path", "features"),
        "grain": ("function", "arguments"),
        "rounds": ("of", "epochs", "batch_size", "steps", "seed", "each"),
    }
    return ("kind", *kinds.get(str(spec.get("kind")), ()))


@final
class IndexedReader:
    """Anything with a length that gives an example by number, as grain's sources do.

    An example is a dict or a tuple of arrays, or one array.

    Args:
      source: the data source.
      name: what to call it in messages.
      wide: keep 64-bit types.

    Raises:
      SourceError: no length, no example, or an example of something else.
    """

    shuffle: Shuffle = "examples"

    def __init__(self, source: Any, name: str, wide: bool) -> None:
        self._source, self._name, self._wide = source, name, wide
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise SourceError(
                f"{name} returned a {type(source).__name__}; return something with a "
                "length and examples by number, such as a grain data source"
            )
        if not len(source):
            raise SourceError(f"{name} returned a source without examples")
        self.parts = (Part(name, len(source)),)
        example = self._example(0)
        self.fields: Mapping[str, Field] = {
            name: Field(array.dtype, array.shape) for name, array in example.items()
        }

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``."""
        examples = [self._example(row) for row in rows.tolist()]
        for row, example in zip(rows.tolist(), examples, strict=True):
            found = {n: Field(a.dtype, a.shape) for n, a in example.items()}
            if found != self.fields:
                raise SourceError(
                    f"example {row} of {self._name} has {_listed(found)}; the first "
                    f"one has {_listed(self.fields)}"
                )
        return {name: np.stack([e[name] for e in examples]) for name in self.fields}

    def _example(self, row: int) -> dict[str, Array]:
        example = self._source[row]
        if isinstance(example, Mapping):
            items = {str(name): example[name] for name in sorted(example)}
        elif isinstance(example, tuple | list):
            items = {f"{index:03d}": value for index, value in enumerate(example)}
        else:
            items = {"": example}
        where = f"example {row} of {self._name}"
        return {
            n: as_jax_type(np.asarray(v), where, self._wide) for n, v in items.items()
        }


def _npz(path: str, wide: bool) -> dict[str, Array]:
    (file,) = _files(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {
                name: as_jax_type(archive[name], f"'{name}' of {file}", wide)
                for name in sorted(archive.files)
            }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, JGError):
            raise
        raise SourceError(f"{file} is no .npz file: {error}") from error


def _files(pattern: str) -> list[Path]:
    found = sorted(glob.glob(str(Path(pattern).expanduser())))
    if not found and "{task}" in pattern:
        raise SourceError(
            f"there is no file {pattern} in this process, which is no worker, and "
            "{task} stands for the number of one; name the file of one worker, or give "
            "arrays"
        )
    if not found:
        raise SourceError(
            f"there is no file {pattern} where the data is read; give a path or a "
            "pattern that every worker can open"
        )
    return [Path(path) for path in found]


def _call(path: str, arguments: Mapping[str, Any], allowed: Sequence[str]) -> Any:
    if not any(fnmatch.fnmatchcase(path, pattern) for pattern in allowed):
        raise ForbiddenSourceError(
            f"this server may not call '{path}' for data; allow it when the server is "
            f"started: jgraph server --allow-source '{path}'",
            path=path,
        )
    from importlib import import_module

    module, _, function = path.partition(":")
    try:
        return getattr(import_module(module), function)(**arguments)
    except JGError:
        raise
    except Exception as error:
        raise SourceError(
            f"'{path}' cannot be called for data: {type(error).__name__}: {error}",
            path=path,
        ) from error


def _listed(fields: Mapping[str, Field]) -> str:
    return ", ".join(f"{name or 'array'} {field}" for name, field in fields.items())
