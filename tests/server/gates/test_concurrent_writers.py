"""Writers that update at once, through the gates of synchronous and bounded training.

Each batch has a place of its own in both parameters, one on each ps, and its update
adds there. The runtimes, the gates and who decides are the real ones; values and
messages arrive in an order drawn by a seed, except that those of one sender to one
receiver keep theirs.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from hypothesis import given, settings, strategies as st

from jgraph.coordination.data.slots import Lease, Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.sync.aggregation import (
    Applied,
    Arbiter,
    DataAsked,
    DealData,
    Decide,
    End,
    Event,
    Void,
)
from jgraph.errors import RunOverError
from jgraph.graph.device import DeviceSpec
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName
from jgraph.graph.variable import Variable
from jgraph.plan.plan import plan
from jgraph.plan.program.accumulate import (
    MEAN,
    averaging,
    contributing,
    gated,
    shards_of,
)
from jgraph.plan.program.program import Program, StoredVariable
from jgraph.plan.program.types import value_type
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import body_of
from jgraph.rpc.transport import Frame
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.store import VariableStore
from jgraph.server.gates.gates import Decides, Gates
from jgraph.train.data.data import as_dataset
from jgraph.train.model.adapters import adapt
from jgraph.train.step.arrange import Arrangement
from jgraph.train.step.sync_step import SyncStep
from jgraph.train.step.train_step import TrainStep
from tests.support.tasks import Tasks

WRITERS, BATCHES, GATE = 4, 24, "g"
PS: Final = [TaskName(f"/job:ps/task:{n}") for n in range(2)]
WORKERS: Final = [TaskName(f"/job:worker/task:{n}") for n in range(WRITERS)]
HANDLES: Final = [f"w{n}" for n in range(WRITERS)]
ROWS: Final = np.eye(BATCHES, dtype=np.float32)


class Sums(nnx.Module):
    """Two parameters, each on its ps."""

    def __init__(self) -> None:
        self.first = nnx.Param(jnp.zeros(BATCHES))
        self.second = nnx.Param(jnp.zeros(BATCHES))


def loss(model: Sums, batch: Any) -> Any:
    return -(batch * (model.first[...] + model.second[...])).sum()


class Link:
    """The part of a transport that gates use: what is posted waits."""

    def __init__(self, src: TaskName, posts: "Posts") -> None:
        self._src = src
        self._posts = posts

    def post(self, dst: TaskName, message: Frame) -> None:
        self._posts.setdefault((self._src, dst), deque()).append(message)


Posts: TypeAlias = dict[tuple[TaskName, TaskName], deque[Frame | Callable[[], None]]]


class Timer:
    """Goes off among the messages, at any time."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def __call__(self) -> None:
        self.callback()

    def cancel(self) -> None:
        self.callback = lambda: None


