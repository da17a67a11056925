"""Sums of contributions on each host, around ``coordination.sync.host_sums``.

A collector keeps what its host's replicas gave for owners on other hosts, sums it in a
thread, and posts the sum; an owner keeps sums until it averages.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np

from jgraph.coordination.sync import host_sums as machine
from jgraph.coordination.sync.aggregation import Step
from jgraph.coordination.sync.roster import Roster
from jgraph.errors import MalformedMessageError
from jgraph.graph.ir import TaskName
from jgraph.plan.program.accumulate import mean
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.runtime.cost import Cost
from jgraph.runtime.gate import Chosen, Contribution, Key
from jgraph.server.gates.step_columns import columns_of, steps_of
from jgraph.server.gates.timers import AGAIN_S, CallLater

_Array: TypeAlias = np.ndarray[Any, Any]

Post: TypeAlias = Callable[[TaskName, pb.HostSum, Sequence[_Array]], None]
"""Sends an owner a sum."""

Submit: TypeAlias = Callable[[Callable[[], Any], Callable[[Any], None], Cost], None]
"""Runs work in a thread, and calls back on this one; see ``ExecutorHost``."""


@final
class HostSums:
    """The part of one task in the sums of a gate.

    Args:
      order: which variables each owner has.
      task: this one.
      container: of the variables.
      version: updates applied so far.
      post: sends an owner a sum.
      submit: runs work in a thread.
      call_later: waits.
    """

    def __init__(
        self,
        order: pb.HostSums,
        task: TaskName,
        container: str,
        version: int,
        roster: Roster,
        post: Post,
        submit: Submit,
        call_later: CallLater,
    ) -> None:
        self._post, self._submit, self._call_later = post, submit, call_later
        self._task = task
        self._roster = roster
        self._keys: dict[TaskName, list[Key]] = {}  # by part
        self._sizes: dict[Key, int] = {}
        self._owners: dict[TaskName, TaskName] = {}
        for one in order.parts:
            part = TaskName(one.task)
            self._keys[part] = [(container, name) for name in one.variables]
            self._sizes.update(zip(self._keys[part], one.elements, strict=True))
            self._owners[part] = TaskName(order.by.get(part, part))
        self._parts = {key: part for part, keys in self._keys.items() for key in keys}
        own = [part for part, owner in self._owners.items() if owner == task]
        self._machine = machine.HostSums(version, own)
        self._contributions: dict[Step, dict[TaskName, Contribution]] = {}
        self._sums: dict[tuple[int, TaskName, TaskName], Contribution] = {}
        self._average: machine.Average | None = None
        self._waiting: Callable[[], None] | None = None
        self._newest: dict[TaskName, machine.SendSum] = {}
        self._outbox: dict[TaskName, tuple[pb.HostSum, Sequence[_Array]]] = {}
        self._cost = Cost(kind="update")
        self._is_closed = False

    def keep(self, step: Step, slot: int, values: Contribution) -> Contribution:
        """Takes the parts of other owners of a contribution; returns what is left."""
        away: defaultdict[TaskName, dict[Key, _Array]] = defaultdict(dict)
        here: dict[Key, _Array] = {}
        own: dict[TaskName, None] = {}
        for key, value in values.items():
            part = self._parts.get(key)
            if part is not None and self._owners[part] != self._task:
                away[part][key] = value
                continue
            here[key] = value
            if part is not None:
                own[part] = None
        self._contributions[step] = dict(away)
        self._take(machine.ContributionKept(step, slot, tuple(away), tuple(own)))
        return here

    def drop(self, step: Step) -> None:
        """Forgets what a step contributed."""
        self._contributions.pop(step, None)
        self._take(machine.ContributionDropped(step))

    def decided(self, steps: tuple[Step, ...]) -> None:
        """The next update is made of these contributions."""
        self._take(machine.UpdateDecided(steps))
        self._contributions.clear()

    def received(
        self, src: TaskName, news: pb.HostSum, tensors: Sequence[_Array]
    ) -> None:
        """Takes a sum of the own part.

        Raises:
          MalformedMessageError: it is not of the variables of this task.
        """
        part = TaskName(news.part)
        keys = self._keys[part] if self._owners.get(part) == self._task else []
        due = [(self._sizes[key], np.dtype(np.float32)) for key in keys]
        if [(np.size(t), np.asarray(t).dtype) for t in tensors] != due:
            raise MalformedMessageError(
                f"a sum of {len(tensors)} arrays from {src}, which are not gradients "
                f"of the {len(keys)} variables that {self._task} has of {part}",
                task=self._task,
            )
        values = dict(zip(keys, map(np.asarray, tensors), strict=True))
        self._sums[news.version, part, src] = values
        steps = tuple(steps_of(self._roster, news.steps))
        self._take(machine.SumCame(part, src, news.version, steps))

    def link_lost(self, owner: TaskName) -> None:
        """What was sent to an owner may be lost."""
        for part, its in self._owners.items():
            if its == owner:
                self._take(machine.LinkLost(part))

    def when_here(self, let_in: Callable[[], None]) -> None:
        """Calls ``let_in`` when all that was decided is here."""
        self._waiting = let_in
        self._let_in()

    def chosen(self, contributions: Sequence[Contribution]) -> Chosen:
        """Returns what is averaged.

        Args:
          contributions: what was kept here of those that were decided, in their order.
        """
        average, self._average = self._average, None
        if average is None or not average.sums:
            return Chosen(contributions)
        version = average.version
        sums = [self._sums[version, *which] for which in average.sums]
        self._sums = {at: one for at, one in self._sums.items() if at[0] > version}
        parts: Mapping[Key, list[_Array]] = {
            key: [each[key] for each in (*contributions, *sums) if key in each]
            for part, _ in average.sums
            for key in self._keys[part]
        }
        return Chosen(contributions, parts)

    def close(self) -> None:
        """Sends nothing any more: what is summed now is of no gate."""
        self._is_closed = True
        self._outbox.clear()
        self._waiting = None

    def _take(self, event: machine.Event) -> None:
        for instruction in self._machine.handle(event):
            match instruction:
                case machine.SendSum():
                    self._send(instruction)
                case machine.SendAgain(part):
                    self._call_later(AGAIN_S, partial(self._send_again, part))
                case machine.Average():
                    self._average = instruction
                    self._let_in()

    def _let_in(self) -> None:
        if self._average is not None and self._waiting is not None:
            let_in, self._waiting = self._waiting, None
            let_in()

    def _send(self, order: machine.SendSum) -> None:
        self._newest[order.part] = order
        parts = [self._contributions[step][order.part] for step in order.steps]
        keys = self._keys[order.part]
        work = partial(_summed, [[one[key] for one in parts] for key in keys])
        self._submit(work, partial(self._summed, order), self._cost)

    def _summed(self, order: machine.SendSum, result: Any) -> None:
        if self._is_closed or self._newest[order.part] is not order:
            return  # threads may overtake each other
        if isinstance(result, BaseException):
            raise result
        news = pb.HostSum(
            version=order.version,
            steps=columns_of(self._roster, order.steps),
            part=order.part,
        )
        self._outbox[order.part] = news, result
        self._post(self._owners[order.part], news, result)

    def _send_again(self, part: TaskName) -> None:
        if part in self._outbox and not self._is_closed:
            self._post(self._owners[part], *self._outbox[part])


def _summed(columns: Sequence[Sequence[_Array]]) -> list[_Array]:
    return [mean(column, over=1) for column in columns]
