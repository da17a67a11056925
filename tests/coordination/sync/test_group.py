"""A group whose children die, freeze and are late, in any order: what never happens."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jgraph.coordination.sync import group, group_member as member
from jgraph.graph.ir import TaskName

VERSIONS = 6


class World:
    """Members and their children; messages keep their order between two members.

    Attributes:
      sums: versions given on by each member, in order.
      jobs: versions that the child of each member was told to sum, by epoch.
    """

    def __init__(self, seed: int, members: int, faults: int) -> None:
        self.random = random.Random(seed)
        self.names = [TaskName(f"/job:worker/task:{n}") for n in range(members)]
        self.group = group.Group(self.names)
        self.members = {name: member.GroupMember(0) for name in self.names}
        self.faults = faults
        self.queues: defaultdict[Any, deque[Callable[[], None]]] = defaultdict(deque)
        self.children: dict[TaskName, int] = {}
        self.jobs: defaultdict[int, dict[TaskName, list[int]]] = defaultdict(dict)
        self.sums: dict[TaskName, list[int]] = {name: [] for name in self.names}
        self.decided: Counter[int] = Counter()
        self.parts: defaultdict[Any, set[TaskName]] = defaultdict(set)
        self.is_given_up = False
        for name in self.names:
            self.post(name, self.names[0], partial(self.lead, group.MemberOpened(name)))
            self.tell(name, member.AllContributed(0))

    def post(self, src: Any, dst: TaskName, act: Callable[[], None]) -> None:
        self.queues[src, dst].append(act)

    def lead(self, event: group.Event) -> None:
        for said in self.group.handle(event):
            news: member.Event
            match said:
                case group.BeginEpoch(epoch):
                    news = member.EpochBegun(epoch)
                case group.EpochUp():
                    news = said
                case group.GiveUp():
                    self.is_given_up, news = True, member.GroupGaveUp()
            for name in self.names:
                self.post(self.names[0], name, partial(self.tell, name, news))

    def tell(self, name: TaskName, event: member.Event) -> None:
        for said in self.members[name].handle(event):
            self.perform(name, said)

    def perform(self, name: TaskName, said: member.Instruction) -> None:
        to_leader = partial(self.post, name, self.names[0])
        match said:
            case member.EndChild():
                self.children.pop(name, None)
            case member.BeginChild(epoch):
                self.children[name] = epoch
                self.jobs[epoch][name] = []
                self.of_child(name, epoch, member.ChildReady(epoch))
            case member.TellReady(epoch, needs):
                to_leader(partial(self.lead, group.MemberReady(name, epoch, needs)))
            case member.TellFailed(epoch, why):
                to_leader(partial(self.lead, group.MemberFailed(name, epoch, why)))
            case member.Sum(epoch, version):
                self.begin_sum(epoch, name, version)
            case member.SendParts(version):
                for owner in self.names:
                    self.post(name, owner, partial(self.part, owner, name, version))
            case member.GiveSum(version):
                self.give(name, version)

    def of_child(self, name: TaskName, epoch: int, event: member.Event) -> None:
        """What a child says arrives, unless it is ended before."""

        def arrive() -> None:
            if self.children.get(name) == epoch:
                self.tell(name, event)

        self.post("child", name, arrive)

    def begin_sum(self, epoch: int, name: TaskName, version: int) -> None:
        jobs = self.jobs[epoch]
        jobs[name].append(version)
        place = len(jobs[name]) - 1
        # It is a sum of one version as soon as all have begun it.
        there = {each[place] for each in jobs.values() if len(each) > place}
        assert there == {version}, f"epoch {epoch} sums {jobs}"
        if len(jobs) == len(self.names) and all(len(j) > place for j in jobs.values()):
            for one in self.names:
                done = member.ChildSummed(epoch, version)
                self.of_child(one, epoch, done)
                summed = partial(self.lead, group.VersionSummed(epoch))
                self.post("child", self.names[0], summed)

    def part(self, owner: TaskName, src: TaskName, version: int) -> None:
        self.parts[owner, version].add(src)
        if len(self.parts[owner, version]) == len(self.names):
            self.tell(owner, member.MessagesSummed(version))

    def give(self, name: TaskName, version: int) -> None:
        self.sums[name].append(version)
        if not all(version in sums for sums in self.sums.values()):
            return
        for one in self.names:  # who decides has heard all
            self.post("arbiter", one, partial(self.decide, one, version))

    def decide(self, name: TaskName, version: int) -> None:
        self.tell(name, member.UpdateDecided())
        self.decided[version] += 1
        if self.decided[version] == len(self.names) and version + 1 < VERSIONS:
            for one in self.names:
                event = member.AllContributed(version + 1)
                self.post("replica", one, partial(self.tell, one, event))

    def fault(self) -> None:
        """A child dies, or a time is over."""
        self.faults -= 1
        if self.random.random() < 0.3 and self.group.state == "starting":
            self.lead(group.StartIsLate(max(self.jobs, default=1)))
        elif self.children:
            name = self.random.choice(sorted(self.children))
            epoch = self.children[name]
            event: member.Event = member.ChildFailed(epoch, "SIGKILL")
            if self.random.random() < 0.5:
                event = member.SumIsLate(epoch, len(self.sums[name]))
            self.tell(name, event)

    def run(self) -> None:
        for _ in range(20_000):
            ready = [key for key, queue in self.queues.items() if queue]
            if not ready:
                return
            if self.faults and self.random.random() < 0.1:
                self.fault()
                continue
            self.queues[self.random.choice(ready)].popleft()()
        raise AssertionError("it does not come to an end")


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 12))
def test_each_version_is_summed_once_for_each_member_whatever_dies(
    seed: int, members: int, faults: int
) -> None:
    """And no epoch ever adds what two versions are made of."""
    world = World(seed, members, faults)
    world.run()
    assert list(world.sums.values()) == [list(range(VERSIONS))] * members


def test_the_worlds_have_faults_that_are_outlived_and_groups_that_give_up() -> None:
    worlds = [World(seed, 3, 12) for seed in range(40)]
    for world in worlds:
        world.run()
    assert any(world.is_given_up for world in worlds)
    assert any(len(w.jobs) > 3 and not w.is_given_up for w in worlds)


@pytest.mark.row(50, 51)
@pytest.mark.parametrize("after", range(1, 40))
def test_one_loss_at_any_moment_costs_no_version(after: int) -> None:
    world = World(seed=after, members=3, faults=0)
    for _ in range(after):
        ready = [key for key, queue in world.queues.items() if queue]
        world.queues[world.random.choice(ready)].popleft()()
    world.faults = 1
    world.fault()
    world.run()
    assert list(world.sums.values()) == [list(range(VERSIONS))] * 3
    assert not world.is_given_up
