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
from jgraph.runtime.gate import averages, key_of
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
    chosen = [
        {
            key_of(v): (100 * rng.normal(size=v.type.shape)).astype(v.type.np_dtype)
            for v in variables
        }
        for _ in range(contributions)
    ]
    alone = averages(partition, node, VariableGroup(variables), chosen)
    group = VariableGroup([variables[n] for n in order], [4])
    flat, *others = averages(partition, node, group, chosen)
    together = [*unpacked(flat, cuts_of([types[n] for n in order[:4]])), *others]
    for n, value in zip(order, together, strict=True):
        assert value.dtype == alone[n].dtype
        assert value.tobytes() == np.ascontiguousarray(alone[n]).tobytes()
    assert flat.ctypes.data % 64 == 0  # JAX takes it without a copy


def test_a_copy_takes_the_means_that_were_made_on_a_flat_array() -> None:
    types = [ValueType(shape, "float32") for shape in SHAPES]
    variables = [StoredVariable(f"mean/{n}", type_) for n, type_ in enumerate(types)]
    node = AggregateNode(tuple(range(len(variables))))
    partition = Partition(PS, (), tuple(variables), (node,))
    group, store = VariableGroup(variables, [4]), VariableStore(PS)
    chosen = [
        {key_of(v): np.full(v.type.shape, n, np.float32) for v in variables}
        for n in (1, 2)
    ]
    loaded = load_partition(partition, (), CompileCache())
    loaded = replace(loaded, variables=((group, VariableGroup([])),))
    means = averages(partition, node, group, chosen)
    for _ in range(2):  # makes the variables, then writes those that are there
        repeat(loaded, 0, means, store)
        for value, type_ in zip(store.read(variables), types, strict=True):
            np.testing.assert_array_equal(value, np.full(type_.shape, 1.5))
    with pytest.raises(MalformedMessageError, match="2 arrays for a node that takes 3"):
        repeat(loaded, 0, means[1:], store)
