"""A board that says what each look at an imagined cluster changes, for transcripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact
from tests.support import board_facts


@final
@dataclass(frozen=True, slots=True)
class Says:
    """The sentence of the board is another one."""

    sentence: str


@final
@dataclass(frozen=True, slots=True)
class Begins:
    """Something is wrong from now on."""

    level: str
    text: str
    type: str


@final
@dataclass(frozen=True, slots=True)
class Ends:
    """Something is not wrong any more; since when it was."""

    text: str
    since_s: float


Change = Says | Begins | Ends


@final
class WatchedBoard:
    """A board, told what a poller finds at the time of a line."""

    def __init__(self) -> None:
        self._board = Board()
        self._sentence = self._board.sentence()

    def look(
        self,
        *tasks: str,
        now: float,
        missing: Sequence[str] = (),
        only: str = "",
        **told: Any,
    ) -> list[Change] | None:
        """A master tells of tasks; what differs from usual, all of them or one."""
        rows = {
            name: board_facts.task(**(told if only in {"", name} else {}))
            for name in tasks
        }
        fact = {**board_facts.status(now, rows), "missing": list(missing)}
        return self._take(fact)

    def run(self, step: int, *, now: float, **told: Any) -> list[Change] | None:
        """A master tells how the run stands."""
        return self._take(board_facts.run(now, step, **told))

    def report(
        self, worker: int, *, now: float, step_s: float = 0.02, loss: float = 0.5
    ) -> list[Change] | None:
        """A loop tells of ten steps."""
        fact = board_facts.report(
            now,
            worker,
            metrics={"loss": {"min": loss, "mean": loss, "max": loss}},
            step_s=[step_s] * 10,
            times={"compute": 10 * step_s},
        )
        return self._take(fact)

    def silent(self, text: str, *, now: float) -> list[Change] | None:
        """Nobody answers."""
        time = board_facts.START + now
        return self._take({"kind": "silent", "time": time, "text": text})

    def _take(self, fact: Fact) -> list[Change] | None:
        before = {alarm.id: alarm for alarm in self._board.alarms()}
        self._board.take(fact)
        after = {alarm.id: alarm for alarm in self._board.alarms()}
        changes: list[Change] = [
            Ends(alarm.text, alarm.since - board_facts.START)
            for name, alarm in before.items()
            if name not in after
        ]
        changes += [
            Begins(alarm.level, alarm.text, alarm.type)
            for name, alarm in after.items()
            if name not in before
        ]
        if (sentence := self._board.sentence()) != self._sentence:
            self._sentence = sentence
            changes.append(Says(sentence))
        return changes or None
