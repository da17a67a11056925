"""A step that is refused for an id leaves every variable of every task as it was."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.errors import RowIdError
from jgraph.graph.rows.rows import checked_ids, unique_rows
from jgraph.graph.tracing.function import Function

ROWS, IDS = (10, 7), 6


class Counting:
    """Tables and counters somewhere on the ps, and a step that adds to all of them.

    Args:
      random: decides where they are, what is cut, and which tables are updated.
      num_ps: of the cluster.
    """

    def __init__(self, random: np.random.Generator, num_ps: int) -> None:
        self._num_ps = num_ps
        self._updated = [bool(random.integers(2)) for _ in ROWS]
        self._tables = [
            self._table(f"table{n}", rows, random) for n, rows in enumerate(ROWS)
        ]
        self._counters = [
            jg.Variable(f"count{n}", jnp.zeros(()), device=f"/job:ps/task:{n}")
            for n in range(num_ps)
        ]
        self.variables = [*self._tables, *self._counters]
        self.function = Function(self._step, "counting")

    def _table(self, name: str, rows: int, random: np.random.Generator) -> jg.Variable:
        start = jnp.zeros((rows, 2))
        if random.integers(2):
            cut = jg.fixed_size_partitioner(2)
            return jg.Variable(name, start, device="/job:ps", partitioner=cut)
        home = f"/job:ps/task:{random.integers(self._num_ps)}"
        return jg.Variable(name, start, device=home)

    def _step(self, *ids: Any) -> Any:
        total = jnp.zeros(())
        for table, given, rows, updated in zip(
            self._tables, ids, ROWS, self._updated, strict=True
        ):
            unique, _ = unique_rows(given, rows=rows, feature=table.name)
            found = table[unique]
            total = total + found.sum()
            if updated:
                table[unique] = found + 1
        for counter in self._counters:
            counter[...] = counter[...] + 1
        return total

    def after(self, state: dict[str, Any], ids: list[Any]) -> dict[str, Any]:
        """Returns what a step makes of a state: by numpy, without a cluster."""
        new = {name: np.array(value) for name, value in state.items()}
        for table, given, updated in zip(self._tables, ids, self._updated, strict=True):
            new[table.name][np.unique(given)] += updated
        for counter in self._counters:
            new[counter.name] += 1
        return new


@pytest.mark.parametrize(
    "seed",
    [
        *range(4),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 40)),
    ],
)
def test_random_refusals_leave_all_state_unchanged(
    session: Session, cluster: Cluster, seed: int
) -> None:
    random = np.random.default_rng(seed)
    world = Counting(random, len(cluster.tasks("ps")))
    session.initialize(world.variables)
    state = session.read(world.variables)
    refused = 0
    for _ in range(8):
        ids = [random.integers(0, rows, IDS).astype(np.int32) for rows in ROWS]
        if random.integers(2):
            refused += 1
            table = random.integers(len(ROWS))
            ids[table][random.integers(IDS)] = random.choice([-1, ROWS[table], 2**30])
            with pytest.raises(RowIdError):
                session.run(world.function, *ids)
        else:
            session.run(world.function, *ids)
            state = world.after(state, ids)
        found = session.read(world.variables)
        for name, value in state.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert 0 < refused < 8


def test_ids_of_a_whole_table_are_looked_at_before_a_step_is_counted(
    session: Session,
) -> None:
    count = jg.Variable("count", jnp.zeros(()), device="/job:ps/task:0")
    table = jg.Variable("table", jnp.zeros((3, 1)), device="/job:ps/task:1")

    def step(ids: Any) -> None:
        with jg.device("/job:worker/task:0"):
            part = ((0, 2),)  # the last number is no id
            known = checked_ids(ids, rows=3, part=part, feature="colour")
            found = table[...][known[:2]].sum()
        table[...] = table[...] + found + 1
        count[...] = count[...] + 1

    session.initialize([count, table])
    function = jg.function(step)
    session.run(function, np.array([0, 2, 9], np.int32))
    with pytest.raises(RowIdError, match="'colour' has the id 3 at position 1, and"):
        session.run(function, np.array([0, 3, 9], np.int32))
    found = session.read([count, table])
    assert (found["count"], found["table"].ravel().tolist()) == (1, [1, 1, 1])


def test_write_that_ids_are_made_from_comes_before_their_check(
    session: Session,
) -> None:
    count = jg.Variable("count", jnp.zeros((), jnp.int32), device="/job:ps/task:0")
    table = jg.Variable("table", jnp.zeros((3, 1)), device="/job:ps/task:1")

    def step() -> Any:
        count[...] = count[...] + 1
        unique, _ = unique_rows(count[...][None], rows=3)
        table[unique] = table[unique] + 1

    session.initialize([count, table])
    for _ in range(2):
        session.run(jg.function(step))
    with pytest.raises(RowIdError):
        session.run(jg.function(step))
    assert session.read([table])["table"].ravel().tolist() == [0, 1, 1]


def test_what_a_worker_makes_and_a_ps_writes_waits_where_it_is_made(
    session: Session,
) -> None:
    """The ps is sent nothing but what it writes."""
    seen = jg.Variable("seen", jnp.zeros((), jnp.int32), device="/job:ps/task:0")
    table = jg.Variable("table", jnp.zeros((3, 1)), device="/job:ps/task:1")

    def step(ids: Any, number: Any) -> Any:
        with jg.device("/job:worker/task:0"):
            unique, _ = unique_rows(ids, rows=3)
            made = number + 1
        table[unique] = table[unique] + 1
        seen[...] = made

    session.initialize([seen, table])
    function = jg.function(step)
    ids = np.array([0, 2], np.int32)
    for number in (4, 5):
        session.run(function, ids, np.int32(number))
    with pytest.raises(RowIdError):
        session.run(function, np.array([0, 3], np.int32), np.int32(9))
    found = session.read([seen, table])
    assert (found["seen"], found["table"].ravel().tolist()) == (6, [2, 0, 2])
    edges = session.plan(function, ids, np.int32(4)).edges
    sent = [[v.shape for v in e.values] for e in edges if e.dst == "/job:ps/task:0"]
    assert sent == [[()]]
