"""Data sources opened by tasks on a client's request."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from jgraph.cluster.calls import COMPILE_S
from jgraph.cluster.connection import Connection
from jgraph.coordination.slots import Part, Shuffle
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.runtime.batches import Field, Reader


@final
@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a source has: fields of an example, parts, and how to shuffle it."""

    fields: Mapping[str, Field]
    parts: tuple[Part, ...]
    shuffle: Shuffle


def allowed_sources_in(path: Path) -> list[str]:
    """Returns the import paths that a cluster file lets data come from.

    Args:
      path: a file that ``ClusterSpec.from_toml`` has taken.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("sources")
    return list(table["allow"]) if table else []


def open_source_on(cluster: Connection, task: TaskName, source: str) -> SourceFacts:
    """Lets a task open a source, under its own text as the name of the data.

    Args:
      cluster: where the task is.
      task: a worker.
      source: JSON of what to open.

    Raises:
      SourceError: the task cannot open it.
      ForbiddenSourceError: it may not.
    """
    order = pb.OpenSource(name=source, source=source)
    reply = cluster.call(
        "OpenSource",
        frame(open_source=order),
        timeout_s=COMPILE_S,  # an index of many files may take minutes
        to=cluster.spec.address(task),
    )
    body = body_of(reply)
    return SourceFacts(
        {
            field.name: Field(np.dtype(field.type.dtype), tuple(field.type.shape))
            for field in body.fields
        },
        tuple(
            Part(name, examples)
            for name, examples in zip(body.parts, body.examples, strict=True)
        ),
        body.shuffle,
    )


def source_info(reader: Reader) -> pb.SourceInfo:
    """Returns the answer of a task that has opened a source."""
    return pb.SourceInfo(
        fields=[
            pb.SourceField(
                name=name,
                type=pb.TensorType(dtype=field.dtype.name, shape=field.shape),
            )
            for name, field in sorted(reader.fields.items())
        ],
        parts=[part.name for part in reader.parts],
        examples=[part.examples for part in reader.parts],
        shuffle=reader.shuffle,
    )
