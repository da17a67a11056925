"""Requests of the right kind with anything in them: errors of ours, nothing changed."""

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor as Field

from jgraph.cluster.methods import METHODS
from jgraph.errors import JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.transport import Frame
from tests.support.served import PS, WORKER, Served

# What ends the server, is meant to forget what is there, or is answered at its end.
NAMES = sorted({*METHODS} - {"Shutdown", "Reset", "Master.Reset", "DrainHold"})
PLAN = (
    '{"parts": [["d", 8]], "batch_size": 2, "seed": 0, "shuffle": "slots", '
    '"slot_batches": 1}'
)
TEXTS: tuple[str, ...] = (
    *("", "w", "h", PS, WORKER, "/job:worker/task:9", "null", "[]", "{}", PLAN),
    *('{"kind": "npz"}', '{"kind": "npz", "path": "/nope"}', "float32", "a" * 300),
)
WHOLE = (0, 1, -1, 2**31 - 1, 2**32 - 1, 2**62, 2**63)
REAL = (0.0, 1.0, -1.0, float("nan"), float("inf"))


def fill(chance: random.Random, message: Any, depth: int = 0) -> None:
    """Gives most fields a value, now and then one that makes sense."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.3 or depth > 4:
            continue
        value = getattr(message, field.name)
        for _ in range(chance.randrange(3) if field.is_repeated else 1):
            if field.message_type is not None:
                if not field.message_type.GetOptions().map_entry:
                    fill(chance, value.add() if field.is_repeated else value, depth + 1)
                continue
            try:
                any_value = anything(chance, field)
                if field.is_repeated:
                    value.append(any_value)
                else:
                    setattr(message, field.name, any_value)
            except ValueError:
                continue  # too large for the field


def anything(chance: random.Random, field: Field) -> Any:
    match field.cpp_type:
        case Field.CPPTYPE_STRING:
            is_text = field.type == Field.TYPE_STRING
            return chance.choice(TEXTS) if is_text else b"xx"
        case Field.CPPTYPE_DOUBLE | Field.CPPTYPE_FLOAT:
            return chance.choice(REAL)
        case Field.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case _:
            return chance.choice(WHOLE)


@pytest.mark.bad_input_row(5)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_any_request_is_answered_in_words_and_changes_nothing(
    served: Served, seed: int
) -> None:
    chance, wrong = random.Random(seed), list[str]()
    for _ in range(150):
        method = chance.choice(NAMES)
        header = pb.Frame()
        body = getattr(header, METHODS[method].request)
        body.SetInParent()
        fill(chance, body)
        if method == "Master.Connect":
            body.timeout_s = 0.1
        if method == "Master.AskData":
            body.handle, body.idle = "", False  # else it waits, for a while
        types = ("float32", "int64", "uint8")
        tensors = tuple(
            np.ones(chance.randrange(4), chance.choice(types))
            for _ in range(chance.randrange(3))
        )
        try:
            served.cluster.call(method, Frame(header, tensors))
        except JGError as error:
            if error.code == "JG-900":
                wrong.append(f"{error} from {method}: {header}")
    assert not wrong
