"""What the tests of the plan layer share: run a graph both ways, check a program."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgraph as jg
from jgraph.graph.graph import Graph, eval_graph
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.trace import trace
from jgraph.plan.plan import Plan, plan
from jgraph.plan.program.nodes import (
    RecvNode,
    SegmentNode,
    SendNode,
    inputs_of,
    outputs_of,
)
from jgraph.plan.program.program import Partition, Program
from jgraph.plan.program.types import from_plain, to_plain
from tests.support.graph_interpreter import Compiled, run_program

PS = [TaskName("/job:ps/task:0"), TaskName("/job:ps/task:1")]
WORKERS = [TaskName(f"/job:worker/task:{i}") for i in range(4)]
TASKS = PS + WORKERS
DRIVER = WORKERS[0]

# Unoptimised code compiles in a third of the time.
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Nothing is then computed in another way because its neighbours are elsewhere.
EXACT = {**FAST, "xla_disable_hlo_passes": "fusion,algsimp"}

Values = dict[str, Any]


def variable(name: str, value: Any, task: str = PS[0]) -> jg.Variable:
    return jg.Variable(name, jnp.asarray(value), device=task)


def vector(n: int = 12) -> Any:
    return np.linspace(-1, 1, n, dtype=np.float32)


def graph_of(
    fn: Callable[..., Any], *args: Any, variables: Sequence[jg.Variable] | None = None
) -> Graph:
    """Returns the graph of ``fn`` on ``args``."""
    return trace(fn, *args, variables=variables)[0]


def descended(loss: Callable[[list[Any]], Any], weights: Sequence[jg.Variable]) -> Any:
    """Takes a step of gradient descent; returns the loss before it."""
    values = [w[...] for w in weights]
    found, gradients = jax.value_and_grad(loss)(values)
    for w, value, gradient in zip(weights, values, gradients, strict=True):
        w[...] = value - 0.1 * gradient
    return found


def initial_values(variables: Sequence[jg.Variable]) -> Values:
    """Returns the initial value of each variable by name."""
    values = {}
    for variable in variables:
        assert variable.init is not None
        values[variable.name] = variable.init()
    return values


def reference(
    graph: Graph, values: Values, args: Any, options: dict[str, Any]
) -> tuple[list[Any], Values]:
    """Returns (fetches, new values of the variables), as one jit gives them."""
    before = [values[v.name] for v in graph.variables]
    run = jax.jit(lambda v, f: eval_graph(graph, v, f), compiler_options=options)
    fetches, after = run(before, jax.tree.leaves(args))
    names = [v.name for v in graph.variables]
    return fetches, dict(zip(names, after, strict=True))


def simulated(
    planned: Plan,
    values: Values,
    args: Any,
    options: dict[str, Any],
    compiled: Compiled | None = None,
) -> tuple[list[Any], Values]:
    """Returns (fetches, new values of the variables), as the program gives them."""
    graph, program = planned.graph, planned.program
    store = {
        (v.container, v.name): np.asarray(to_plain(jax.numpy.asarray(values[v.name])))
        for v in graph.variables
    }
    leaves = [
        np.asarray(to_plain(x)) for x in map(jax.numpy.asarray, jax.tree.leaves(args))
    ]
    feeds = {f.name: x for f, x in zip(graph.feeds, leaves, strict=True)}
    fetched = run_program(program, store, feeds, compiled, options)
    fetches = [
        from_plain(x, atom.aval)
        for x, atom in zip(fetched, graph.jaxpr.outvars, strict=True)
    ]
    after = {
        v.name: from_plain(store[v.container, v.name], v.aval) for v in graph.variables
    }
    return fetches, after


def assert_same(got: Any, wanted: Any, *, exact: bool) -> None:
    """Compares pytrees of arrays; if not exact, within 1e-6 of each array's largest.

    Or within 1e-7 of the largest of all: a gradient that is zero has rounding errors.
    """
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    paths = jax.tree_util.tree_flatten_with_path(wanted)[0]
    plain = [np.asarray(to_plain(want)) for _, want in paths]
    floats = [b for b in plain if np.issubdtype(b.dtype, np.floating)]
    most = max((float(np.max(np.abs(b), initial=0.0)) for b in floats), default=0.0)
    for (path, want), have in zip(paths, jax.tree.leaves(got), strict=True):
        a, b = np.asarray(to_plain(have)), np.asarray(to_plain(want))
        name = jax.tree_util.keystr(path)
        if exact or not np.issubdtype(b.dtype, np.floating):
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            limit = max(1e-6 * float(np.max(np.abs(b), initial=1e-30)), 1e-7 * most)
            np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=name)


def check_plan(
    fn: Callable[..., Any],
    *args: Any,
    variables: Sequence[jg.Variable] = (),
    tasks: Sequence[TaskName] = TASKS,
    exact: bool = True,
    **kwargs: Any,
) -> Plan:
    """Plans ``fn``, checks the program, and runs it against one jit."""
    graph = graph_of(fn, *args, variables=variables or None)
    planned = plan(graph, tasks=tasks, driver=kwargs.pop("driver", DRIVER), **kwargs)
    check_program(planned.program)
    values = initial_values(variables)
    options = EXACT if exact else FAST
    wanted = reference(graph, values, args, options)
    assert_same(simulated(planned, values, args, options), wanted, exact=exact)
    return planned


def check_program(program: Program) -> None:
    """Asserts what every program must be, whatever it computes."""
    digests = [s.digest for s in program.segments]
    assert len(set(digests)) == len(digests)
    for code in program.segments:
        assert hashlib.sha256(code.exported).hexdigest() == code.digest
    sends: dict[tuple[str, str, str], list[str]] = {}
    recvs: dict[tuple[str, str, str], list[str]] = {}
    for partition in program.partitions:
        _check_partition(partition, set(digests))
        for node in partition.nodes:
            if isinstance(node, SendNode):
                types = [str(partition.values[v]) for v in node.values]
                key = (partition.task, node.dst, node.key)
                assert key not in sends
                sends[key] = types
            elif isinstance(node, RecvNode):
                types = [str(partition.values[v]) for v in node.outs]
                recvs[node.src, partition.task, node.key] = types
    assert sends == recvs


def _check_partition(partition: Partition, digests: set[str]) -> None:
    sent = Counter(
        (v, n.dst) for n in partition.nodes if isinstance(n, SendNode) for v in n.values
    )
    assert all(count == 1 for count in sent.values()), "a value is sent twice"
    known: set[int] = set()
    for position, node in enumerate(partition.nodes):
        assert known.issuperset(inputs_of(node))
        assert all(n < position for n in getattr(node, "after", ()))
        made = outputs_of(node)
        assert not known & set(made)
        known.update(made)
        if isinstance(node, SegmentNode):
            assert node.digest in digests
    uses = Counter(v for n in partition.nodes for v in inputs_of(n))
    for node in partition.nodes:
        if isinstance(node, SegmentNode):
            assert all(uses[node.inputs[p]] == 1 for p in node.donate)


def segments_per_task(planned: Plan) -> Mapping[TaskName, int]:
    """Returns how many segments each task runs."""
    return Counter(s.task for s in planned.segments)


def nodes_of(planned: Plan, task: TaskName, kind: type[Any]) -> list[Any]:
    """Returns the nodes of one kind in a task's partition."""
    return [n for n in planned.program.partition(task).nodes if isinstance(n, kind)]
