"""Ledger of finished batches, kept from reports, to deal the others again.

Enough to go on without the master that dealt them: what was dealt and is not known as
done is dealt again.
"""

from collections.abc import Iterable, Mapping
from typing import Any, final

from jgraph.coordination.data.batch_order import BatchOrder
from jgraph.coordination.data.slots import Lease, SlotPlan


@final
class BatchLedger:
    """The batches of one run.

    Args:
      plan: the slots.
      position: where the run began; see ``Dispatch.state``.
      updates: applied to the model by then, one per batch.

    Example:
      >>> from jgraph.coordination.data.dispatch import Dispatch
      >>> from jgraph.coordination.data.slots import Part
      >>> plan = SlotPlan([Part("data", 8)], batch_size=1, seed=0)
      >>> begin = Dispatch(plan, budget=8, workers=1).state()
      >>> ledger = BatchLedger(plan, begin, updates=0)
      >>> ledger.add([Lease(0, 0, 0, 1), Lease(0, 0, 2, 1)])
      >>> ledger.position(updates=3)["unfinished"], ledger.done
      ([[0, 0, 1, 1]], 2)
    """

    def __init__(
        self, plan: SlotPlan, position: Mapping[str, Any], updates: int
    ) -> None:
        self._order = BatchOrder(plan)
        self._end, unfinished = self._order.restored(position)
        self._open = set(unfinished)
        self._again = int(position["again"])
        self.done = int(position["done"])
        """Batches done, over all runs."""
        self._unknown = updates - self.done

    def add(self, leases: Iterable[Lease]) -> None:
        """Takes batches that are done; one that was done before counts no more."""
        for lease in leases:
            for batch in lease.each():
                self._add(self._order.place(*batch))

    def _add(self, place: int) -> None:
        if place >= self._end:
            self._open.update(range(self._end, place))
            self._end = place + 1
        elif place in self._open:
            self._open.remove(place)
        else:
            return
        self.done += 1

    def position(self, updates: int) -> dict[str, Any]:
        """Returns where the run is, as plain data.

        Args:
          updates: applied to the model by now. Those of batches that nobody told of as
            done come again, and are counted as such.
        """
        again = max(0, updates - self.done - self._unknown)
        return {
            **self._order.position(self._end, sorted(self._open)),
            "done": self.done,
            "again": self._again + again,
        }
