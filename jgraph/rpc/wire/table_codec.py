"""Codec of hash-table specifications: to their message, and back."""

from jgraph.errors import ConfigError, InvalidProgramError
from jgraph.graph.rows.hash_spec import Admission, Column, HashSpec, Initial
from jgraph.plan.program.program import StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.wire.codec import check_type


def table_to(spec: HashSpec) -> pb.HashSpec:
    """Returns the message of a hash table."""
    return pb.HashSpec(
        name=spec.name,
        columns=[
            pb.HashColumn(
                name=c.name,
                width=c.width,
                dtype=c.dtype,
                kind=c.initial.kind,
                scale=c.initial.scale,
                seed=c.initial.seed,
            )
            for c in spec.columns
        ],
        capacity_bytes=spec.capacity_bytes,
        sightings=spec.admission.sightings,
        probability=spec.admission.probability,
        eviction=spec.eviction,
        ttl=spec.ttl,
    )


def table_from(message: pb.HashSpec) -> HashSpec:
    """Returns the hash table of a message.

    Raises:
      InvalidProgramError: there can be no such table.
    """
    for column in message.columns:
        check_type(pb.TensorType(dtype=column.dtype, shape=[column.width]), "a column")
    try:
        return HashSpec(
            name=message.name,
            columns=tuple(map(_column_from, message.columns)),
            capacity_bytes=message.capacity_bytes,
            admission=Admission(message.sightings, message.probability),
            eviction=message.eviction,  # type: ignore[arg-type]  # HashSpec checks it
            ttl=message.ttl,
        )
    except ConfigError as error:
        raise InvalidProgramError(error.message) from None


def check_table(variable: StoredVariable) -> None:
    """Checks that a variable is a column of its hash table.

    Raises:
      InvalidProgramError: it is none, or of another type.
    """
    if variable.table is None:
        return
    type_ = variable.type
    for column in variable.table.columns:
        shape = (1, column.width) if column.width else (1,)
        same = (shape, column.dtype) == (type_.shape, type_.dtype)
        if column.name == variable.name and same:
            return
    raise InvalidProgramError(
        f"'{variable.name[:80]}' of type {type_} is no column of the hash table "
        f"'{variable.table.name[:80]}'"
    )


def _column_from(message: pb.HashColumn) -> Column:
    kind: str = message.kind
    initial = Initial(kind, message.scale, message.seed)  # type: ignore[arg-type]
    return Column(message.name, message.width, message.dtype, initial)
