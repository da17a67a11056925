"""Means of contributions: of small variables on one flat array, with the same bits."""

from dataclasses import replace

import numpy as np
import pytest

from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import AggregateNode, ValueType
from jgraph.plan.program.program import Partition, StoredVariable
from jgraph.plan.program.row_values import cuts_of, unpacked
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.gate import Chosen, averages, key_of
from jgraph.runtime.loaded import load_partition
from jgraph.runtime.node_work import repeat
from jgraph.runtime.store.groups import VariableGroup
from jgraph.runtime.store.store import VariableStore

PS = TaskName("/job:ps/task:0")
SHAPES = [(3,), (2, 5), (), (17,), (4, 4, 4), (1,)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("contributions", [1, 2, 3])
def test_a_mean_on_a_flat_array_has_the_bits_of_means_alone(
    dtype: str, contributions: int
) -> None:
    types = [ValueType(shape, dtype) for shape in SHAPES]
    variables = [StoredVariable(f"mean/{n}", type_) for n, type_ in enumerate(types)]
    partition = Partition(PS, (), tuple(variables), ())
    order = [4, 1, 0, 3, 2, 5]  # those of the flat array first, as a segment has them
    node = AggregateNode(tuple(range(len(variables))))
    rng = np.random.default_rng(0)
    given = [
        {
            key_of(v): (100 * rng.normal(size=v.type.shape)).astype(v.type.np_dtype)
            for v in variables
        }
        for _ in range(contributions)
    ]
    chosen = Chosen(given)
    alone = averages(partition, node, VariableGroup(variables), chosen)
    group = VariableGroup([variables[n] for n in order], [4])
    flat, *others = averages(partition, node, group, chosen)
    together = [*unpacked(flat, cuts_of([types[n] for n in order[:4]])), *others]
    for n, value in zip(order, together, strict=True):
        assert value.dtype == alone[n].dtype
        assert value.tobytes() == np.ascontiguousarray(alone[n]).tobytes()
    assert flat.ctypes.data % 64 == 0  # JAX takes it without a copy


def test_a_part_of_what_is_averaged_may_have_come_as_a_sum() -> None:
    """Of one variable of a flat array, and of another one; of three contributions."""
    variables = [
        StoredVariable(f"mean/{n}", ValueType((2,), "float32")) for n in range(4)
    ]
    partition = Partition(PS, (), tuple(variables), ())
    node = AggregateNode(tuple(range(4)))
    whole = [variables[1], variables[3]]
    parts = [[np.array([value, 2 * value], np.float32)] for value in (6, 9)]
    chosen = Chosen(
        [
            {key_of(v): np.full(2, n, np.float32) for v in variables if v not in whole}
            for n in range(3)
        ],
        {key_of(v): part for v, part in zip(whole, parts, strict=True)},
    )
    flat, *others = averages(partition, node, VariableGroup(variables, [2]), chosen)
    assert unpacked(flat, cuts_of([v.type for v in variables[:2]]))[0].tolist() == [
        1,
        1,
    ]
    assert unpacked(flat, cuts_of([v.type for v in variables[:2]]))[1].tolist() == [
        2,
        4,
    ]
    assert [other.tolist() for other in others] == [[1, 1], [3, 6]]


def test_a_copy_takes_the_means_that_were_made_on_a_flat_array() -> None:
    types = [ValueType(shape, "float32") for shape in SHAPES]
    variables = [StoredVariable(f"mean/{n}", type_) for n, type_ in enumerate(types)]
    node = AggregateNode(tuple(range(len(variables))))
    partition = Partition(PS, (), tuple(variables), (node,))
    group, store = VariableGroup(variables, [4]), VariableStore(PS)
    given = [
        {key_of(v): np.full(v.type.shape, n, np.float32) for v in variables}
        for n in (1, 2)
    ]
    loaded = load_partition(partition, (), CompileCache())
    loaded = replace(loaded, variables=((group, VariableGroup([])),))
    means = averages(partition, node, group, Chosen(given))
    for _ in range(2):  # makes the variables, then writes those that are there
        repeat(loaded, 0, means, store)
        for value, type_ in zip(store.read(variables), types, strict=True):
            np.testing.assert_array_equal(value, np.full(type_.shape, 1.5))
    with pytest.raises(MalformedMessageError, match="2 arrays for a node that takes 3"):
        repeat(loaded, 0, means[1:], store)