class World:
    """Tasks with their gates, and all that is on the way between them."""

    def __init__(self) -> None:
        self.step = TrainStep(
            adapt(Sums(), loss, seed=0, data=as_dataset(ROWS)),
            optax.sgd(1.0),
            arrangement=Arrangement(
                lambda sizes: dict(zip(sizes, itertools.cycle(PS), strict=False)),
                ps=tuple(PS),
            ),
        )
        self.tasks = Tasks(*PS, *WORKERS)
        self.posts: Posts = {}
        self.gates: dict[TaskName, Gates] = {}
        for task in PS:
            link: Any = Link(task, self.posts)
            opened = self.tasks.runtimes[task].gates
            later = partial(self.later, task)
            self.gates[task] = Gates(task, link, opened, later, many=WRITERS)
        self.started = 0
        """Steps of all examples: a number is used once."""

    def later(
        self, task: TaskName, seconds: float, callback: Callable[[], None]
    ) -> Timer:
        timer = Timer(callback)
        key = task, TaskName(f"the timer of {task}")
        self.posts.setdefault(key, deque()).append(timer)
        return timer

    def planned(self, graph: Graph, driver: TaskName) -> Program:
        home = DeviceSpec.from_string(driver)
        tasks = [*PS, *WORKERS]
        return plan(graph, tasks=tasks, driver=driver, default=home).program

    def register_writers(self, graph: Graph, program: Program) -> None:
        self.feeds = [feed.name for feed in graph.feeds]
        for handle, worker in zip(HANDLES, WORKERS, strict=True):
            self.tasks.register(handle, program.rename_task(WORKERS[0], worker))

    def begin(self, order: random.Random, opened: pb.OpenGate) -> None:
        """Begins with zeros, and with gates that are new."""
        self.order, self.steps = order, dict[str, StepKey]()
        self.posts.clear()  # of an example that failed
        self.tasks.messages.clear()
        for variable in self.step.variables:
            value = np.zeros(variable.shape, variable.dtype)
            self.store_of(variable).write([stored(variable)], [value])
        for gates in self.gates.values():
            gates.open(opened)

    def store_of(self, variable: Variable) -> VariableStore:
        return self.tasks.runtimes[str(variable.device)].store

    def values(self) -> dict[str, Any]:
        found = {}
        for variable in self.step.variables:
            (found[variable.name],) = self.store_of(variable).read([stored(variable)])
        return found

    def write(self, handle: str, batch: int, slot: int = 0) -> None:
        """Starts a step of a writer."""
        self.started += 1
        numbers = np.int32(self.started), np.int32(0), np.int32(slot)
        given = ROWS[batch : batch + 1], *numbers
        feeds = dict(zip(self.feeds, given, strict=False))
        self.steps[handle] = self.tasks.start(handle, self.started, feeds)

    def update(self) -> StepKey:
        """Starts the update that was decided, on each ps after it heard of that."""
        self.started += 1
        step = "apply", self.started
        for task in PS:
            told = self.tasks._record(task, step)
            begin = partial(self.tasks.runtimes[task].start_step, step, told)
            self.posts.setdefault((PS[0], task), deque()).append(begin)
        return step

    def idle(self) -> list[str]:
        """Returns the writers with no step under way."""
        return [handle for handle in HANDLES if self.is_idle(handle)]

    def is_idle(self, handle: str) -> bool:
        task = WORKERS[HANDLES.index(handle)]
        return handle not in self.steps or self.is_over(self.steps[handle], task)

    def is_over(self, step: StepKey, task: TaskName) -> bool:
        outcome = self.tasks.outcomes.get((task, step))
        assert not isinstance(outcome, BaseException), outcome
        return outcome is not None

    def deliver(self) -> bool:
        """Delivers any of what is on the way; returns whether something was."""
        values = {dst for dst, *_ in self.tasks.messages}
        waiting: list[Any] = [*sorted(values), *self.posts]
        if not waiting:
            return False
        chosen = self.order.choice(waiting)
        if isinstance(chosen, tuple):
            src, dst = chosen
            message = self.posts[chosen].popleft()
            if not self.posts[chosen]:
                del self.posts[chosen]
            if callable(message):
                message()
            else:
                self.gates[dst].received(src, body_of(message))
        else:
            first = next(m for m in self.tasks.messages if m[0] == chosen)
            self.tasks.messages.remove(first)
            self.tasks.messages.appendleft(first)
            self.tasks.deliver_one()
        return True


def stored(variable: Variable) -> StoredVariable:
    type_ = value_type(variable.spec.aval)
    return StoredVariable(variable.name, type_, variable.spec.container)


# ---------------------------------------------------------------- bounded staleness


@cache
def bounded_world() -> World:
    world = World()
    graph = world.step.graph(ROWS[:1])
    world.register_writers(graph, gated(world.planned(graph, WORKERS[0]), GATE))
    return world


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32), bound=st.none() | st.integers(0, 4))
def test_of_writers_behind_a_bound_no_update_is_lost_and_none_is_too_old(
    seed: int, bound: int | None
) -> None:
    world, order = bounded_world(), random.Random(seed)
    shards = shards_of(world.tasks.runtimes[PS[0]].program("w0"))
    world.begin(order, pb.OpenGate(gate=GATE, shards=shards, max_staleness=bound))
    left = [*range(BATCHES)]
    while True:
        idle = world.idle()
        if left and idle and order.random() < 0.5:
            world.write(order.choice(idle), left.pop())
        elif not world.deliver() and not left:
            break
    assert world.idle() == HANDLES
    values = world.values()
    assert values["global_step"] == BATCHES
    for name in ("params/first", "params/second"):
        np.testing.assert_array_equal(values[name], np.ones(BATCHES))
    for task in shards:
        rows = world.gates[task].staleness(GATE)
        assert sum(row.updates for row in rows) == BATCHES
        if bound is not None:
            assert max(row.staleness for row in rows) <= bound


# ---------------------------------------------------------------------- synchronous


