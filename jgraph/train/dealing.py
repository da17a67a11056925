"""What the master is told of the data of an asynchronous run."""

from collections.abc import Callable, Sequence

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
        first = updates()
        info = {
            "first_step": first,
            "steps": first + order.steps,
            "batch_size": order.batch_size,
            "metrics": list(names),
            "container": container,
        }
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
