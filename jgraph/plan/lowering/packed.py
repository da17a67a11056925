"""Segments with packed variables: what lies in flat arrays, and the rest.

A ``PackedSegment`` takes and gives one flat array for many small variables, and for
many small values. Its lane groups run on these arrays (``lanes``); everything else is
an ordinary segment, the ``rest``, which also makes the single numbers for the groups.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias, cast, final

import jax
import jax.numpy as jnp

from jgraph._compat import Literal, Var
from jgraph.graph.mesh import mesh_of
from jgraph.plan.analysis.flow import Flow, Op
from jgraph.plan.lowering.lanes import (
    LaneGroup,
    Run,
    lane_groups,
    run_group,
)
from jgraph.plan.lowering.lower import (
    Segment,
    SegmentFunction,
    segment_function,
)
from jgraph.plan.program.nodes import packed_starts, packed_type, runs
from jgraph.plan.program.types import value_type

Pack: TypeAlias = tuple[Var, ...]
"""Values that lie in one flat array, in order."""


@final
@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A segment of which some arguments and results are flat arrays.

    Its executable takes: the ``update_runs``, then the ``updates`` of the rest, the
    ``read_runs``, the ``reads`` of the rest, its rows, the ``packs_in``, the inputs
    of the rest. It gives the new values likewise, then the ``packs_out`` and the other
    ``outs`` of the segment.

    Attributes:
      segment: as it would be without packs; its ``outs`` begin with the values of
        ``packs_out``.
      rest: what is not done on flat arrays. Its ``outs`` are the numbers that groups
        take, then those of the segment.
      groups: updates of variables that are alike.
      update_runs: variables that are taken and given back as one array.
      read_runs: variables that are only taken so.
      packs_in: values from outside that come so.
      packs_out: values for outside that leave so.
    """

    segment: Segment
    rest: Segment
    groups: tuple[LaneGroup, ...] = ()
    update_runs: tuple[Run, ...] = ()
    read_runs: tuple[Run, ...] = ()
    packs_in: tuple[Pack, ...] = ()
    packs_out: tuple[Pack, ...] = ()

    @property
    def updates(self) -> Run:
        """The variables that are taken and given back, in the order of arguments."""
        return (*(v for run in self.update_runs for v in run), *self.rest.updates)

    @property
    def reads(self) -> Run:
        """The variables that are only taken."""
        return (*(v for run in self.read_runs for v in run), *self.rest.reads)

    def takes_alone(self, pack: Pack) -> bool:
        """Whether the rest takes values of a pack by themselves."""
        return not set(pack).isdisjoint(self.rest.inputs)


def groups_of(flow: Flow, segment: Segment) -> list[LaneGroup]:
    """Returns the updates of a segment that can run on flat arrays."""
    if not segment.updates or mesh_of(op.equation for op in segment.ops) is not None:
        return []
    whole = [op for op in segment.ops if op.whole]
    reads = {op.equation.outvars[0]: op.reads[0][0] for op in whole if not op.writes}
    written = {op.writes[0]: op.equation.invars[1] for op in whole if op.writes}
    equations = [op.equation for op in segment.ops if not (op.reads or op.writes)]
    inputs = [v for v in segment.inputs if v not in flow.ragged]
    allowed = set(segment.updates) | set(segment.reads)
    while True:
        groups = lane_groups(
            equations,
            {var: v for var, v in reads.items() if v in allowed},
            {v: atom for v, atom in written.items() if v in allowed},
            inputs,
        )
        # What others in the segment take by itself lies in no flat array.
        alone = _used(_rest_ops(flow, segment, groups, ()))
        taken = {v for group in groups for run in group.runs() for v in run}
        if alone.isdisjoint(taken):
            return groups
        allowed -= alone


def packed(
    flow: Flow,
    segment: Segment,
    groups: Sequence[LaneGroup],
    packs: Collection[Pack],
    packs_out: Sequence[Pack],
) -> PackedSegment:
    """Returns a segment with its groups on flat arrays.

    Args:
      flow: the graph.
      segment: with the values of ``packs_out`` first among its ``outs``.
      groups: from ``groups_of``.
      packs: values that come as flat arrays.
      packs_out: values of the segment that are to leave so.
    """
    if not groups:
        return PackedSegment(segment, segment, packs_out=tuple(packs_out))
    packs_in = [p for group in groups for p in group.input_packs() if p in packs]
    rest = _rest(flow, segment, groups, packs_in)
    used = dict.fromkeys(run for group in groups for run in group.runs())
    updated = {group.variables for group in groups}
    return PackedSegment(
        segment,
        rest,
        tuple(groups),
        tuple(run for run in used if run in updated),
        tuple(run for run in used if run not in updated),
        tuple(dict.fromkeys(packs_in)),
        tuple(packs_out),
    )


def packed_function(flow: Flow, packed: PackedSegment) -> SegmentFunction:
    """Returns a packed segment as a function over plain arrays."""
    code = segment_function(flow, packed.rest)
    if packed.groups:
        code = _with_groups(flow, packed, code)
    return _with_packs(packed, code) if packed.packs_out else code


def _with_packs(packed: PackedSegment, code: SegmentFunction) -> SegmentFunction:
    lengths, due = [len(pack) for pack in packed.packs_out], len(packed.segment.outs)

    def function(*args: Any) -> list[Any]:
        results = code.function(*args)
        first = len(results) - due
        packs_out, others = runs(results[first:], lengths)
        return [*results[:first], *map(_flat, packs_out), *others]

    return replace(code, function=function)


