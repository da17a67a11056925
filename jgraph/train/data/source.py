"""Data sources that workers read themselves: named here, opened where they are read."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, final

import jax
import numpy as np

from jgraph.client.cluster import Cluster
from jgraph.client.state.sources import SourceFacts, open_source_on
from jgraph.cluster.loop_messages import source_info, source_text
from jgraph.errors import ConfigError, SourceError
from jgraph.graph.ir import TaskName
from jgraph.runtime.data.sources import open_source
from jgraph.train.data.data import Data, Dataset, as_dataset
from jgraph.train.data.forms import Stream
from jgraph.view import markup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Features = Mapping[str, tuple[str, Sequence[int]]]
"""Name, and dtype and shape of one example: ``{"image": ("uint8", (28, 28))}``."""


@final
@dataclass(frozen=True)
class Source:
    """Data in files, or from a function, that every worker opens itself.

    Every worker must find the same files under the same path; for ``Federated`` each
    has files of its own there. ``{task}`` in a path stands for the worker's number. A
    batch is a dict of
    arrays by the name of the column or feature; a batch of a grain source has the
    structure of its examples. ``.npz`` arrays and grain sources are shuffled over all
    examples; the other files in blocks of a few batches: the order of the blocks, and
    the examples within each block. The formats other than ``.npz`` need the extra
    ``pip install 'jgraph[data]'`` where the files are read.

    Attributes:
      spec: the kind of the source and its arguments, as plain data.

    Raises:
      ConfigError: an argument that is neither text nor a number.
      SourceError: when the source is used: a file is missing or damaged, has other
        columns on another worker, or the reader of its format is not installed there.
      ForbiddenSourceError: when the source is used: a function that a server does not
        allow.

    Example:
      >>> Source.parquet("/data/train-*.parquet", columns=["x", "y"])
      Source(parquet, '/data/train-*.parquet')
    """

    spec: Mapping[str, Any]

    @classmethod
    def npz(cls, path: str) -> Self:
        """Returns the arrays of one file that ``numpy.savez`` wrote.

        Args:
          path: of the file. All arrays have one length along axis 0, the examples.

        Example:
          >>> Source.npz("/data/mnist.npz")
          Source(npz, '/data/mnist.npz')
        """
        return cls({"kind": "npz", "path": path})

    @classmethod
    def parquet(cls, path: str, *, columns: Sequence[str] | None = None) -> Self:
        """Returns the columns of Parquet files.

        Args:
          path: of the file, or a pattern of files such as ``/data/train-*.parquet``.
          columns: which to read; all if unset. A column has numbers, or lists of
            numbers that all have one length.
        """
        names = None if columns is None else list(columns)
        return cls({"kind": "parquet", "path": path, "columns": names})

    @classmethod
    def spark(
        cls,
        frame: "DataFrame",
        *,
        columns: Sequence[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Returns columns of a DataFrame, which Spark writes now as Parquet files.

        From then on they are files as any others: nothing of Spark is needed to train.
        Needs ``pip install 'jgraph[spark]'`` here and ``'jgraph[data]'`` where they are
        read.

        Args:
          frame: the DataFrame of Spark.
          columns: which; all if unset. A column has numbers or booleans, lists of them
            of one length, or dense vectors.
          directory: a new directory, under one path on all hosts of the workers and of
            the executors; the files stay. A temporary one if unset, which goes with
            this process: where all are on this machine.

        Raises:
          ConfigError: no DataFrame; no such column, or one of another type; a directory
            that will not do.
          DataError: no rows, rows without a value, lists of different lengths, sparse
            vectors; says how many, and leaves no file.

        Example:
          >>> where = "/mnt/share/train"
          >>> Source.spark(df, columns=["x"], directory=where)  # doctest: +SKIP
          Source(parquet, '/mnt/share/train/*.parquet')
        """
        from jgraph.train.spark.frame_files import write_frame

        path, names = write_frame(frame, columns, directory)
        return cls.parquet(f"{path}/*.parquet", columns=names)

    @classmethod
    def tfrecord(cls, path: str, features: Features) -> Self:
        """Returns the features of TFRecord files of ``tf.train.Example``.

        Args:
          path: of the file, or a pattern of files.
          features: dtype and shape of one example of each feature to read. A feature
            of bytes is taken as the raw bytes of its array, little-endian.

        Example:
          >>> Source.tfrecord("/data/*.tfrecord", {"image": ("uint8", (28, 28))})
          Source(tfrecord, '/data/*.tfrecord')
        """
        return cls({"kind": "tfrecord", "path": path, "features": _plain(features)})

    @classmethod
    def array_record(cls, path: str, features: Features) -> Self:
        """Returns the features of ArrayRecord files of ``tf.train.Example``.

        The arguments are those of ``tfrecord``.
        """
        plain = _plain(features)
        return cls({"kind": "array_record", "path": path, "features": plain})

    @classmethod
    def grain(cls, function: str, **arguments: Any) -> Self:
        """Returns the data that a function makes where it is read.

        Args:
          function: ``"package.module:function"``. It returns an object with a length
            that gives an example for a number, such as a grain data source or
            ``MapDataset``. The servers must allow the function: ``jgraph server
            --allow-source package.module:function``.
          **arguments: texts and numbers that the function is called with.
        """
        return cls({"kind": "grain", "function": function, "arguments": arguments})

    def __post_init__(self) -> None:
        try:
            json.dumps(self.spec)
        except TypeError as error:
            raise ConfigError(
                f"a data source is described by texts and numbers: {error}"
            ) from error

    def __repr__(self) -> str:
        what = self.spec.get("path", self.spec.get("function"))
        return f"Source({self.spec['kind']}, {what!r})"

    def spec_for(self) -> dict[str, Any]:
        """Returns what a task opens for a program with the types of this one."""
        # What 64-bit types become is the program's to say, and not the reader's.
        wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        return {**self.spec, **({"wide": True} if wide else {})}

    def open(self, cluster: Cluster | None, tasks: Sequence[TaskName] = ()) -> Dataset:
        """Opens the source on these tasks of the cluster (all workers), or here.

        Raises:
          SourceError: see the class; also what differs between two workers.
        """
        spec = self.spec_for()
        plain = json.dumps(spec, sort_keys=True)
        if cluster is None:
            reader = open_source(spec, ("*",))
            facts = SourceFacts(dict(reader.fields), reader.parts, reader.shuffle)
            return Dataset(*shown(facts), facts=facts, local=reader, source=plain)
        workers = list(tasks) or cluster.tasks("worker")
        worker_facts = [open_source_on(cluster, worker, plain) for worker in workers]
        for worker, other in zip(workers, worker_facts, strict=True):
            if other != worker_facts[0]:
                raise SourceError(
                    f"{self!r} is not the same on {workers[0]} and {worker}: "
                    f"{source_text(source_info(worker_facts[0]))} there, "
                    f"{source_text(source_info(other))} here; make the files alike",
                    task=worker,
                )
        return Dataset(*shown(worker_facts[0]), facts=worker_facts[0], source=plain)

    def _repr_html_(self) -> str:
        return markup.facts("Source", self.spec)


