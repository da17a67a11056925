"""Sums of what replicas contribute, by children of the servers, or as messages.

The shell of ``coordination.sync.group`` and ``coordination.sync.group_member``. Each
server lends its child the memory in which that finds what the own replica contributed,
in parts of the workers that own them, and leaves the mean of the own part.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np

from jgraph.cluster.transport_choice import is_loopback
from jgraph.coordination.sync import group, group_member as member
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.gates.group_child import GroupChild
from jgraph.server.gates.group_host import GroupHost
from jgraph.server.gates.group_memory import GroupMemory
from jgraph.server.gates.timers import CallLater, Timer

_LOG = logging.getLogger("jgraph.group")

START_SHARE: Final = 0.25
SUM_SHARE: Final = 0.1
"""Of the limit of a step, for children to begin, and to sum: so it has time for three
that do not begin, and for one more that does not sum."""

_EMPTY: Final = pb.Empty()
_Array: TypeAlias = np.ndarray[Any, Any]

Post: TypeAlias = Callable[[TaskName, pb.GroupNews, Sequence[_Array]], None]
"""Sends a member what is new."""


@final
class GroupSums:
    """The part of one task in the sums of a gate.

    Args:
      host: of this task.
      order: what is summed, and for whom.
      container: of the variables.
      version: updates applied so far.
      post: sends members what is new.
      give: takes note of a sum that is here now.
      call_later: waits.

    Raises:
      TaskMemoryError: there is no memory to lend.
      JGError: see ``GroupHost.check``.
    """

    def __init__(
        self,
        host: GroupHost,
        order: pb.CollectiveGroup,
        container: str,
        version: int,
        post: Post,
        give: Callable[[], None],
        call_later: CallLater,
    ) -> None:
        host.check(order)
        self._host, self._post, self._give = host, post, give
        self._call_later = call_later
        self._task = host.context.task
        self._members = [TaskName(part.task) for part in order.parts]
        self._rank = self._members.index(self._task)
        self._start_s = START_SHARE * order.limit_s
        self._sum_s = SUM_SHARE * order.limit_s
        self._memory = GroupMemory(self._task, order, container)
        self._port = 0
        self._machine = member.GroupMember(version)
        leads = self._task == self._members[0]
        self._group = group.Group(self._members) if leads else None
        self._child: GroupChild | None = None
        self._start_timer: Timer | None = None
        self._sum_timer: Timer | None = None
        self._is_closed = False

    @property
    def contributions(self) -> int:
        """How many are summed."""
        return len(self._members)

    @property
    def child(self) -> int:
        """The process of the child; 0: there is none."""
        return 0 if self._child is None else self._child.pid

    def begin(self) -> None:
        """Begins, once the gate is open here."""
        if self._group is not None:
            for other in self._members[1:]:
                self._say(other, pb.GroupNews(asked=_EMPTY))
        self._say(self._members[0], pb.GroupNews(opened=_EMPTY))

    @property
    def memory(self) -> GroupMemory:
        """What is summed of this task, and the mean of what it owns."""
        return self._memory

    def all_contributed(self, version: int) -> None:
        """All replicas have contributed to a version."""
        self._take(member.AllContributed(version))

    def decided(self) -> None:
        """What was summed last is part of an update."""
        self._take(member.UpdateDecided())

    def received(
        self, src: TaskName, news: pb.GroupNews, tensors: Sequence[Any]
    ) -> None:
        """Takes what a member tells; what others do is nothing to it.

        Raises:
          MalformedMessageError: a part is not of its size.
        """
        if src not in self._members or self._is_closed:
            return
        if self._group is not None:
            self._heard_by_leader(src, news)
        match news.WhichOneof("kind"):
            case "asked":
                self._say(src, pb.GroupNews(opened=_EMPTY))
            case "part":
                if self._memory.take_row(src, news.part, tensors):
                    self._take(member.MessagesSummed(news.part))
            case _ if src == self._members[0]:
                self._heard_of_leader(news)

    def close(self) -> None:
        """Ends the child; nothing more is summed."""
        self._is_closed = True
        self._end_child()
        for timer in (self._start_timer, self._sum_timer):
            if timer is not None:
                timer.cancel()
        self._memory.close()

    # ------------------------------------------------------------ leading

    def _heard_by_leader(self, src: TaskName, news: pb.GroupNews) -> None:
        match news.WhichOneof("kind"):
            case "opened":
                self._lead(group.MemberOpened(src))
            case "ready":
                epoch, version = news.ready.epoch, news.ready.version
                self._lead(group.MemberReady(src, epoch, version))
            case "failed":
                epoch, why = news.failed.epoch, news.failed.why
                self._lead(group.MemberFailed(src, epoch, why))

    def _lead(self, event: group.Event) -> None:
        assert self._group is not None  # who calls leads
        for instruction in self._group.handle(event):
            match instruction:
                case group.BeginEpoch(epoch, why):
                    self._begin_epoch(epoch)
                    if why:
                        self._note("regrouped", f"ended, and others begin: {why}")
                case group.EpochUp(epoch, first):
                    self._cancel_start()
                    up = pb.EpochVersion(epoch=epoch, version=first)
                    self._say_all(pb.GroupNews(up=up))
                case group.GiveUp(why):
                    self._cancel_start()
                    text = f"broke {group.ATTEMPTS} times, at last as {why}; from now "
                    text += "on gradients go as messages, as with dense='workers'"
                    self._note("fell back", text)
                    self._say_all(pb.GroupNews(gave_up=_EMPTY))

    def _begin_epoch(self, epoch: int) -> None:
        self._cancel_start()
        event: group.Event = group.StartIsLate(epoch)
        after_s = self._start_s
        try:
            port = _free_port(self._host.host(self._task))
        except OSError as error:
            why = f"no port is free there: {error}"
            event, after_s = group.MemberFailed(self._task, epoch, why), 0.0
        else:
            news = pb.GroupNews(begun=pb.EpochBegun(epoch=epoch, port=port))
            self._say_all(news)
        self._start_timer = self._call_later(after_s, partial(self._lead, event))

    def _note(self, kind: str, text: str) -> None:
        text = f"the children of {self._task} and others for XLA's collectives {text}"
        self._host.events.note(kind, text, level=logging.WARNING)

    def _cancel_start(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None

    # ------------------------------------------------------------ a member

    def _heard_of_leader(self, news: pb.GroupNews) -> None:
        match news.WhichOneof("kind"):
            case "begun":
                self._port = news.begun.port
                self._take(member.EpochBegun(news.begun.epoch))
            case "up":
                self._take(group.EpochUp(news.up.epoch, news.up.version))
            case "gave_up":
                self._take(member.GroupGaveUp())

    def _take(self, event: member.Event) -> None:
        if self._is_closed:
            return
        for instruction in self._machine.handle(event):
            self._perform(instruction)

    def _perform(self, instruction: member.Instruction) -> None:
        match instruction:
            case member.EndChild():
                self._end_child()
            case member.BeginChild(epoch):
                self._begin_child(epoch)
            case member.TellReady(epoch, needs):
                ready = pb.EpochVersion(epoch=epoch, version=needs)
                self._tell(pb.GroupNews(ready=ready))
            case member.TellFailed(epoch, why):
                failed = pb.EpochFailed(epoch=epoch, why=why)
                self._tell(pb.GroupNews(failed=failed))
            case member.Sum(epoch, version):
                assert self._child is not None  # it is up
                late = partial(self._take, member.SumIsLate(epoch, version))
                self._sum_timer = self._call_later(self._sum_s, late)
                self._child.sum(version)
            case member.SendParts(version):
                for owner in self._members:
                    news = pb.GroupNews(part=version)
                    self._say(owner, news, [self._memory.row(owner)])
            case member.GiveSum(version):
                _LOG.debug("%s has its sum of update %d", self._task, version)
                self._give()

    def _begin_child(self, epoch: int) -> None:
        leader = self._host.host(self._members[0])
        host = self._host.host(self._task)
        setup = {
            "rank": self._rank,
            "members": len(self._members),
            "elements": self._memory.elements,
            "memory": self._memory.fd,
            "address": f"{leader}:{self._port}",
            "host": host.strip("[]"),
            "loopback": is_loopback(host),
        }
        failed = lambda why: self._take(member.ChildFailed(epoch, why))
        try:
            self._child = GroupChild(setup, partial(self._heard, epoch), failed)
        except OSError as error:
            # Not at once: this epoch is not told to all members yet.
            why = f"its child cannot begin: {error}"
            self._call_later(0.0, partial(failed, why))

    def _heard(self, epoch: int, line: str) -> None:
        what, _, rest = line.partition(" ")
        match what:
            case "ready":
                self._take(member.ChildReady(epoch))
            case "summed":
                self._cancel_sum()
                if self._group is not None:
                    self._lead(group.VersionSummed(epoch))
                self._take(member.ChildSummed(epoch, int(rest)))
            case "failed":
                self._take(member.ChildFailed(epoch, rest))

    def _end_child(self) -> None:
        self._cancel_sum()
        if self._child is not None:
            self._child.end()
            self._child = None

    def _cancel_sum(self) -> None:
        if self._sum_timer is not None:
            self._sum_timer.cancel()
            self._sum_timer = None

    # ------------------------------------------------------------ sending

    def _tell(self, news: pb.GroupNews) -> None:
        self._say(self._members[0], news)

    def _say_all(self, news: pb.GroupNews) -> None:
        for one in self._members:
            self._say(one, news)

    def _say(
        self, dst: TaskName, news: pb.GroupNews, tensors: Sequence[_Array] = ()
    ) -> None:
        if dst == self._task:
            self.received(dst, news, tensors)
        else:
            self._post(dst, news, tensors)


def _free_port(host: str) -> int:
    """Returns a port of this host at which nobody listens now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host.strip("[]"), 0))
        return int(free.getsockname()[1])
