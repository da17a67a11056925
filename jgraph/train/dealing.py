"""What the master is told of a run and its data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jgraph.cluster.loop_orders import DealtData
from jgraph.train.rejoin import WAIT_S
from jgraph.train.runner import Order, Position, position_in


def dealt_data(
    order: Order,
    position: Position,
    container: str,
    names: Sequence[str],
    done: Sequence[int],
    updates: Callable[[], int],
) -> DealtData:
    """Returns what is dealt out, and what whoever attaches to the run must know.

    Args:
      order: what to train.
      position: where in the data to begin.
      container: of the variables.
      names: of the metrics of a step.
      done: steps so far, by worker.
      updates: says how many updates are applied to the model.
    """
    plan = order.dataset.plan(order.batch_size, order.seed)
    info = None
    if order.detached:
        info = run_info(order, updates(), container, names)
    return DealtData(
        plan,
        order.steps,
        len(done),
        position_in(plan, position, sum(done)),
        updates=updates,
        wait_s=WAIT_S,
        stop=order.stop,
        info=info,
    )


def run_info(
    order: Order,
    first: int,
    container: str,
    names: Sequence[str],
    *,
    sync: bool = False,
) -> Mapping[str, Any]:
    """Returns what whoever attaches to a run must know; see ``RunInfo``.

    Args:
      order: what to train.
      first: updates before it.
      container: of the variables.
      names: of the metrics of a step.
      sync: training is synchronous.
    """
    return {
        "first_step": first,
        "steps": first + order.steps,
        "batch_size": order.batch_size,
        "metrics": list(names),
        "container": container,
        "synchronous": sync,
    }
