from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph.client.cluster import Cluster, connect
from jgraph.client.session import Session
from jgraph.client.values import assign_initial, in_pieces
from jgraph.errors import ConfigError, TaskLostError
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Variable
from jgraph.plan.sharding.partitioner import fixed_size_partitioner
from tests.support.servers import Servers


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 40))
def test_pieces_keep_the_order_and_stay_small(sizes: list[int], limit: int) -> None:
    variables = [
        Variable(f"v{i}", ((size,), jnp.float32, None)) for i, size in enumerate(sizes)
    ]
    pieces = in_pieces(variables, limit)
    assert [v for piece in pieces for v in piece] == variables
    for piece in pieces:
        assert len(piece) == 1 or sum(4 * v.shape[0] for v in piece) <= limit
    for one, following in pairwise(pieces):
        together = sum(4 * v.shape[0] for v in [*one, following[0]])
        assert together > limit


def test_state_of_many_pieces_is_written_and_read_whole(session: Session) -> None:
    elements = 3 << 20  # 12 MB each: several pieces
    variables = [
        Variable(f"big{i}", ((elements,), jnp.float32, jnp.zeros), device="/job:ps")
        for i in range(8)
    ]
    session.initialize(variables)
    assert len(set(session.variable_tasks(variables).values())) == 2
    session.write(
        {v: np.full(elements, i, np.float32) for i, v in enumerate(variables)}
    )
    values = session.read(variables)
    assert [values[v.name][-1] for v in variables] == list(range(8))


def test_who_reads_the_same_again_needs_no_other_plan(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (Variable(n, jnp.zeros(2), device="/job:ps") for n in ("one", "two"))
    traced = []

    def note(*args: Any, **kwargs: Any) -> Any:
        traced.append([v.name for v in kwargs["variables"]])
        return trace(*args, **kwargs)

    session.initialize([one, two])
    monkeypatch.setattr("jgraph.client.values.trace", note)
    for number in (1.0, 2.0):
        session.write({one: np.full(2, number, np.float32)})
        assert session.read([one, two])["one"].tolist() == [number] * 2
        session.read([two])
    reads = [names for names in traced if names != ["one"]]
    assert reads == [["one", "two"], ["two"]]


def test_a_variable_that_was_made_anew_elsewhere_is_read_there(
    session: Session, cluster: Cluster
) -> None:
    for task in cluster.tasks("ps"):
        there = Variable("there", jnp.zeros(2), device=task)
        session.initialize([there])
        session.write({there: np.ones(2, np.float32)})
        assert session.read([there])["there"].tolist() == [1, 1]
        session.reset()


def test_given_values_of_equal_elements_come_to_tasks_bit_by_bit(
    session: Session,
) -> None:
    elements = 1 << 19
    given_values: dict[str, np.ndarray[Any, Any]] = {
        "zeros": np.zeros(elements, np.float32),
        "negative": np.full(elements, -0.0, np.float32),
        "nan": np.full(elements, 0x7FC00123, np.uint32).view(np.float32),
        "bytes": np.full(4 * elements, 7, np.int8),
        "pairs": np.full(elements, 1 + 2j, np.complex64),
        "last": np.r_[np.zeros(elements - 1, np.float32), np.float32(-0.0)],
    }
    for shards in (None, fixed_size_partitioner(2)):
        variables = [
            Variable(
                f"{name}{shards and 2}", value, device="/job:ps", partitioner=shards
            )
            for name, value in given_values.items()
        ]
        session.initialize(variables)
        values = session.read(variables)
        for variable, wanted in zip(variables, given_values.values(), strict=True):
            found = np.asarray(values[variable.name])
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes(), variable.name


@pytest.mark.parametrize("element", [0.0, -0.0])
def test_only_a_given_value_whose_elements_differ_travels(element: float) -> None:
    elements = 5 << 20
    mixed = np.r_[np.full(elements - 1, element, np.float32), np.float32(-element)]
    for value in (np.full(elements, element, np.float32), mixed):
        w = Variable("w", value)
        graph, _ = trace(partial(assign_initial, [w]), variables=[w], name="initialize")
        nbytes = sum(np.asarray(const).nbytes for const in graph.consts)
        assert nbytes == (value.nbytes if value is mixed else 0)


def test_variables_of_one_name_in_two_containers_are_two(session: Session) -> None:
    """A copy of a variable on another task, under its own name."""
    w = Variable("same", np.arange(3.0), device="/job:ps/task:1")
    copy = Variable(
        "same", (w.shape, w.dtype, None), device="/job:worker/task:1", container="copy"
    )

    def snapshot() -> None:
        copy[...] = w[...]
        w[...] = w[...] + 1

    session.run(snapshot)
    assert session.read([w])["same"].tolist() == [1, 2, 3]
    assert session.read([copy])["same"].tolist() == [0, 1, 2]
    tasks = session.variable_tasks([w, copy])
    assert tasks == {
        ("", "same"): "/job:ps/task:1",
        ("copy", "same"): "/job:worker/task:1",
    }
    session.write({w: np.zeros(3, "f"), copy: np.ones(3, "f")})
    assert session.read([w])["same"].tolist() == [0, 0, 0]
    assert session.run(lambda: copy[...] + w[...]).tolist() == [1, 1, 1]
    for values in (session.read, session.snapshot):
        with pytest.raises(ConfigError, match="two variables are called 'same'"):
            values([w, copy])
    assert session.snapshot([w, w])["same"].tolist() == [0, 0, 0]


def test_a_lost_task_is_missed_only_where_a_variable_may_be_on_it() -> None:
    servers = Servers(ps=2, worker=1)
    with connect(servers.server("/job:worker/task:0").target, timeout_s=20) as cluster:
        servers.lose("/job:ps/task:1")
        session = cluster.session()
        there = Variable("there", np.ones(2, "f"), device="/job:ps/task:0")
        session.initialize([there])
        assert session.read([there])["there"].tolist() == [1, 1]
        for device in ("/job:ps", "/job:ps/task:1", "/task:1", ""):
            open_ = Variable("open", np.ones(2, "f"), device=device)
            with pytest.raises(TaskLostError, match="/job:ps/task:1 "):
                session.initialize([open_])
    servers.stop()
