"""Record files (TFRecord, ArrayRecord): record boundaries, checksums, examples."""

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, final

import numpy as np

from jgraph.coordination.data.slots import Part, Rows, Shuffle
from jgraph.errors import SourceError
from jgraph.runtime.data.batches import Array, Field

_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")


class RecordFile(Protocol):
    """A file of records of bytes."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, rows: Sequence[int]) -> Sequence[bytes]:
        """Returns these records."""


@final
class TFRecordFile:
    """A file in TensorFlow's record format (``tensorflow/core/lib/io/record_writer``).

    A record is its length (uint64), the masked CRC-32C of that, its bytes, and their
    masked CRC-32C, all little endian. Opening reads the lengths only.

    Raises:
      SourceError: the file ends within a record, or a checksum is another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._spans = self._index(file)

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, rows: Sequence[int]) -> Sequence[bytes]:
        """See ``RecordFile.read``."""
        with self._path.open("rb") as file:
            return [self._record(file, row) for row in rows]

    def _index(self, file: BinaryIO) -> list[tuple[int, int]]:
        """Returns where the bytes of each record begin, and how many there are."""
        size = self._path.stat().st_size
        spans: list[tuple[int, int]] = []
        place = 0
        while place < size:
            file.seek(place)
            head = file.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                raise self._damaged(len(spans), "the file ends within it")
            length, crc = _LENGTH.unpack(head)
            if crc != masked_crc(head[:8]):
                raise self._damaged(len(spans), "its length has a wrong checksum")
            spans.append((place + _LENGTH.size, length))
            place += _LENGTH.size + length + _CRC.size
        if place > size:
            raise self._damaged(len(spans) - 1, "the file ends within it")
        return spans

    def _record(self, file: BinaryIO, row: int) -> bytes:
        place, length = self._spans[row]
        file.seek(place)
        record, crc = file.read(length), file.read(_CRC.size)
        if crc != _CRC.pack(masked_crc(record)):
            raise self._damaged(row, "its bytes have a wrong checksum")
        return record

    def _damaged(self, row: int, how: str) -> SourceError:
        return SourceError(
            f"record {row} of {self._path} is damaged: {how}; write the file again",
            file=str(self._path),
            record=row,
        )


@final
class ArrayRecordFile:
    """A file in the ArrayRecord format; needs ``pip install 'jgraph[data]'``."""

    def __init__(self, path: Path) -> None:
        module = needs("array_record.python.array_record_module", "ArrayRecord")
        self._reader = module.ArrayRecordReader(str(path))

    def __len__(self) -> int:
        return int(self._reader.num_records())

    def read(self, rows: Sequence[int]) -> Sequence[bytes]:
        """See ``RecordFile.read``."""
        found: Sequence[bytes] = self._reader.read([int(row) for row in rows])
        return found


@final
class RecordReader:
    """Files of records, each a ``tf.train.Example``.

    Args:
      files: path of each.
      opened: the files.
      features: dtype and shape of one example, by name. A feature of bytes is taken as
        the raw little-endian bytes of its array.

    Raises:
      SourceError: the first record has not these features.
    """

    shuffle: Shuffle = "slots"

    def __init__(
        self,
        files: Sequence[Path],
        opened: Sequence[RecordFile],
        features: Mapping[str, Field],
    ) -> None:
        self._files = files
        self._opened = opened
        self.fields: Mapping[str, Field] = dict(features)
        self.parts = tuple(
            Part(str(path), len(file)) for path, file in zip(files, opened, strict=True)
        )
        first = next((i for i, part in enumerate(self.parts) if part.examples), None)
        if first is not None:
            self.read(first, np.zeros(1, np.int64))

    def read(self, part: int, rows: Rows) -> dict[str, Array]:
        """See ``Reader.read``."""
        records = self._opened[part].read(rows.tolist())
        examples = [
            self._decode(record, part, row)
            for record, row in zip(records, rows.tolist(), strict=True)
        ]
        return {n: np.stack([e[n] for e in examples]) for n in self.fields}

    def _decode(self, record: bytes, part: int, row: int) -> dict[str, Array]:
        where = f"record {row} of {self._files[part]}"
        try:
            features = example_type().FromString(record).features.feature
        except ValueError as error:
            raise SourceError(f"{where} is no tf.train.Example: {error}") from error
        return {
            name: _array(features, name, field, where)
            for name, field in self.fields.items()
        }


def masked_crc(data: bytes) -> int:
    """Returns TensorFlow's masked CRC-32C of ``data``."""
    crc = int(needs("google_crc32c", "TFRecord").value(data))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def needs(module: str, what: str) -> Any:
    """Imports a module of the extra ``data``.

    Raises:
      SourceError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise SourceError(
            f"{what} files need the module {module}, which is not installed where the "
            "data is read; type there: pip install 'jgraph[data]'"
        ) from error


@cache
def example_type() -> Any:
    """Returns the message class ``tf.train.Example``, wire compatible."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="jgraph_example.proto", package="jgraph.example", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, bool, str]) -> Any:
        new = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            added = new.field.add(name=field, number=number, type=kind, label=label)
            if of:
                added.type_name = of
        return new

    whole, package = kinds.TYPE_MESSAGE, ".jgraph.example."
    message("BytesList", ("value", 1, kinds.TYPE_BYTES, True, ""))
    message("FloatList", ("value", 1, kinds.TYPE_FLOAT, True, ""))
    message("Int64List", ("value", 1, kinds.TYPE_INT64, True, ""))
    lists = ("BytesList", "FloatList", "Int64List")
    feature = message(
        "Feature",
        *(
            (f"{name[:-4].lower()}_list", number, whole, False, package + name)
            for number, name in enumerate(lists, 1)
        ),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message(
        "Features", ("feature", 1, whole, True, f"{package}Features.FeatureEntry")
    )
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(
        name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL
    )
    entry.field.add(
        name="value",
        number=2,
        type=whole,
        label=kinds.LABEL_OPTIONAL,
        type_name=f"{package}Feature",
    )
    message("Example", ("features", 1, whole, False, f"{package}Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("jgraph.example.Example")
    return message_factory.GetMessageClass(found)


def _array(features: Any, name: str, field: Field, where: str) -> Array:
    if name not in features:
        raise SourceError(
            f"{where} has no feature '{name}'; it has {', '.join(sorted(features))}"
        )
    feature = features[name]
    match feature.WhichOneof("kind"):
        case "bytes_list":
            raw = b"".join(feature.bytes_list.value)
            whole = len(raw) % field.dtype.itemsize == 0
            array = np.frombuffer(raw, field.dtype if whole else np.uint8)
        case "float_list":
            array = np.array(feature.float_list.value, np.float32)
        case _:
            array = np.array(feature.int64_list.value, np.int64)
    count = int(np.prod(field.shape, dtype=np.int64))
    if array.size != count:
        raise SourceError(
            f"feature '{name}' of {where} has {array.size} values; {field} has {count}"
        )
    return array.astype(field.dtype).reshape(field.shape)
