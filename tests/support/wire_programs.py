"""Hypothesis strategies of programs that are right, for the tests of their codec."""

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jgraph.graph.ir import TaskName
from jgraph.graph.rows.rows import Layout
from jgraph.plan.program.nodes import (
    PACKABLE,
    CheckNode,
    ConstNode,
    FeedNode,
    FetchNode,
    JoinNode,
    LookupNode,
    MergeNode,
    Node,
    ReadNode,
    RecvNode,
    RouteNode,
    Rows,
    SegmentNode,
    SendNode,
    SplitNode,
    UnpackNode,
    ValueType,
    WriteNode,
    packed_types,
    runs,
)
from jgraph.plan.program.program import Partition, Program, SegmentCode, StoredVariable

DRIVER = TaskName("/job:worker/task:0")
PS = TaskName("/job:ps/task:0")
DTYPES = ["float32", "bfloat16", "int32", "bool", "int4", "float8_e4m3fn"]

types = st.builds(
    ValueType,
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)


class _Builder:
    """A partition being built: values and nodes that refer to what is there."""

    def __init__(self, task: TaskName, draw: Any) -> None:
        self.task = task
        self.draw = draw
        self.values: list[ValueType] = []
        self.variables = [
            StoredVariable(f"w{i}", t, draw(st.sampled_from(["", "run1"])))
            for i, t in enumerate(draw(st.lists(types, max_size=3)))
        ]
        self.nodes: list[Node] = []

    def new(self, *made: ValueType) -> tuple[int, ...]:
        self.values += made
        return tuple(range(len(self.values) - len(made), len(self.values)))

    def some_values(self, at_most: int = 3) -> tuple[int, ...]:
        if not self.values:
            return ()
        ids = st.integers(0, len(self.values) - 1)
        return tuple(self.draw(st.lists(ids, max_size=at_most)))

    def some_variables(self) -> tuple[int, ...]:
        ids = range(len(self.variables))
        return tuple(
            self.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else ()
        )

    def after(self) -> tuple[int, ...]:
        if not self.nodes:
            return ()
        ids = st.integers(0, len(self.nodes) - 1)
        return tuple(self.draw(st.lists(ids, max_size=2)))

    def stored(self, variables: tuple[int, ...]) -> list[ValueType]:
        return [self.variables[i].type for i in variables]

    def some_packs(self, variables: tuple[int, ...]) -> tuple[int, ...]:
        """Returns lengths of runs of variables of one dtype that can be packed."""
        alike = itertools.groupby(type_.dtype for type_ in self.stored(variables))
        groups = [(dtype, len([*run])) for dtype, run in alike]
        can = itertools.takewhile(lambda group: group[0] in PACKABLE, groups)
        lengths = [length for _, length in can]
        return tuple(lengths[: self.draw(st.integers(0, len(lengths)))])

    def add(self, kind: str, digests: list[str]) -> None:
        draw = self.draw
        if kind == "const":
            type_ = draw(types)
            bits = np.arange(int(np.prod(type_.shape))) % 2
            value = bits.reshape(type_.shape).astype(type_.np_dtype)
            self.nodes.append(ConstNode(value, *self.new(type_)))
        elif kind == "read":
            read, after = self.some_variables(), self.after()
            packs = self.some_packs(read)
            outs = self.new(*packed_types(self.stored(read), packs))
            self.nodes.append(ReadNode(read, outs, after, packs))
            cuts, _ = runs(self.stored(read), packs)
            for flat, cut in zip(outs, cuts, strict=False):
                self.nodes.append(UnpackNode(flat, self.new(*cut)))
        elif kind == "join":
            part = draw(types.filter(lambda type_: type_.shape != ()))
            parts = self.new(*[part] * draw(st.integers(1, 3)))
            whole = replace(part, shape=(len(parts) * part.shape[0], *part.shape[1:]))
            for part_id in parts:
                zeros = np.zeros(part.shape, part.np_dtype)
                self.nodes.append(ConstNode(zeros, part_id))
            self.nodes.append(JoinNode(parts, *self.new(whole)))
        elif kind == "rows":
            self.add_rows(digests)
        else:
            both = self.some_variables()
            cut = draw(st.integers(0, len(both)))
            inputs, after = self.some_values(), self.after()
            donate = tuple(range(draw(st.integers(0, len(inputs)))))
            outs = self.new(*draw(st.lists(types, max_size=3)))
            digest = draw(st.sampled_from(digests))
            self.nodes.append(
                SegmentNode(
                    *(digest, both[:cut], both[cut:], inputs, outs, donate, after),
                    packs=self.some_packs(both[:cut]),
                    read_packs=self.some_packs(both[cut:]),
                )
            )

    def add_rows(self, digests: list[str]) -> None:
        """Routes ids, looks their rows up, merges, splits and updates them."""
        draw, count = self.draw, self.draw(st.integers(0, 4))
        sizes = draw(st.sampled_from([(3,), (2, 2), (0, 5)]))
        layout = Layout(sizes, "mod" if sizes == (2, 2) else "div")
        plain = ValueType((count,), "int32")
        ragged = replace(plain, ragged=True)
        (given,) = self.new(plain)
        self.nodes.append(ConstNode(np.zeros(count, np.int32), given))
        ids, looked_at = self.new(plain, ValueType((), "int32"))
        start = draw(st.integers(0, count))
        self.nodes.append(
            CheckNode(given, 5, "x", (start,), (count,), (ids, looked_at))
        )
        positions, *local = self.new(plain, *[ragged] * len(sizes))
        names = draw(st.text("ab", max_size=2)), draw(st.booleans())
        self.nodes.append(RouteNode(ids, layout, *names, positions, tuple(local)))
        first = len(self.variables)
        self.variables += [
            StoredVariable(f"table{first + n}", ValueType((size, 2), "float32"))
            for n, size in enumerate(sizes)
        ]
        rows = tuple(Rows(first + n, v) for n, v in enumerate(local))
        whole = ValueType((count, 2), "float32")
        found = self.new(*[replace(whole, ragged=True)] * len(sizes))
        self.nodes.append(LookupNode(rows, found, self.after()))
        (merged,) = self.new(whole)
        self.nodes.append(MergeNode(tuple(local), found, merged))
        parts = self.new(*[replace(whole, ragged=True)] * len(sizes))
        self.nodes.append(SplitNode(merged, tuple(local), parts))
        cut = draw(st.integers(0, len(rows)))
        digest = draw(st.sampled_from(digests))
        self.nodes.append(
            SegmentNode(
                *(digest, (), (), parts, self.new(whole)),
                row_updates=rows[:cut],
                row_reads=rows[cut:],
            )
        )

    def partition(self) -> Partition:
        values, variables = tuple(self.values), tuple(self.variables)
        return Partition(self.task, values, variables, tuple(self.nodes))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws a program of a driver and a ps that talk to each other."""
    code = draw(st.lists(st.binary(max_size=20), min_size=1, max_size=3, unique=True))
    segments = tuple(
        SegmentCode(hashlib.sha256(c).hexdigest(), c, ("cpu", "cuda"), f"add x{i}")
        for i, c in enumerate(code)
    )
    digests = [s.digest for s in segments]
    driver, ps = _Builder(DRIVER, draw), _Builder(PS, draw)
    feeds = tuple((f"x{i}", t) for i, t in enumerate(draw(st.lists(types, max_size=3))))
    for name, type_ in feeds:
        driver.nodes.append(FeedNode(name, *driver.new(type_)))
    kinds = st.sampled_from(["const", "read", "segment", "rows", "join"])
    for builder in (driver, ps):
        for kind in draw(st.lists(kinds, max_size=4)):
            builder.add(kind, digests)
    for i, (src, dst) in enumerate([(driver, ps), (ps, driver)]):
        sent = src.some_values()
        src.nodes.append(SendNode(dst.task, f"key{i}", sent))
        made = dst.new(*(src.values[v] for v in sent))
        dst.nodes.append(RecvNode(src.task, f"key{i}", made))
    ps.add("segment", digests)
    fetched = driver.some_values()
    driver.nodes.append(FetchNode(fetched))
    fetches = tuple((f"[{i}]", driver.values[v]) for i, v in enumerate(fetched))
    parts = (driver.partition(), ps.partition())
    return Program("step", DRIVER, parts, segments, feeds, fetches)


F32 = ValueType((2,), "float32")
CODE = b"code"
DIGEST = hashlib.sha256(CODE).hexdigest()


def small() -> Program:
    """A driver feeds a ps, which updates its variable and answers."""
    driver = Partition(
        DRIVER,
        values=(F32, F32),
        variables=(),
        nodes=(
            FeedNode("x", 0),
            SendNode(PS, "x", (0,)),
            RecvNode(PS, "y", (1,)),
            FetchNode((1,)),
        ),
    )
    ps = Partition(
        PS,
        values=(F32, F32, F32, F32),
        variables=(StoredVariable("w", F32), StoredVariable("v", F32)),
        nodes=(
            ConstNode(np.ones(2, np.float32), 0),
            RecvNode(DRIVER, "x", (1,)),
            ReadNode((1,), (2,)),
            SegmentNode(DIGEST, (0,), (1,), (0, 1, 2), (3,), (1,), (2,)),
            WriteNode((1,), (3,), (2, 3)),
            SendNode(DRIVER, "y", (3,)),
        ),
    )
    return Program(
        "step",
        DRIVER,
        (driver, ps),
        (SegmentCode(DIGEST, CODE, ("cpu",), "add"),),
        (("x", F32),),
        (("[0]", F32),),
    )
