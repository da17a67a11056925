"""Master terms (fencing): orders of a master that was replaced are refused."""

from collections import OrderedDict
from typing import Final, final

from jgraph.errors import FencedError

_KEPT: Final = 256
"""Runs that a task remembers."""


@final
class MasterTerms:
    """The newest master that a task has heard of, by run.

    Example:
      >>> epochs = MasterTerms()
      >>> epochs.check("run-1", 1), epochs.check("run-1", 2)
      (None, None)
      >>> epochs.check("run-1", 1)
      Traceback (most recent call last):
      jgraph.errors.FencedError: JG-139 an order of master 1 of run ...
    """

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()

    def check(self, run: str, epoch: int) -> None:
        """Takes note of who gives an order.

        Args:
          run: empty: one that nobody takes over.
          epoch: of the master.

        Raises:
          FencedError: a later master of that run was here already.
        """
        if not run:
            return
        newest = max(epoch, self._newest.pop(run, 0))
        self._newest[run] = newest
        if len(self._newest) > _KEPT:
            self._newest.popitem(last=False)
        if epoch < newest:
            raise FencedError(
                f"an order of master {epoch} of run '{run}' came after master {newest} "
                "had taken over; it is not carried out",
                run=run,
                epoch=newest,
            )
