"""Secure sums at a member: masks before it trains, and shares after.

The keys of a round are made when its batch is dealt, and the batch is given to the loop
when the masks are there: they are a feed of its step. A mask serves for one step only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.cluster.loop_messages import deal_of, leases_of
from jgraph.cluster.methods import reading
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.sync.secure_rounds import SumRule
from jgraph.errors import JGError, SecureSumError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.security.secure_sum import SumMember
from jgraph.server.loops.data_feed import Ask
from jgraph.server.loops.sum_desk import Compute, keys_of

_LOG = logging.getLogger("jgraph.privacy")

Send: TypeAlias = Callable[[pb.SumMessage], Awaitable[pb.SumAnswer]]
"""Sends a message to who sums; returns the answer."""


@final
class SumPart:
    """The part of one loop in secure sums.

    Args:
      task: this one.
      rule: how members are summed.
      plan: numbers the batches.
      send: sends to who sums.
      compute: runs work in a thread.
    """

    def __init__(
        self,
        task: TaskName,
        rule: SumRule,
        plan: SlotPlan,
        send: Send,
        compute: Compute,
    ) -> None:
        self._rule = rule
        self._plan = plan
        self._send = send
        self._compute = compute
        self._member = SumMember(task, threshold=rule.threshold)
        self._masks: dict[int, Any] = {}
        self._helping: asyncio.Task[None] | None = None

    def asking(self, ask: Ask) -> Ask:
        """Returns what to ask for batches, which come when there are masks for them."""

        async def asked(
            done: int, batches: int, idle: bool, received: int
        ) -> pb.DataDeal:
            deal = await ask(done, batches, idle, received)
            if not deal.sum or not deal.leases:
                return deal
            self.close()
            (lease,) = leases_of(deal.leases)
            try:
                mask = await self._agree(deal.sum)
            except SecureSumError as error:
                _LOG.warning("%s", error)
                mask = None
            if mask is None:
                return deal_of(())
            number = self._plan.number(lease.epoch, lease.slot, lease.first)
            self._masks = {number: mask}
            self._helping = asyncio.ensure_future(self._help(deal.sum))
            return deal

        return asked

    def mask(self, number: int) -> Any:
        """Returns the mask for what is made of the batch of a number, uint32[words].

        Raises:
          SecureSumError: it was taken: two contributions with it would tell of both.
        """
        mask = self._masks.pop(number, None)
        if mask is None:
            raise SecureSumError(
                f"batch {number} has no mask: what is made of it cannot be part of a "
                "secure sum"
            )
        return mask

    def close(self) -> None:
        """Ends the part in the sum under way."""
        self._masks = {}
        if self._helping is not None:
            self._helping.cancel()
            self._helping = None

    async def _agree(self, number: int) -> Any:
        """Returns the mask of a sum; None: this member has no part in it.

        Raises:
          SecureSumError: what is asked is refused.
        """
        own = self._member.begin(number)
        failpoint("sum.keys_made")
        values = [own.sealing, own.masking, own.seed]
        came = await self._say(number, "keys", [pb.SumPart(values=values)])
        if came.step != "exchange":
            return None
        with reading("keys of a secure sum"):
            keys = {part.member: keys_of(part.values) for part in came.parts}
        sealed = self._member.share(number, keys)
        failpoint("sum.shares_made")
        parts = [pb.SumPart(member=n, values=[one]) for n, one in sealed.items()]
        came = await self._say(number, "exchange", parts)
        if came.step != "masked":
            return None
        boxes = {part.member: part.values[0] for part in came.parts}
        zeros = np.zeros(self._rule.words, np.uint32)
        mask = await self._compute(lambda: self._member.mask(number, boxes, zeros))
        failpoint("sum.masks_made")
        return mask

    async def _help(self, number: int) -> None:
        """Tells shares, once it is known who is in the sum."""
        try:
            came = await self._say(number, "masked", [])
            if came.step != "reveal":
                return
            failpoint("sum.asked")
            shares = self._member.reveal(
                number,
                [part.member for part in came.parts if not part.outside],
                [part.member for part in came.parts if part.outside],
            )
            parts = [pb.SumPart(member=n, values=[s]) for n, s in shares.seeds.items()]
            parts += [
                pb.SumPart(member=n, values=[s], outside=True)
                for n, s in shares.keys.items()
            ]
            await self._say(number, "reveal", parts)
        except JGError as error:
            _LOG.warning("the part in secure sum %d ends: %s", number, error)

    async def _say(
        self, number: int, step: str, parts: Sequence[pb.SumPart]
    ) -> pb.SumAnswer:
        message = pb.SumMessage(number=number, step=step, parts=parts)
        while True:
            answer = await self._send(message)
            if answer.step != "wait":  # else it was waited for there
                return answer
