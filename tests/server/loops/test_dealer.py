"""The runs whose data a task deals out, by name."""

import json

from jgraph.clock import SystemClock
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.loops.dealer import Dealers
from tests.support.run_async import run_async


def test_a_run_that_begins_again_leaves_no_timer_of_the_one_before() -> None:
    async def main() -> None:
        dealers = Dealers(SystemClock())
        plan = json.dumps(SlotPlan([Part("a", 10)], 1, 0).to_dict())
        order = pb.OpenDataRun(run="r", plan=plan, budget=10, workers=1, lease_s=60.0)
        dealers.open(order)
        before = dealers.get("r")
        dealers.open(order)
        assert dealers.get("r") is not before
        assert before._timer.cancelled()
        assert not dealers.get("r")._timer.cancelled()
        dealers.close_all()

    run_async(main())
