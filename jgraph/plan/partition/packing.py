"""Packing: which values and variables of a program travel and lie in flat arrays.

A value by itself costs a step its place in a message at both ends, and an argument or a
result of XLA: tens of microseconds, whatever its size. Small values that one unit makes
and the same tasks take are packed: they leave as one flat array. Updates that are alike
(``jgraph.plan.lowering.lanes``) take such an array as it is, in the order that they
want; where each value is needed by itself, it is cut out where it arrives.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from jgraph._compat import Literal, Var
from jgraph.graph.ir import TaskName
from jgraph.graph.mesh import mesh_of
from jgraph.plan.lowering.lanes import LEAST, SMALL_BYTES, LaneGroup, Run
from jgraph.plan.lowering.lower import Segment, segment_of
from jgraph.plan.lowering.packed import Pack, PackedSegment, groups_of, packed
from jgraph.plan.partition.segments import Segmentation, SegmentGroup
from jgraph.plan.program.nodes import PACKABLE


@final
@dataclass(slots=True)
class Packing:
    """What is packed of a cut.

    Args:
      cut: the clusters.
      driver: takes what is fetched.

    Attributes:
      packs: the pack in which a value leaves the cluster that makes it.
      leaving: per cluster, the values that others need: those packed first.
    """

    cut: Segmentation
    driver: TaskName
    packs: dict[Var, Pack] = field(default_factory=dict)
    leaving: list[list[Var]] = field(default_factory=list)
    _groups: dict[int, list[LaneGroup]] = field(default_factory=dict)
    _packed: dict[int, PackedSegment] = field(default_factory=dict)
    _fetched: frozenset[Var] = frozenset()

    def __post_init__(self) -> None:
        flow, clusters = self.cut.flow, self.cut.clusters
        self._fetched = frozenset(a for a in flow.fetches if not isinstance(a, Literal))
        self.leaving = [self._leaving(n, c) for n, c in enumerate(clusters)]
        for position, cluster in enumerate(clusters):
            if cluster.kind == "segment" and not cluster.only_writes(flow):
                segment = self._segment(position)
                self._groups[position] = groups_of(flow, segment)
        for position, cluster in enumerate(clusters):
            if cluster.kind in {"read", "segment"}:
                self._pack(position, cluster)

    def segment(self, position: int) -> PackedSegment:
        """Returns a cluster as a segment, with the packs that it takes and gives."""
        if position not in self._packed:
            leaving = self.packs_of(self.leaving[position])
            groups = self._groups.get(position, [])
            packs = set(self.packs.values())
            segment = self._segment(position)
            self._packed[position] = packed(
                self.cut.flow, segment, groups, packs, leaving
            )
        return self._packed[position]

    def packs_of(self, values: Iterable[Var]) -> list[Pack]:
        """Returns the packs in which values lie, each once."""
        return list(dict.fromkeys(self.packs[v] for v in values if v in self.packs))

    def is_cut(self, pack: Pack, task: TaskName) -> bool:
        """Whether a task needs the values of a pack by themselves."""
        if task == self.driver and not self._fetched.isdisjoint(pack):
            return True
        users = {u for v in pack for u in self.cut.users.get(v, ())}
        return any(
            self.cut.clusters[user].task == task and not self._takes_flat(user, pack)
            for user in users
        )

    def _takes_flat(self, user: int, pack: Pack) -> bool:
        segment = self.segment(user)
        return pack in segment.packs_in and not segment.takes_alone(pack)

    def _segment(self, position: int) -> Segment:
        cluster = self.cut.clusters[position]
        ops = [self.cut.flow.ops[i] for i in cluster.ops]
        return segment_of(self.cut.flow, ops, self.leaving[position])

    def _leaving(self, position: int, cluster: SegmentGroup) -> list[Var]:
        results = [
            v
            for i in sorted(cluster.roots)
            for v in self.cut.flow.ops[i].equation.outvars
        ]
        return [
            v
            for v in results
            if v in self._fetched
            or any(u != position for u in self.cut.users.get(v, ()))
        ]

    def _pack(self, position: int, cluster: SegmentGroup) -> None:
        """Packs what leaves a cluster."""
        ops = [self.cut.flow.ops[i] for i in cluster.ops]
        if mesh_of(op.equation for op in ops) is not None:
            return
        alike: dict[tuple[frozenset[TaskName], str], list[Var]] = {}
        for var in self.leaving[position]:
            takers = self.takers(var)
            if cluster.task not in takers and self._is_small(var):
                key = takers, self.cut.flow.type_of(var).dtype
                alike.setdefault(key, []).append(var)
        for values in alike.values():
            for pack in self._chosen(values, cluster):
                self.packs |= dict.fromkeys(pack, pack)
        packs = self.packs_of(self.leaving[position])
        self.leaving[position] = [
            *(v for pack in packs for v in pack),
            *(v for v in self.leaving[position] if v not in self.packs),
        ]

    def takers(self, var: Var) -> frozenset[TaskName]:
        """Returns the tasks that need a value."""
        users = self.cut.users.get(var, ())
        takers = {self.cut.clusters[user].task for user in users}
        return frozenset(takers | ({self.driver} if var in self._fetched else set()))

    def _is_small(self, var: Var) -> bool:
        type_ = self.cut.flow.type_of(var)
        known = not (type_.ragged or type_.symbols) and type_.dtype in PACKABLE
        return known and type_.shape != () and 0 < type_.nbytes <= SMALL_BYTES

    def _chosen(self, values: Sequence[Var], cluster: SegmentGroup) -> Iterator[Pack]:
        """Yields packs of values: those that updates want, then of all others."""
        remaining = dict.fromkeys(values)
        wanted = (
            self._read_in_runs(values, cluster)
            if cluster.kind == "read"
            else [
                pack
                for groups in self._groups.values()
                for g in groups
                for pack in g.input_packs()
            ]
        )
        for pack in dict.fromkeys(wanted):
            if all(v in remaining for v in pack):
                yield pack
                for v in pack:
                    del remaining[v]
        if len(remaining) >= LEAST:
            yield tuple(remaining)

    def _read_in_runs(self, values: Sequence[Var], cluster: SegmentGroup) -> list[Pack]:
        """Returns the values of variables that lie together, as they lie."""
        ops = self.cut.flow.ops
        producer = self.cut.flow.producer
        of = {ops[producer[v]].reads[0][0]: v for v in values}
        runs: Collection[Run] = dict.fromkeys(
            run
            for position, groups in self._groups.items()
            if self.cut.clusters[position].task == cluster.task
            for group in groups
            for run in group.runs()
        )
        return [tuple(of[v] for v in run) for run in runs if all(v in of for v in run)]
