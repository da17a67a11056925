"""Programs over the wire: they come back equal, or are refused as invalid."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, strategies as st

from jgraph.errors import InvalidProgramError
from jgraph.graph.ir import TaskName
from jgraph.graph.rows.rows import Layout
from jgraph.plan.program.nodes import (
    AggregateNode,
    ConstNode,
    FetchNode,
    JoinNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RouteNode,
    RowMean,
    Rows,
    SegmentNode,
    SendNode,
    SplitNode,
    UnpackNode,
    ValueType,
    WriteNode,
)
from jgraph.plan.program.program import Partition, Program, StoredVariable
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Tensor
from jgraph.rpc.wire.program_codec import decode_program, encode_program
from tests.support.wire_programs import DIGEST, F32, PS, programs, small


def same(ours: Program, theirs: Program) -> bool:
    """Equality that looks into the arrays of constants."""

    def plain(program: Program) -> object:
        return dataclasses.asdict(
            program,
            dict_factory=lambda items: [
                (
                    k,
                    (v.dtype.name, v.shape, v.tobytes())
                    if isinstance(v, np.ndarray)
                    else v,
                )
                for k, v in items
            ],
        )

    kinds = [
        [[type(n) for n in p.nodes] for p in program.partitions]
        for program in (ours, theirs)
    ]
    return plain(ours) == plain(theirs) and kinds[0] == kinds[1]


def over_the_wire(program: Program) -> Program:
    message, tensors = encode_program(program)
    return decode_program(pb.Program.FromString(message.SerializeToString()), tensors)


def test_small_program_comes_back_equal() -> None:
    assert same(over_the_wire(small()), small())


@given(programs())
def test_any_program_comes_back_equal(program: Program) -> None:
    assert same(over_the_wire(program), program)


def of_any_size(text: str) -> Program:
    """``small``, whose feed has a size with this text."""
    program, named = small(), dataclasses.replace(F32, symbols=(text,))
    driver, ps = program.partitions
    return dataclasses.replace(
        program,
        feeds=(("x", named),),
        partitions=(
            dataclasses.replace(driver, values=(named, F32)),
            dataclasses.replace(ps, values=(F32, named, F32, F32)),
        ),
    )


@pytest.mark.parametrize("text", ["b", "2*batch", "_n1"])
def test_sizes_that_are_names_come_back_equal(text: str) -> None:
    assert same(over_the_wire(of_any_size(text)), of_any_size(text))


@pytest.mark.parametrize("text", ["b + 1", "b*b", "0*b", "-b", "x" * 81, "b\n"])
def test_a_size_of_a_feed_that_nothing_can_tell_is_refused(text: str) -> None:
    with pytest.raises(InvalidProgramError, match="a size that nothing can tell"):
        over_the_wire(of_any_size(text))


def test_another_number_of_sizes_than_dimensions_is_refused() -> None:
    message, tensors = encode_program(small())
    message.partitions[0].values[0].symbols.extend(["b", "c", "d"])
    with pytest.raises(InvalidProgramError, match="has 3 symbols"):
        decode_program(message, tensors)


def test_partition_alone_comes_back_without_its_peers() -> None:
    program = dataclasses.replace(small(), partitions=small().partitions[1:])
    assert same(over_the_wire(program), program)


def with_ps_node(index: int, node: Node) -> Program:
    driver, ps = small().partitions
    nodes = list(ps.nodes)
    nodes[index] = node
    ps = dataclasses.replace(ps, nodes=tuple(nodes))
    return dataclasses.replace(small(), partitions=(driver, ps))


X9 = TaskName("/job:x/task:9")
SEGMENT = SegmentNode(DIGEST, (0,), (1,), (0, 1, 2), (3,), (1,), (2,))
WRONG: dict[str, Program] = {
    "node 2 (ReadNode) of /job:ps/task:0: variable 2 does not exist": with_ps_node(
        2, ReadNode((2,), (2,))
    ),
    "value 9 does not exist": with_ps_node(2, ReadNode((1,), (9,))),
    "value 1 does not exist or is made twice": with_ps_node(2, ReadNode((1,), (1,))),
    "value 3 is used before it is made": with_ps_node(
        3, dataclasses.replace(SEGMENT, inputs=(3,))
    ),
    "it waits for a later node": with_ps_node(
        3, dataclasses.replace(SEGMENT, after=(3,))
    ),
    "its code did not come": with_ps_node(
        3, dataclasses.replace(SEGMENT, digest="0" * 64)
    ),
    "donates an input that it does not have": with_ps_node(
        3, dataclasses.replace(SEGMENT, donate=(3,))
    ),
    "donated input 1 comes twice": with_ps_node(
        3, dataclasses.replace(SEGMENT, donate=(1, 1))
    ),
    "variable 0 comes twice": with_ps_node(3, dataclasses.replace(SEGMENT, reads=(0,))),
    "written variable 1 comes twice": with_ps_node(4, WriteNode((1, 1), (3, 3))),
    "it talks to its own task": with_ps_node(5, SendNode(PS, "y", (3,))),
    "is not the name of a task": with_ps_node(5, SendNode(TaskName("ps0"), "y", (3,))),
    "message 'y' from /job:ps/task:0 to /job:worker/task:0 is not": with_ps_node(
        5, SendNode(X9, "y", (3,))
    ),
    "only the driver /job:worker/task:0 has these": with_ps_node(4, FetchNode((3,))),
    "types [float32[2]] where [float32[3]] are due": with_ps_node(
        0, ConstNode(np.ones(3, np.float32), 0)
    ),
}


IDS = ValueType((3,), "int32")
RAGGED = ValueType((3,), "int32", ragged=True)
FOUND = ValueType((3, 2), "float32", ragged=True)
MERGED = ValueType((3, 2), "float32")
ROUTE = RouteNode(0, Layout((4, 4), "mod"), "colour", False, 1, (2, 3))
LOOKUP = LookupNode((Rows(0, 2), Rows(1, 3)), (4, 5))
MERGE, SPLIT = MergeNode((2, 3), (4, 5), 6), SplitNode(6, (2, 3), (7, 8))
UPDATE = SegmentNode(DIGEST, (), (), (7, 8), (), row_updates=LOOKUP.rows)


def rows_program(**changed: Node | ValueType) -> Program:
    """A task routes ids to its two tables, and updates their rows."""
    tables = tuple(
        StoredVariable(f"table{n}", ValueType((4, 2), "float32")) for n in range(2)
    )
    types = dict.fromkeys((2, 3), RAGGED) | dict.fromkeys((4, 5, 7, 8), FOUND)
    values = tuple(types.get(n, MERGED if n == 6 else IDS) for n in range(9))
    nodes: dict[str, Node] = {
        "const": ConstNode(np.zeros(3, np.int32), 0),
        "route": ROUTE,
        "lookup": LOOKUP,
        "merge": MERGE,
        "split": SPLIT,
        "update": UPDATE,
    }
    for name, new in changed.items():
        if isinstance(new, ValueType):
            at = int(name.removeprefix("value"))
            values = (*values[:at], new, *values[at + 1 :])
        else:
            nodes[name] = new
    partition = Partition(PS, values, tables, tuple(nodes.values()))
    return dataclasses.replace(small(), partitions=(partition,))


def test_program_of_rows_comes_back_equal() -> None:
    assert same(over_the_wire(rows_program()), rows_program())


def of_layout(*sizes: int, kind: str = "div") -> Program:
    return rows_program(route=dataclasses.replace(ROUTE, layout=Layout(sizes, kind)))


def row_mean(ids: ValueType, rows: ValueType, mean: RowMean) -> Program:
    stored = StoredVariable("ids", ids), StoredVariable("rows", rows)
    nodes = (AggregateNode((), (mean,)),)
    partition = Partition(PS, (), stored, nodes, gate="gate")
    return dataclasses.replace(small(), partitions=(partition,))


def test_means_of_rows_come_back_equal() -> None:
    program = row_mean(IDS, MERGED, RowMean(0, (1,)))
    assert same(over_the_wire(program), program)


WRONG |= {
    "(AggregateNode) of /job:ps/task:0: variable 2 does not exist": row_mean(
        IDS, MERGED, RowMean(0, (2,))
    ),
    "averaged variable 0 comes twice": row_mean(IDS, MERGED, RowMean(0, (0,))),
    "ids of type float32[3,2]": row_mean(MERGED, MERGED, RowMean(0, (1,))),
    "another number of rows than of ids": row_mean(
        IDS, ValueType((4, 2), "float32"), RowMean(0, (1,))
    ),
    "layout 'round'": of_layout(4, 4, kind="round"),
    "keys of int32[3]": of_layout(1, 1, kind="hash"),
    "a shard of negative size": of_layout(-1, 4),
    "more rows than int32 counts": of_layout(2**31, 4),
    "another number of shards": of_layout(8),
    "do not go round 2 shards": of_layout(3, 5, kind="mod"),
    "ids of type int32[3], which no route gives": rows_program(
        split=SPLIT, lookup=dataclasses.replace(LOOKUP, rows=(Rows(0, 0), Rows(1, 3)))
    ),
    "types [float32[3,2], ": rows_program(value4=MERGED),
    "[int32[3], int32[≤3], int32[≤3]] are due": rows_program(value3=IDS),
    "variable 7 does not exist": rows_program(
        update=dataclasses.replace(UPDATE, row_reads=(Rows(7, 2),))
    ),
    "rows of type float32[≤3,2]": rows_program(value6=FOUND),
    "variable 1 comes twice": rows_program(
        update=dataclasses.replace(UPDATE, row_reads=(Rows(1, 2),))
    ),
}

WRONG |= {
    "it packs variables that it does not have": with_ps_node(
        2, ReadNode((1,), (2,), (), (2,))
    ),
    "(SegmentNode) of /job:ps/task:0: it packs variables": with_ps_node(
        3, dataclasses.replace(SEGMENT, read_packs=(0,))
    ),
    "it makes no value": rows_program(split=UnpackNode(6, ())),
    "it joins no arrays": rows_program(split=JoinNode((), 7)),
    "it joins arrays whose size is not known": rows_program(split=JoinNode((4, 5), 7)),
    "types [float32[3,2]] where [float32[6,2]] are due": rows_program(
        split=JoinNode((6, 6), 7), value7=MERGED, value8=MERGED
    ),
    "it packs values that cannot lie in one array": rows_program(
        split=UnpackNode(6, (7, 8))
    ),
    "types [float32[3,2]] where [float32[32]] are due": rows_program(
        split=UnpackNode(6, (7, 8)), value7=MERGED, value8=MERGED
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_program_is_refused_naming_program_and_node(message: str) -> None:
    program = WRONG[message]
    with pytest.raises(InvalidProgramError) as caught:
        over_the_wire(program)
    assert message in str(caught.value)
    assert "program 'step'" in str(caught.value)


def test_changed_code_is_refused_before_it_is_looked_at() -> None:
    message, tensors = encode_program(small())
    changed = tensors[0].copy()
    changed[0] ^= 1
    with pytest.raises(InvalidProgramError, match="does not match its digest"):
        decode_program(message, (changed, *tensors[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors[:-1], "too few tensors"),
        (lambda tensors: (*tensors, tensors[0]), "1 tensors too many"),
        (lambda tensors: (tensors[0].reshape(2, 2), *tensors[1:]), "row of bytes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: Callable[..., tuple[Tensor, ...]],
    said: str,
) -> None:
    message, tensors = encode_program(small())
    with pytest.raises(InvalidProgramError, match=said):
        decode_program(message, change(tensors))


@pytest.mark.parametrize(
    ("shape", "dtype"), [([-1], "int8"), ([1 << 62, 4], "int8"), ([2], "object")]
)
def test_impossible_types_are_refused(shape: list[int], dtype: str) -> None:
    message, tensors = encode_program(small())
    message.partitions[0].values[0].CopyFrom(pb.TensorType(shape=shape, dtype=dtype))
    with pytest.raises(InvalidProgramError, match="a value has"):
        decode_program(message, tensors)


@given(programs(), st.data())
def test_mutated_program_is_refused_or_decoded(
    program: Program, data: st.DataObject
) -> None:
    message, tensors = encode_program(program)
    text = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.integers(0, 255))
    with suppress(DecodeError, InvalidProgramError):
        mutated = pb.Program.FromString(bytes(text))
        assert isinstance(decode_program(mutated, tensors), Program)