def _with_groups(
    flow: Flow, packed: PackedSegment, code: SegmentFunction
) -> SegmentFunction:
    rest, numbers = packed.rest, [*_numbers(packed.groups)]
    rows = len(rest.row_updates) + len(rest.row_reads)
    sizes = [
        *(len(packed.update_runs), len(rest.updates)),
        *(len(packed.read_runs), len(rest.reads)),
        *(rows, len(packed.packs_in)),
    ]
    first = len(rest.updates) + len(rest.row_updates)

    def function(*args: Any) -> list[Any]:
        (updated, updates, read, reads, of_rows, packs_in), inputs = runs(args, sizes)
        results = code.function(*updates, *reads, *of_rows, *inputs)
        known = dict(zip(numbers, results[first:], strict=False))
        single = dict(zip(rest.inputs, inputs, strict=True))
        flat: dict[Run | Pack, Any] = {
            **dict(zip(packed.update_runs, updated, strict=True)),
            **dict(zip(packed.read_runs, read, strict=True)),
            **dict(zip(packed.packs_in, packs_in, strict=True)),
        }

        def leaf(members: Run | Pack) -> Any:
            if members not in flat:
                flat[members] = _flat([single[v] for v in cast("Pack", members)])
            return flat[members]

        written = {
            group.variables: run_group(
                group, [leaf(members) for members in group.leaves], known.__getitem__
            )
            for group in packed.groups
        }
        new = [written[run] for run in packed.update_runs]
        return [*new, *results[:first], *results[first + len(numbers) :]]

    specs = flow.graph.variables
    flat = [
        [_flat_aval([specs[v].aval for v in run]) for run in packed.update_runs],
        [_flat_aval([specs[v].aval for v in run]) for run in packed.read_runs],
        [_flat_aval([v.aval for v in pack]) for pack in packed.packs_in],
    ]

    def among(own: Sequence[Any], flat: Sequence[Sequence[Any]]) -> list[Any]:
        """Puts what is said of flat arrays among what is said of the rest."""
        lengths = [len(rest.updates), len(rest.reads), rows]
        (updates, reads, of_rows), inputs = runs(own, lengths)
        updated, read, packs_in = flat
        return [*updated, *updates, *read, *reads, *of_rows, *packs_in, *inputs]

    return replace(
        code,
        function=function,
        avals=among(code.avals, flat),
        ids=among(code.ids, [[None] * len(each) for each in flat]),
    )


def _numbers(groups: Sequence[LaneGroup]) -> dict[Var, None]:
    return dict.fromkeys(v for group in groups for v in group.numbers.values())


def _rest(
    flow: Flow,
    segment: Segment,
    groups: Sequence[LaneGroup],
    packs_in: Sequence[Pack],
) -> Segment:
    """Returns what is not done on flat arrays."""
    ops = _rest_ops(flow, segment, groups, packs_in)
    needed = {v for op in ops for v in flow.inputs(op)} | _wanted(
        segment, groups, packs_in
    )
    used = _used(ops)
    return replace(
        segment,
        ops=tuple(ops),
        updates=tuple(v for v in segment.updates if v in used),
        reads=tuple(v for v in segment.reads if v in used),
        inputs=tuple(v for v in segment.inputs if v in needed),
        outs=(*_numbers(groups), *segment.outs),
        blind=(),  # whoever assembles the whole segment writes these
        passed=(),
    )


def _rest_ops(
    flow: Flow,
    segment: Segment,
    groups: Sequence[LaneGroup],
    packs_in: Sequence[Pack],
) -> list[Op]:
    written = {v for group in groups for v in group.variables}
    needed = _wanted(segment, groups, packs_in)
    ops: list[Op] = []
    for op in reversed(segment.ops):
        if op.is_whole_write and op.writes[0] in written:
            continue
        if op.writes or not needed.isdisjoint(op.equation.outvars):
            ops.append(op)
            needed.update(flow.inputs(op))
    return ops[::-1]


def _wanted(
    segment: Segment, groups: Sequence[LaneGroup], packs_in: Sequence[Pack]
) -> set[Var]:
    """Returns the values that groups, and others than the segment, take of the rest."""
    taken = [
        pack for group in groups for pack in group.input_packs() if pack not in packs_in
    ]
    atoms = (*_numbers(groups), *segment.outs, *(v for pack in taken for v in pack))
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _used(ops: Sequence[Op]) -> set[int]:
    return {v for op in ops for v in (*op.writes, *(read for read, _ in op.reads))}


def _flat(values: Sequence[Any]) -> Any:
    """Returns values as they lie in one flat array, see ``packed_starts``."""
    starts = packed_starts([value_type(value) for value in values])
    rows = [jnp.ravel(value) for value in values]
    ends = [
        jnp.zeros(b - a - r.size, r.dtype)
        for r, (a, b) in zip(rows, pairwise(starts), strict=True)
    ]
    return jnp.concatenate(
        [part for pair in zip(rows, ends, strict=True) for part in pair if part.size]
    )


def _flat_aval(avals: Sequence[Any]) -> Any:
    type_ = packed_type([value_type(aval) for aval in avals])
    return jax.ShapeDtypeStruct(type_.shape, type_.np_dtype)
