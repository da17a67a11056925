"""Which examples the updates of synchronous training are made of."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import SlotPlan
from jgraph.train.run.run import Run
from jgraph.train.state.runner import Position
from tests.support.models import cross_entropy


def loss_that_counts(examples: int) -> Callable[[Any, Any], Any]:
    """Returns a loss of batches ``(x, y, number of the example)``."""

    def loss(model: Any, batch: Any) -> Any:
        seen = jax.nn.one_hot(batch[2], examples).sum(0)
        return cross_entropy(model(batch[0]), batch[1]), {"seen": seen}

    return loss


def examples_counted(run: Run) -> np.ndarray[Any, Any]:
    """Returns how often each example is part of an update: of the metric ``seen``."""
    share, count = (run.metrics(name)["value"] for name in ("seen", "contributions"))
    total: np.ndarray[Any, Any] = (share * count[:, None]).sum(0)
    return total


def examples_due(position: Position) -> np.ndarray[Any, Any]:
    """Returns how often each example is in the batches that a position calls done."""
    assert position is not None
    order = BatchOrder(SlotPlan.from_dict(position["plan"]))
    end, left = order.restored(position)
    size = order.plan.batch_size
    due = np.zeros(order.plan.examples)
    for lease in map(order.batch, set(range(end)) - set(left)):
        rows = order.plan.rows(lease.epoch, lease.slot)
        due[rows[lease.first * size : (lease.first + 1) * size]] += 1
    return due
