"""Secure sums at who sums: passes keys and shares between members, takes masks off.

The shell of ``coordination.sync.secure_rounds``. Members ask, and are answered when the
next step begins; so they need not be reached. What passes here is public keys, sealed
shares, and at the end shares of one secret of each member.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast, final

import numpy as np

from jgraph.cluster.methods import reading
from jgraph.coordination.secure.sum_round import (
    AskShares,
    Instruction,
    PassKeys,
    PassShares,
    Step,
    Unmask,
    Void,
)
from jgraph.coordination.sync.secure_rounds import (
    Event,
    SumCame,
    SumFailed,
    SumRule,
    SumStepLate,
    Unmasked,
)
from jgraph.errors import JGError
from jgraph.failpoints import failpoint
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.security.secure_sum import MaskedSum, MemberKeys, Told
from jgraph.server.loops.dealer import ANSWER_S

_LOG = logging.getLogger("jgraph.privacy")

STEP_S: Final = 10.0
"""A step in which nobody trains is waited for so long."""
_SHARE: Final = 0.25  # of the time of a round, if that is less

Compute: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs work in a thread."""


@final
class SumDesk:
    """What who sums has of the secure sum under way.

    Args:
      rule: how members are summed.
      tasks: of each replica, by its program handle.
      tell: takes what happens.
      compute: runs work in a thread.
      round_s: limit of a round.
    """

    def __init__(
        self,
        rule: SumRule,
        tasks: Mapping[str, TaskName],
        tell: Callable[[Event], None],
        compute: Compute,
        round_s: float,
    ) -> None:
        self._rule = rule
        self._tasks = tasks
        self._tell = tell
        self._compute = compute
        self._step_s = min(STEP_S, _SHARE * round_s)
        self._number = 0
        self._members: frozenset[TaskName] = frozenset()
        self._masked = MaskedSum(0, threshold=rule.threshold)
        self._boxes: dict[tuple[str, str], bytes] = {}
        self._near: dict[str, tuple[str, ...]] = {}
        self._answers: dict[tuple[str, str], asyncio.Future[pb.SumAnswer]] = {}
        self._over: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._working: asyncio.Task[None] | None = None
        self.correction: Any = None
        """What takes the masks of the sum away, uint32[words]."""

    def begin(self, number: int, members: Collection[TaskName]) -> None:
        """A sum begins."""
        self.end()
        self._number, self._members = number, frozenset(members)
        self._masked = MaskedSum(number, threshold=self._rule.threshold)
        self.correction = None
        self._wait_for("keys")

    def end(self) -> None:
        """The sum is decided, or given up: its members have no more part in it."""
        self._number = 0
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(pb.SumAnswer(step="void"))
        self._answers, self._boxes, self._near = {}, {}, {}
        self._over = set()
        self._end_timer()
        if self._working is not None:
            self._working.cancel()
            self._working = None

    def perform(self, what: Instruction) -> None:
        """Does what the sum needs."""
        match what:
            case PassKeys(member, neighbours):
                self._near[member] = neighbours
                keys = [(peer, self._masked.keys[peer]) for peer in neighbours]
                parts = [
                    pb.SumPart(member=p, values=[k.sealing, k.masking, k.seed])
                    for p, k in keys
                ]
                self._answer(member, "keys", "exchange", parts)
            case PassShares(member, senders):
                parts = [
                    pb.SumPart(member=peer, values=[self._boxes[peer, member]])
                    for peer in senders
                ]
                self._answer(member, "exchange", "masked", parts)
            case AskShares(member, inside, outside):
                parts = [pb.SumPart(member=peer) for peer in inside]
                parts += [pb.SumPart(member=peer, outside=True) for peer in outside]
                self._answer(member, "masked", "reveal", parts)
            case Unmask(inside, outside):
                self._end_timer()
                self._working = asyncio.ensure_future(self._unmask(inside, outside))
            case Void():  # the round is given up as a whole
                pass

    async def take(self, message: pb.SumMessage) -> pb.SumAnswer:
        """Takes what a member sends; answers when the next step begins, or to wait.

        Raises:
          MalformedMessageError: it is no message of a member.
        """
        task, number = self._tasks.get(message.handle), message.number
        if task is None or number != self._number or task not in self._members:
            return pb.SumAnswer(step="void")
        with reading("a message of a secure sum"):
            self._learn(task, message)
        step = cast("Step", message.step)
        if message.parts or step == "reveal":
            self._tell(SumCame(message.handle, number, step))
        if step == "reveal":
            return pb.SumAnswer(step="over")
        if number != self._number:  # it was the last, and there is no sum
            return pb.SumAnswer(step="void")
        answer = self._waiting(task, step)
        if step in self._over and not answer.done():
            return pb.SumAnswer(step="void")
        try:
            return await asyncio.wait_for(asyncio.shield(answer), ANSWER_S)
        except TimeoutError:
            return pb.SumAnswer(step="wait")

    def _learn(self, task: TaskName, message: pb.SumMessage) -> None:
        """Keeps what a message has; what came before stays."""
        if message.step in self._over:
            return
        match message.step:
            case "keys":
                for part in message.parts:
                    self._masked.keys.setdefault(task, keys_of(part.values))
            case "exchange":
                for part in message.parts:
                    (self._boxes[task, part.member],) = part.values
                near = {(task, peer) for peer in self._near.get(task, ())}
                if not self._boxes.keys() >= near:
                    raise ValueError("not a share for each neighbour")
            case "reveal":
                inside, outside = (
                    {p.member: p.values[0] for p in message.parts if p.outside == kind}
                    for kind in (False, True)
                )
                self._masked.tell(task, Told(inside, outside))
            case "masked":
                pass
            case other:
                raise ValueError(f"a step '{other}'")

    def _answer(self, member: str, step: str, then: str, parts: list[Any]) -> None:
        if step not in self._over:
            self._over.add(step)
            self._wait_for(then)
        answer = self._waiting(member, step)
        if not answer.done():
            answer.set_result(pb.SumAnswer(step=then, parts=parts))

    def _waiting(self, member: str, step: str) -> asyncio.Future[pb.SumAnswer]:
        key = member, step
        if key not in self._answers:
            self._answers[key] = asyncio.get_running_loop().create_future()
        return self._answers[key]

    def _wait_for(self, step: str) -> None:
        """Limits how long a step is waited for, unless members train in it."""
        self._end_timer()
        if step == "masked":
            return
        late = SumStepLate(self._number, cast("Step", step))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._step_s, partial(self._tell, late))

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _unmask(self, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
        number, masked, near = self._number, self._masked, dict(self._near)

        def work() -> Any:
            masked.add(np.zeros(self._rule.words, np.uint32))
            return masked.unmasked(inside, outside, lambda name: near[name])

        try:
            correction = await self._compute(work)
        except JGError as error:
            _LOG.warning("secure sum %d has no result: %s", number, error)
            self._tell(SumFailed(number, error.message))
        except Exception as error:  # noqa: BLE001  # nobody waits for it
            _LOG.exception("secure sum %d has no result", number)
            self._tell(SumFailed(number, type(error).__name__))
        else:
            failpoint("sum.unmasked")
            self.correction = correction
            self._tell(Unmasked(number))


def keys_of(values: Sequence[bytes]) -> MemberKeys:
    """Returns keys as they came.

    Raises:
      ValueError: they are none.
    """
    if [len(value) for value in values] != [32, 32, 32]:
        raise ValueError("keys of another length")
    return MemberKeys(*values)