def as_source_or_dataset(
    data: Data | Source | Dataset,
    cluster: Cluster | None = None,
    *,
    finite: bool = False,
    batch_size: int | None = None,
    known: Dataset | None = None,
) -> Dataset:
    """Opens a source, or looks at other data as ``as_dataset`` does.

    Args:
      data: what the user gave.
      cluster: whose workers open a source; None: this process does.
      finite: refuse NaN and infinity.
      batch_size: examples of a batch, if the user said so.
      known: data that was used before; an iterator goes on where it is.
    """
    if isinstance(data, Source):
        return data.open(cluster)
    if (
        known is not None
        and isinstance(known.fed, Stream)
        and known.fed.iterable is data
    ):
        known.batch_size(batch_size)
        return known
    return as_dataset(data, finite=finite, batch_size=batch_size)


def _plain(features: Features) -> dict[str, Any]:
    return {
        name: [np.dtype(dtype).name, list(shape)]
        for name, (dtype, shape) in sorted(features.items())
    }


def shown(facts: SourceFacts) -> tuple[dict[str, Any], Any]:
    """Returns arrays of the right types without memory, and their structure."""
    examples = sum(part.examples for part in facts.parts)
    fields = {
        name: np.broadcast_to(np.zeros((), field.dtype), (examples, *field.shape))
        for name, field in sorted(facts.fields.items())
    }
    names = list(fields)
    if names == [""]:
        tree = jax.tree.structure(0)
    elif names == [f"{index:03d}" for index in range(len(names))]:
        tree = jax.tree.structure(tuple(names))
    else:
        tree = jax.tree.structure(dict.fromkeys(names, 0))
    return {
        f"data[{name!r}]" if name else "data": a for name, a in fields.items()
    }, tree
