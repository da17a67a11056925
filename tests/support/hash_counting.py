"""A hash table whose rows count what is applied to them: of each example two keys."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from jgraph.client.cluster import Cluster
from jgraph.graph.rows.hash_keys import split_keys
from jgraph.train.run.run import Run
from jgraph.train.strategies.strategies import Strategy
from jgraph.train.trainer import Trainer
from tests.support.hash_eviction import KEYS, Counts, counts_in, loss
from tests.support.ledger import examples_counted, examples_due

EXAMPLES, BATCH = 64, 2
NUMBER = np.arange(EXAMPLES, dtype=np.int32) % KEYS
IDS = np.stack([NUMBER, 2**40 + np.arange(EXAMPLES)], 1)
"""A key of its own, and one that it shares with others."""
DATA = {"ids": split_keys(IDS), "number": NUMBER}


def trainer(cluster: Cluster, strategy: Strategy) -> Trainer:
    """Of a table that has room for all keys."""
    model = Counts(capacity_bytes=1 << 22)
    return Trainer(model, loss, optax.sgd(1.0), cluster=cluster, strategy=strategy)


def check_steps(there: Trainer, run: Run) -> None:
    """Each update was applied once to the rows of each key, and no batch is left out.

    Also one that was applied, and of which nobody was told as a ps was lost. Two
    workers take part in each.
    """
    found = counts_in(run.model())
    shared, own = _by_number(found)
    np.testing.assert_array_equal(own, shared)
    assert shared.sum() == BATCH * run.steps
    due = np.zeros(KEYS)
    np.add.at(due, NUMBER, examples_due(there.current_position()))
    assert (due <= 2 * shared).all()


def check_counts(there: Trainer, run: Run, *, together: bool) -> None:
    """Each batch that is done was applied once to the rows of its keys, and no other.

    Args:
      there: has trained.
      run: its run.
      together: an update is the mean of those who took part in it.
    """
    position = there.current_position()
    assert position is not None
    assert position["again"] == 0
    due, found = np.zeros(KEYS), counts_in(run.model())
    np.add.at(due, NUMBER, examples_due(position))
    shared, own = _by_number(found)
    np.testing.assert_allclose(own, shared, rtol=1e-6)
    if together:
        np.testing.assert_allclose(examples_counted(run), due, atol=0.01)
        due = run.metrics("seen")["value"].sum(0)
    np.testing.assert_allclose(shared, due, rtol=1e-6)
    assert set(found) <= set(IDS.ravel().tolist())


def _by_number(found: Mapping[int, float]) -> tuple[Any, Any]:
    """Returns what the shared key of each number has counted, and all its others."""
    own = np.zeros(KEYS)
    for number, (_, key) in zip(NUMBER.tolist(), IDS.tolist(), strict=True):
        own[number] += found.get(key, 0.0)
    return np.array([found.get(key, 0.0) for key in range(KEYS)]), own
