"""What the master is told of a run and its data."""

from collections.abc import Callable, Sequence

from jgraph.cluster.loop_orders import DealtData, Detached
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.rejoin import WAIT_S
from jgraph.train.runner import Order, Position, position_in


def dealt_data(
    order: Order,
    position: Position,
    container: str,
    names: Sequence[str],
    done: Sequence[int],
    updates: Callable[[], int],
    saves: pb.RunSaves | None,
) -> DealtData:
    """Returns what is dealt out, and what whoever attaches to the run must know.

    Args:
      order: what to train.
      position: where in the data to begin.
      container: of the variables.
      names: of the metrics of a step.
      done: steps so far, by worker.
      updates: says how many updates are applied to the model.
      saves: what the master saves.
    """
    plan = order.dataset.plan(order.batch_size, order.seed)
    detached = None
    if order.detached:
        detached = run_info(order, updates(), container, names, saves=saves)
    return DealtData(
        plan,
        order.steps,
        len(done),
        position_in(plan, position, sum(done)),
        updates=updates,
        wait_s=WAIT_S,
        stop=order.stop,
        detached=detached,
    )


def run_info(
    order: Order,
    first: int,
    container: str,
    names: Sequence[str],
    *,
    sync: bool = False,
    saves: pb.RunSaves | None = None,
) -> Detached:
    """Returns what the master is told of a detached run; see ``RunInfo``.

    Args:
      order: what to train.
      first: updates before it.
      container: of the variables.
      names: of the metrics of a step.
      sync: training is synchronous.
      saves: what the master saves.
    """
    about = {
        "first_step": first,
        "steps": first + order.steps,
        "batch_size": order.batch_size,
        "metrics": list(names),
        "container": container,
        "synchronous": sync,
        "checkpoints": "" if saves is None else saves.directory,
    }
    return Detached(about, saves)