@cache
def together(wanted: int) -> tuple[World, list[TaskName]]:
    """Returns the tasks of synchronous training, and who has a gate."""
    world = World()
    sync = SyncStep(world.step, ROWS[:1], wanted, WRITERS)
    applied = world.planned(sync.apply_graph(), PS[0])
    used = {v.name for p in applied.partitions for v in p.variables}
    graph = sync.gradient_graph({name for name in used if name.startswith(MEAN)})
    program = contributing(world.planned(graph, WORKERS[0]), GATE)
    world.register_writers(graph, program)
    shards = [PS[0], *(s for s in shards_of(program) if s != PS[0])]
    world.tasks.register("apply", averaging(applied, GATE, shards))
    return world, shards


class Rounds:
    """Who decides what is averaged, and the writers that it deals batches to."""

    def __init__(
        self, world: World, shards: Sequence[TaskName], wanted: int, steps: int
    ) -> None:
        self.world = world
        self.plan = SlotPlan([Part("data", BATCHES)], 1, 0, shuffle="slots")
        self.data = SyncData(self.plan, HANDLES)
        tasks = dict(zip(HANDLES, WORKERS, strict=True))
        self.machine = Arbiter(
            *(shards, tasks, self.data), wanted=wanted, version=0, steps=steps
        )
        self.held: dict[str, deque[int]] = {handle: deque() for handle in HANDLES}
        self.counted: list[int] = []
        self.batch_of: dict[StepKey, int] = {}
        self.update: StepKey | None = None
        self.end: End | None = None
        self.events: deque[Event] = deque()
        self.gates = world.gates[shards[0]]
        self.gates.listen(GATE, Decides(self.take, lambda task: None))

    def take(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) > 1:
            return  # one after the other
        while self.events:
            for instruction in self.machine.handle(self.events[0]):
                self.perform(instruction)
            self.events.popleft()

    def perform(self, instruction: Any) -> None:
        match instruction:
            case Decide(_, steps):
                self.counted += [self.batch_of[step] for step in steps]
                self.gates.decide(GATE, steps)
                self.update = self.world.update()
            case Void(step):
                self.gates.void(GATE, step)
            case DealData(handle, leases):
                for lease in leases or ():
                    self.held[handle].extend(self.numbers(lease))
            case End():
                self.end = instruction
                self.gates.close(GATE, RunOverError("over"))

    def numbers(self, lease: Lease) -> list[int]:
        within = range(lease.first, lease.first + lease.batches)
        return [self.plan.number(lease.epoch, lease.slot, index) for index in within]

    def write(self, handle: str) -> None:
        if not self.held[handle]:
            self.take(DataAsked(handle, 2, idle=True))
        if self.held[handle]:
            batch = self.held[handle].popleft()
            self.world.write(handle, batch % BATCHES, slot=batch)
            self.batch_of[self.world.steps[handle]] = batch

    def look(self) -> None:
        """Tells of the update that is over."""
        step = self.update
        if step is not None and all(self.world.is_over(step, task) for task in PS):
            self.update = None
            self.take(Applied())


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    wanted=st.integers(1, WRITERS),
    steps=st.integers(1, 2 * BATCHES // WRITERS),
    turns=st.booleans(),
)
def test_of_writers_that_are_averaged_each_update_has_as_many_and_none_twice(
    seed: int, wanted: int, steps: int, turns: bool
) -> None:
    """With ``turns`` a gate takes what comes in a turn of the event loop at once."""
    world, shards = together(wanted)
    order = random.Random(seed)
    opened = pb.OpenGate(gate=GATE, synchronous=True, shards=shards)
    if turns:
        opened.handles.extend(HANDLES)
    world.begin(order, opened)
    rounds = Rounds(world, shards, wanted, steps)
    while rounds.end is None:
        rounds.look()
        idle = world.idle()
        # Seldom while much is on the way: it would only grow.
        if idle and order.random() * (8 + len(world.tasks.messages)) < 4:
            rounds.write(order.choice(idle))
        else:
            assert world.deliver() or idle or rounds.update, "everybody waits"
    while world.deliver():
        pass  # of writers whose steps came too late
    values = world.values()
    assert rounds.end == End("done")
    assert len(rounds.counted) == len({*rounds.counted}) == steps * wanted
    due = np.bincount([n % BATCHES for n in rounds.counted], minlength=BATCHES)
    assert values["global_step"] == steps
    for name in ("params/first", "params/second"):
        np.testing.assert_allclose(values[name], due / wanted, 1e-6)
