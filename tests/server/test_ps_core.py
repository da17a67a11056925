"""What a ps is without its network: any order of pushes, losses and copies of it.

The store, the numbers of frames by which each is taken once, the records, and the copy
that is made of them are the real ones. The model is an array to which each push adds
one, at a place of its own.
"""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jgraph.errors import (
    FencedError,
    JGError,
    MalformedMessageError,
)
from jgraph.graph.ir import TaskName
from jgraph.plan.program.nodes import ValueType
from jgraph.plan.program.program import StoredVariable
from jgraph.plan.program.replay import Record
from jgraph.rpc.exchange.inbound import Inbound, InboundStream, StreamReplaced
from jgraph.rpc.wire.record_codec import record_to
from jgraph.runtime.rendezvous import StepKey
from jgraph.runtime.store.change_log import Recorder
from jgraph.runtime.store.store import VariableStore
from jgraph.server.replication.follower import ChangeApplier

PLACES = 256
PS = TaskName("/job:ps/task:0")
W = StoredVariable("w", ValueType((PLACES,), "int32"))
WORKERS = st.integers(0, 1)


@dataclass
class Client:
    """A process of a worker: what it has sent, by number."""

    incarnation: int = 0
    stream: InboundStream | None = None
    is_broken: bool = False
    sent: dict[int, int] = field(default_factory=dict)
    replaced: list[InboundStream] = field(default_factory=list)


