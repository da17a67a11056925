"""Data sources opened by tasks on a client's request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from jgraph.client.connection import Connection
from jgraph.cluster.deadlines import COMPILE_S
from jgraph.coordination.data.slots import Part, Shuffle
from jgraph.errors import DataError, SourceError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of, frame
from jgraph.runtime.data.batches import Field


@final
@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a source has: fields of an example, parts, and how to shuffle it."""

    fields: Mapping[str, Field]
    parts: tuple[Part, ...]
    shuffle: Shuffle


def open_source_on(cluster: Connection, task: TaskName, source: str) -> SourceFacts:
    """Lets a task open a source, under its own text as the name of the data.

    Args:
      cluster: where the task is.
      task: a worker.
      source: JSON of what to open.

    Raises:
      SourceError: the task, which it names, cannot open it.
      DataError: there are no examples there.
      ForbiddenSourceError: it may not.
    """
    order = pb.OpenSource(name=source, source=source)
    try:
        reply = cluster.call(
            "OpenSource",
            frame(open_source=order),
            timeout_s=COMPILE_S,  # an index of many files may take minutes
            to=cluster.spec.address(task),
        )
    except (SourceError, DataError) as error:
        # Each opens the same path, and what lies there may be another on each host.
        where = f"on {task}: {error.message}"
        raise type(error)(where, **{**error.details, "task": task}) from error
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
