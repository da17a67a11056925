"""Machines do what their transcripts say; these are the place to read first."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jgraph.coordination.data.shares import Cut, Shares
from jgraph.coordination.data.slots import Part, SlotPlan
from jgraph.coordination.data.sync_data import SyncData
from jgraph.coordination.sync import aggregation
from jgraph.coordination.sync.rounds import RoundRule
from jgraph.coordination.sync.secure_rounds import SecureRounds, SumRule
from jgraph.graph.ir import TaskName
from tests.support.transcripts import replayed, rows_of
from tests.support.watched_board import WatchedBoard

HERE = Path(__file__).parent


def slots(batches: int, slot_batches: int = 4) -> SlotPlan:
    """Slots of so many batches of one example, dealt in their order."""
    parts = [Part("data", batches)]
    return SlotPlan(parts, 1, seed=0, shuffle="none", slot_batches=slot_batches)


def arbiter(
    shards: Sequence[TaskName],
    replicas: Sequence[str],
    *,
    wanted: int,
    steps: int,
    halt_every: Sequence[int] = (),
    fraction: float = 0.0,
    least: int = 1,
    threshold: int = 0,
) -> aggregation.Arbiter:
    """An arbiter after 5 updates, with replica a on worker 0, b on worker 1, ...

    With a fraction some of them are invited to an update; with a threshold the ps see
    sums alone of these.
    """
    rule = RoundRule(fraction, least, seed=1) if fraction else None
    return aggregation.Arbiter(
        shards,
        {name: TaskName(f"/job:worker/task:{i}") for i, name in enumerate(replicas)},
        SyncData(slots(100), replicas, own=rule is not None),
        wanted=wanted,
        version=5,
        steps=steps,
        halt_every=halt_every,
        rule=rule,
        sums=SumRule(threshold, neighbours=4) if threshold else None,
    )


def secure_rounds(
    replicas: Sequence[str], *, threshold: int, least: int
) -> SecureRounds:
    """The secure sums of replicas on workers, each of which is a neighbour of all."""
    tasks = {name: TaskName(f"/job:worker/task:{i}") for i, name in enumerate(replicas)}
    rule = SumRule(threshold, neighbours=10)
    return SecureRounds(rule, tasks, least=least, draw=int)


def shares(each: int, most: int) -> Shares:
    """Shares by speed, of so many pieces for each replica."""
    return Shares(Cut(each, most=most, measured=True))


EXTRAS: Mapping[str, Any] = {
    "slots": slots,
    "shares": shares,
    "Arbiter": arbiter,
    "SecureRounds": secure_rounds,
    "WatchedBoard": WatchedBoard,
}


def called(script: Path) -> str:
    """Returns the name of a script: step/replica_loop/halt."""
    package, _, machine, file = script.relative_to(HERE).with_suffix("").parts
    return f"{package}/{machine}/{file}"


CASES = [
    pytest.param(
        script,
        id=called(script),
        marks=[pytest.mark.row(row) for row in rows_of(script.read_text("utf-8"))],
    )
    for script in sorted(HERE.glob("*/testdata/*/*.txt"))
]


@pytest.mark.parametrize("script", CASES)
def test_a_machine_does_as_its_transcript_says(script: Path, rewrite: bool) -> None:
    package, machine, _ = called(script).split("/")
    module = import_module(f"jgraph.coordination.{package}.{machine}")
    text = script.read_text("utf-8")
    assert text.startswith("# "), "say first what it shows"
    now = replayed(text, module, EXTRAS)
    if rewrite:
        script.write_text(now, "utf-8")
    assert now == script.read_text("utf-8")