class PsCore(RuleBasedStateMachine):
    """A ps, two workers, and a copy of the ps."""

    @initialize()
    def begin(self) -> None:
        self.clients = [Client(), Client()]
        self.model = np.zeros(PLACES, np.int32)
        self.pushes = 0
        self.store = VariableStore(PS)
        self.store.write([W], [self.model])
        self.restart_inbound()
        self.keep_copy()
        self.checkpoint = self.model.copy()

    def restart_inbound(self) -> None:
        self.inbound = Inbound()
        self.known: list[set[int]] = [set(), set()]  # to this process of the ps
        for worker in (0, 1):
            self.restart_worker(worker)

    def keep_copy(self) -> None:
        """Begins a copy with all that is there."""
        self.recorder = Recorder(lambda: None)
        self.copy = VariableStore(TaskName("/job:ps/task:1"))
        self.copier = ChangeApplier("", [], self.copy)
        self.acknowledged: set[int] = set()
        self.history = [self.model.copy()]
        self.under_way: list[Record] = []
        self.store.whole(
            "", lambda what, arrays: self.recorder.put(what, [*map(np.array, arrays)])
        )
        self.ship()

    # ------------------------------------------------------------ workers

    @rule(worker=WORKERS)
    def restart_worker(self, worker: int) -> None:
        client = self.clients[worker]
        if client.stream is not None:
            client.replaced.append(client.stream)
        client.incarnation += 1
        client.sent, client.is_broken = {}, False
        self.known[worker].add(client.incarnation)
        client.stream, _ = self.inbound.connect(name(worker), client.incarnation)

    @precondition(lambda self: self.pushes < PLACES)
    @rule(worker=WORKERS, arrives=st.booleans(), fails=st.booleans())
    def push(self, worker: int, arrives: bool, fails: bool) -> None:
        """Sends a push; the connection may break before it arrives."""
        client, place = self.clients[worker], self.pushes
        self.pushes += 1
        number = len(client.sent) + 1
        client.sent[number] = place
        if client.is_broken:
            return
        if not arrives:
            client.is_broken = True
            assert client.stream is not None
            assert self.inbound.is_current(client.stream)
        else:
            assert self.deliver(worker, number, fails=fails)

    @rule(worker=WORKERS, back=st.integers(0, 5))
    def resume(self, worker: int, back: int) -> None:
        """Makes the connection again and sends what may not have arrived, or more."""
        client = self.clients[worker]
        assert client.stream is not None
        client.replaced.append(client.stream)
        client.stream = self.inbound.resume(name(worker), client.incarnation)
        client.is_broken = False
        received = client.stream.received.last
        for number in range(max(1, received + 1 - back), len(client.sent) + 1):
            assert self.deliver(worker, number) == (number > received)

    @rule(worker=WORKERS, ahead=st.integers(1, 3))
    def skip(self, worker: int, ahead: int) -> None:
        """A frame that comes without those before it is refused, and they may come."""
        client = self.clients[worker]
        stream = client.stream
        assert stream is not None
        if not stream.may_jump:
            with pytest.raises(MalformedMessageError):
                self.inbound.accept(stream, stream.received.last + 1 + ahead)

    @rule(worker=WORKERS, which=st.integers(0, 20))
    def hear_an_older_process(self, worker: int, which: int) -> None:
        replaced = self.clients[worker].replaced
        if replaced:
            old = replaced[which % len(replaced)]
            with pytest.raises((FencedError, StreamReplaced)):
                self.inbound.accept(old, 1 + which)

    @rule(worker=WORKERS)
    def connect_an_older_process(self, worker: int) -> None:
        client = self.clients[worker]
        older = {s.incarnation for s in client.replaced} - {client.incarnation}
        for incarnation in older & self.known[worker]:
            with pytest.raises(FencedError):
                self.inbound.connect(name(worker), incarnation)
            with pytest.raises(FencedError):
                self.inbound.resume(name(worker), incarnation)

    # ------------------------------------------------------------ the ps

    def deliver(self, worker: int, number: int, *, fails: bool = False) -> bool:
        """A frame is here; returns whether it is a new one."""
        client = self.clients[worker]
        assert client.stream is not None
        if not self.inbound.accept(client.stream, number):
            return False
        place, made = client.sent[number], list[Any]()
        step: StepKey = (name(worker), place)

        def run(w: Any) -> list[Any]:
            if fails:
                raise ValueError("a step that fails")
            made.append(w + jnp.zeros(PLACES, jnp.int32).at[place].set(1))
            return made

        def told() -> None:
            self.recorder.put("w", [np.array(made[0])], step)

        if fails:
            with pytest.raises(ValueError, match="a step that fails"):
                self.store.update([W], [], run, record=told)
            self.recorder.forget(step)
            return True
        self.store.update([W], [], run, record=told)
        self.model[place] += 1
        self.history.append(self.model.copy())

        def kept(error: JGError | None) -> None:
            assert error is None
            self.acknowledged.add(place)

        self.recorder.when_kept(step, kept)
        return True

    @rule(count=st.integers(1, 5))
    def ship(self, count: int = 1) -> None:
        """The copy takes records; steps whose records it has are told of."""
        self.under_way += self.recorder.take()
        for record in self.under_way[:count]:
            self.copier.apply(record_to("stream", record))
        del self.under_way[:count]
        self.recorder.commit(self.copier.number)

    @rule()
    def lose_the_ps(self) -> None:
        """The copy takes its place: nothing that was told of is lost."""
        self.model = self.history[self.copier.number - 1].copy()
        assert (self.model[list(self.acknowledged)] == 1).all()
        self.store = self.copy
        self.restart_inbound()
        self.keep_copy()

    @rule()
    def save(self) -> None:
        self.checkpoint = np.array(self.store.read([W])[0])

    @rule()
    def go_back(self) -> None:
        """All that is there is of the checkpoint, and a copy of that is made."""
        self.model = self.checkpoint.copy()
        self.store.write([W], [self.checkpoint])
        self.keep_copy()

    # ------------------------------------------------------------ what holds

    @invariant()
    def every_push_is_applied_once_or_not(self) -> None:
        np.testing.assert_array_equal(self.store.read([W])[0], self.model)
        assert self.model.max() <= 1

    @invariant()
    def the_copy_is_what_was_there_at_its_record(self) -> None:
        at = self.history[self.copier.number - 1]
        np.testing.assert_array_equal(self.copy.read([W])[0], at)
        assert (at[list(self.acknowledged)] == 1).all()


def name(worker: int) -> TaskName:
    return TaskName(f"/job:worker/task:{worker}")


TestPsCore = PsCore.TestCase
