"""Simulated streams of requests and of repositories keep what serving promises."""

import random
from collections import Counter

import pytest

from jgraph.coordination.serving.batching import (
    FULL,
    LATE,
    Batching,
    Came,
    Execute,
    Freed,
    Left,
    Limits,
    Refuse,
    Tick,
    WakeAt,
)
from jgraph.coordination.serving.versions import (
    Drain,
    Failed,
    Idle,
    Listed,
    Load,
    LoadAsked,
    Loaded,
    Publish,
    Unload,
    UnloadAsked,
    Versions,
)


def limits(rng: random.Random) -> Limits:
    most = rng.choice([1, 4, 16])
    return Limits(
        max_rows=most,
        buckets=tuple(sorted({1, most // 2 or 1, most})),
        max_delay_s=rng.choice([0.0, 0.003]),
        slots=rng.choice([1, 3]),
        max_queued_rows=rng.choice([most, 40]),
        merges=rng.random() < 0.7,
    )


class Stream:
    """Requests at random times, executions of random lengths, and what was told."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.limits = limits(self.rng)
        self.machine = Batching(self.limits)
        self.rows: dict[int, int] = {}
        self.deadlines: dict[int, float] = {}
        self.begun: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()
        self.left: set[int] = set()
        self.running: dict[int, float] = {}
        self.wake = float("inf")
        self.now = 0.0

    def tell(self, event: Came | Left | Freed | Tick) -> None:
        for done in self.machine.handle(event):
            match done:
                case Execute():
                    self.check(done)
                case Refuse(request, why):
                    assert not self.begun[request] or why == LATE
                    assert why != LATE or self.deadlines[request] <= self.now
                    self.refused[request] += 1
                case WakeAt(at):
                    assert at >= self.now
                    self.wake = at
        assert 0 <= self.machine.queued_rows <= self.limits.max_queued_rows

    def check(self, run: Execute) -> None:
        assert run.slot not in self.running
        rows = sum(piece.rows for piece in run.pieces)
        if self.limits.merges:
            assert rows <= run.bucket <= self.limits.max_rows
            assert run.bucket in self.limits.buckets
        else:
            assert len(run.pieces) == 1
            assert rows == run.bucket
        for piece in run.pieces:
            assert piece.request not in self.left
            assert self.deadlines[piece.request] > self.now
            assert piece.first == self.begun[piece.request]
            self.begun[piece.request] += piece.rows
        self.running[run.slot] = self.now + self.rng.expovariate(200)

    def run(self, requests: int) -> None:
        coming = 0.0
        request = 0
        while request < requests or self.running or self.machine.queued_rows:
            ends = min(self.running.values(), default=float("inf"))
            comes = coming if request < requests else float("inf")
            self.now = min(ends, comes, self.wake)
            assert self.now < float("inf"), "requests wait for nothing"
            if self.now == ends:
                slot = min(self.running, key=self.running.__getitem__)
                del self.running[slot]
                self.tell(Freed(slot, self.now))
            elif self.now == comes:
                self.come(request)
                request += 1
                coming = self.now + self.rng.expovariate(400)
            else:
                self.wake = float("inf")
                self.tell(Tick(self.now))

    def come(self, request: int) -> None:
        rows = self.rng.choice([1, 1, 1, 2, 5, 30])
        self.rows[request] = rows
        self.deadlines[request] = self.now + self.rng.choice([0.0, 0.004, 0.05, 10.0])
        self.tell(Came(request, rows, self.deadlines[request], self.now))
        if self.rng.random() < 0.1:
            leaving = self.rng.randrange(request + 1)
            self.left.add(leaving)
            self.tell(Left(leaving, self.now))


@pytest.mark.parametrize("seeds", range(20))
def test_no_request_is_lost_answered_twice_or_begun_after_its_deadline(
    seeds: int,
) -> None:
    for seed in range(seeds * 25, seeds * 25 + 25):
        stream = Stream(seed)
        stream.run(120)
        for request, rows in stream.rows.items():
            whole, told = stream.begun[request] == rows, stream.refused[request]
            if request in stream.left:
                assert told <= 1
                continue
            assert told == (0 if whole else 1), f"seed {seed}, request {request}"


def test_a_queue_is_full_only_when_it_is() -> None:
    machine = Batching(Limits(max_queued_rows=1))
    assert isinstance(machine.handle(Came(0, 1, 9.0, 0.0))[0], Execute)
    assert isinstance(machine.handle(Came(1, 1, 9.0, 0.0))[0], WakeAt)
    assert machine.handle(Came(2, 1, 9.0, 0.0)) == [Refuse(2, FULL)]


class Repository:
    """A directory that changes, and a loader that fails now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machine = Versions(newest=self.rng.choice([1, 1, 2, 0]))
        self.there: set[int] = set()
        self.in_memory: set[int] = set()
        self.loading: list[int] = []
        self.draining: list[int] = []
        self.table = Publish(())
        self.has_answered = self.was_unloaded = False

    def tell(self, event: object) -> None:
        for done in self.machine.handle(event):  # type: ignore[arg-type]
            match done:
                case Load(version):
                    assert version not in self.in_memory
                    self.loading.append(version)
                    assert len(self.loading) == 1
                case Publish():
                    assert set(done.ready) <= self.in_memory
                    assert set(done.labels.values()) <= set(done.ready)
                    self.table = done
                case Drain(version):
                    assert version not in self.table.ready
                    self.draining.append(version)
                case Unload(version):
                    assert version not in self.table.ready
                    self.in_memory.remove(version)
        self.has_answered |= bool(self.table.ready)
        assert self.was_unloaded or not self.has_answered or self.table.ready

    def change(self) -> None:
        match self.rng.randrange(7):
            case 0:
                self.there.add(max(self.there, default=0) + 1)
            case 1 if self.there:
                self.there.discard(self.rng.choice(sorted(self.there)))
            case 2 if self.loading:
                version = self.loading.pop()
                if self.rng.random() < 0.3:
                    self.tell(Failed(version, "bad"))
                else:
                    self.in_memory.add(version)
                    self.tell(Loaded(version))
            case 3 if self.draining:
                self.tell(Idle(self.draining.pop(0)))
            case 4 if self.rng.random() < 0.1:
                self.was_unloaded = True
                self.tell(UnloadAsked())
            case 5 if self.was_unloaded:
                self.tell(LoadAsked())
        labels = {"stable": self.rng.randrange(1, 9)} if self.rng.random() < 0.3 else {}
        self.tell(Listed(tuple(sorted(self.there)), labels))


@pytest.mark.parametrize("seeds", range(10))
def test_there_is_always_a_version_that_answers_once_there_was_one(seeds: int) -> None:
    for seed in range(seeds * 30, seeds * 30 + 30):
        repository = Repository(seed)
        for _ in range(150):
            repository.change()
