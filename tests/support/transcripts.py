"""Transcripts of state machines: what one is told line by line, and what it answers.

    # A loop that halts starts nothing.
    ReplicaLoop first_step=3, steps=9
    0.5s LoopStarted
      StartStep 3
    HaltAsked 1
      Halted 1, in_flight=1
    StepComputed 3
    halted
      1

A line makes a machine, tells it an event, calls a method (``kept 2``) or asks for an
attribute (``halted``). Arguments are Python's, and words are strings: ``ps0`` is a
task, ``a#1`` the step ``("a", 1)``, ``e0s3[4:6]`` a lease, of batches 4 and 5 of slot 3
in epoch 0, and ``before`` the machine of so far. ``2.5s`` is the time from there on, 0
for a new machine; whatever takes ``now`` gets it. Indented is what the line gave: an
instruction per line, its first field without a name, and none that is as by default.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, Final

from jgraph import errors
from jgraph.coordination.data.slots import Lease
from jgraph.errors import JGError

LINE: Final = re.compile(r"(?:([\d.]+)s )?(\w+) ?(.*)")
TASK: Final = re.compile(r"/job:(\w+)/task:(\d+)")
SHORT: Final = re.compile(r"^(ps|worker)(\d+)$")
LEASE: Final = re.compile(r"e(\d+)s(\d+)\[(\d+):(\d+)\]")
STEP: Final = re.compile(r"(\w+)#(\d+)")
WIDTH: Final = 88


def replayed(script: str, module: ModuleType, extras: Mapping[str, Any]) -> str:
    """Returns a script with what the machines of a module answer now.

    Args:
      script: its answers may be those of another time, or missing.
      module: where the machine and its events are.
      extras: more that a script may name.
    """
    replay, lines = Replay(module, extras), list[str]()
    for number, line in enumerate(script.splitlines(), 1):
        if line.startswith("  "):
            continue  # an answer of before
        lines.append(line)
        if line and not line.startswith("#"):
            try:
                lines += replay.run(line)
            except Exception as error:
                error.add_note(f"line {number} of the script: {line}")
                raise
    return "\n".join(lines) + "\n"


def rows_of(script: str) -> set[int]:
    """Returns the rows of docs/reliability.md that a script says it shows."""
    return {int(row) for row in re.findall(r"\bRow (\d+)\b", script)}


class Replay:
    """A machine and the time, while a script goes on."""

    def __init__(self, module: ModuleType, extras: Mapping[str, Any]) -> None:
        known = {**vars(errors), **vars(module)}
        self._names = Names({n: v for n, v in known.items() if isinstance(v, type)})
        self._names.update(extras, call=lambda *args, **named: (args, named))
        self._names["lease"] = lambda e, s, first, end: Lease(e, s, first, end - first)
        self._machine: Any = None
        self._now = 0.0

    def run(self, line: str) -> list[str]:
        """Carries out a line; returns what it gave."""
        parts = LINE.fullmatch(line)
        assert parts, "neither a word and its arguments nor an answer"
        time, word, arguments = parts.groups()
        if time is not None:
            self._now = float(time)
        try:
            answer = self._answer(word, arguments)
        except JGError as error:
            answer = [f"raises {shown(error)}"]
        return [wrapped(one) for one in answer]

    def _answer(self, word: str, arguments: str) -> list[str]:
        if word.islower():
            target = getattr(self._machine, word)
            if not callable(target):
                return [shown(target)]
            return answer_of(self._call(target, arguments))
        target = self._names[word]
        assert callable(target), f"{word} is neither a machine nor an event of it"
        if is_dataclass(target):
            event = self._call(target, arguments)
            return answer_of(self._call(self._machine.handle, "", event) or None)
        self._now = 0.0
        self._machine = self._names["before"] = self._call(target, arguments)
        return []

    def _call(self, target: Any, arguments: str, *first: Any) -> Any:
        code = STEP.sub(
            r'("\1", \2)', LEASE.sub(r"lease(\1, \2, \3, \4)", f"call({arguments})")
        )
        args, named = eval(code, {"__builtins__": {}}, self._names)
        if "now" in inspect.signature(target).parameters:
            named["now"] = self._now
        return target(*first, *args, **named)


class Names(dict[str, Any]):
    """What words of a script mean."""

    def __missing__(self, name: str) -> str:
        return SHORT.sub(r"/job:\1/task:\2", name)


def answer_of(result: Any) -> list[str]:
    match result:
        case None:
            return []
        case [first, *_] if is_dataclass(first) and not isinstance(first, Lease):
            return [shown(one) for one in result]
    return [shown(result)]


def shown(value: Any) -> str:
    """Returns a value as scripts have it."""
    match value:
        case JGError():
            details = [f"{k}={shown(v)}" for k, v in value.details.items()]
            said = ", ".join([quoted(value.message), *details])
            return f"{type(value).__name__}({said})"
        case Lease(epoch, slot, first, batches):
            return f"e{epoch}s{slot}[{first}:{first + batches}]"
        case str():
            short = TASK.fullmatch(value)
            word = f"{short[1]}{short[2]}" if short else value
            return word if word.isidentifier() else quoted(value)
        case float():
            return f"{value:g}"
        case (str(name), int(number)) if not isinstance(number, bool):
            return f"{name}#{number}"
        case Mapping():
            plain = {k: v for k, v in value.items() if not isinstance(v, Mapping)}
            pairs = [f"{shown(k)}: {shown(v)}" for k, v in plain.items()]
            return f"{{{', '.join(pairs)}}}"
        case set() | frozenset():
            return f"[{', '.join(map(shown, sorted(value)))}]"
        case Sequence():
            return f"[{', '.join(map(shown, value))}]"
    return told(value) if is_dataclass(value) else str(value)


def told(instruction: Any) -> str:
    values = [(f, getattr(instruction, f.name)) for f in fields(instruction)]
    words = [
        ("" if number == 0 else f"{field.name}=") + shown(value)
        for number, (field, value) in enumerate(values)
        if value != field.default
    ]
    return f"{type(instruction).__name__} {', '.join(words)}".rstrip()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def wrapped(line: str) -> str:
    return textwrap.fill(
        line,
        WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
